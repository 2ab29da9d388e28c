"""Connect `placement_sync` and `agents` for delegating writes to Placement to agents.

`placement_sync` decides who writes to Placement and counts the writer epochs. `agents` knows which hosts' agents can
write, and sends them the epoch. Neither imports the other, so both register their functions here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from accelerators.runtime.registry import Registry

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

WRITER_EPOCH: Registry[Callable[[], int]] = Registry("source of the writer's epoch", single=True)
"""Function that returns the current epoch of the Placement writer. `agents` sends it to the agents."""
WRITER_STATUSES: Registry[Callable[[Collection[int]], dict[int, WriterStatus]]] = Registry(
    "source of writer statuses", single=True
)
"""Function that takes ids of hosts and returns the WriterStatus of each host that has an agent, by id. `placement_sync`
uses it to decide who writes."""


def get_writer_statuses(hosts: Collection[int]) -> dict[int, WriterStatus]:
    """Return the WriterStatus of each host, by its id; `NO_AGENT` for a host without an agent.

    Raises LookupError if no function is registered in `WRITER_STATUSES`.
    """
    return dict.fromkeys(hosts, NO_AGENT) | WRITER_STATUSES.only()(hosts)
