"""Every answer bears a request id, and whoever writes an event can ask for it."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from django.http import HttpRequest, HttpResponse

from accelerators.caller import request_id


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
