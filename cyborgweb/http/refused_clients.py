"""Reports clients whose requests were refused because they used more than their share: in the log and as an event."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from heapq import nlargest
from typing import Any

from accelerators import conductor
from accelerators.domain.states import EventSource
from accelerators.refusal_counts import RefusalKind, Refusals, note_refusal
from accelerators.runtime import metrics
from cyborgweb.monitoring.backlog import REFUSED_CLIENTS_ACTION, REFUSED_CLIENTS_HOST

log = logging.getLogger(__name__)

MAX_NAMED = 5
"""How many clients an event names: those with the most refusals."""
REASON = "The service was busy, and these clients had more requests or answers under way than others."

_refusals = metrics.create_counter(
    "cyborg_http_share_total",
    "HTTP requests that were answered with 503 because their client used more than its share.",
    "by",
)


def note_refused_client(client: str) -> None:
    """Count one refusal of this client. It writes nothing."""
    _refusals.labels(client.partition(" ")[0]).inc()
    note_refusal(_REFUSED_CLIENTS, client)


def _build_events(refusals: Mapping[str, Refusals]) -> list[dict[str, Any]]:
    """Log the clients with the most refusals, and return the event that names them."""
    most = nlargest(MAX_NAMED, refusals.items(), key=lambda each: each[1].number)
    named = ", ".join(f"{client} ({refused.number} times)" for client, refused in most)
    log.warning("requests refused with 503, because their clients used more than their share: %s", named)
    total = sum(refused.number for refused in refusals.values())
    return [
        conductor.build_event(
            REFUSED_CLIENTS_ACTION,
            EventSource.SYSTEM,
            "web",
            host_name=REFUSED_CLIENTS_HOST,
            changes={"clients": [None, named], "count": [None, total]},
            reason=REASON,
        )
    ]


_REFUSED_CLIENTS = RefusalKind(_build_events)
