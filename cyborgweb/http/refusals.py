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


SHARE_MESSAGE = (
    "The service is busy, and you have more requests under way than others: send fewer at the same time, and try again"
    " in a second."
)


class RefusedRequestError(CyborgwebError):
    """Raised when a request is refused; `status` is the HTTP status of the answer, a key of MESSAGES.

    `is_body_complete`: the whole body was read before, so the connection can be used for the next request.
    `over_share`: with the status 503 the client that has used more than its share, '' if there is no such client.
    """

    def __init__(self, status: int, is_body_complete: bool = False, over_share: str = "") -> None:
        self.message = SHARE_MESSAGE if over_share else MESSAGES[status]
        super().__init__(self.message)
        self.status, self.is_body_complete, self.over_share = status, is_body_complete, over_share


class ClientDisconnectedError(CyborgwebError):
    """Raised when the client has disconnected, or has not accepted a part of its answer in time."""


def build_refusal(path: str, refused: RefusedRequestError) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return the headers and the body of the answer to a refused request.

    Below `/api/` and for v2 the body is JSON as those APIs have it, otherwise it is text. A 503 gets `Retry-After`.
    """
    status, message, content_type = refused.status, refused.message, b"application/json"
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
