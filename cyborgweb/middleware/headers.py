"""What every answer tells a browser not to do. Django's outermost middleware, so files and refusals bear it too.

The policy is strict; a page that needs more says so in its template with `{% csp_allow %}`, and only there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from django.http import HttpRequest, HttpResponse

SOURCES = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "font-src": "'self'",
    "img-src": "'self' data:",
    "connect-src": "'self'",
    "form-action": "'self'",
    "base-uri": "'none'",
    "frame-ancestors": "'none'",
}
"""Content Security Policy level 3. `connect-src 'self'` covers our own sockets."""
PERMISSIONS = "camera=(), display-capture=(), geolocation=(), microphone=(), payment=(), serial=(), usb=()"
"""What no page of ours ever asks a browser for."""


@lru_cache(maxsize=8)
def policy(more: tuple[tuple[str, str], ...] = ()) -> str:
    """The header's value; `more` are pairs of a directive and what it allows besides."""
    allowed = dict(more)
    return "; ".join(f"{name} {value} {allowed.get(name, '')}".rstrip() for name, value in SOURCES.items())


class HeadersMiddleware:
    """Sets Content-Security-Policy and Permissions-Policy; the others are SecurityMiddleware's, right inside of it."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self.get_response(request)
        response.headers["Content-Security-Policy"] = policy(getattr(request, "csp_allowed", ()))
        response.headers["Permissions-Policy"] = PERMISSIONS
        return response
