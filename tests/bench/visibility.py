"""Measure how long after its Ack a report is visible to a client: from the Ack until a response contains it."""

from __future__ import annotations

import asyncio
import http.client
import time
from typing import Any

from tests.bench import messages
from tests.bench.peer import Key, Peer, connect, local_address

DEADLINE_S = 20.0
PAUSE_S = 0.002


class DeviceListClient:
    """A client of `GET /v2/devices?hostname=…` with one persistent connection."""

    def __init__(self, port: int, token: str, host: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        self._headers = {"X-Auth-Token": token, "Accept": "application/json"}
        self._path = f"/v2/devices?hostname={host}"

    def fetch(self) -> bytes:
        """Return the body of the response; raise RuntimeError if its status is not 200."""
        self._connection.request("GET", self._path, headers=self._headers)
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"GET {self._path}: {answer.status} {body[:200]!r}")
        return body

    def wait_for(self, text: bytes) -> int:
        """Repeat the GET until a response contains `text`; return the number of GETs, or raise TimeoutError."""
        end, asked = time.perf_counter() + DEADLINE_S, 0
        while time.perf_counter() < end:
            asked += 1
            if text in self.fetch():
                return asked
            time.sleep(PAUSE_S)
        raise TimeoutError(f"{text!r} not seen in {DEADLINE_S:.0f} s")


async def measure_visibility(key: Key, port: int, token: str, samples: int) -> dict[str, Any]:
    """Let one agent change one of its eight devices `samples` times; return the sorted times in milliseconds."""
    peer = await connect(local_address(port), 0, key)
    api, loop, times = DeviceListClient(port, token, messages.host_name(0)), asyncio.get_running_loop(), list[float]()
    get_times: list[float] = []
    first = int(time.time())
    rest = messages.devices(8, messages.host_name(0))[1:]
    for number in range(samples):
        model = f"m{first + number}"
        changed = messages.devices(1, messages.host_name(0), model)
        acked: asyncio.Future[None] = loop.create_future()
        peer.on_message = lambda _peer, _payload, acked=acked: acked.set_result(None)  # type: ignore[misc]
        peer.send(messages.report(messages.report_parts(changed + rest), first + number))
        await acked
        began = time.perf_counter()
        await asyncio.to_thread(api.wait_for, f'"{model}"'.encode())
        times.append((time.perf_counter() - began) * 1000)
        get_times.append(await asyncio.to_thread(_time_fetch, api))
        await asyncio.sleep(0.05 + 0.037 * (number % 3))
    _abort(peer)
    return {"times_ms": sorted(times), "get_ms": sorted(get_times)[len(get_times) // 2]}


def _time_fetch(api: DeviceListClient) -> float:
    began = time.perf_counter()
    api.fetch()
    return (time.perf_counter() - began) * 1000


def _abort(peer: Peer) -> None:
    if peer.transport:
        peer.transport.abort()
