"""Every answer bears a request id, and whoever writes an event can ask for it. Nothing is posted to a console that is
read only.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

from django.http import HttpRequest, HttpResponse

from accelerators.domain.caller import request_id
from cyborgweb.auth import read_only
from cyborgweb.auth.policy import READS
from cyborgweb.pages import error_pages

ALWAYS = tuple(f"/admin/{path}/" for path in ("login", "logout", "census", "inbox", "lists", "cyborgweb/maintenance"))
"""What is posted there changes nothing, or only what somebody keeps for themselves; or it ends the maintenance."""


class RequestIdMiddleware:
    """Sets `x-openstack-request-id: req-<uuid>` on every answer (contract section 1.7)."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        made = f"req-{uuid.uuid4()}"
        token = request_id.set(made)
        try:
            response = self.get_response(request)
        finally:
            request_id.reset(token)
        response["x-openstack-request-id"] = made
        return response


class ReadOnlyMiddleware:
    """503 and the reason for what would be posted to the console while everything is read only. The APIs ask by
    themselves (`cyborgweb.auth.policy`)."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        posts = request.method not in READS and request.path.startswith("/admin/")
        if posts and not request.path.startswith(ALWAYS) and (now := read_only.current()):
            return error_pages.read_only(request, read_only.sentence(now))
        return self.get_response(request)
