"""The load generator: a separate process that reads commands as JSON lines from its standard input.

Each line is one command with its arguments, and each answer is one line. `tests.bench.lab.Generator` sends them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

from agents import wire
from agents.host.backoff import Backoff, ConnectionTiming
from tests.bench import callers, messages, visible
from tests.bench.orders import obey
from tests.bench.peer import Address, Key, Peer, Refused, address, connect, key_of
from tests.bench.sampling import Sampling

AT_ONCE = 128
"""Handshakes at the same time when connecting is not what is measured; in a storm all agents connect at once."""
OPS = ("rescan", "logs")
RETURN_S = 180.0
BEAT_S = 8.0
BEAT = '{{"type":"Beat","seq":{}}}'
Say = Callable[[Peer], str]


class Load:
    """The commands of the load generator; it keeps groups of connected agents by name."""

    def __init__(self) -> None:
        self.groups: dict[str, list[Peer]] = {}
        self.keys: dict[int, Key] = {}
        self._came: list[tuple[int, float]] = []
        self._sampling: dict[str, Sampling] = {}
        self.sequence = int(time.time())  # never lower than a seq that an earlier run has stored

    async def connect(self, group: str, port: int, count: int) -> dict[str, Any]:
        """Connect agents 0 … count-1 as `group`, AT_ONCE handshakes at a time, until each has its Welcome."""
        self._prepare_keys(count)
        began = time.perf_counter()
        peers, refused = await self._connect(address(port), count, AT_ONCE, lambda peer: None)
        self.groups[group] = peers
        return {"seconds": time.perf_counter() - began, "refused": refused}

    def _prepare_keys(self, count: int) -> None:
        for number in range(len(self.keys), count):
            self.keys[number] = key_of(number)

    async def _connect(
        self, where: Address, count: int, at_once: int, welcomed: Callable[[Peer], None], *, again: bool = False
    ) -> tuple[list[Peer], dict[str, int]]:
        gate, peers, refused = asyncio.Semaphore(at_once), [], dict[str, int]()

        async def one(number: int) -> None:
            backoff = Backoff(ConnectionTiming())
            while True:
                try:
                    async with gate:
                        peer = await connect(where, number, self.keys[number])
                    break
                except (Refused, OSError) as error:
                    after = error.retry_after if isinstance(error, Refused) else 0.0
                    reason = str(error)[:300]
                    refused[reason] = refused.get(reason, 0) + 1
                if not again:
                    return
                await asyncio.sleep(after + backoff.next_delay())
            peers.append(peer)
            welcomed(peer)

        await asyncio.gather(*(one(number) for number in range(count)))
        return peers, refused

    async def run(self, group: str, message: str, devices: int, seconds: float, pause: float = 0.0) -> dict[str, Any]:
        """Let every agent of `group` send, wait for its Ack and send again; return the count and the latencies.

        `message` is "beat", "report" or the hash of an unchanged report. With a `pause` each agent waits `pause`
        seconds before it sends again, and the agents start one after the other, spread over the first pause.
        """
        peers, times = self.groups[group], list[float]()
        later = asyncio.get_running_loop().call_later
        say = self._say(message, devices)
        now = time.perf_counter
        end = now() + seconds
        idle = asyncio.Event()
        open_sockets = len(peers)

        def send(peer: Peer) -> None:
            peer.sent_at = now()
            peer.send(say(peer))

        def answered(peer: Peer, _payload: bytes) -> None:
            nonlocal open_sockets
            at = now()
            times.append(at - peer.sent_at)
            if pause and at + pause < end:
                later(pause, send, peer)
                return
            if not pause and at < end:
                peer.sent_at = at
                peer.send(say(peer))
                return
            open_sockets -= 1
            if not open_sockets:
                idle.set()

        began = now()
        for number, peer in enumerate(peers):
            peer.on_message = answered
            if pause:
                later(pause * number / len(peers), send, peer)
            else:
                send(peer)
        async with asyncio.timeout(seconds + 30):
            await idle.wait()
        took = now() - began
        times.sort()
        return {"count": len(times), "seconds": took} | _percentiles(times)

    def _say(self, message: str, devices: int) -> Say:
        if message == "beat":
            return lambda peer: BEAT.format(self._next())
        parts = messages.report_parts(messages.devices(devices))
        content = "" if message == "report" else message
        return lambda peer: messages.report(parts, self._next(), content)

    def _next(self) -> int:
        self.sequence += 1
        return self.sequence

    async def storm(self, group: str, port: int, count: int, devices: int) -> dict[str, Any]:
        """Connect all agents at once; each reports as soon as it has its Welcome. With `devices` 0 they only connect.

        An agent that is refused tries again with the real agent's back-off.
        """
        self._prepare_keys(count)
        parts = [messages.report_parts(messages.devices(devices, messages.host_name(n))) for n in range(count)]
        acked, everyone, last = 0, asyncio.Event(), 0.0
        now = time.perf_counter

        def answered(_peer: Peer, _payload: bytes) -> None:
            nonlocal acked
            acked += 1
            if acked == count:
                everyone.set()

        def welcomed(peer: Peer) -> None:
            nonlocal last
            last = now()
            if devices:
                peer.on_message = answered
                peer.send(messages.report(parts[peer.number], self._next()))

        began = now()
        peers, refused = await self._connect(address(port), count, count, welcomed, again=True)
        self.groups[group] = peers
        if devices:
            async with asyncio.timeout(120):
                await everyone.wait()
        return {"connected_s": last - began, "acked_s": now() - began, "acked": acked, "refused": refused}

    async def back(self, group: str, port: int, count: int, fingerprint: str) -> dict[str, Any]:
        """Connect all agents at once; from then on each sends heartbeats. A refused agent retries with the back-off.

        With a `fingerprint` they connect over TLS.
        """
        later, began = asyncio.get_running_loop().call_later, time.perf_counter()

        def beat(peer: Peer) -> None:
            if not peer.lost:
                peer.send(BEAT.format(self._next()))
                later(BEAT_S, beat, peer)

        def welcomed(peer: Peer) -> None:
            later(BEAT_S * random.random(), beat, peer)

        async with asyncio.timeout(RETURN_S):
            where = address(port, fingerprint)
            self.groups[group], refused = await self._connect(where, count, count, welcomed, again=True)
        return {"connected_s": time.perf_counter() - began, "refused": refused}

    async def obey(self, group: str, port: int, count: int) -> dict[str, Any]:
        """Connect agents that accept commands; remember when each command arrived, for `came`."""
        self._prepare_keys(count)
        hello = wire.encode_message(wire.Hello("bench", "bench", ("bench_driver",), OPS))

        def take(peer: Peer, payload: bytes) -> None:
            at = time.monotonic()
            message = wire.decode_from_gateway(payload.decode())
            if isinstance(message, wire.Command):
                self._came.append((message.number, at))
                peer.send(wire.encode_message(wire.Taken((message.number,))))

        def begin(peer: Peer) -> None:
            peer.on_message = take
            peer.send(hello)

        self.groups[group], refused = await self._connect(address(port), count, AT_ONCE, begin)
        return {"refused": refused}

    async def sample(self, group: str, devices: int, pause: float) -> dict[str, Any]:
        """Let a group send heartbeats every `pause` seconds from now on, and samples when the gateway asks."""
        self._sampling[group] = Sampling(self.groups[group], devices, pause)
        self._sampling[group].begin()
        return {}

    async def sampled(self, group: str, seconds: float) -> dict[str, Any]:
        """Return how many samples the group sends in the next `seconds`, and the latencies of its heartbeats."""
        found = await self._sampling[group].look(seconds)
        return {"samples": found["samples"]} | _percentiles(found["times"])

    async def came(self) -> dict[str, Any]:
        """Return (number, monotonic time) of each command that arrived since the last call."""
        found, self._came = self._came, []
        return {"came": found}

    async def visible(self, **arguments: Any) -> dict[str, Any]:
        """Run `tests.bench.visible.probe` as agent 0."""
        self._prepare_keys(1)
        return await visible.probe(self.keys[0], **arguments)

    async def fetch(self, **arguments: Any) -> dict[str, Any]:
        """Run `tests.bench.callers.fetch`."""
        return await callers.fetch(**arguments)

    async def cycle(self, **arguments: Any) -> dict[str, Any]:
        """Run `tests.bench.callers.cycle`."""
        return await callers.cycle(**arguments)

    async def close(self, group: str) -> dict[str, Any]:
        """Abort the connections of a group; return how many were already lost."""
        peers = self.groups.pop(group, [])
        lost = sum(peer.lost for peer in peers)
        for peer in peers:
            if peer.transport:
                peer.transport.abort()
        await asyncio.sleep(0.2)
        return {"lost": lost}


def _percentiles(ordered: list[float]) -> dict[str, float]:
    if not ordered:
        return {"p50_ms": 0.0, "p99_ms": 0.0}
    return {f"p{n}_ms": ordered[min(len(ordered) - 1, len(ordered) * n // 100)] * 1000 for n in (50, 99)}


if __name__ == "__main__":
    obey(Load)
