"""Gives every request an id, which events can record, and refuses writes to the console while it is read only."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from django.http import HttpRequest, HttpResponse

from accelerators import conductor
from accelerators.domain.caller import request_id
from cyborgweb.auth import read_only
from cyborgweb.auth.policy import READ_METHODS
from cyborgweb.pages import error_pages

EXEMPT_PATHS = (
    *(f"/admin/{path}/" for path in ("login", "logout", "census", "inbox", "lists", "cyborgweb/maintenance")),
    "/mail/",
)
"""Paths that accept writes also while everything is read only: they change nothing, or only a person's own settings, or
they end the maintenance; the links in mails check it themselves."""


class RequestIdMiddleware:
    """Gives each request a new id: it is the header `x-openstack-request-id: req-<uuid>` of the response (contract
    section 1.7), and the value of the context variable `request_id` while the request is handled.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Answer the request under a new id; an id that the client sent is ignored."""
        new_id = f"req-{uuid.uuid4()}"
        token = request_id.set(new_id)
        try:
            response = self.get_response(request)
        finally:
            request_id.reset(token)
        response["x-openstack-request-id"] = new_id
        return response


class ReadOnlyMiddleware:
    """Answers writes to the console with 503 and the reason while everything is read only.

    The APIs check this themselves (`cyborgweb.auth.policy`). The transactions of writes to the console and to the APIs
    check it once more, because the mode may be switched on while the request is handled.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Answer 503 to a write below `/admin/` while everything is read only, except below `EXEMPT_PATHS`."""
        if request.method in READ_METHODS or request.path.startswith(EXEMPT_PATHS):
            return self.get_response(request)
        if request.path.startswith("/admin/") and (maintenance := read_only.get_maintenance()):
            return error_pages.show_read_only(request, read_only.describe_maintenance(maintenance))
        with conductor.checking_writes(read_only.refuse_in_transaction):
            return self.get_response(request)

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        """Answer 503 if the mode was switched on while a page of the console handled the request."""
        if isinstance(exception, read_only.ReadOnlyError):
            return error_pages.show_read_only(request, str(exception))
        return None
