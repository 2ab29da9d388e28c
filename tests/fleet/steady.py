"""The well-behaved clients in one process: one binds and deletes requests at a steady rate, as Nova does; an operator
disables and enables a device, which Placement must be told; and the tables are watched for each host's reports.

`neighbours.Neighbours` starts the process. All times are of the monotonic clock, which the processes share.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, deque
from typing import Any
from uuid import UUID, uuid5

import psycopg

from tests.bench.api_clients import BIND, LARGEST, REQUESTS, Client
from tests.bench.remote_calls import serve_calls

INSTANCES = UUID("0d0b3c62-7f0c-4a51-9f0b-6e1c3f0f7d11")
"""Namespace of the instances' ids, which follow from the seed, so that the fake Nova knows them beforehand."""
POLL_S = 0.04
TOGGLE_S = 4.0
"""How often the operator disables or enables the device."""
BIND_S = 60.0
"""How long a bind may take at most; then it has failed."""
SELECT_APPLIED = "SELECT name, applied_epoch, applied_seq FROM accelerators_host WHERE name LIKE 'bench-%'"


def instance_id(seed: int, number: int) -> str:
    """Return the id of an instance."""
    return str(uuid5(INSTANCES, f"{seed}-{number}"))


class SteadyClients:
    """The commands of the process."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._port, self._tokens, self._offers = 0, dict[str, str](), list[tuple[str, str]]()
        self._seed, self._number = 0, 0
        self._free = deque[int]()
        """Numbers of the offers that no request holds."""
        self._held = deque[tuple[str, int]]()
        """Bound requests, the oldest first, each with the number of its offer."""
        self._idle: list[Client] = []
        self._bound_s: list[float] = []
        self._failures: Counter[str] = Counter()
        self._toggles: Counter[str] = Counter()
        self._visible: list[tuple[str, int, int, float]] = []
        self._generators: list[asyncio.Task[None]] = []

    async def start(
        self,
        port: int,
        tokens: dict[str, str],
        offers: list[tuple[str, str]],
        device: str,
        seed: int,
        per_s: float,
        database: str,
    ) -> dict[str, Any]:
        """Begin to bind `per_s` requests a second to `offers` (host, provider), each of which has one unit; to disable
        and enable a device; and to watch the tables of the database whose socket is in the folder `database`."""
        self._port, self._tokens, self._offers, self._seed = port, tokens, offers, seed
        self._free = self._free or deque(range(len(offers)))
        self._bound_s, self._visible, self._failures, self._toggles = [], [], Counter(), Counter()
        self._generators = [
            asyncio.create_task(self._bind_steadily(per_s)),
            asyncio.create_task(self._toggle_device(device)),
            asyncio.create_task(self._watch_tables(database)),
        ]
        return {}

    async def stop_binding(self) -> dict[str, Any]:
        """Begin no further bind, wait for those under way, and delete all requests; return the durations of the binds
        in seconds, the failures by reason, and the outcomes of what the operator did."""
        await self._end(self._generators.pop(0))
        await self._end(self._generators.pop(0))
        if self._tasks:
            await asyncio.wait(self._tasks)
        while self._held:
            await self._delete_oldest()
        for client in self._idle:
            client.close()
        self._idle.clear()
        return {"bound_s": self._bound_s, "failures": self._failures, "toggles": self._toggles}

    async def stop_watching(self) -> dict[str, Any]:
        """Stop to watch the tables; return (host, epoch, seq, time) of each report that became visible."""
        await self._end(self._generators.pop(0))
        return {"visible": self._visible}

    async def _end(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(outcome, Exception):
            raise RuntimeError(f"a steady client has failed: {outcome!r}")

    async def _bind_steadily(self, per_s: float) -> None:
        """Begin a bind every 1 / `per_s` seconds, however long the others take, and delete the oldest request."""
        next_at = time.monotonic()
        while True:
            await asyncio.sleep(max(0.0, next_at - time.monotonic()))
            next_at += 1 / per_s
            if not self._free:
                self._failures["no unit is free, because binds or deletions are late"] += 1
                continue
            task = asyncio.create_task(self._bind_one(self._free.popleft()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _bind_one(self, offer: int) -> None:
        """Create a request, bind it and read it until it is Bound; then delete the oldest one."""
        self._number += 1
        host, provider = self._offers[offer]
        values = zip(BIND, (host, provider, instance_id(self._seed, self._number)), strict=True)
        try:
            made = json.loads(await self._call("POST", REQUESTS, 201, {"device_profile_name": "one"}))
            uuid = made["arqs"][0]["uuid"]
            patch = {uuid: [{"op": "add", "path": f"/{name}", "value": value} for name, value in values]}
            began = time.monotonic()
            async with asyncio.timeout(BIND_S):
                await self._call("PATCH", REQUESTS, 202, patch)
                while (state := json.loads(await self._call("GET", f"{REQUESTS}/{uuid}", 200))["state"]) != "Bound":
                    if state == "BindFailed":
                        raise RuntimeError("BindFailed")
                    await asyncio.sleep(0.05)
            self._bound_s.append(time.monotonic() - began)
            self._held.append((uuid, offer))
            if len(self._held) > len(self._offers) // 2:
                await self._delete_oldest()
        except (OSError, TimeoutError, RuntimeError, asyncio.IncompleteReadError) as error:
            self._failures[f"{type(error).__name__}: {str(error)[:120]}"] += 1

    async def _toggle_device(self, device: str) -> None:
        """Disable and enable a device in turns; what fails is tried again the next time."""
        while True:
            for action in ("disable", "enable"):
                try:
                    await self._call("POST", f"/v2/devices/{device}/{action}", 204)
                except (OSError, RuntimeError, asyncio.IncompleteReadError) as error:
                    self._toggles[f"{action}: {type(error).__name__}: {str(error)[:120]}"] += 1
                else:
                    self._toggles["done"] += 1
                await asyncio.sleep(TOGGLE_S)

    async def _delete_oldest(self) -> None:
        """Delete the request that has been bound for the longest time; its unit is free then."""
        uuid, offer = self._held.popleft()
        await self._call("DELETE", f"{REQUESTS}?arqs={uuid}", 204)
        self._free.append(offer)

    async def _call(self, method: str, path: str, expected: int, body: object = None) -> bytes:
        """Send a request on a connection that no other one uses now; retry once if the server has just closed it."""
        for is_last in (False, True):
            client = self._idle.pop() if self._idle and not is_last else await self._connect()
            try:
                answer = await client.request(method, path, expected, body)
            except (ConnectionError, asyncio.IncompleteReadError):
                client.close()
                if is_last:
                    raise
                continue
            except BaseException:
                client.close()
                raise
            self._idle.append(client)
            break
        return answer

    async def _connect(self) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self._port, limit=LARGEST), self._tokens)

    async def _watch_tables(self, database: str) -> None:
        """Record each growth of a host's applied report, with the time at which it was seen."""
        applied: dict[str, tuple[int, int]] = {}
        async with await psycopg.AsyncConnection.connect(
            host=database, user="postgres", dbname="cyborg", autocommit=True
        ) as connection:
            while True:
                rows = await (await connection.execute(SELECT_APPLIED)).fetchall()
                at = time.monotonic()
                for name, epoch, seq in rows:
                    if applied.get(name) != (epoch, seq):
                        applied[name] = epoch, seq
                        self._visible.append((name, epoch, seq, at))
                await asyncio.sleep(POLL_S)


if __name__ == "__main__":
    serve_calls(SteadyClients)
