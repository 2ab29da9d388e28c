"""The verdict on a fleet: what was acknowledged is what counts, and nobody is told anything but to come back."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from agents import wire
from agents.host.pace import Owed, Pace
from tests.fleet import verdict
from tests.fleet.__main__ import TEACHES
from tests.fleet.hosts import Doings, Host, open_files
from tests.fleet.installation import Sight


class Silent:
    """A peer to whom reports are sent."""

    def send(self, text: str) -> None:
        """Into the void."""


class There:
    """An installation whose tables and hosts are as said."""

    count = 1

    def __init__(self, host: Host, *stored: tuple[str, str, int, str]) -> None:
        self.stored, self.states = list(stored), [list(host.state())]
        self.fleet, self.seen = self, [Sight(0.0, connected=1, counts={}, refused={})]

    def ask(self, do: str) -> dict[str, Any]:
        """As the fleet answers."""
        return {do: self.states}

    def rows(self, statement: str) -> list[Any]:
        """As the database does."""
        return self.stored if statement is verdict.STORED else [(0, 0, 0)]


def report(host: Host) -> tuple[str, str]:
    """Sends what is there now; its hash and model."""
    host._owed = Owed(8.0, Pace())
    host._report(Silent(), time.monotonic())  # type: ignore[arg-type]
    return host._since[-1].content, host._since[-1].model


def acknowledge(host: Host, seq: int) -> None:
    """As the gateway does."""

    async def hear() -> None:
        host._hear(Silent(), wire.encode(wire.Ack(seq, "Report")).encode())  # type: ignore[arg-type]

    asyncio.run(hear())


@pytest.fixture
def host() -> Host:
    """One with two devices that has said nothing yet."""
    return Host(7, 2, Doings())


def lost(host: Host, content: str, model: str, devices: int = 2) -> bool:
    """With this in the tables."""
    return bool(verdict.lost(There(host, (host.state()[0], content, devices, model))))  # type: ignore[arg-type]


def test_what_was_sent_last_is_not_what_was_acknowledged_last(host: Host) -> None:
    first, model = report(host)
    assert host.state()[1:5] == (0, 0, "", "") and not lost(host, "", "", 0), "nothing was promised"
    acknowledge(host, 1)
    assert host.state()[2:] == (1, first, "g0", 2, [])
    assert not lost(host, first, model) and lost(host, first, "g7") and lost(host, first, model, 1)
    host.failing = True
    host.change()
    second, none = report(host)
    host.failing = False
    assert host.state()[2:] == (1, first, "g0", 2, [(second, none)]) and none == ""
    assert not lost(host, first, model) and not lost(host, second, model), "either may be stored"
    assert lost(host, "another", model)
    acknowledge(host, 2)
    assert host.state()[2:] == (2, second, "", 2, [])
    assert not lost(host, second, model) and lost(host, first, model), "settled"


@pytest.mark.parametrize(
    ("what", "holds"),
    [
        *((word, True) for word in ("503", "busy", "closed", "silence", "ConnectionResetError", "TimeoutError")),
        *((word, False) for word in ("403", "500", "clone", "revoked", "malformed", "superseded", "KeyError")),
    ],
)
def test_who_is_told_anything_but_to_come_back_breaks_the_promise(host: Host, what: str, holds: bool) -> None:
    there = There(host)
    there.seen[-1].refused[what] = 2
    lines = verdict.judge(there, True, 0.0, Sight(0.0), [])  # type: ignore[arg-type]
    assert {line.promise: line.holds for line in lines}["only told to come back"] is holds
    assert there.seen[-1].sent_away == (2 if what == "503" else 0)


def test_help_names_the_files_that_are_needed() -> None:
    assert open_files(1000) == 1700 and "1.5 N + 200 here" in TEACHES
