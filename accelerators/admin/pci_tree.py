"""Fold the PCI tree above a host's cards, buses behind bridges, into what a picture can show. Does no input or output.

Drivers report the bridges above a function, root first. A bus without reported bridges is connected directly to its
NUMA node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

BridgePath = tuple[str, ...]
BusPosition = tuple[str, BridgePath]
"""Address `dddd:bb` of a bus, '' for devices that are not on PCI; and the bridges above it, root first."""
MAX_BOX_DEPTH = 4
"""Maximum number of nested boxes of bridges; buses behind further bridges are drawn behind the innermost box."""


@dataclass(frozen=True)
class TreeBranch:
    """A bus, or a box of bridges if `bus` is None; the following branches with a greater `depth` are behind the box.

    For a box, `bridges` is a chain of bridges without branches between them, root first; for a bus, `bridges` are those
    between it and the box around it. `switch` is true if every bus in the box has further bridges above it: the
    downstream ports of a switch.
    """

    depth: int
    bridges: BridgePath
    bus: BusPosition | None = None
    switch: bool = False


def build_tree(buses: Iterable[BusPosition]) -> list[TreeBranch]:
    """Return the tree as a list in drawing order: a box comes before everything behind it.

    Buses that have a bridge in common come together, at the place of the first of them; otherwise the order is kept.
    """
    return list(_iterate_branches(list(buses), 0, 0))


def _iterate_branches(buses: Sequence[BusPosition], common: int, depth: int) -> Iterator[TreeBranch]:
    """Yield the branches of buses that have their first `common` bridges in common, without these bridges.

    `depth` is the depth of the branches; boxes are not nested deeper than MAX_BOX_DEPTH.
    """
    ports: dict[BridgePath, list[BusPosition]] = {}
    for bus in buses:
        ports.setdefault(bus[1][common : common + 1] or bus[:1], []).append(bus)
    for port_buses in ports.values():
        if len(port_buses) == 1 or depth == MAX_BOX_DEPTH:
            yield from (TreeBranch(depth, bus[1][common:], bus) for bus in port_buses)
            continue
        levels = zip(*(path for _, path in port_buses), strict=False)
        shared = len(list(takewhile(lambda level: len(set(level)) == 1, levels)))
        switch = all(len(path) > shared for _, path in port_buses)
        yield TreeBranch(depth, port_buses[0][1][common:shared], switch=switch)
        yield from _iterate_branches(port_buses, shared, depth + 1)
