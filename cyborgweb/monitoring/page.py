"""`GET /metrics`: everything for Prometheus, as text or as OpenMetrics, to this machine or to who has the token.

What was collected is told for a few seconds to everybody who asks, so ten scrapers cost one; who asks while it is being
collected is told the last one. A collection is bounded: a fixed number of statements, each with a time-out.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import threading
import time
from dataclasses import dataclass, field

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from accelerators.runtime import metrics as meters
from cyborgweb.monitoring import snapshot

KEPT_S = 3.0
STALE_S = 60.0
"""Who comes during a collection is told nothing that is older."""
FORWARDED = re.compile(r"forwarded|x-forwarded-.*|x-real-ip|via", re.IGNORECASE)
"""With any such header a request comes through a proxy: that the proxy runs here says nothing of who asked it."""
OPENMETRICS = "application/openmetrics-text"
REFUSED = (
    "Metrics are told to this machine itself, or to who sends Authorization: Bearer with the value of "
    "CYBORG_METRICS_TOKEN.\n"
)


@dataclass
class Collection:
    """What was told at one moment. Is a collector: what `prometheus_client` renders."""

    at: float = float("-inf")
    metrics: list[Metric] = field(default_factory=list)
    rendered: dict[str, bytes] = field(default_factory=dict)

    def collect(self) -> list[Metric]:
        """All of it."""
        return self.metrics


class Collected:
    """The last collection, for all that ask; one thread at a time makes another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = Collection()

    def body(self, accept: str) -> tuple[bytes, str]:
        """What is told, and its content type."""
        encode, media = choose_encoder(OPENMETRICS if OPENMETRICS in accept else "")
        last = self._last
        age = time.monotonic() - last.at if media in last.rendered else float("inf")
        if age > KEPT_S and self._lock.acquire(blocking=age > STALE_S):
            try:
                last = self._last
                if time.monotonic() - last.at > KEPT_S:
                    last = Collection(time.monotonic(), [*meters.counted(), *snapshot.collect()])
                if media not in last.rendered:
                    last.rendered[media] = encode(last)
                self._last = last
            finally:
                self._lock.release()
        return last.rendered[media], media

    def forget(self) -> None:
        """The next one is collected afresh (tests)."""
        self._last = Collection()


collected = Collected()


@require_safe
def metrics(request: HttpRequest) -> HttpResponse:
    """The page."""
    if not (_is_here(request) or _has_token(request)):
        return HttpResponse(REFUSED, status=403, content_type="text/plain; charset=utf-8")
    body, media = collected.body(request.headers.get("Accept", ""))
    return HttpResponse(body, content_type=media)


def _is_here(request: HttpRequest) -> bool:
    """Whether it was sent by this machine itself."""
    if any(FORWARDED.fullmatch(name) for name in request.headers):
        return False
    try:
        return ipaddress.ip_address(request.META.get("REMOTE_ADDR", "")).is_loopback
    except ValueError:
        return False


def _has_token(request: HttpRequest) -> bool:
    wanted = settings.KEYS.metrics_token
    scheme, _, said = request.headers.get("Authorization", "").partition(" ")
    return bool(wanted) and scheme.lower() == "bearer" and hmac.compare_digest(said.strip().encode(), wanted.encode())
