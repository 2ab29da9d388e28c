"""`GET /metrics`: all metrics for Prometheus, in its text format or as OpenMetrics, for this machine itself or for
clients with the token.

A collection is served to everybody for `CACHE_S` seconds, so ten scrapers cost as much as one. A request that arrives
while a new collection is made gets the previous one. A collection is bounded: a fixed number of statements, each with a
timeout.
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

CACHE_S = 3.0
STALE_S = 60.0
"""A request that arrives during a collection waits for it if the previous one is older than this, in seconds."""
PROXY_HEADERS = re.compile(r"forwarded|x-forwarded-.*|x-real-ip|via", re.IGNORECASE)
"""Headers of requests that came through a proxy. The address of a proxy on this machine says nothing about the client.
"""
OPENMETRICS = "application/openmetrics-text"
REFUSED_TEXT = (
    "Metrics are served only to this machine itself, and to requests that send Authorization: Bearer with the value "
    "of CYBORG_METRICS_TOKEN.\n"
)


@dataclass
class MetricsSnapshot:
    """One collection of all metrics, at the time `at` (monotonic clock). A collector for `prometheus_client`.

    `rendered` maps a content type to the metrics in that format; `MetricsCache` adds each at its first request.
    """

    at: float = float("-inf")
    metrics: list[Metric] = field(default_factory=list)
    rendered: dict[str, bytes] = field(default_factory=dict)

    def collect(self) -> list[Metric]:
        """Return all metrics of this collection. `prometheus_client` calls it."""
        return self.metrics


class MetricsCache:
    """Cache of the metrics that were collected last. One thread at a time collects new ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = MetricsSnapshot()

    def render_metrics(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics in the format that `accept` prefers, and its content type.

        If the last collection is older than `CACHE_S` seconds, make a new one. While another thread makes one, return
        the last one; but if that is older than `STALE_S` seconds or not yet rendered in this format, wait for the
        thread.
        """
        encode, media = choose_encoder(OPENMETRICS if OPENMETRICS in accept else "")
        last = self._last
        age = time.monotonic() - last.at if media in last.rendered else float("inf")
        if age > CACHE_S and self._lock.acquire(blocking=age > STALE_S):
            try:
                last = self._last
                if time.monotonic() - last.at > CACHE_S:
                    last = MetricsSnapshot(time.monotonic(), [*meters.collect_metrics(), *snapshot.collect_gauges()])
                if media not in last.rendered:
                    last.rendered[media] = encode(last)
                self._last = last
            finally:
                self._lock.release()
        return last.rendered[media], media

    def clear(self) -> None:
        """Drop the cached metrics, so that the next request collects them anew. For tests."""
        self._last = MetricsSnapshot()


metrics_cache = MetricsCache()


@require_safe
def metrics(request: HttpRequest) -> HttpResponse:
    """Answer with the metrics, or with 403 if the client is not this machine and has no token."""
    if not (_is_local(request) or _has_valid_metrics_token(request)):
        return HttpResponse(REFUSED_TEXT, status=403, content_type="text/plain; charset=utf-8")
    body, media = metrics_cache.render_metrics(request.headers.get("Accept", ""))
    return HttpResponse(body, content_type=media)


def _is_local(request: HttpRequest) -> bool:
    """Return whether the request comes directly from this machine: from a loopback address, and without headers of a
    proxy.
    """
    if any(PROXY_HEADERS.fullmatch(name) for name in request.headers):
        return False
    try:
        return ipaddress.ip_address(request.META.get("REMOTE_ADDR", "")).is_loopback
    except ValueError:
        return False


def _has_valid_metrics_token(request: HttpRequest) -> bool:
    """Return whether the request has the configured metrics token as Bearer token; False if none is configured."""
    expected_token = settings.KEYS.metrics_token
    scheme, _, sent_token = request.headers.get("Authorization", "").partition(" ")
    return (
        bool(expected_token)
        and scheme.lower() == "bearer"
        and hmac.compare_digest(sent_token.strip().encode(), expected_token.encode())
    )
