"""This host's own hand at Placement: what writes there, if it is installed, and whether it may just now.

Used by `executor`; `session` says what the gateway has told. The code that writes is found by entry point, since it
belongs to a room that this one does not import, and is loaded at the agent's start or not at all; what that needs in
turn it imports at the first command.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from agents import wire
from agents.host.execution.command_semantics import Answer
from agents.host.execution.plan_runner import aside
from drivers.errors import Timeout

log = logging.getLogger("cyborg.placement")

GROUP, NAME = "cyborg.placement", "direct"
LONGEST_S = 60.0
"""A host's writing may take so long."""


@dataclass
class Authority:
    """Whether this host may write: only on a connection whose gateway answers, and only for the writer's epoch that it
    was told on that connection. Set on the event loop, asked by the thread that writes."""

    epoch: int = -1
    answers: Callable[[], bool] = field(default=lambda: False)

    def connected(self, answers: Callable[[], bool]) -> None:
        """A new connection, on which nothing was told yet; `answers()`: whether its gateway has answered lately."""
        self.epoch, self.answers = -1, answers

    def lost(self) -> None:
        """There is no connection."""
        self.connected(lambda: False)

    def told(self, epoch: int) -> None:
        """The writer's epoch, by a message of its own or with a command; the two may overtake each other."""
        self.epoch = max(self.epoch, epoch)

    def refused(self, epoch: int) -> str:
        """Why nobody may write for a writer of this epoch now, '' when it is allowed."""
        if not self.answers():
            return "the connection to the conductor is lost, so it may have given the writing to another"
        if epoch != self.epoch:
            return f"there is another writer (epoch {self.epoch}) than the one this was asked for (epoch {epoch})"
        return ""


class Direct:
    """Writes to Placement for `host`. `module` is `placement_sync.direct`, None where it is not installed."""

    def __init__(self, host: str, environ: Mapping[str, str], authority: Authority) -> None:
        self._host, self._environ, self.authority = host, environ, authority
        self._module = _found()

    def lacks(self) -> str:
        """Why this host cannot write to Placement, '' when it can."""
        if self._module is None:
            return "the host has no package that writes to Placement: install all of cyborgweb there"
        return str(self._module.lacks(self._environ))[:500]

    async def write(self, command: wire.Command, end_by: float) -> Answer:
        """Do what a command says, in a thread that stops before its next call when it may not go on."""
        loop = asyncio.get_running_loop()
        until = min(end_by, loop.time() + LONGEST_S)

        def refused() -> str:
            late = "" if loop.time() < until else "the time for it is over"
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
    for one in metadata.entry_points(group=GROUP, name=NAME):
        try:
            return one.load()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the agent goes on without
            log.error("%s cannot be loaded, so this host does not write to Placement: %s", one.value, error)
    return None
