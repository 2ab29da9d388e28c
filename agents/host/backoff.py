"""Back-off and acknowledgement time-outs as plain arithmetic: the callers pass the time in, and no socket is used."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ConnectionTiming:
    """All waiting times of a connection, in seconds; tests use smaller ones.

    `draw_fraction` returns a random number in [0, 1).
    """

    first_backoff_s: float = 0.5
    """Upper bound of the first back-off delay."""
    max_backoff_s: float = 30.0
    """Upper bound of every back-off delay."""
    refused_delay_s: float = 60.0
    """Mean delay after a refusal that only an operator can lift."""
    stable_after_s: float = 30.0
    """The back-off is reset after a connection that lasted at least this long."""
    open_timeout_s: float = 10.0
    """Time-out of each part of connecting: the challenge, the WebSocket, the Welcome."""
    ping_interval_s: float = 20.0
    """Interval of WebSocket pings, and time-out of each."""
    ack_timeout_s: float = 15.0
    """How many seconds the gateway may send no Ack while one is owed; at least three heartbeat intervals are
    allowed."""
    report_ack_timeout_s: float = 60.0
    """How many seconds one report may wait for its Ack; at least twelve heartbeat intervals are allowed, because the
    Ack of a report follows a commit."""
    draw_fraction: Callable[[], float] = random.random


@dataclass
class Backoff:
    """Exponential back-off with full jitter: each delay is drawn from [0, cap).

    cap doubles from `first_backoff_s` to `max_backoff_s`.
    """

    timing: ConnectionTiming
    failures: int = 0

    def next_delay(self) -> float:
        """Count a failure and return the delay before the next attempt, in seconds."""
        cap = min(self.timing.max_backoff_s, self.timing.first_backoff_s * 2.0 ** min(self.failures, 32))
        self.failures += 1
        return self.timing.draw_fraction() * cap

    def reset(self) -> None:
        """Start again with the shortest delays, after a successful attempt."""
        self.failures = 0


@dataclass
class PendingAcks:
    """Tracks which heartbeats and which report the gateway has not acknowledged, and since when.

    All times are seconds on the caller's clock.
    """

    beat_s: float
    timing: ConnectionTiming
    pending_report_seq: int | None = None
    """The `seq` of the report that waits for its Ack, None if none does. Only one report waits at a time; of the
    reports that are made meanwhile only the newest is sent."""
    _report_sent_at: float = 0.0
    _pending_beats: set[int] = field(default_factory=set)
    _silent_since: float | None = None
    last_ack_at: float = 0.0
    """When the last Ack came, or when the connection began if no Ack has come on it."""

    def record_sent(self, message_type: str, seq: int, now: float) -> None:
        """Note that a Beat or a Report (`message_type`) was sent at `now`. The silence time-out starts if no Ack was
        owed yet."""
        if self._silent_since is None:
            self._silent_since = now
        if message_type == "Report":
            self.pending_report_seq, self._report_sent_at = seq, now
        else:
            self._pending_beats.add(seq)

    def record_ack(self, message_type: str, seq: int, now: float) -> None:
        """Note an Ack that came at `now`, in seconds. It restarts the silence time-out, or ends it if no other Ack is
        owed.

        An Ack of a report counts only for the report that waits; one for an older report clears nothing. An Ack of a
        Beat covers all heartbeats up to its `seq`. An Ack of a Result or a NewKey covers none, because its `seq` is
        another number.
        """
        self.last_ack_at = now
        if message_type == "Report":
            if seq == self.pending_report_seq:
                self.pending_report_seq = None
        elif message_type == "Beat":
            self._pending_beats = {beat for beat in self._pending_beats if beat > seq}
        self._silent_since = now if self._pending_beats or self.pending_report_seq is not None else None

    def next_deadline(self) -> float:
        """Return when the next Ack is overdue, on the caller's clock; infinity while no Ack is owed."""
        deadlines = [float("inf")]
        if self._silent_since is not None:
            deadlines.append(self._silent_since + max(self.timing.ack_timeout_s, 3 * self.beat_s))
        if self.pending_report_seq is not None:
            deadlines.append(self._report_sent_at + max(self.timing.report_ack_timeout_s, 12 * self.beat_s))
        return min(deadlines)

    def is_gateway_answering(self, now: float) -> bool:
        """Return whether an Ack came within the last two heartbeat intervals.

        The conductor treats a host as silent only after a longer time than that.
        """
        return now - self.last_ack_at < 2 * self.beat_s

    def describe_overdue(self, now: float) -> str:
        """Return a sentence for the log when the gateway has owed an Ack for too long, else ''."""
        if now < self.next_deadline():
            return ""
        what = (
            "acknowledged nothing"
            if self.pending_report_seq is None
            else f"not acknowledged report {self.pending_report_seq}"
        )
        since = now - (self._silent_since if self._silent_since is not None else self._report_sent_at)
        return f"the gateway has {what} for {since:.0f} s"


def should_log_repetition(count: int) -> bool:
    """Return whether to log a failure that has occurred `count` times: only at 1, 2, 4, 8, …"""
    return count & (count - 1) == 0


async def wait_for_event(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set or `seconds` have passed (infinity is allowed). Returns None in both cases."""
    try:
        async with asyncio.timeout(max(seconds, 0)):
            await event.wait()
    except TimeoutError:
        return  # the caller compares its deadlines with the clock
