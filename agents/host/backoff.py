"""When to try again and when to stop waiting: the arithmetic of `link` and `meter`, without clocks or sockets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Pace:
    """All waits of a link, in seconds. Tests give smaller ones; `draw` returns [0, 1)."""

    low: float = 0.5
    high: float = 30.0
    slow: float = 60.0
    """After a refusal that only an operator can lift."""
    settled: float = 30.0
    """A connection that lived this long starts the back-off anew."""
    open: float = 10.0
    ping: float = 20.0
    silence: float = 15.0
    report: float = 60.0
    """A report may wait longer than a beat for its Ack: that one comes after a commit."""
    draw: Callable[[], float] = random.random


@dataclass
class Backoff:
    """Full jitter: each delay is drawn from [0, cap), and cap doubles from `low` to `high`."""

    pace: Pace
    failures: int = 0

    def next(self) -> float:
        """The delay before the next attempt, in seconds."""
        cap = min(self.pace.high, self.pace.low * 2.0 ** min(self.failures, 32))
        self.failures += 1
        return self.pace.draw() * cap

    def reset(self) -> None:
        """The last attempt was a good one."""
        self.failures = 0


@dataclass
class Owed:
    """Which of our messages the gateway still has to acknowledge."""

    beat_s: float
    pace: Pace
    report: int | None = None
    """seq of the report under way; one at a time, so a newer one supersedes what was not sent yet."""
    _report_at: float = 0.0
    _beats: set[int] = field(default_factory=set)
    _silent_since: float | None = None
    answered: float = 0.0
    """When the last Ack came, or this began."""

    def sent(self, of: str, seq: int, now: float) -> None:
        """A Beat or Report left at `now`."""
        if self._silent_since is None:
            self._silent_since = now
        if of == "Report":
            self.report, self._report_at = seq, now
        else:
            self._beats.add(seq)

    def acknowledged(self, of: str, seq: int, now: float) -> None:
        """An Ack came. One for a beat covers the beats before it; any Ack ends the silence."""
        self.answered = now
        if of == "Report":
            if seq == self.report:
                self.report = None
        else:
            self._beats = {beat for beat in self._beats if beat > seq}
        self._silent_since = now if self._beats or self.report is not None else None

    def due(self) -> float:
        """When waiting ends, on the clock of `sent`; infinity while nothing is owed."""
        ends = [float("inf")]
        if self._silent_since is not None:
            ends.append(self._silent_since + max(self.pace.silence, 3 * self.beat_s))
        if self.report is not None:
            ends.append(self._report_at + max(self.pace.report, 12 * self.beat_s))
        return min(ends)

    def answers(self, now: float) -> bool:
        """Whether an Ack came within two beats: the conductor takes a host for silent only later than that."""
        return now - self.answered < 2 * self.beat_s

    def overdue(self, now: float) -> str:
        """A sentence when the gateway has owed an Ack for too long, else ''."""
        if now < self.due():
            return ""
        what = "nothing" if self.report is None else f"report {self.report}"
        since = now - (self._silent_since if self._silent_since is not None else self._report_at)
        return f"the gateway acknowledged {what if self.report is None else 'not ' + what} for {since:.0f} s"


def worth_saying(times: int) -> bool:
    """The same failure is said the 1st, 2nd, 4th, 8th … time: a long outage does not fill the log."""
    return times & (times - 1) == 0


async def set_or_passed(event: asyncio.Event, seconds: float) -> None:
    """Until the event is set or so many seconds have passed, which may be infinity."""
    try:
        async with asyncio.timeout(max(seconds, 0)):
            await event.wait()
    except TimeoutError:
        return  # the caller looks at the clock
