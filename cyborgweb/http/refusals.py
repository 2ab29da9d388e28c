"""The answers to requests that are refused before Django sees them, in the style of the API that the path names."""

from __future__ import annotations

import json

from accelerators.api.own.errors import MESSAGE_BY_STATUS, build_error_body
from accelerators.api.v2.faults import wrap_fault
from cyborgweb.errors import CyborgwebError

V2_PREFIXES = ("/v2", "/accelerator/")
MESSAGES = {
    400: "The Content-Length of the request cannot be read.",
    408: "The body of the request did not arrive in time: send it again.",
    413: MESSAGE_BY_STATUS[413],
    503: "The service is busy: try again in a second.",
}


class RefusedRequestError(CyborgwebError):
    """Raised when a request is refused; `status` is the HTTP status of the answer, a key of MESSAGES.

    `is_body_complete`: the whole body was read before, so the connection can be used for the next request.
    """

    def __init__(self, status: int, is_body_complete: bool = False) -> None:
        super().__init__(MESSAGES[status])
        self.status, self.is_body_complete = status, is_body_complete


class ClientDisconnectedError(CyborgwebError):
    """Raised when the client has disconnected, or has not accepted a part of its answer in time."""


def build_refusal(path: str, status: int) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return the headers and the body of the answer with this status, a key of MESSAGES.

    Below `/api/` and for v2 the body is JSON as those APIs have it, otherwise it is text. A 503 gets `Retry-After`.
    """
    message, content_type = MESSAGES[status], b"application/json"
    if path.startswith("/api/"):
        body = json.dumps({"error_message": message} | build_error_body(status, message)).encode()
    elif status == 503:
        body = json.dumps({"error_message": message}).encode()
    elif path.startswith(V2_PREFIXES):
        body = json.dumps(wrap_fault(status, message)).encode()
    else:
        body, content_type = message.encode(), b"text/plain; charset=utf-8"
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    return headers, body
