"""Gives every request an id, which events can record, and refuses writes to the console while it is read only."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from django.http import HttpRequest, HttpResponse

from accelerators.domain.caller import request_id
from cyborgweb.auth import read_only
from cyborgweb.auth.policy import READS
from cyborgweb.pages import error_pages

ALWAYS = tuple(f"/admin/{path}/" for path in ("login", "logout", "census", "inbox", "lists", "cyborgweb/maintenance"))
"""Paths that accept writes also while the console is read only: they change nothing, or only a person's own settings,
or they end the maintenance."""


class RequestIdMiddleware:
    """Sets `x-openstack-request-id: req-<uuid>` on every response (contract section 1.7), and the context variable
    `request_id` while the request is handled."""

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
    """Answers writes to the console with 503 and the reason while everything is read only.

    The APIs check this themselves (`cyborgweb.auth.policy`).
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        posts = request.method not in READS and request.path.startswith("/admin/")
        if posts and not request.path.startswith(ALWAYS) and (now := read_only.current()):
            return error_pages.read_only(request, read_only.sentence(now))
        return self.get_response(request)
