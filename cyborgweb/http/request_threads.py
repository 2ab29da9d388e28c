"""Runs a WSGI application on a bounded number of threads of an ASGI server.

A thread is taken only when the request's body has arrived completely, and an answer that is not streamed is sent after
the thread is free again. So slow clients do not occupy threads. The two exceptions are uploads and streamed answers
that are large, or whose size is not known: they are read and written in a thread, with a deadline for each chunk.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import io
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from cyborgweb.auth.clients import name_client
from cyborgweb.http.answers import AnswerSender
from cyborgweb.http.bodies import BodyReader, has_body, read_content_length
from cyborgweb.http.deadlines import ClientLimits, make_client_limits
from cyborgweb.http.fair_queue import FairQueue
from cyborgweb.http.refusals import ClientDisconnectedError, RefusedRequestError, build_refusal
from cyborgweb.http.refused_clients import note_refused_client
from cyborgweb.http.slow_clients import note_slow_client
from cyborgweb.monitoring.served import busy_refusals
from cyborgweb.settings.keys import Keys, get_keys

REFUSAL_DRAIN_S = 2.0
"""How long the rest of a refused body is read and dropped before the connection is closed. If it were closed at once,
a client that is still sending would see a reset connection and not the answer."""
MIN_UPLOAD_RATE = 16_384
"""Bytes a second that an upload must have on average."""
MIN_WAIT_S = 0.1
"""How long a part of an upload is waited for at least, also if the disk was slower than the client."""
STREAM_BUFFER_BYTES = 65_536
JOINED_BYTES = 1_048_576
"""A streamed answer of at most this size, such as a static file, is read into memory before it is sent, so that a
client that does not read it occupies no thread."""
WSGI_CONSTANTS: dict[str, Any] = {
    "SCRIPT_NAME": "",
    "wsgi.version": (1, 0),
    "wsgi.errors": sys.stderr,
    "wsgi.multithread": True,
    "wsgi.multiprocess": True,
    "wsgi.run_once": False,
}


@dataclass
class Answer:
    """The answer of a WSGI application. `body` is None if it was streamed and is already sent."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes | None = None

    def start(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], object]:
        """Store the status and headers (this is WSGI's `start_response`)."""
        self.status = int(status[:3])
        self.headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        return _refuse_write

    def get_announced_bytes(self) -> float:
        """Return the size of the body that the headers announce, infinity if they announce none."""
        return float(dict(self.headers).get(b"content-length", "inf"))


def _refuse_write(data: bytes) -> None:
    """Raise NotImplementedError: WSGI's old `write` is not supported, and Django does not use it."""
    raise NotImplementedError("WSGI's write() is not supported: return an iterable")


@dataclass
class ClientMemory:
    """What all clients of a process use together, in one or several RequestThreads: their bodies and answers.

    `served_peers` are the address and port of each client whose request has arrived and waits for a thread or has one,
    with the number of these requests.
    """

    bodies: BodyReader
    answers: AnswerSender
    keys: Keys
    served_peers: Counter[tuple[str, int]] = field(default_factory=Counter)

    @contextmanager
    def serving(self, scope: Any) -> Iterator[None]:
        """Count the client of this request among `served_peers` while the block runs."""
        peer = tuple(scope.get("client") or ("", 0))
        self.served_peers[peer] += 1
        try:
            yield
        finally:
            self.served_peers[peer] -= 1
            if not self.served_peers[peer]:
                del self.served_peers[peer]


def make_client_memory(limits: ClientLimits, keys: Keys) -> ClientMemory:
    """Return a ClientMemory with these limits. `keys` say which proxies name their clients in X-Forwarded-For."""
    return ClientMemory(
        BodyReader(limits.body_s, limits.body_buffer_bytes),
        AnswerSender(limits.write_s, limits.answer_buffer_bytes),
        keys,
    )


class RequestThreads:
    """Runs a WSGI application on `threads` threads. At most `queue` further requests wait for a thread; all others get
    503 at once.

    The clients that wait get threads in turn; `kept_free` threads are not given to a client that has all others
    (`FairQueue`). Several instances can share one `memory`, so that they have its limits together.
    """

    def __init__(
        self,
        application: Any,
        threads: int,
        queue: int,
        limits: ClientLimits | None = None,
        memory: ClientMemory | None = None,
        kept_free: int = 0,
    ) -> None:
        self._application = application
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="request")
        self._queue = FairQueue(threads, queue, kept_free)
        self._limits = limits or make_client_limits()
        self._memory = memory or make_client_memory(self._limits, get_keys())

    @property
    def active_requests(self) -> int:
        """The number of requests that run or wait for a thread."""
        return self._queue.running_requests + self._queue.waiting_requests

    async def __call__(self, scope: Any, receive: Any, send: Any, streams_body: bool = False) -> None:
        """Read the body, run the request on a thread, and send the answer.

        With `streams_body`, the application reads the body while it arrives. Answers 503 if no further request of this
        client can wait, or too many bytes of bodies or answers are in memory; 408 and 413 for bodies.
        """
        client = name_client(scope, self._memory.keys)
        try:
            self._queue.check(client, is_body_complete=not has_body(scope))
            if streams_body:
                is_chunked = read_content_length(scope) is None
                arriving = _ArrivingBody(receive, self._limits.body_s, is_chunked)
                buffered = io.BufferedReader(arriving, STREAM_BUFFER_BYTES)
                answer = await self._run_on_thread(client, scope, buffered, send, None, not has_body(scope))
            else:
                answer = await self._read_body_and_run(client, scope, receive, send)
            if answer.body is not None:
                await self._memory.answers.send(scope, send, client, answer.status, answer.headers, answer.body)
        except ClientDisconnectedError:
            return
        except RefusedRequestError as refused:
            if refused.status == 503:
                busy_refusals.inc()
            elif refused.status == 408:
                note_slow_client(scope.get("client"))
            if refused.over_share:
                note_refused_client(refused.over_share)
            await send_refusal(scope, receive, send, refused)

    async def _read_body_and_run(self, client: str, scope: Any, receive: Any, send: Any) -> Answer:
        """Read the body, run the application on a thread and return its answer. The body is not kept any longer."""
        async with self._memory.bodies.read(scope, receive) as body:
            return await self._run_on_thread(client, scope, io.BytesIO(body), send, len(body))

    async def _run_on_thread(
        self,
        client: str,
        scope: Any,
        body: Any,
        send: Any,
        body_bytes: int | None = None,
        is_body_complete: bool = True,
    ) -> Answer:
        """Run the application on a thread and return its answer. A streamed answer is sent by the thread."""
        loop = asyncio.get_running_loop()
        environ = build_environ(scope, body, body_bytes)

        async def send_in_time(message: dict[str, Any]) -> None:
            """Send a part of a streamed answer. Raises ClientDisconnectedError if it is not accepted in time."""
            try:
                # Our own listeners close the connection before this; other servers have no such deadline.
                async with asyncio.timeout(2 * self._limits.write_s):
                    await send(message)
            except TimeoutError:
                raise ClientDisconnectedError from None

        def send_from_thread(message: dict[str, Any]) -> None:
            """Run `send_in_time` on the event loop and wait for it."""
            asyncio.run_coroutine_threadsafe(send_in_time(message), loop).result()

        with self._memory.serving(scope):
            async with self._queue.take_thread(client, is_body_complete):
                run = contextvars.copy_context().run
                return await loop.run_in_executor(self._executor, run, self._run, environ, send_from_thread)

    def _run(self, environ: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> Answer:
        """Call the application. Return its answer with the body, or send a streamed one while it is made."""
        answer = Answer()
        result = self._application(environ, answer.start)
        try:
            is_complete = isinstance(result, list) or getattr(result, "streaming", True) is False
            if is_complete or answer.get_announced_bytes() <= JOINED_BYTES:
                answer.body = b"".join(result)
                return answer
            send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
            for chunk in result:
                send({"type": "http.response.body", "body": chunk, "more_body": True})
            send({"type": "http.response.body", "body": b""})
            return answer
        finally:
            if close := getattr(result, "close", None):
                close()


class _ArrivingBody(io.RawIOBase):
    """The `wsgi.input` of an upload: a thread reads the body while it arrives on the event loop.

    A client that is slower than MIN_UPLOAD_RATE for `timeout_s` seconds is taken for disconnected. The body then ends;
    but reading it raises ConnectionResetError if its length is not known (`is_chunked`), because the reader could not
    notice that bytes are missing.
    """

    def __init__(self, receive: Any, timeout_s: float, is_chunked: bool) -> None:
        self._receive, self._loop, self._is_chunked = receive, asyncio.get_running_loop(), is_chunked
        self._deadline = self._loop.time() + timeout_s
        self._part, self._has_more = memoryview(b""), True

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with what has arrived, after waiting for it; return the number of bytes, 0 at the end."""
        while not self._part and self._has_more:
            event = asyncio.run_coroutine_threadsafe(self._receive_in_time(), self._loop).result()
            if self._is_chunked and event.get("type") != "http.request":
                raise ConnectionResetError(errno.ECONNRESET, "the client disconnected, or is too slow")
            self._part, self._has_more = memoryview(event.get("body", b"")), event.get("more_body", False)
        size = min(len(buffer), len(self._part))
        buffer[:size], self._part = self._part[:size], self._part[size:]
        return size

    async def _receive_in_time(self) -> dict[str, Any]:
        """Return the next part of the body, an empty last part if the client is too slow or has disconnected."""
        try:
            async with asyncio.timeout(max(self._deadline - self._loop.time(), MIN_WAIT_S)):
                event: dict[str, Any] = await self._receive()
        except TimeoutError:
            event = {}
        self._deadline += len(event.get("body", b"")) / MIN_UPLOAD_RATE
        return event


def build_environ(scope: Any, body: Any, body_bytes: int | None = None) -> dict[str, Any]:
    """Return the WSGI environment of a request. CONTENT_LENGTH is `body_bytes`, if the length of the body is known.

    A request that came in chunks then looks like one with a Content-Length, because Django reads no other bodies.
    """
    server, client = scope.get("server") or ("localhost", 80), scope.get("client")
    environ: dict[str, Any] = WSGI_CONSTANTS | {
        "REQUEST_METHOD": scope["method"],
        "PATH_INFO": scope["path"].encode().decode("latin-1"),
        "QUERY_STRING": scope["query_string"].decode("latin-1"),
        "SERVER_PROTOCOL": f"HTTP/{scope['http_version']}",
        "SERVER_NAME": server[0],
        "SERVER_PORT": str(server[1] or 0),
        "wsgi.url_scheme": scope.get("scheme", "http"),
        "wsgi.input": body,
    }
    if client:
        environ["REMOTE_ADDR"], environ["REMOTE_PORT"] = client[0], str(client[1])
    for raw_name, raw_value in scope["headers"]:
        if b"_" in raw_name:  # otherwise X_Forwarded_For would be taken for the proxy's X-Forwarded-For
            continue
        name, value = raw_name.decode("latin-1").upper().replace("-", "_"), raw_value.decode("latin-1")
        if name not in ("CONTENT_TYPE", "CONTENT_LENGTH"):
            name = f"HTTP_{name}"
        if name in environ:
            value = f"{environ[name]}{'; ' if name == 'HTTP_COOKIE' else ','}{value}"
        environ[name] = value
    if body_bytes is not None:
        environ.pop("HTTP_TRANSFER_ENCODING", None)
        if body_bytes or "CONTENT_LENGTH" in environ:
            environ["CONTENT_LENGTH"] = str(body_bytes)
    return environ


async def send_refusal(scope: Any, receive: Any, send: Any, refused: RefusedRequestError) -> None:
    """Send the answer to a refused request. If its body is not complete, close the connection afterwards.

    The answer is sent completely; then the rest of the body is dropped for at most REFUSAL_DRAIN_S.
    """
    headers, body = build_refusal(scope["path"], refused)
    if not refused.is_body_complete:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": not refused.is_body_complete})
    if not refused.is_body_complete:
        with suppress(TimeoutError):
            async with asyncio.timeout(REFUSAL_DRAIN_S):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b""})
