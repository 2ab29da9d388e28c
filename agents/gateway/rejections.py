"""Record refusals of agents as events: few events for each host and code, with a count.

An event bears a host's name only if the client has proven who it is. Every client that reaches the gateway can send
handshakes in any host's name, so handshakes without such a proof share one series of events for each code.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from django.db import DatabaseError, InterfaceError, OperationalError

from accelerators import conductor
from accelerators.domain.states import EventSource
from agents.gateway import metrics

log = logging.getLogger(__name__)

EVENT_INTERVAL_S = 60.0
"""Minimum seconds between two events of the same host and code."""
MAX_EVENTS_AT_ONCE = 6
"""How many events of the same host and code may follow each other at that distance, after a quiet time."""
EVENT_REFILL_S = 3600.0
"""Seconds after which one event more is allowed: of one host and code at most MAX_EVENTS_AT_ONCE + 24 a day."""
MAX_TALLIES = 500
"""Maximum number of (host, code) pairs that are counted separately."""
MAX_CLAIMS = 10
"""Maximum number of claimed host names, and of addresses, in an event about clients that have proven nothing."""
UNPROVEN_HOST = "(unknown)"
"""Stands in place of a host name in events about clients that have not proven which host they are."""


@dataclass(slots=True)
class _RefusalTally:
    """Refusals of one host and code: how many are not recorded yet, the last reason, and the time of the last event.

    `claimed` and `addresses` are the first host names that unproven clients have claimed since the last event, and
    their addresses. `allowance` is the number of events that may be written, as of `updated_at` (monotonic clock).
    """

    count: int
    reason: str
    updated_at: float
    written_at: float = float("-inf")
    allowance: float = MAX_EVENTS_AT_ONCE
    claimed: dict[str, None] = field(default_factory=dict)
    addresses: dict[str, None] = field(default_factory=dict)

    def update_allowance(self, now: float) -> None:
        """Add to the allowance what the time since `updated_at` has earned."""
        earned = (now - self.updated_at) / EVENT_REFILL_S
        self.allowance, self.updated_at = min(MAX_EVENTS_AT_ONCE, self.allowance + earned), now


class RefusalCounter:
    """Counts refusals on the event loop until the writer thread records them.

    The memory is bounded: beyond MAX_TALLIES, new hosts share one tally per code.
    """

    def __init__(self) -> None:
        self._tallies: dict[tuple[str, str], _RefusalTally] = {}

    def add(
        self,
        proven_host: str,
        code: str,
        reason: str,
        *,
        claimed: str = "",
        address: str = "",
        is_disconnected: bool = True,
    ) -> None:
        """Count one refusal of the host `proven_host`, '' if the client has not proven which host it is.

        `claimed` is the host name that the client claims, and `address` where it comes from; they are only recorded if
        it has proven nothing. `is_disconnected` means that it was refused or disconnected; only then the metrics count
        it. False is for agents that stay connected, for example when samples are dropped.
        """
        metrics.refusals_by_code[code] += is_disconnected
        key = (proven_host[:255].replace("\0", "") or UNPROVEN_HOST, code)
        if key not in self._tallies and len(self._tallies) >= MAX_TALLIES:
            key = ("(many)", code)
        tally = self._tallies.setdefault(key, _RefusalTally(0, reason, time.monotonic()))
        tally.count += 1
        tally.reason = reason.replace("\0", "")
        if not proven_host:
            _note_claim(tally.claimed, claimed)
            _note_claim(tally.addresses, address)

    def flush(self) -> None:
        """Record an event for each tally with new refusals, if its allowance and EVENT_INTERVAL_S permit one.

        A tally without new refusals is deleted when its allowance is complete again, so that a pause between two floods
        earns no additional events. All events are written in one statement. Raise OperationalError or InterfaceError if
        the database is down; the counts are kept then.
        """
        now = time.monotonic()
        due: dict[tuple[str, str], int] = {}
        for key, tally in list(self._tallies.items()):
            tally.update_allowance(now)
            if tally.count and tally.allowance >= 1 and now - tally.written_at >= EVENT_INTERVAL_S:
                due[key] = tally.count
            elif not tally.count and tally.allowance >= MAX_EVENTS_AT_ONCE:
                del self._tallies[key]
        if due:
            self._record_events(due)
        for key, count in due.items():  # only after the write, which fails while the database is down
            tally = self._tallies[key]
            tally.count -= count
            tally.allowance -= 1
            tally.written_at = now
            tally.claimed, tally.addresses = {}, {}

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
        """Return the event `agent.refused` with code, count and the last reason of one tally; nothing is written.

        If the clients have proven nothing, the event also has the names that they claimed, and their addresses.
        """
        tally = self._tallies[host, code]
        changes: dict[str, Any] = {"code": [None, code], "count": [None, count]}
        if tally.claimed:
            changes["claimed"] = [None, ", ".join(tally.claimed)]
        if tally.addresses:
            changes["addresses"] = [None, ", ".join(tally.addresses)]
        return conductor.build_event(
            "agent.refused", EventSource.SYSTEM, "gateway", host_name=host, changes=changes, reason=tally.reason
        )


def _note_claim(claims: dict[str, None], text: str) -> None:
    """Add a text that a client chose to `claims`, cut and without characters that cannot be stored, unless there are
    MAX_CLAIMS already.
    """
    if text and len(claims) < MAX_CLAIMS:
        claims[text[:255].replace("\0", "")] = None
