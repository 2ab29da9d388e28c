"""Counts what other services of the cloud are asked: Placement, Nova, Glance, Keystone. Wraps the one session.

The agents' own calls, where agents write to Placement, are made on their hosts and are not among them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from accelerators import meters

SERVICES = {"placement": "placement", "compute": "nova", "image": "glance", None: "keystone", "identity": "keystone"}
"""By keystoneauth1's service types; Keystone is asked by its address."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"})

_calls = meters.counter(
    "cyborg_cloud_calls_total",
    "Calls to other services by what came of them: a status, `timeout`, `unreachable`, `error`.",
    "service",
    "method",
    "status",
)
_seconds = meters.histogram(
    "cyborg_cloud_call_seconds",
    "How long other services took to answer, or not to.",
    (0.02, 0.1, 0.3, 1.0, 3.0, 10.0),
    "service",
    "method",
)


def counted(session: Any) -> Any:
    """The same keystoneauth1 session, whose calls are counted from now on."""
    session.request = _counting(session.request)
    return session


def _counting(ask: Callable[..., Any]) -> Callable[..., Any]:
    from keystoneauth1 import exceptions

    def request(url: str, method: str, *positional: Any, **named: Any) -> Any:
        began, status = time.monotonic(), "error"
        try:
            answer = ask(url, method, *positional, **named)
            status = _status(answer.status_code)
        except exceptions.HttpError as error:
            status = _status(error.http_status)
            raise
        except exceptions.ConnectTimeout:
            status = "timeout"
            raise
        except (exceptions.ConnectionError, exceptions.EndpointNotFound):
            status = "unreachable"
            raise
        else:
            return answer
        finally:
            service = SERVICES.get((named.get("endpoint_filter") or {}).get("service_type"), "other")
            verb = method if method in METHODS else "other"
            _calls.labels(service, verb, status).inc()
            _seconds.labels(service, verb).observe(time.monotonic() - began)

    return request


def _status(code: int) -> str:
    return str(code) if 100 <= code < 600 else "error"
