"""A proxy for any service on a TCP port or a UNIX socket, which delays or withholds the service's answers.

It copies bytes and knows no protocol, so that PostgreSQL, Keystone, Placement and Nova can all be made slow with it.
The delay is a latency, as on a long line: an answer of many chunks comes late by the delay, and not by a multiple of
it. `http_proxy` and `postgres_proxy` run a proxy in a thread of the test process, with which it ends.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CHUNK = 262_144
SOCKET_NAME = ".s.PGSQL.5432"
LOOK_S = 0.02


@dataclass
class SlowProxy:
    """The proxy's controls, which a test may change at any time, and its counters."""

    delay_s: float = 0.0
    """How many seconds after its arrival each chunk of an answer is passed on."""
    silent: bool = False
    """Whether answers are withheld completely. Connections stay open, so that a client waits until its own time-out."""
    url: str = ""
    delayed: int = 0
    """How many chunks were delayed."""

    async def copy_at_once(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Copy the questions of a connection until either end closes it."""
        with suppress(OSError):
            while data := await source.read(CHUNK):
                sink.write(data)
                await sink.drain()
        sink.close()

    async def copy_late(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Copy the answers of a connection until either end closes it; each chunk waits for its time."""
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def read() -> None:
            try:
                while data := await source.read(CHUNK):
                    self.delayed += bool(self.delay_s or self.silent)
                    chunks.put_nowait((loop.time() + self.delay_s, data))
            except OSError:
                pass  # the service has closed the connection, which ends the answers
            finally:
                chunks.put_nowait((0.0, b""))

        reading = loop.create_task(read())
        try:
            with suppress(OSError):
                while chunk := await self._wait_for_chunk(chunks):
                    sink.write(chunk)
                    await sink.drain()
        finally:
            reading.cancel()
            sink.close()

    async def _wait_for_chunk(self, chunks: asyncio.Queue[tuple[float, bytes]]) -> bytes:
        """Return the next chunk when it may be passed on, b'' at the end."""
        due, data = await chunks.get()
        if (wait_s := due - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(wait_s)
        while self.silent and data:
            await asyncio.sleep(LOOK_S)
        return data


async def serve_http(proxy: SlowProxy, target: str) -> asyncio.Server:
    """Start `proxy` on a free port in front of the HTTP service at the URL `target`; its `url` gets the same path."""
    there = urlsplit(target)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _connect(proxy, reader, writer, asyncio.open_connection(there.hostname, there.port, limit=CHUNK))

    server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=CHUNK)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{there.path}"
    return server


async def serve_postgres(proxy: SlowProxy, server: Path, folder: Path) -> asyncio.Server:
    """Start `proxy` in `folder`, libpq's `host`, in front of the PostgreSQL whose socket is in the folder `server`."""
    folder.mkdir(parents=True, exist_ok=True)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _connect(proxy, reader, writer, asyncio.open_unix_connection(str(server / SOCKET_NAME), limit=CHUNK))

    return await asyncio.start_unix_server(accept, str(folder / SOCKET_NAME), limit=CHUNK)


@contextmanager
def http_proxy(target: str) -> Iterator[SlowProxy]:
    """Run a proxy in front of the HTTP service at the URL `target` for the block (`serve_http`)."""
    proxy = SlowProxy()
    with _running(serve_http(proxy, target)):
        yield proxy


@contextmanager
def postgres_proxy(server: Path, folder: Path) -> Iterator[SlowProxy]:
    """Run a proxy in `folder` in front of a PostgreSQL for the block (`serve_postgres`)."""
    proxy = SlowProxy()
    with _running(serve_postgres(proxy, server, folder)):
        yield proxy


async def _connect(
    proxy: SlowProxy,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    opening: Coroutine[Any, Any, tuple[asyncio.StreamReader, asyncio.StreamWriter]],
) -> None:
    """Copy both directions until the connection ends; close it at once if the service cannot be reached."""
    try:
        answers, questions = await opening
    except OSError:
        writer.close()
        return
    await asyncio.gather(proxy.copy_at_once(reader, questions), proxy.copy_late(answers, writer))


@contextmanager
def _running(starting: Coroutine[Any, Any, asyncio.Server]) -> Iterator[None]:
    """Run the server that `starting` starts on an event loop in a thread until the end of the block."""
    over, loop, started = asyncio.Event(), asyncio.new_event_loop(), threading.Event()

    async def serve() -> None:
        async with await starting:
            started.set()
            await over.wait()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(serve())
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(10), "the proxy does not listen"
    try:
        yield
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)
