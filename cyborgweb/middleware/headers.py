"""Sets the headers that restrict what a browser may do: Content-Security-Policy and Permissions-Policy.

The middleware is outside those that serve static files and refuse requests, so their responses have the headers, too.
The policy is strict; a page that needs more must say so in its template with `{% csp_allow %}`.
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
"""The directives of Content Security Policy level 3. `connect-src 'self'` also allows our own WebSockets."""
PERMISSIONS_POLICY = "camera=(), display-capture=(), geolocation=(), microphone=(), payment=(), serial=(), usb=()"
"""Browser features that none of our pages uses; the header forbids them."""


@lru_cache(maxsize=8)
def build_content_policy(extra_sources: tuple[tuple[str, str], ...] = ()) -> str:
    """Return the value of Content-Security-Policy: SOURCES, with the `extra_sources` (directive, sources) added.

    An extra directive that is not in SOURCES is ignored.
    """
    extra_by_directive = dict(extra_sources)
    return "; ".join(f"{name} {value} {extra_by_directive.get(name, '')}".rstrip() for name, value in SOURCES.items())


class HeadersMiddleware:
    """Sets Content-Security-Policy and Permissions-Policy. SecurityMiddleware, the next one, sets the other headers."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Add both headers to the response. A template may have added sources with `{% csp_allow %}`."""
        response = self.get_response(request)
        response.headers["Content-Security-Policy"] = build_content_policy(getattr(request, "csp_allowed", ()))
        response.headers["Permissions-Policy"] = PERMISSIONS_POLICY
        return response
