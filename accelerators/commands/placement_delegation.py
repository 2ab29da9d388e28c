"""What the conductor may leave to agents: writing to Placement. `placement_sync` decides it and counts the epochs,
`agents` knows which hosts can do it and tells them; neither imports the other, so they meet here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

OP = "placement"
"""The command by which a host's agent is told to write."""
TOPIC = "writer"
"""Rung when there is another writer: the epoch has changed."""


class Hand(NamedTuple):
    """How an agent stands: why it cannot write now ('' when it can), and whether it has been `silent` for so long that
    it has stopped by itself whatever it was told."""

    lacks: str
    silent: bool


NOBODY = Hand("no agent has ever joined from there", True)

Epoch = Callable[[], int]
Hands = Callable[[Collection[int]], dict[int, Hand]]
_epoch: list[Epoch] = []
_hands: list[Hands] = []


def register(epoch: Epoch | None = None, hands: Hands | None = None) -> None:
    """Called from `AppConfig.ready()` by the room that knows."""
    _epoch.extend([epoch] if epoch else [])
    _hands.extend([hands] if hands else [])


def epoch() -> int:
    """The epoch of whoever writes to Placement now."""
    return max((one() for one in _epoch), default=0)


def hands(hosts: Collection[int]) -> dict[int, Hand]:
    """How the agents of these hosts (ids) stand."""
    known = dict.fromkeys(hosts, NOBODY)
    for one in _hands:
        known |= one(hosts)
    return known
