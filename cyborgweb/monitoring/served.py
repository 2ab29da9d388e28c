"""Django middleware that counts and times HTTP requests by route template.

The path itself is never used as a label: paths hold ids, and requests for addresses that do not exist would each create
a time series.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import lru_cache

from django.contrib.admindocs.utils import replace_named_groups
from django.http import HttpRequest, HttpResponse

from accelerators.runtime import metrics

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
NO_ROUTE = "(none)"
"""The route label for addresses without a route, and for static files."""

_requests = metrics.create_counter(
    "cyborg_http_requests_total", "HTTP requests by route, method and class of status.", "route", "method", "status"
)
_seconds = metrics.create_histogram(
    "cyborg_http_request_seconds",
    "Time until the answer to an HTTP request began.",
    (0.005, 0.02, 0.1, 0.5, 2.0, 10.0),
    "route",
    "method",
)
busy_refusals = metrics.create_counter(
    "cyborg_http_busy_total", "HTTP requests that were answered with 503, because all threads and the queue were full."
)


class RequestMetricsMiddleware:
    """Count and time every request.

    It must be the outermost middleware, so that it counts the answers of the others.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Answer the request, then count it by route, method and class of status (`2xx`) and record the duration."""
        started = time.monotonic()
        response = self.get_response(request)
        match = request.resolver_match
        route = format_route(match.route) if match else NO_ROUTE
        method = request.method if request.method in METHODS else "other"
        _requests.labels(route, method, f"{response.status_code // 100}xx").inc()
        _seconds.labels(route, method).observe(time.monotonic() - started)
        return response


@lru_cache(maxsize=1024)
def format_route(route: str) -> str:
    r"""Return a route in readable form: `^api(?:/|$)\Ahosts/(?P<uuid>…)/?\Z` becomes `/api/hosts/{uuid}`. Both mounts
    of v2 give the same. Any other route that begins with `^` becomes NO_ROUTE.
    """
    _, anchored, rest = route.rpartition(r"\A")
    if route.startswith("^api"):
        return "/api/" + _simplify_pattern(rest if anchored else "")
    if anchored:
        return "/v2/" + _simplify_pattern(rest.removeprefix("(?:v2/)?").removeprefix("v2"))
    return NO_ROUTE if route.startswith("^") else "/" + _simplify_pattern(rest)


def _simplify_pattern(pattern: str) -> str:
    """Return the pattern of a route with groups and converters as `{name}`, and without anchors and optional
    endings.
    """
    readable = replace_named_groups(pattern) if "(?P" in pattern else pattern
    short = re.sub(r"\(\?:/\[\^/\]\+\)\?|\(\?:\\\.json\)\?|/\?|\\Z|\$$|\^", "", readable)
    return re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", short)
