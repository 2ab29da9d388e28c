"""Refusals become events: at most one per host, code and minute, with a count."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from django.db import DatabaseError, InterfaceError, OperationalError

from accelerators import conductor
from accelerators.domain.states import Source
from agents.gateway import metrics

log = logging.getLogger(__name__)

WINDOW_S = 60.0
MAX_KEYS = 500
"""Who is refused says a name that nobody has proved: so many at a time have tallies of their own."""


@dataclass(slots=True)
class _Tally:
    count: int
    reason: str
    written_at: float


class Refusals:
    """Counted on the event loop, written by the writer thread. Bounded: beyond MAX_KEYS new ones share one tally."""

    def __init__(self) -> None:
        self._tallies: dict[tuple[str, str], _Tally] = {}

    def add(self, host: str, code: str, reason: str, *, away: bool = True) -> None:
        """One refusal of whoever says to be `host`. `away`: it is not let in, or not let go on."""
        metrics.refused[code] += away
        key = (host[:255].replace("\0", "") or "(unknown)", code)
        if key not in self._tallies and len(self._tallies) >= MAX_KEYS:
            key = ("(many)", code)
        tally = self._tallies.setdefault(key, _Tally(0, reason, -WINDOW_S))
        tally.count += 1
        tally.reason = reason.replace("\0", "")

    def flush(self) -> None:
        """Write the tallies that are due, in one statement; forget those that are quiet."""
        now = time.monotonic()
        due: dict[tuple[str, str], int] = {}
        for key, tally in list(self._tallies.items()):
            if now - tally.written_at < WINDOW_S:
                continue
            if tally.count:
                due[key] = tally.count
            else:
                del self._tallies[key]
        if due:
            self._write(due)
        for key, count in due.items():  # only now: the database may have been away
            self._tallies[key].count -= count
            self._tallies[key].written_at = now

    def _write(self, due: dict[tuple[str, str], int]) -> None:
        """What the database refuses is lost, and said: it must not keep what comes after it from being written."""
        try:
            conductor.record_all([self._event(*key, count) for key, count in due.items()])
        except (OperationalError, InterfaceError):
            raise
        except DatabaseError:
            log.exception("refusals of %d agents cannot be recorded", len(due))

    def _event(self, host: str, code: str, count: int) -> dict[str, Any]:
        changes = {"code": [None, code], "count": [None, count]}
        reason = self._tallies[host, code].reason
        return conductor.event(
            "agent.refused", Source.SYSTEM, "gateway", host_name=host, changes=changes, reason=reason
        )
