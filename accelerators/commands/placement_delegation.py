"""Connect `placement_sync` and `agents` for delegating writes to Placement to agents.

`placement_sync` decides who writes to Placement and counts the writer epochs. `agents` knows which hosts' agents can
write, and sends them the epoch. Neither imports the other, so both register their functions here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

PLACEMENT_OP = "placement"
"""The command that makes a host's agent write to Placement."""
WRITER_TOPIC = "writer"
"""Topic of notifications that the writer, and with it the epoch, has changed."""


class WriterStatus(NamedTuple):
    """An agent's ability to write to Placement.

    `reason` says why it cannot write now; it is '' if it can. `has_stopped_writing` is True if nothing has been heard
    of the agent for so long that it must have stopped by itself any write that it was ordered to do.
    """

    reason: str
    has_stopped_writing: bool


NO_AGENT = WriterStatus("no agent of this host has ever connected", True)

EpochSource = Callable[[], int]
WriterStatusSource = Callable[[Collection[int]], dict[int, WriterStatus]]
_epoch_sources: list[EpochSource] = []
_status_sources: list[WriterStatusSource] = []


def register_sources(epoch_source: EpochSource | None = None, status_source: WriterStatusSource | None = None) -> None:
    """Register the sources for `get_writer_epoch` and `get_writer_statuses`. Call it from `AppConfig.ready()` of the
    app that knows them."""
    _epoch_sources.extend([epoch_source] if epoch_source else [])
    _status_sources.extend([status_source] if status_source else [])


def get_writer_epoch() -> int:
    """Return the current epoch of the Placement writer; 0 if no source is registered."""
    return max((source() for source in _epoch_sources), default=0)


def get_writer_statuses(hosts: Collection[int]) -> dict[int, WriterStatus]:
    """Return for each host (by id) whether its agent can write to Placement; `NO_AGENT` for a host without an agent."""
    statuses = dict.fromkeys(hosts, NO_AGENT)
    for source in _status_sources:
        statuses |= source(hosts)
    return statuses
