"""Clients of the API for `tests.bench.load_generator`: they list, or create, bind and delete requests.

Each client keeps one connection open and sends its next request when the last one is answered. A status other than the
expected one ends the run.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any
from uuid import uuid4

PROFILE = "bench"
REQUESTS = "/v2/accelerator_requests"
BIND = ("hostname", "device_rp_uuid", "instance_uuid")
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
LARGEST = 64 * 1024 * 1024
SLOWEST = 50

Job = Callable[["Client", int], Awaitable[None]]
"""The work that a client repeats. It is called with the client and the client's number."""


class Client:
    """One persistent HTTP/1.1 connection that sends a caller's tokens."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tokens: dict[str, str]) -> None:
        self._reader, self._writer = reader, writer
        named = "".join(f"{name}: {value}\r\n" for name, value in tokens.items())
        self._headers = f"Host: 127.0.0.1\r\nAccept: application/json\r\n{named}"

    async def request(self, method: str, path: str, expected: int, body: object = None) -> bytes:
        """Send a request and return the body of the response; raise RuntimeError if the status is not `expected`."""
        content = b"" if body is None else json.dumps(body).encode()
        kind = "Content-Type: application/json\r\n" if content else ""
        head = f"{method} {path} HTTP/1.1\r\n{self._headers}{kind}Content-Length: {len(content)}\r\n\r\n"
        self._writer.write(head.encode() + content)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        found = LENGTH.search(answer)
        text = await self._reader.readexactly(int(found[1])) if found else b""
        if (status := int(answer[9:12])) != expected:
            raise RuntimeError(f"{method} {path}: {status} {text[:300]!r}")
        return text

    def close(self) -> None:
        """Drop the connection."""
        self._writer.transport.abort()


async def fetch(
    port: int, tokens: dict[str, str], paths: list[str], clients: int, seconds: float, pause: float = 0.0
) -> dict[str, Any]:
    """Let all clients GET `paths` in turn, with `pause` seconds after each response; return counts and times."""
    size = 0
    turn = count()

    async def one(client: Client, _: int) -> None:
        nonlocal size
        size = len(await client.request("GET", paths[next(turn) % len(paths)], 200))

    return await _run_clients(port, tokens, one, clients, seconds, pause) | {"bytes": size}


async def run_request_cycles(
    port: int, tokens: dict[str, str], offers: list[tuple[str, str]], clients: int, seconds: float
) -> dict[str, Any]:
    """Let each client create a request, bind it to one of `offers` (host, provider), read, unbind and delete it."""

    async def one(client: Client, number: int) -> None:
        host, provider = offers[number % len(offers)]
        instance = str(uuid4())
        made = json.loads(await client.request("POST", REQUESTS, 201, {"device_profile_name": PROFILE}))
        uuid = made["arqs"][0]["uuid"]
        values = zip(BIND, (host, provider, instance), strict=True)
        bound = [{"op": "add", "path": f"/{name}", "value": value} for name, value in values]
        await client.request("PATCH", REQUESTS, 202, {uuid: bound})
        (seen,) = json.loads(await client.request("GET", f"{REQUESTS}?instance={instance}", 200))["arqs"]
        if (seen["uuid"], seen["state"]) != (uuid, "Bound"):
            raise RuntimeError(f"bound {uuid}, read {seen['uuid']} {seen['state']}")
        await client.request("PATCH", REQUESTS, 202, {uuid: [{"op": "remove", "path": f"/{name}"} for name in BIND]})
        await client.request("DELETE", f"{REQUESTS}?arqs={uuid}", 204)

    return await _run_clients(port, tokens, one, clients, seconds)


async def _run_clients(
    port: int, tokens: dict[str, str], job: Job, clients: int, seconds: float, pause: float = 0.0
) -> dict[str, Any]:
    """Repeat `job` in all clients for `seconds`; return how often it ran, in how many seconds, and its durations."""
    streams = [await asyncio.open_connection("127.0.0.1", port, limit=LARGEST) for _ in range(clients)]
    everyone = [Client(*both, tokens) for both in streams]
    times: list[float] = []
    now = time.perf_counter
    began = now()

    async def one(number: int, client: Client) -> None:
        while (at := now()) < began + seconds:
            await job(client, number)
            times.append(now() - at)
            if pause:
                await asyncio.sleep(pause)

    try:
        async with asyncio.timeout(seconds + 30):
            await asyncio.gather(*(one(number, client) for number, client in enumerate(everyone)))
    finally:
        for client in everyone:
            client.close()
    times.sort()
    middle, last = times[(len(times) - 1) // 2], times[min(len(times) - 1, len(times) * 99 // 100)]
    found = {"count": len(times), "seconds": now() - began, "p50_ms": middle * 1000, "p99_ms": last * 1000}
    return found | {"slowest_ms": [seconds * 1000 for seconds in times[-SLOWEST:]]}
