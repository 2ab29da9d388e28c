"""Reports clients whose requests were refused because they used more than their share: in the log and as an event."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from django.db import Error, connection

from accelerators import conductor
from accelerators.domain.states import EventSource
from accelerators.runtime import metrics
from cyborgweb.monitoring.backlog import REFUSED_CLIENTS_ACTION, REFUSED_CLIENTS_HOST

log = logging.getLogger(__name__)

INTERVAL_S = 60.0
"""Minimum seconds between two reports."""
MAX_CLIENTS, MAX_NAMED = 1_000, 5
"""How many clients are counted between two reports, and how many of them a report names."""
REASON = "The service was busy, and these clients had more requests or answers under way than others."

_refusals = metrics.create_counter(
    "cyborg_http_share_total",
    "HTTP requests that were answered with 503 because their client used more than its share.",
    "by",
)


class RefusedClients:
    """Counts refusals by client, on the event loop. The first one is reported at once, later ones every INTERVAL_S."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._counts: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._next_report_at = float("-inf")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="refused-clients")

    def add(self, client: str) -> None:
        """Count one refusal of this client, and report it soon."""
        _refusals.labels(client.partition(" ")[0]).inc()
        if client in self._counts or len(self._counts) < MAX_CLIENTS:
            self._counts[client] += 1
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(self._next_report_at, loop.time()), self._report)

    def _report(self) -> None:
        """Report the clients that were counted since the last report, and begin to count anew."""
        loop = asyncio.get_running_loop()
        self._timer, self._next_report_at = None, loop.time() + self._interval_s
        counts, self._counts = self._counts, Counter()
        loop.run_in_executor(self._thread, _write_report, counts)


def _write_report(counts: Counter[str]) -> None:
    """Write the clients with the most refusals to the log and into an event. Log that it failed if the database is
    down."""
    named = ", ".join(f"{client} ({count} times)" for client, count in counts.most_common(MAX_NAMED))
    log.warning("requests refused with 503, because their clients used more than their share: %s", named)
    changes = {"clients": [None, named], "count": [None, counts.total()]}
    event = conductor.build_event(
        REFUSED_CLIENTS_ACTION,
        EventSource.SYSTEM,
        "web",
        host_name=REFUSED_CLIENTS_HOST,
        changes=changes,
        reason=REASON,
    )
    try:
        conductor.record_events([event])
    except Error:  # also InterfaceError, which is no DatabaseError
        log.exception("the event client.refused cannot be recorded")
    finally:
        connection.close()
