"""Write to Placement from this host for the conductor, if that code is installed and while this host has the authority.

The code that writes is found by its entry point, because it is in a package that this one must not import. It is loaded
when the agent starts, or not at all; it imports its own dependencies at the first command.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from agents import wire
from agents.host.connection.authority import PlacementAuthority
from agents.host.execution.command_semantics import ExecutionResult
from drivers.errors import Timeout
from drivers.isolation.threads import run_in_thread

log = logging.getLogger("cyborg.placement")

ENTRY_POINT_GROUP, ENTRY_POINT_NAME = "cyborg.placement", "direct"
MAX_DURATION_S = 60.0
"""Largest duration of one `placement` command on this host, in seconds."""


class DirectPlacementWriter:
    """Writes to Placement for `host`. It uses `placement_sync.agent_writer`, if that is installed and can be loaded."""

    def __init__(self, host: str, environ: Mapping[str, str], authority: PlacementAuthority) -> None:
        self._host, self._environ, self.authority = host, environ, authority
        self._module = _load_placement_module()

    def find_obstacle(self) -> str:
        """Return the reason why this host cannot write to Placement, '' when it can; at most 500 characters."""
        if self._module is None:
            return "the host has no package that writes to Placement: install the complete cyborgweb package there"
        return str(self._module.lacks(self._environ))[:500]

    async def write(self, command: wire.Command, end_by: float) -> ExecutionResult:
        """Carry out a `placement` command in a thread and return how it ended.

        Return *refused* when this host cannot or must not write now. Before each call to Placement the thread checks
        the authority and the deadline, and stops when it may not go on. The deadline is `end_by` on the event loop's
        clock, at most MAX_DURATION_S from now. Return *unknown* when the thread has not ended one second after the
        deadline.
        """
        loop = asyncio.get_running_loop()
        deadline = min(end_by, loop.time() + MAX_DURATION_S)

        def find_refusal() -> str:
            """Return the reason why the thread must not go on, '' when it may: the deadline has passed, or the
            authority is lost."""
            time_problem = "" if loop.time() < deadline else "the time limit of the command has passed"
            return time_problem or self.authority.find_refusal(command.writer)

        if problem := self.find_obstacle() or find_refusal():
            return ExecutionResult("refused", problem)
        module = self._module
        assert module is not None
        try:
            outcome, text = await run_in_thread(
                lambda: module.write(self._host, command.payload, self._environ, find_refusal),
                deadline - loop.time() + 1.0,
            )
        except Timeout:
            return ExecutionResult("unknown", "Placement did not answer in time")
        return ExecutionResult(outcome, text)


def _load_placement_module() -> Any | None:
    """Load and return the module that writes to Placement, None when it is not installed or cannot be loaded."""
    for entry_point in metadata.entry_points(group=ENTRY_POINT_GROUP, name=ENTRY_POINT_NAME):
        try:
            return entry_point.load()
        except Exception as error:  # noqa: BLE001 - the agent must run even if this package is broken
            log.error("%s cannot be loaded, so this host does not write to Placement: %s", entry_point.value, error)
    return None
