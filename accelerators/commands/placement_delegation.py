"""Connect `placement_sync` and `agents` for delegating writes to Placement to agents.

`placement_sync` decides who writes to Placement and counts the writer epochs. `agents` knows which hosts' agents can
write, and sends them the epoch. Neither imports the other, so both register their functions here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

OP = "placement"
"""The command that makes a host's agent write to Placement."""
TOPIC = "writer"
"""Topic of notifications that the writer, and with it the epoch, has changed."""


class WriterStatus(NamedTuple):
    """An agent's ability to write to Placement.

    `reason` says why it cannot write now; it is '' if it can. `has_stopped_writing` is True if nothing has been heard
    of the agent for so long that it must have stopped by itself any write that it was ordered to do.
    """

    lacks: str
    silent: bool


NOBODY = WriterStatus("no agent of this host has ever connected", True)

Epoch = Callable[[], int]
Hands = Callable[[Collection[int]], dict[int, WriterStatus]]
_epoch: list[Epoch] = []
_hands: list[Hands] = []


def register(epoch: Epoch | None = None, hands: Hands | None = None) -> None:
    """Register the sources for `get_writer_epoch` and `get_writer_statuses`. Call it from `AppConfig.ready()` of the
    app that knows them."""
    _epoch.extend([epoch] if epoch else [])
    _hands.extend([hands] if hands else [])


def epoch() -> int:
    """Return the current epoch of the Placement writer; 0 if no source is registered."""
    return max((one() for one in _epoch), default=0)


def hands(hosts: Collection[int]) -> dict[int, WriterStatus]:
    """Return for each host (by id) whether its agent can write to Placement; `NO_AGENT` for a host without an agent."""
    known = dict.fromkeys(hosts, NOBODY)
    for one in _hands:
        known |= one(hosts)
    return known
