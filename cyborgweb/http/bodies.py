"""Read request bodies on the event loop, so that a slow client occupies no thread.

A body is in memory from its first byte until its request is answered. All bodies of a process share one limit of bytes.
The first FREE_BYTES of each body do not count: binds and other short requests are accepted while large bodies have used
up the limit. The number of connections limits the memory that these first bytes can occupy.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from cyborgweb.http.refusals import ClientDisconnectedError, RefusedRequestError
from cyborgweb.settings.keys import MAX_BODY_BYTES

FREE_BYTES = 16_384


class BodyReader:
    """Reads bodies of at most MAX_BODY_BYTES, each within `timeout_s`, and all together at most `buffer_bytes`."""

    def __init__(self, timeout_s: float, buffer_bytes: int) -> None:
        self._timeout_s, self._buffer_bytes = timeout_s, buffer_bytes
        self.buffered_bytes = 0

    @asynccontextmanager
    async def read(self, scope: Any, receive: Any) -> AsyncIterator[bytes]:
        """Yield the request's whole body. Its bytes count as buffered until the block ends.

        Raises RefusedRequestError: 413 for a larger body, at once if Content-Length announces it; 408 if it is not
        complete in time; 503 if the bodies of all requests are too large together; 400 for an unusable Content-Length.
        Raises ClientDisconnectedError if the client disconnects meanwhile.
        """
        if not has_body(scope):
            yield b""
            return
        if (read_content_length(scope) or 0) > MAX_BODY_BYTES:
            raise RefusedRequestError(413)
        body, counted = bytearray(), 0
        try:
            try:
                async with asyncio.timeout(self._timeout_s):
                    more = True
                    while more:
                        event = await receive()
                        if event["type"] == "http.disconnect":
                            raise ClientDisconnectedError
                        body += event.get("body", b"")
                        more = event.get("more_body", False)
                        added = max(0, len(body) - FREE_BYTES) - counted
                        counted += added
                        self.buffered_bytes += added
                        if len(body) > MAX_BODY_BYTES:
                            raise RefusedRequestError(413)
                        if counted and self.buffered_bytes > self._buffer_bytes:
                            raise RefusedRequestError(503)
            except TimeoutError:
                raise RefusedRequestError(408) from None
            data = bytes(body)
            del body
            yield data
        finally:
            self.buffered_bytes -= counted


def has_body(scope: Any) -> bool:
    """Return whether a request may have a body. One of HTTP/1 has one only if it has one of these headers."""
    names = (b"content-length", b"transfer-encoding")
    return not scope["http_version"].startswith("1") or any(name in names for name, _ in scope["headers"])


def read_content_length(scope: Any) -> int | None:
    """Return the Content-Length of a request, None if it has none.

    Raises RefusedRequestError 400 if it is no number.
    """
    value = next((value for name, value in scope["headers"] if name == b"content-length"), None)
    if value is None:
        return None
    if not value.isdigit() or len(value) > 18:
        raise RefusedRequestError(400)
    return int(value)
