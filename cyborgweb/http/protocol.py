"""uvicorn's HTTP protocol with deadlines for slow and silent clients, and limits for what they can occupy."""

from __future__ import annotations

import json
import socket
import struct
from asyncio import TimerHandle
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from cyborgweb.auth.clients import get_network
from cyborgweb.http.answers import RESET_EXTENSION
from cyborgweb.http.deadlines import ClientLimits
from cyborgweb.http.slow_clients import note_slow_client

MAX_HEADER_BYTES = 65_536
"""Maximum number of bytes of a request's line and headers, and of the trailers after a body in chunks."""
MAX_HEADERS = 200
"""Maximum number of headers of a request."""
MAX_CHUNK_OVERHEAD = 8
"""Maximum number of bytes on the connection for each byte of a body in chunks. A chunk of one byte needs six."""
MIN_WRITE_BYTES = 262_144
"""Number of bytes of a waiting answer that a client must accept in `write_s` seconds; otherwise it is disconnected. If
fewer bytes wait, it must accept enough for the application to continue writing."""


class HttpProtocol(HttpToolsProtocol):
    """A connection of an HTTP client. Subclasses, which `make_http_protocol` makes, have `limits`.

    The deadlines are: `header_s` from the first byte of a request (of the first request: from the connection, before a
    TLS handshake) to the end of its headers; `keep_alive_s` between two requests; `body_s` for the rest of a body whose
    request is already answered; and MIN_WRITE_BYTES of an answer in each `write_s`. The body of a request that is not
    yet answered is the application's concern. After an upgrade none of this applies, because WebSockets have their own
    deadlines.
    """

    limits: ClassVar[ClientLimits]
    open_connections: ClassVar[dict[HttpProtocol, str]]
    """All connections except WebSockets, with the addresses of their clients, the oldest first."""
    connections_by_address: ClassVar[Counter[str]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._accepted_at = self.loop.time()
        self._end_handshake: Callable[[], None] | None = None
        """Ends the connection while its TLS handshake is under way."""
        self._read_deadline: TimerHandle | None = None
        self._write_check: TimerHandle | None = None
        self._is_in_headers = False
        self._header_bytes = 0
        """Bytes of the present request's headers that have arrived, without the first segment."""
        self._parsed_header_bytes = 0
        """Bytes of the present request's headers that are complete."""
        self._has_begun = False
        """Whether a request has begun in the present segment."""
        self._body_bytes = self._framing_bytes = 0
        """Bytes of the present request's body, and of the other data that came after its headers, such as the sizes of
        chunks."""

    def handshake_begun(self, address: str, end_handshake: Callable[[], None]) -> None:
        """Count a connection from this address from the beginning of its TLS handshake, which `end_handshake` ends."""
        self._end_handshake = end_handshake
        self._count_connection(address)

    def handshake_failed(self) -> None:
        """Count the connection no longer."""
        self._end_handshake = None
        self._stop_counting()

    def connection_made(self, transport: Any) -> None:
        """Count the connection, and start the deadline of the headers."""
        super().connection_made(transport)
        self._end_handshake = None
        if self not in self.open_connections:
            self._count_connection(self.client[0] if self.client else "")
        if not self.transport.is_closing():
            self._start_read_deadline(max(0.0, self._accepted_at + self.limits.header_s - self.loop.time()))

    def _count_connection(self, address: str) -> None:
        """Count this connection. If there are too many, end one that waits for its client: the oldest one of the
        address with the most connections, or if all of these are being served, the oldest one of all.
        """
        network = get_network(address)
        self.open_connections[self] = network
        self.connections_by_address[network] += 1
        if len(self.open_connections) <= self.limits.connections:
            return
        ((largest, _),) = self.connections_by_address.most_common(1)
        waiting = filter(HttpProtocol.waits_for_client, self.open_connections)
        of_largest = (each for each in self.open_connections if self.open_connections[each] == largest)
        oldest = next(filter(HttpProtocol.waits_for_client, of_largest), None) or next(waiting)
        oldest._stop_deadlines()
        if oldest._end_handshake is not None:
            oldest._end_handshake()
        else:
            oldest._reset_connection()

    def _stop_counting(self) -> None:
        """Stop counting this connection, if it is counted."""
        if (network := self.open_connections.pop(self, None)) is not None:
            self.connections_by_address[network] -= 1
            if not self.connections_by_address[network]:
                del self.connections_by_address[network]

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all deadlines."""
        self._stop_deadlines()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        """Stop all deadlines, and hand the connection over to the WebSocket protocol."""
        self._stop_deadlines()
        super().handle_websocket_upgrade()

    def waits_for_client(self) -> bool:
        """Return whether the next step is the client's: there is no complete request without an answer."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def data_received(self, data: bytes) -> None:
        """Parse the data. Start the deadline of the headers with the first bytes of a further request. Refuse headers
        that are too large.
        """
        if self.timeout_keep_alive_task is not None:
            self._start_read_deadline(self.limits.header_s)
        was_in_headers, body_bytes, self._has_begun = self._is_in_headers, self._body_bytes, False
        super().data_received(data)
        if self.transport.is_closing():
            return
        if was_in_headers and self._is_in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse(431, "The headers of the request are too large.")
        elif not was_in_headers and not self._has_begun:
            self._framing_bytes += len(data) - (self._body_bytes - body_bytes)
            if self._framing_bytes > MAX_HEADER_BYTES + MAX_CHUNK_OVERHEAD * self._body_bytes:
                self._refuse(431, "The trailers of the request are too large.")

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._is_in_headers, self._header_bytes, self._has_begun = True, 0, True
        self._parsed_header_bytes = 0
        self._body_bytes = self._framing_bytes = 0
        self.scope["extensions"] = {RESET_EXTENSION: {"reset": self._reset_connection}}

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header. Refuse too many. Drop a trailer, which comes after the body: it would be taken for a
        header.
        """
        if not self._is_in_headers or self.transport.is_closing():
            return
        self._parsed_header_bytes += len(name) + len(value)
        if len(self.headers) >= MAX_HEADERS or self._parsed_header_bytes > MAX_HEADER_BYTES:
            self._refuse(431, "The request has too many headers.")
        else:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Pass on a part of the body, unless the request was refused."""
        self._body_bytes += len(body)
        if not self.transport.is_closing():
            super().on_body(body)

    def on_headers_complete(self) -> None:
        """Stop the deadline of the headers, and start the request."""
        self._is_in_headers = False
        if self.transport.is_closing():
            return
        self._stop_read_deadline()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End the body. If the request was answered before, wait for the next one."""
        if self.transport.is_closing():
            return
        super().on_message_complete()
        if self.cycle is not None and self.cycle.response_complete and self.cycle.more_body:
            self.cycle.more_body = False
            self._stop_read_deadline()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """Wait for the next request, or first for the rest of this one's body."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._start_write_check()
        elif self.cycle.response_complete and self.cycle.more_body:
            self._unset_keepalive_if_required()
            self._start_read_deadline(self.limits.body_s)

    def pause_writing(self) -> None:
        """Begin to check how much of its answer the client accepts."""
        super().pause_writing()
        self._start_write_check()

    def resume_writing(self) -> None:
        """End this check, unless the connection is being closed: then the client must accept the rest, too."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_write_check()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection."""
        super().timeout_keep_alive_handler()
        self._start_write_check()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is not valid HTTP."""
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        """Send an error in place of an answer, and close the connection."""
        body = json.dumps({"error_message": message}).encode()
        headers = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + headers + body)
        self.transport.close()
        self._stop_read_deadline()
        self._start_write_check()

    def _start_read_deadline(self, seconds: float) -> None:
        """Close the connection after `seconds`, unless `_stop_read_deadline` is called before."""
        self._stop_read_deadline()
        self._read_deadline = self.loop.call_later(seconds, self._end_reading)

    def _stop_read_deadline(self) -> None:
        """Stop the deadline that `_start_read_deadline` started, if there is one."""
        if self._read_deadline is not None:
            self._read_deadline.cancel()
            self._read_deadline = None

    def _end_reading(self) -> None:
        """Close the connection of a client that has missed a deadline; one that has begun a request is told why."""
        if self._is_in_headers:
            note_slow_client(self.client)
            self._refuse(408, "The headers of the request did not arrive in time.")
        else:
            self.transport.close()
            self._start_write_check()

    def _start_write_check(self) -> None:
        """Check after `write_s` seconds how much the client has accepted, unless `_stop_write_check` is called."""
        self._stop_write_check()
        self._write_check = self.loop.call_later(
            self.limits.write_s, self._check_writing, self.transport.get_write_buffer_size()
        )

    def _stop_write_check(self) -> None:
        """Stop the check that `_start_write_check` started, if there is one."""
        if self._write_check is not None:
            self._write_check.cancel()
            self._write_check = None

    def _check_writing(self, waiting_bytes: int) -> None:
        """End the connection if the client has accepted too little of the `waiting_bytes`; otherwise check again."""
        if waiting_bytes - self.transport.get_write_buffer_size() < MIN_WRITE_BYTES:
            note_slow_client(self.client)
            self._reset_connection()
        else:
            self._start_write_check()

    def _reset_connection(self) -> None:
        """End the connection at once. The kernel drops what the client has not accepted yet, and tells the client.

        The transport may have closed its socket already: uvloop then returns None for it, or one without a descriptor.
        """
        connection = self.transport.get_extra_info("socket")
        if connection is not None and connection.fileno() >= 0:
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _stop_deadlines(self) -> None:
        """Stop all deadlines but uvicorn's own, and stop counting this connection."""
        self._stop_counting()
        self._stop_read_deadline()
        self._stop_write_check()


def make_http_protocol(limits: ClientLimits) -> type[HttpProtocol]:
    """Return the protocol class with these limits. The connections of all its listeners are counted together."""
    state = {"limits": limits, "open_connections": {}, "connections_by_address": Counter()}
    return type("LimitedHttpProtocol", (HttpProtocol,), state)
