"""The PCI tree above a host's cards: which bus hangs behind which bridges, folded to what a picture can show. Pure.

Called by `admin.picture`. Drivers report the bridges above a function, root first; a bus above which none was reported
hangs on its NUMA node itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

Path = tuple[str, ...]
Bus = tuple[str, Path]
"""`dddd:bb`, '' for what is not on PCI; and the bridges above it."""
DEEPEST = 4
"""So many boxes stand inside each other; buses behind further bridges are drawn behind the last."""


@dataclass(frozen=True)
class Branch:
    """A bus; or, where `bus` is None, a box of bridges: what comes next and is deeper hangs behind it.

    `bridges` are those on which nothing else hangs, folded into one, root first; of a bus those between it and the box
    above it. `switch`: behind a box are bridges again, its downstream ports.
    """

    depth: int
    bridges: Path
    bus: Bus | None = None
    switch: bool = False


def of(buses: Iterable[Bus]) -> list[Branch]:
    """All of them in the order of the drawing: a box before what hangs behind it, else as given."""
    return list(_below(list(buses), 0, 0))


def _below(buses: Sequence[Bus], known: int, depth: int) -> Iterator[Branch]:
    """What hangs behind the first `known` of their bridges, which they have in common."""
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
