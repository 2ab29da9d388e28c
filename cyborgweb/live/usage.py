"""A device's usage as server-sent events, served on the event loop, so that listeners occupy no request thread.

It answers at the address of the usage resource (`agents.api`) for clients that accept `text/event-stream`. Whether a
client may listen is asked of that resource itself, at the beginning and again every `Pace.judge` seconds. Samples are
read once a second for all listeners together, in one thread.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec
from django.db import DatabaseError, connection

from accelerators.models import Device
from agents import telemetry

log = logging.getLogger(__name__)

PATH = re.compile(r"\A/api/devices/([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/usage/?\Z")
EVENTS = b"text/event-stream"
MAX_LISTENERS = 500
SLOW_S = 10.0
"""Seconds after which a listener that has not accepted an event is dropped; also the longest silence before a
comment is sent.
"""
FAREWELL_S = 1.0
WATCHED_S = 10.0
"""Seconds for which agents are asked to send samples. The request is repeated while somebody listens, so they stop
soon after the last listener has gone.
"""
NOT_OURS = {b"content-type", b"content-length", b"etag", b"cache-control", b"content-encoding"}
HEADERS = [(b"content-type", EVENTS), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
FULL = b"Too many listeners are connected: try again later, or ask for application/json."


@dataclass(frozen=True)
class Pace:
    """Seconds between two events, between two permission checks of a listener, and for how long these checks may
    fail before the stream ends.
    """

    event: float = 1.0
    judge: float = 30.0
    patience: float = 90.0


@dataclass(eq=False)
class _Listener:
    """A client that listens to one device. If it is slow, only the newest event is kept for it."""

    uuid: str
    said: dict[str, Any]
    news: asyncio.Event = field(default_factory=asyncio.Event)
    event: bytes = b""
    ended: bool = False

    def tell(self, facts: dict[str, Any]) -> None:
        """Set the next event from those of `facts` that the client asked for."""
        self.said |= {name: value for name, value in facts.items() if name in self.said}
        self.event = b"data: %b\n\n" % msgspec.json.encode(self.said)
        self.news.set()

    def end(self) -> None:
        """End this stream."""
        self.ended = True
        self.news.set()


class Usage:
    """The ASGI application. `inward` is the application that serves the same resource as JSON, on a bounded number
    of threads.
    """

    def __init__(self, inward: Any, pace: Pace = Pace()) -> None:
        self._inward, self._pace = inward, pace
        self._inside = 0
        self._listeners: set[_Listener] = set()
        self._places: dict[str, tuple[int, str]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "usage")

    @staticmethod
    def wants(scope: Any) -> bool:
        """Return whether this request asks for a stream of usage."""
        if scope["method"] != "GET" or not PATH.match(scope["path"]):
            return False
        accepted = (value for name, value in scope["headers"] if name == b"accept")
        return any(kind.partition(b";")[0].strip() == EVENTS for value in accepted for kind in value.split(b","))

    def stop(self) -> None:
        """End all streams, because the process is about to stop or the reader has ended."""
        for listener in self._listeners:
            listener.end()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._inside >= MAX_LISTENERS:
            await _answer(send, 503, [(b"content-type", b"text/plain"), (b"retry-after", b"30")], FULL)
            return
        self._inside += 1
        try:
            status, headers, body = await self._judge(scope)
            if status != 200:
                await _answer(send, status, headers, body)
                return
            kept = [(name, value) for name, value in headers if name not in NOT_OURS]
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS + kept})
            await self._serve(scope, _listener(scope, body), receive, send)
        finally:
            self._inside -= 1

    async def _serve(self, scope: Any, listener: _Listener, receive: Any, send: Any) -> None:
        """Serve one stream until the client disconnects, loses its permission, is too slow, or the process ends."""
        self._listeners.add(listener)
        listener.tell({})
        if self._reader is None:
            self._reader = asyncio.get_running_loop().create_task(self._read())
        gone = asyncio.ensure_future(_until_gone(receive))
        tasks = [gone, asyncio.ensure_future(_speak(listener, send)), asyncio.ensure_future(self._watch(scope))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._listeners.discard(listener)
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ends:
            if isinstance(error, Exception) and not isinstance(error, TimeoutError | OSError):
                log.error("a usage stream ended with an error", exc_info=error)
        if gone.cancelled():
            await _farewell(send)

    async def _judge(self, scope: Any) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Ask the JSON resource with the client's own request; return its status, headers and body."""
        headers = [(name, value) for name, value in scope["headers"] if name not in (b"accept", b"if-none-match")]
        inner = dict(scope) | {"headers": [*headers, (b"accept", b"application/json")]}
        started: list[dict[str, Any]] = []
        body = b""

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(event: dict[str, Any]) -> None:
            nonlocal body
            if event["type"] == "http.response.start":
                started.append(event)
            body += event.get("body", b"")

        await self._inward(inner, receive, send)
        return started[0]["status"], list(started[0]["headers"]), body

    async def _watch(self, scope: Any) -> None:
        """Return when the client may no longer listen, or when no check has succeeded for `Pace.patience` seconds."""
        loop = asyncio.get_running_loop()
        sure = loop.time()
        while loop.time() - sure < self._pace.patience:
            await asyncio.sleep(self._pace.judge)
            status, _, _ = await self._judge(scope)
            if status == 200:
                sure = loop.time()
            elif status < 500:
                return

    async def _read(self) -> None:
        """Read samples every `Pace.event` seconds and pass them to all listeners, until there are none."""
        loop = asyncio.get_running_loop()
        try:
            while self._listeners:
                began = loop.time()
                asked = {one.uuid for one in self._listeners}
                try:
                    facts = await loop.run_in_executor(self._thread, self._look, asked)
                except DatabaseError as error:
                    log.warning("usage streams get no new samples because the database fails: %s", type(error).__name__)
                    facts = {}
                for one in self._listeners:
                    if one.uuid in facts:
                        one.tell(facts[one.uuid])
                await asyncio.sleep(max(0.0, began + self._pace.event - loop.time()))
        finally:
            self._reader = None
            self.stop()  # there are no listeners left, or the reader failed and would never tell them anything

    def _look(self, uuids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Ask the gateways for the devices' last samples and keep their agents sending; return them by uuid. Runs in
        the thread.

        The host and key of each device are cached, because they do not change.
        """
        wanted = set(uuids)
        try:
            self._places = {uuid: place for uuid, place in self._places.items() if uuid in wanted}
            if new := wanted - self._places.keys():
                found = Device.objects.filter(uuid__in=new).values_list("uuid", "host_id", "key")
                self._places |= {str(uuid): (host, key) for uuid, host, key in found}
            hosts = {host for host, _ in self._places.values()}
            loads = telemetry.watch(hosts, self._pace.event, WATCHED_S)
        finally:
            connection.close()  # a new connection is needed every few seconds at most
        return {uuid: telemetry.of_device(loads, *place) for uuid, place in self._places.items()}


def _listener(scope: Any, body: bytes) -> _Listener:
    found = PATH.match(scope["path"])
    assert found
    return _Listener(found[1], msgspec.json.decode(body))


async def _speak(listener: _Listener, send: Any) -> None:
    """Send each new event until the stream ends, and a comment after `SLOW_S` seconds without one. Raises
    TimeoutError if the client accepts nothing.
    """
    while not listener.ended:
        text = b": still here\n\n"
        try:
            async with asyncio.timeout(SLOW_S):
                await listener.news.wait()
            listener.news.clear()
            text = listener.event
        except TimeoutError:
            log.debug("no new sample for %s s", SLOW_S)
        if not listener.ended:
            async with asyncio.timeout(SLOW_S):
                await send({"type": "http.response.body", "body": text, "more_body": True})


async def _until_gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _farewell(send: Any) -> None:
    try:
        async with asyncio.timeout(FAREWELL_S):
            await send({"type": "http.response.body", "body": b""})
    except (TimeoutError, OSError) as error:
        log.debug("a listener did not accept the end of its stream: %s", type(error).__name__)


async def _answer(send: Any, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
