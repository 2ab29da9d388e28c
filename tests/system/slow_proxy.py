"""A proxy for any service on a TCP port or a UNIX socket, which delays or withholds the service's answers.

It copies bytes and knows no protocol, so that PostgreSQL, Keystone, Placement and Nova can all be made slow with it. It
runs in a thread of the test process and ends with it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CHUNK = 16_384
LOOK_S = 0.02


@dataclass
class SlowProxy:
    """The proxy's controls, which a test may change at any time, and its counters."""

    delay_s: float = 0.0
    """How many seconds each chunk of an answer is delayed."""
    silent: bool = False
    """Whether answers are withheld completely. Connections stay open, so that a client waits until its own time-out."""
    url: str = ""
    delayed: int = 0
    """How many chunks were delayed."""

    async def hold_back(self) -> None:
        """Return when the next chunk of an answer may be passed on."""
        self.delayed += bool(self.delay_s or self.silent)
        await asyncio.sleep(self.delay_s)
        while self.silent:
            await asyncio.sleep(LOOK_S)

    async def copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_answer: bool) -> None:
        """Copy one direction of a connection until either end closes it."""
        with suppress(OSError):
            while data := await source.read(CHUNK):
                if is_answer:
                    await self.hold_back()
                sink.write(data)
                await sink.drain()
        sink.close()


@contextmanager
def http_proxy(target: str) -> Iterator[SlowProxy]:
    """Run a proxy on a free port in front of the HTTP service at the URL `target`; its `url` has the same path."""
    there = urlsplit(target)
    proxy = SlowProxy()

    async def listen(loop_is_over: asyncio.Event) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await _connect(proxy, reader, writer, asyncio.open_connection(there.hostname, there.port))

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{there.path}"
        async with server:
            started.set()
            await loop_is_over.wait()

    started = threading.Event()
    with _running(listen, started):
        yield proxy


@contextmanager
def postgres_proxy(server: Path, folder: Path) -> Iterator[SlowProxy]:
    """Run a proxy in `folder`, libpq's `host`, in front of the PostgreSQL whose socket is in the folder `server`."""
    proxy, name = SlowProxy(), ".s.PGSQL.5432"

    async def listen(loop_is_over: asyncio.Event) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await _connect(proxy, reader, writer, asyncio.open_unix_connection(str(server / name)))

        async with await asyncio.start_unix_server(accept, str(folder / name)):
            started.set()
            await loop_is_over.wait()

    started = threading.Event()
    folder.mkdir(parents=True, exist_ok=True)
    with _running(listen, started):
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
    await asyncio.gather(proxy.copy(reader, questions, False), proxy.copy(answers, writer, True))


@contextmanager
def _running(listen: Callable[[asyncio.Event], Coroutine[Any, Any, None]], started: threading.Event) -> Iterator[None]:
    """Run `listen` on an event loop in a thread until the end of the block."""
    over, loop = asyncio.Event(), asyncio.new_event_loop()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(listen(over))
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
