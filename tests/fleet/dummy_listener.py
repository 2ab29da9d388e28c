"""The dummy listener of a control run: it takes what hostile clients send, answers little, and works as little.

It accepts every agent and every request. A connection that leaves its request incomplete is closed after the time for
which the product would wait, so that it costs its client the same.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, cast

from agents import wire
from tests.bench.remote_calls import serve_calls

BODY_S = 30.0
"""How long an incomplete request may take (CYBORG_BODY_TIMEOUT_S)."""
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
MAX_MESSAGE_BYTES = 1_048_576
NONCE = b'{"nonce":"' + b"n" * 64 + b'"}'
LIST = b"x" * 262_144
"""The answer to a request for a list, so that slow readers have something to read."""
SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"


class DummyConnection(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._unread, self._is_socket = b"", False
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()

    def data_received(self, data: bytes) -> None:
        assert self._transport
        if self._is_socket:
            return
        self._unread += data
        while self._unread and not self._transport.is_closing():
            head, found, rest = self._unread.partition(b"\r\n\r\n")
            size = self._find_body_size(head, rest) if found else None
            if size is None:
                return
            self._unread = rest[size:]
            self._answer(head)

    def _find_body_size(self, head: bytes, rest: bytes) -> int | None:
        """Return the number of bytes of the request's body, None while it is not complete."""
        if CHUNKED.search(head):
            end = rest.find(b"0\r\n\r\n")
            return None if end < 0 else end + 5
        length = LENGTH.search(head)
        size = int(length[1]) if length else 0
        return size if len(rest) >= size else None

    def _answer(self, head: bytes) -> None:
        assert self._transport
        path = head.split(b" ", 2)[1].decode()
        if path == wire.AGENT_PATH:
            self._stop_deadline()
            self._is_socket = True
            welcome = wire.encode_message(wire.Welcome(8.0, 0, "", MAX_MESSAGE_BYTES)).encode()
            self._transport.write(SWITCH + bytes((0x81, len(welcome))) + welcome)
            return
        closes = path == wire.CHALLENGE_PATH
        body = NONCE if closes else LIST if head.startswith(b"GET /v2/devices") else b"{}"
        more = b"Connection: close\r\n" if closes else b""
        self._transport.write(b"HTTP/1.1 200 OK\r\n%sContent-Length: %d\r\n\r\n%s" % (more, len(body), body))
        if closes:
            self._transport.close()
        else:
            self._start_deadline()

    def _start_deadline(self) -> None:
        assert self._transport
        self._stop_deadline()
        self._deadline = asyncio.get_running_loop().call_later(BODY_S, self._transport.close)

    def _stop_deadline(self) -> None:
        if self._deadline:
            self._deadline.cancel()
            self._deadline = None


class DummyListener:
    """The commands of the process."""

    async def start(self) -> dict[str, Any]:
        """Listen on a free port, and return it."""
        server = await asyncio.get_running_loop().create_server(DummyConnection, "127.0.0.1", 0)
        return {"port": server.sockets[0].getsockname()[1]}


if __name__ == "__main__":
    serve_calls(DummyListener)
