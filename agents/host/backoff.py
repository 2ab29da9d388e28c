"""Back-off and acknowledgement time-outs as plain arithmetic: the callers pass the time in, and no socket is used."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Pace:
    """All waiting times of a connection, in seconds; tests use smaller ones.

    `draw_fraction` returns a random number in [0, 1).
    """

    low: float = 0.5
    """Upper bound of the first back-off delay."""
    high: float = 30.0
    """Upper bound of every back-off delay."""
    slow: float = 60.0
    """Mean delay after a refusal that only an operator can lift."""
    settled: float = 30.0
    """The back-off is reset after a connection that lasted at least this long."""
    open: float = 10.0
    """Time-out of each part of connecting: the challenge, the WebSocket, the Welcome."""
    ping: float = 20.0
    """Interval of WebSocket pings, and time-out of each."""
    silence: float = 15.0
    """How long the gateway may send no Ack while one is owed; at least three heartbeat intervals are allowed."""
    report: float = 60.0
    """How long one report may wait for its Ack, at least twelve heartbeat intervals: that Ack follows a commit."""
    draw: Callable[[], float] = random.random


@dataclass
class Backoff:
    """Exponential back-off with full jitter: each delay is drawn from [0, cap).

    cap doubles from `first_backoff_s` to `max_backoff_s`.
    """

    pace: Pace
    failures: int = 0

    def next(self) -> float:
        """Count a failure and return the delay before the next attempt, in seconds."""
        cap = min(self.pace.high, self.pace.low * 2.0 ** min(self.failures, 32))
        self.failures += 1
        return self.pace.draw() * cap

    def reset(self) -> None:
        """Start again with the shortest delays, after a successful attempt."""
        self.failures = 0


@dataclass
class Owed:
    """Tracks which heartbeats and which report the gateway has not acknowledged, and since when.

    All times are seconds on the caller's clock.
    """

    beat_s: float
    pace: Pace
    report: int | None = None
    """The seq of the report that waits for its Ack. One at a time: of those made meanwhile only the newest is sent."""
    _report_at: float = 0.0
    _beats: set[int] = field(default_factory=set)
    _silent_since: float | None = None
    answered: float = 0.0
    """When the last Ack came; until then, when the connection began."""

    def sent(self, of: str, seq: int, now: float) -> None:
        """Note that a Beat or a Report (`message_type`) was sent at `now`."""
        if self._silent_since is None:
            self._silent_since = now
        if of == "Report":
            self.report, self._report_at = seq, now
        else:
            self._beats.add(seq)

    def acknowledged(self, of: str, seq: int, now: float) -> None:
        """Note an Ack. The Ack of a beat covers the earlier beats too; every Ack restarts the silence time-out."""
        self.answered = now
        if of == "Report":
            if seq == self.report:
                self.report = None
        else:
            self._beats = {beat for beat in self._beats if beat > seq}
        self._silent_since = now if self._beats or self.report is not None else None

    def due(self) -> float:
        """Return when the next Ack is overdue, on the caller's clock; infinity while no Ack is owed."""
        ends = [float("inf")]
        if self._silent_since is not None:
            ends.append(self._silent_since + max(self.pace.silence, 3 * self.beat_s))
        if self.report is not None:
            ends.append(self._report_at + max(self.pace.report, 12 * self.beat_s))
        return min(ends)

    def answers(self, now: float) -> bool:
        """Return whether an Ack came within the last two heartbeat intervals.

        The conductor treats a host as silent only after a longer time than that.
        """
        return now - self.answered < 2 * self.beat_s

    def overdue(self, now: float) -> str:
        """Return a sentence for the log when the gateway has owed an Ack for too long, else ''."""
        if now < self.due():
            return ""
        what = "acknowledged nothing" if self.report is None else f"not acknowledged report {self.report}"
        since = now - (self._silent_since if self._silent_since is not None else self._report_at)
        return f"the gateway has {what} for {since:.0f} s"


def worth_saying(times: int) -> bool:
    """Return whether to log a failure that has occurred `times` times: only at 1, 2, 4, 8, …"""
    return times & (times - 1) == 0


async def set_or_passed(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set or `seconds` have passed (infinity is allowed). Returns None in both cases."""
    try:
        async with asyncio.timeout(max(seconds, 0)):
            await event.wait()
    except TimeoutError:
        return  # the caller compares its deadlines with the clock
