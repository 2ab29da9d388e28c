"""Fold the PCI tree above a host's cards, buses behind bridges, into what a picture can show. Does no input or output.

Drivers report the bridges above a function, root first. A bus without reported bridges is connected directly to its
NUMA node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

Path = tuple[str, ...]
Bus = tuple[str, Path]
"""Address `dddd:bb` of a bus, '' for devices that are not on PCI; and the bridges above it, root first."""
DEEPEST = 4
"""Maximum number of nested boxes of bridges; buses behind further bridges are drawn behind the innermost box."""


@dataclass(frozen=True)
class Branch:
    """A bus, or a box of bridges if `bus` is None; the following branches with a greater `depth` are behind the box.

    For a box, `bridges` is a chain of bridges without branches between them, root first; for a bus, `bridges` are those
    between it and the box around it. `switch` is true if every bus in the box has further bridges above it: the
    downstream ports of a switch.
    """

    depth: int
    bridges: Path
    bus: Bus | None = None
    switch: bool = False


def of(buses: Iterable[Bus]) -> list[Branch]:
    """Return the tree as a list in drawing order: a box comes before everything behind it, else the order is kept."""
    return list(_below(list(buses), 0, 0))


def _below(buses: Sequence[Bus], known: int, depth: int) -> Iterator[Branch]:
    """Yield the branches of buses that have their first `known` bridges in common, without these bridges."""
    ports: dict[Path, list[Bus]] = {}
    for bus in buses:
        ports.setdefault(bus[1][known : known + 1] or bus[:1], []).append(bus)
    for behind in ports.values():
        if len(behind) == 1 or depth == DEEPEST:
            yield from (Branch(depth, bus[1][known:], bus) for bus in behind)
            continue
        levels = zip(*(path for _, path in behind), strict=False)
        shared = len(list(takewhile(lambda level: len(set(level)) == 1, levels)))
        switch = all(len(path) > shared for _, path in behind)
        yield Branch(depth, behind[0][1][known:shared], switch=switch)
        yield from _below(behind, shared, depth + 1)
