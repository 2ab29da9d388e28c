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
from agents.host.connection.authority import Authority
from agents.host.execution.command_semantics import Answer
from agents.host.execution.plan_runner import aside
from drivers.errors import Timeout

log = logging.getLogger("cyborg.placement")

GROUP, NAME = "cyborg.placement", "direct"
LONGEST_S = 60.0
"""Largest duration of one `placement` command on this host, in seconds."""


class Direct:
    """Writes to Placement for `host`. It uses `placement_sync.direct`, if that is installed and can be loaded."""

    def __init__(self, host: str, environ: Mapping[str, str], authority: Authority) -> None:
        self._host, self._environ, self.authority = host, environ, authority
        self._module = _found()

    def lacks(self) -> str:
        """Return the reason why this host cannot write to Placement, '' when it can; at most 500 characters."""
        if self._module is None:
            return "the host has no package that writes to Placement: install the complete cyborgweb package there"
        return str(self._module.lacks(self._environ))[:500]

    async def write(self, command: wire.Command, end_by: float) -> Answer:
        """Carry out a `placement` command in a thread and return how it ended.

        Before each call to Placement the thread checks the authority and the deadline, and stops when it may not go on.
        The deadline is `end_by` on the event loop's clock, at most MAX_DURATION_S from now. Return *unknown* when the
        thread has not ended one second after the deadline.
        """
        loop = asyncio.get_running_loop()
        until = min(end_by, loop.time() + LONGEST_S)

        def refused() -> str:
            late = "" if loop.time() < until else "the time limit of the command has passed"
            return late or self.authority.refused(command.writer)

        if problem := self.lacks() or refused():
            return Answer("refused", problem)
        module = self._module
        assert module is not None
        try:
            outcome, text = await aside(
                lambda: module.write(self._host, command.payload, self._environ, refused), until - loop.time() + 1.0
            )
        except Timeout:
            return Answer("unknown", "Placement did not answer in time")
        return Answer(outcome, text)


def _found() -> Any | None:
    """Load and return the module that writes to Placement, None when it is not installed or cannot be loaded."""
    for one in metadata.entry_points(group=GROUP, name=NAME):
        try:
            return one.load()
        except Exception as error:  # noqa: BLE001 - the agent must run even if this package is broken
            log.error("%s cannot be loaded, so this host does not write to Placement: %s", one.value, error)
    return None
