"""The browser's WebSocket at `/ws/console`. Nothing in this module waits for the database.

A page says which list it is and which rows it shows; `live.feed` decides what is sent to it. Pings are left to uvicorn.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import urlsplit

import msgspec
from django.conf import settings

from cyborgweb.live.feed import MALFORMED, SIGNED_OUT, TRY_AGAIN_LATER, ConsoleWatcher, LiveFeed

MAX_WATCHERS = 500
MAX_MESSAGE_SIZE = 16_384
MAX_MESSAGE_BURST, MESSAGES_PER_S = 10.0, 1.0
"""Messages that a page may send at once, and per second after that."""
TOO_LARGE, TOO_MANY = 1009, 4429


class FollowRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The message in which a console page asks for updates.

    It has the path and the query of a list's address, and the keys of the rows that the list shows. A page that is not
    a list sends its path as `page`.
    """

    path: str
    query: str = ""
    rows: list[str] = []
    page: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError if the path, the query, the rows or one of their keys exceed their limits."""
        if (
            len(self.path) > 200
            or len(self.query) > 4000
            or len(self.page) > 400
            or len(self.rows) > 100
            or any(len(r) > 64 for r in self.rows)
        ):
            raise ValueError("the path, the query or the rows exceed their limits")


_follow_request_decoder = msgspec.json.Decoder(FollowRequest)


class ConsoleSocket:
    """The ASGI application for the console's WebSocket.

    Connections from other origins are refused before they are accepted. Those without a session, and those above
    MAX_WATCHERS, are accepted and closed at once, so that the page sees the close code.
    """

    def __init__(self, feed: LiveFeed | None = None) -> None:
        self.feed = feed or LiveFeed()
        self._open_sockets = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection until the page disconnects or the feed closes it with a code."""
        await receive()  # websocket.connect
        headers = dict(scope["headers"])
        if not _is_same_origin(headers):
            await send({"type": "websocket.close"})
            return
        await send({"type": "websocket.accept"})
        session = _read_session_key(headers)
        if not session or self._open_sockets >= MAX_WATCHERS:
            await send({"type": "websocket.close", "code": TRY_AGAIN_LATER if session else SIGNED_OUT})
            return
        loop, outbox = asyncio.get_running_loop(), asyncio.Queue[str | int]()
        watcher = ConsoleWatcher(session, lambda what: _put_threadsafe(loop, outbox, what))
        self._open_sockets += 1
        self.feed.add_watcher(watcher)
        try:
            code = await _wait_for_first(
                self._receive_requests(watcher, receive), _send_messages(watcher, outbox, send)
            )
        finally:
            self._open_sockets -= 1
            self.feed.remove_watcher(watcher)
        if code:
            await send({"type": "websocket.close", "code": code})

    async def _receive_requests(self, watcher: ConsoleWatcher, receive: Any) -> int:
        """Pass what the page sends to the feed. Return 0 when the page has disconnected, or a close code when it sends
        too often, too much, or something that is no FollowRequest.
        """
        loop = asyncio.get_running_loop()
        credit, counted_at = MAX_MESSAGE_BURST, loop.time()
        while (event := await receive())["type"] == "websocket.receive":
            credit, counted_at = (
                min(MAX_MESSAGE_BURST, credit + (loop.time() - counted_at) * MESSAGES_PER_S) - 1,
                loop.time(),
            )
            text = event.get("text") or ""
            if credit < 0:
                return TOO_MANY
            if len(text) > MAX_MESSAGE_SIZE:
                return TOO_LARGE
            try:
                request = _follow_request_decoder.decode(text)
            except msgspec.DecodeError:
                return MALFORMED
            self.feed.follow_rows(watcher, request.path, request.query, request.rows, request.page)
        return 0


async def _send_messages(watcher: ConsoleWatcher, outbox: asyncio.Queue[str | int], send: Any) -> int:
    """Send the texts that the feed has put into the outbox, in order, until a close code comes; return that code.

    When the page has accepted a text, `watcher.sending_since` becomes None.
    """
    while isinstance(message := await outbox.get(), str):
        await send({"type": "websocket.send", "text": message})
        watcher.sending_since = None
    return message


def _put_threadsafe(loop: asyncio.AbstractEventLoop, outbox: asyncio.Queue[str | int], message: str | int) -> None:
    """Put a message into the outbox from the feed's thread. Does nothing if the event loop has ended."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(outbox.put_nowait, message)


async def _wait_for_first(*coroutines: Any) -> int:
    """Run these coroutines until the first of them ends, cancel the others, and return its result. If it has raised an
    exception, raise that.
    """
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return int(done.pop().result())
    finally:
        for task in tasks:
            task.cancel()


def _is_same_origin(headers: dict[bytes, bytes]) -> bool:
    """Return whether the Origin header names the same host as the Host header, which means that our own page opens the
    socket. A page of another site could open a socket with our cookie, but the browser names that site in Origin.
    """
    origin, host = headers.get(b"origin", b"").decode("latin-1"), headers.get(b"host", b"").decode("latin-1")
    return bool(host) and urlsplit(origin).netloc.lower() == host.lower()


def _read_session_key(headers: dict[bytes, bytes]) -> str:
    """Return the session key in the cookie, at most 64 characters; '' if there is none or the cookies
    cannot be read.
    """
    try:
        cookie = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1")).get(settings.SESSION_COOKIE_NAME)
    except CookieError:
        return ""
    return cookie.value[:64] if cookie else ""
