"""Record refusals of agents as events: at most one event per host, code and minute, with a count."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from django.db import DatabaseError, InterfaceError, OperationalError

from accelerators import conductor
from accelerators.domain.states import EventSource
from agents.gateway import metrics

log = logging.getLogger(__name__)

EVENT_INTERVAL_S = 60.0
"""Minimum seconds between two events of the same host and code."""
MAX_TALLIES = 500
"""Maximum number of (host, code) pairs that are counted separately. The host name of a refused client is not verified,
so a client could otherwise fill the memory with invented names."""


@dataclass(slots=True)
class _RefusalTally:
    """Refusals of one host and code: how many are not recorded yet, the last reason, and the time of the last event."""

    count: int
    reason: str
    written_at: float


class RefusalCounter:
    """Counts refusals on the event loop until the writer thread records them.

    The memory is bounded: beyond MAX_TALLIES, new hosts share one tally per code.
    """

    def __init__(self) -> None:
        self._tallies: dict[tuple[str, str], _RefusalTally] = {}

    def add(self, host: str, code: str, reason: str, *, is_disconnected: bool = True) -> None:
        """Count one refusal of a client that claims to be `host`.

        `is_disconnected` means that it was refused or disconnected; only then the metrics count it. False is for agents
        that stay connected, for example when samples are dropped.
        """
        metrics.refusals_by_code[code] += is_disconnected
        key = (host[:255].replace("\0", "") or "(unknown)", code)
        if key not in self._tallies and len(self._tallies) >= MAX_TALLIES:
            key = ("(many)", code)
        tally = self._tallies.setdefault(key, _RefusalTally(0, reason, -EVENT_INTERVAL_S))
        tally.count += 1
        tally.reason = reason.replace("\0", "")

    def flush(self) -> None:
        """Record an event for each tally with new refusals, at most one per tally every EVENT_INTERVAL_S.

        Tallies without new refusals since their last event are deleted after EVENT_INTERVAL_S. All events are written
        in one statement. Raise OperationalError or InterfaceError if the database is down; the counts are kept then.
        """
        now = time.monotonic()
        due: dict[tuple[str, str], int] = {}
        for key, tally in list(self._tallies.items()):
            if now - tally.written_at < EVENT_INTERVAL_S:
                continue
            if tally.count:
                due[key] = tally.count
            else:
                del self._tallies[key]
        if due:
            self._record_events(due)
        for key, count in due.items():  # only after the write, which fails while the database is down
            self._tallies[key].count -= count
            self._tallies[key].written_at = now

    def _record_events(self, due: dict[tuple[str, str], int]) -> None:
        """Record an event for each key of `due`, in one statement. Raise OperationalError or InterfaceError if the
        database is down.

        Events that the database rejects are logged and lost, so that they do not block later ones.
        """
        try:
            conductor.record_events([self._build_event(*key, count) for key, count in due.items()])
        except (OperationalError, InterfaceError):
            raise
        except DatabaseError:
            log.exception("refusals cannot be recorded (agents: %d)", len(due))

    def _build_event(self, host: str, code: str, count: int) -> dict[str, Any]:
        """Return the event `agent.refused` with code, count and the last reason of one tally; nothing is written."""
        changes = {"code": [None, code], "count": [None, count]}
        reason = self._tallies[host, code].reason
        return conductor.build_event(
            "agent.refused", EventSource.SYSTEM, "gateway", host_name=host, changes=changes, reason=reason
        )
