"""A device's usage as server-sent events, served on the event loop, so that listeners occupy no request thread.

It answers at the address of the usage resource (`agents.api`) for clients that accept `text/event-stream`. That
resource itself decides whether a client may listen; it is asked at the beginning and again every
`StreamIntervals.permission_check_s` seconds. Samples are read once a second for all listeners together, in one thread.
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

USAGE_PATH = re.compile(r"\A/api/devices/([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/usage/?\Z")
EVENT_STREAM_TYPE = b"text/event-stream"
MAX_LISTENERS = 500
SEND_TIMEOUT_S = 10.0
"""Seconds after which a listener that has not accepted an event is dropped; also the longest silence before a
comment is sent.
"""
LAST_SEND_TIMEOUT_S = 1.0
SAMPLE_REQUEST_S = 10.0
"""Seconds for which agents are asked to send samples. The request is repeated while somebody listens, so they stop
soon after the last listener has gone.
"""
DROPPED_HEADERS = {b"content-type", b"content-length", b"etag", b"cache-control", b"content-encoding"}
STREAM_HEADERS = [(b"content-type", EVENT_STREAM_TYPE), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
TOO_MANY_LISTENERS = b"Too many listeners are connected: try again later, or ask for application/json."


@dataclass(frozen=True)
class StreamIntervals:
    """Seconds between two events of a usage stream (`event_s`), between two permission checks of a listener, and for
    how long these checks may fail before the stream ends.
    """

    event_s: float = 1.0
    permission_check_s: float = 30.0
    max_check_failure_s: float = 90.0


@dataclass(eq=False)
class _UsageListener:
    """A client that listens to the device `uuid`. If it is slow, only the newest event is kept for it.

    `values` are the fields that the client asked for, with their last values. `event` is the newest event in the format
    of server-sent events; `has_event` is set when it must be sent, or when the stream must end (`ended`).
    """

    uuid: str
    values: dict[str, Any]
    has_event: asyncio.Event = field(default_factory=asyncio.Event)
    event: bytes = b""
    ended: bool = False

    def set_next_event(self, facts: dict[str, Any]) -> None:
        """Update the values that the client asked for from `facts`, and make an event of all of them. An event that was
        not sent yet is replaced.
        """
        self.values |= {name: value for name, value in facts.items() if name in self.values}
        self.event = b"data: %b\n\n" % msgspec.json.encode(self.values)
        self.has_event.set()

    def end_stream(self) -> None:
        """Make `_send_events` return, which ends this stream. An event that was not sent yet is dropped."""
        self.ended = True
        self.has_event.set()


class UsageStream:
    """The ASGI application that serves devices' usage as server-sent events, to at most MAX_LISTENERS clients.

    `json_application` serves the same resource as JSON, on a bounded number of threads.
    """

    def __init__(self, json_application: Any, intervals: StreamIntervals = StreamIntervals()) -> None:
        self._json_application, self._intervals = json_application, intervals
        self._open_streams = 0
        self._listeners: set[_UsageListener] = set()
        self._host_and_key: dict[str, tuple[int, str]] = {}
        self._reader_task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "usage")

    @staticmethod
    def accepts(scope: Any) -> bool:
        """Return whether this request is a GET for a device's usage that accepts `text/event-stream`."""
        if scope["method"] != "GET" or not USAGE_PATH.match(scope["path"]):
            return False
        accepted = (value for name, value in scope["headers"] if name == b"accept")
        return any(
            kind.partition(b";")[0].strip() == EVENT_STREAM_TYPE for value in accepted for kind in value.split(b",")
        )

    def end_all_streams(self) -> None:
        """End all usage streams, because the process is about to stop or the reader of samples has ended."""
        for listener in self._listeners:
            listener.end_stream()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one stream until it ends. If the JSON resource does not answer 200, pass on its answer; answer 503 if
        there are too many streams.
        """
        if self._open_streams >= MAX_LISTENERS:
            await _send_response(
                send, 503, [(b"content-type", b"text/plain"), (b"retry-after", b"30")], TOO_MANY_LISTENERS
            )
            return
        self._open_streams += 1
        try:
            status, headers, body = await self._query_json_resource(scope)
            if status != 200:
                await _send_response(send, status, headers, body)
                return
            passed_headers = [(name, value) for name, value in headers if name not in DROPPED_HEADERS]
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS + passed_headers})
            await self._serve_stream(scope, _create_listener(scope, body), receive, send)
        finally:
            self._open_streams -= 1

    async def _serve_stream(self, scope: Any, listener: _UsageListener, receive: Any, send: Any) -> None:
        """Send events, the first at once, until the client disconnects, loses its permission, is too slow, or all
        streams are ended. Then end the response, unless the client has disconnected.

        The caller must have started the response. The listener is registered meanwhile, and the reader of samples is
        started if it does not run. Errors are logged, not raised.
        """
        self._listeners.add(listener)
        listener.set_next_event({})
        if self._reader_task is None:
            self._reader_task = asyncio.get_running_loop().create_task(self._read_samples())
        disconnected = asyncio.ensure_future(_wait_for_disconnect(receive))
        tasks = [
            disconnected,
            asyncio.ensure_future(_send_events(listener, send)),
            asyncio.ensure_future(self._wait_until_not_allowed(scope)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._listeners.discard(listener)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for error in results:
            if isinstance(error, Exception) and not isinstance(error, TimeoutError | OSError):
                log.error("a usage stream ended with an error", exc_info=error)
        if disconnected.cancelled():
            await _send_last_chunk(send)

    async def _query_json_resource(self, scope: Any) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Send the client's own request, with its token or session, to the JSON resource; return the status, headers
        and body of the answer.
        """
        headers = [(name, value) for name, value in scope["headers"] if name not in (b"accept", b"if-none-match")]
        inner = dict(scope) | {"headers": [*headers, (b"accept", b"application/json")]}
        started: list[dict[str, Any]] = []
        body = b""

        async def receive() -> dict[str, Any]:
            """Return an empty request body."""
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(event: dict[str, Any]) -> None:
            """Keep the start of the answer and its body, in place of sending them."""
            nonlocal body
            if event["type"] == "http.response.start":
                started.append(event)
            body += event.get("body", b"")

        await self._json_application(inner, receive, send)
        return started[0]["status"], list(started[0]["headers"]), body

    async def _wait_until_not_allowed(self, scope: Any) -> None:
        """Ask the JSON resource every `StreamIntervals.permission_check_s` seconds; return when it refuses the client
        (a status below 500 other than 200), or when no check has succeeded for `StreamIntervals.max_check_failure_s`
        seconds.
        """
        loop = asyncio.get_running_loop()
        allowed_at = loop.time()
        while loop.time() - allowed_at < self._intervals.max_check_failure_s:
            await asyncio.sleep(self._intervals.permission_check_s)
            status, _, _ = await self._query_json_resource(scope)
            if status == 200:
                allowed_at = loop.time()
            elif status < 500:
                return

    async def _read_samples(self) -> None:
        """Read samples every `StreamIntervals.event_s` seconds and pass them to the listeners, until no listener is
        left.

        While the database fails, which is logged, the listeners get no new samples. After any other error all streams
        end.
        """
        loop = asyncio.get_running_loop()
        try:
            while self._listeners:
                started_at = loop.time()
                uuids = {one.uuid for one in self._listeners}
                try:
                    values_by_uuid = await loop.run_in_executor(self._thread, self._load_samples, uuids)
                except DatabaseError as error:
                    log.warning("usage streams get no new samples because the database fails: %s", type(error).__name__)
                    values_by_uuid = {}
                for listener in self._listeners:
                    if listener.uuid in values_by_uuid:
                        listener.set_next_event(values_by_uuid[listener.uuid])
                await asyncio.sleep(max(0.0, started_at + self._intervals.event_s - loop.time()))
        finally:
            self._reader_task = None
            # If listeners are left, an error has ended this task, and they would get no samples any more.
            self.end_all_streams()

    def _load_samples(self, uuids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Ask the gateways for the devices' last samples, and the devices' agents to send samples for
        `SAMPLE_REQUEST_S` more seconds. Return, by uuid, what `telemetry.describe_device_load` says of each device.

        Runs in the thread. The host and key of each device are cached, because they do not change. Unknown devices are
        left out. Raises DatabaseError if the database fails.
        """
        wanted = set(uuids)
        try:
            self._host_and_key = {uuid: place for uuid, place in self._host_and_key.items() if uuid in wanted}
            if new := wanted - self._host_and_key.keys():
                found = Device.objects.filter(uuid__in=new).values_list("uuid", "host_id", "key")
                self._host_and_key |= {str(uuid): (host, key) for uuid, host, key in found}
            hosts = {host for host, _ in self._host_and_key.values()}
            loads = telemetry.request_periodic_loads(hosts, self._intervals.event_s, SAMPLE_REQUEST_S)
        finally:
            connection.close()  # most calls use cached rows and send no statement, so no connection is kept open
        return {uuid: telemetry.describe_device_load(loads, *place) for uuid, place in self._host_and_key.items()}


def _create_listener(scope: Any, body: bytes) -> _UsageListener:
    """Return the listener for the device in the path. The JSON resource's answer `body` says which values it gets."""
    found = USAGE_PATH.match(scope["path"])
    assert found
    return _UsageListener(found[1], msgspec.json.decode(body))


async def _send_events(listener: _UsageListener, send: Any) -> None:
    """Send each new event of the listener until its stream is ended, and a comment after `SEND_TIMEOUT_S` seconds
    without an event. Raises TimeoutError if the client does not accept one within `SEND_TIMEOUT_S` seconds.
    """
    while not listener.ended:
        text = b": still here\n\n"
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await listener.has_event.wait()
            listener.has_event.clear()
            text = listener.event
        except TimeoutError:
            log.debug("no new sample for %s s", SEND_TIMEOUT_S)
        if not listener.ended:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send({"type": "http.response.body", "body": text, "more_body": True})


async def _wait_for_disconnect(receive: Any) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_last_chunk(send: Any) -> None:
    """End the response. Do nothing if the client does not accept it within `LAST_SEND_TIMEOUT_S` seconds."""
    try:
        async with asyncio.timeout(LAST_SEND_TIMEOUT_S):
            await send({"type": "http.response.body", "body": b""})
    except (TimeoutError, OSError) as error:
        log.debug("a listener did not accept the end of its stream: %s", type(error).__name__)


async def _send_response(send: Any, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    """Send a complete HTTP response."""
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
