"""Refusals become events: at most one per host, code and minute, with a count."""

from __future__ import annotations

import time
from dataclasses import dataclass

from accelerators import conductor
from accelerators.states import Source
from agents import meters

WINDOW_S = 60.0
MAX_KEYS = 10_000


@dataclass(slots=True)
class _Tally:
    count: int
    reason: str
    written_at: float


class Refusals:
    """Counted on the event loop, written by the writer thread. Bounded: beyond MAX_KEYS new ones share one tally."""

    def __init__(self) -> None:
        self._tallies: dict[tuple[str, str], _Tally] = {}

    def add(self, host: str, code: str, reason: str) -> None:
        """One refusal of whoever says to be `host`."""
        meters.refused[code] += 1
        key = (host[:255] or "(unknown)", code)
        if key not in self._tallies and len(self._tallies) >= MAX_KEYS:
            key = ("(many)", code)
        tally = self._tallies.setdefault(key, _Tally(0, reason, -WINDOW_S))
        tally.count += 1
        tally.reason = reason

    def flush(self) -> None:
        """Write the tallies that are due, forget those that are quiet."""
        now = time.monotonic()
        for (host, code), tally in list(self._tallies.items()):
            if now - tally.written_at < WINDOW_S:
                continue
            if not tally.count:
                del self._tallies[host, code]
                continue
            count, reason = tally.count, tally.reason
            changes = {"code": [None, code], "count": [None, count]}
            conductor.record("agent.refused", Source.SYSTEM, "gateway", host_name=host, changes=changes, reason=reason)
            tally.count -= count  # only now: the database may have been away
            tally.written_at = now
