"""The slow neighbours of the product in one process: proxies before its database and its cloud, and a webhook receiver.

`neighbours.Neighbours` starts the process. `set_slowness` makes all of them slow or quick at any time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.bench.remote_calls import serve_calls
from tests.system.slow_proxy import SlowProxy, serve_http, serve_postgres

HANG_S = 60.0
"""How long the slow receiver keeps a connection without an answer: longer than any sender may wait."""
ACCEPTED = b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n"


class SlowNeighbours:
    """The commands of the process."""

    def __init__(self) -> None:
        self.database = SlowProxy()
        self.services: dict[str, SlowProxy] = {}
        self._servers: list[asyncio.Server] = []
        self._receiver_hangs = False
        self._received: Counter[str] = Counter()

    async def start(self, database: str, folder: str, services: dict[str, str]) -> dict[str, Any]:
        """Serve the database, whose socket is in the folder `database`, in `folder`; each service of `services` (name →
        URL) at another URL; and a webhook receiver. Return all URLs by name, the receiver's as `receiver`."""
        self._servers.append(await serve_postgres(self.database, Path(database), Path(folder)))
        for name, url in services.items():
            self.services[name] = SlowProxy()
            self._servers.append(await serve_http(self.services[name], url))
        receiver = await asyncio.start_server(self._receive, "127.0.0.1", 0)
        self._servers.append(receiver)
        urls = {name: proxy.url for name, proxy in self.services.items()}
        return {"urls": urls | {"receiver": f"http://127.0.0.1:{receiver.sockets[0].getsockname()[1]}/hook"}}

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Accept a message: answer it at once, or never while the receiver hangs."""
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await reader.readuntil(b"\r\n\r\n")
            self._received["hung" if self._receiver_hangs else "answered"] += 1
            if self._receiver_hangs:
                with suppress(TimeoutError):
                    async with asyncio.timeout(HANG_S):
                        await reader.read()
            else:
                writer.write(ACCEPTED)
                await writer.drain()
        writer.close()

    async def set_slowness(self, database_s: float, service_s: float, receiver_hangs: bool) -> dict[str, Any]:
        """Delay each answer of the database and of the services by these seconds; let the receiver hang or not."""
        self.database.delay_s, self._receiver_hangs = database_s, receiver_hangs
        for proxy in self.services.values():
            proxy.delay_s = service_s
        return {}

    async def get_totals(self) -> dict[str, Any]:
        """Return how many answers of each neighbour were delayed, and the messages of the receiver by treatment."""
        delayed = {name: proxy.delayed for name, proxy in self.services.items()} | {"database": self.database.delayed}
        return {"delayed": delayed, "received": self._received}


if __name__ == "__main__":
    serve_calls(SlowNeighbours)
