"""Count and time calls to other cloud services (Placement, Nova, Glance, Keystone), by wrapping the keystoneauth1
session.

Calls that agents make to Placement themselves are made on their hosts and are not counted here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from accelerators import slow_neighbours
from accelerators.runtime import metrics

SERVICES = {"placement": "placement", "compute": "nova", "image": "glance", None: "keystone", "identity": "keystone"}
"""Service name by keystoneauth1's service type; Keystone is called by URL, without a type."""
COUNTED_AT = "_cyborg_counted_at"
"""Name of the attribute that is set on an exception: the time at which it was counted, by `time.monotonic`."""
SLOW_CALL_S, SLOW_CALLS = 1.0, 3
"""A service is slow if this many calls, or more, of a minute took this many seconds, or longer."""
SLOW_SENTENCE = (
    f"answers slowly: {{count}} calls took {SLOW_CALL_S:g} s or longer, the slowest {{worst_s:.1f}} s. What is sent to"
    " it is late. Look at its load and at the network."
)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"})

_calls = metrics.create_counter(
    "cyborg_cloud_calls_total",
    "Calls to other services by outcome: a status, `timeout`, `unreachable`, `error`.",
    "service",
    "method",
    "status",
)
_seconds = metrics.create_histogram(
    "cyborg_cloud_call_seconds",
    "How long other services took to answer or to fail.",
    (0.02, 0.1, 0.3, 1.0, 3.0, 10.0),
    "service",
    "method",
)


def count_calls(session: Any) -> Any:
    """Make this keystoneauth1 session count and time its calls from now on, and return it. Call it once per session."""
    session.request = _count_requests(session.request)
    return session


def _count_requests(send: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `send` and counts the call with its service, method, status and duration.

    Errors are raised as they are, and counted unless they come from an inner call that has been counted.
    """

    def request(url: str, method: str, *positional: Any, **options: Any) -> Any:
        """Call `send`, count the call, and return its answer or raise its error. See `_count_requests`."""
        started = time.monotonic()

        def count(status: str) -> None:
            """Count the call with this status, and record how long it has taken."""
            service = SERVICES.get((options.get("endpoint_filter") or {}).get("service_type"), "other")
            verb = method if method in METHODS else "other"
            seconds = time.monotonic() - started
            _calls.labels(service, verb, status).inc()
            _seconds.labels(service, verb).observe(seconds)
            if seconds >= SLOW_CALL_S:
                slow_neighbours.note(service.title(), SLOW_SENTENCE, seconds, SLOW_CALLS)

        try:
            answer = send(url, method, *positional, **options)
        except BaseException as error:
            if not _is_counted(error, started):
                count(_failure_label(error))
                vars(error)[COUNTED_AT] = time.monotonic()
            raise
        count(_status_label(answer.status_code))
        return answer

    return request


def _is_counted(error: BaseException | None, since: float) -> bool:
    """Return True if the error comes from an inner call, such as a login, that was counted at or after `since`
    (monotonic clock). The outer call was then never made, and is not counted.
    """
    while error is not None:
        if vars(error).get(COUNTED_AT, float("-inf")) >= since:
            return True
        error = error.__cause__ or error.__context__
    return False


def _failure_label(error: BaseException) -> str:
    """Return the status of a failed call, for a label: the HTTP status, `timeout`, `unreachable` or `error`."""
    from keystoneauth1 import exceptions

    if isinstance(error, exceptions.HttpError):
        return _status_label(error.http_status)
    if isinstance(error, exceptions.ConnectTimeout):
        return "timeout"
    return "unreachable" if isinstance(error, exceptions.ConnectionError | exceptions.EndpointNotFound) else "error"


def _status_label(code: int) -> str:
    """Return an HTTP status as the text of its number, such as `404`; `error` for a number outside 100 to 599."""
    return str(code) if 100 <= code < 600 else "error"
