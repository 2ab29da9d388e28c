"""The load generator: a separate process that reads commands as JSON lines from its standard input.

Each line is one command with its arguments, and each answer is one line. `tests.bench.lab.Generator` sends them.
"""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import Callable
from typing import Any

from agents import wire
from agents.host.backoff import Backoff, ConnectionTiming
from tests.bench import api_clients, messages, visibility
from tests.bench.peer import Address, Key, Peer, RefusedError, connect, create_key, local_address
from tests.bench.remote_calls import serve_calls
from tests.bench.sampling import Sampling

MAX_HANDSHAKES = 128
"""Handshakes at the same time when connecting is not what is measured; in a storm all agents connect at once."""
OPS = ("rescan", "logs")
RETURN_S = 180.0
BEAT_S = 8.0
BEAT = '{{"type":"Beat","seq":{}}}'
MessageFactory = Callable[[Peer], str]


class LoadGenerator:
    """The commands of the load generator; it keeps groups of connected agents by name."""

    def __init__(self) -> None:
        self.groups: dict[str, list[Peer]] = {}
        self.keys: dict[int, Key] = {}
        self._arrivals: list[tuple[int, float]] = []
        self._sampling: dict[str, Sampling] = {}
        self.sequence = int(time.time())  # higher than any seq that an earlier run has stored

    async def connect(self, group: str, port: int, count: int) -> dict[str, Any]:
        """Connect agents 0 … count-1 as `group`, MAX_HANDSHAKES handshakes at a time, until each has its Welcome."""
        self._prepare_keys(count)
        began = time.perf_counter()
        peers, refused = await self._connect(local_address(port), count, MAX_HANDSHAKES, lambda peer: None)
        self.groups[group] = peers
        return {"seconds": time.perf_counter() - began, "refused": refused}

    def _prepare_keys(self, count: int) -> None:
        for number in range(len(self.keys), count):
            self.keys[number] = create_key(number)

    async def _connect(
        self,
        gateway: Address,
        count: int,
        max_handshakes: int,
        on_welcome: Callable[[Peer], None],
        *,
        retry: bool = False,
    ) -> tuple[list[Peer], dict[str, int]]:
        gate, peers, refused = asyncio.Semaphore(max_handshakes), [], dict[str, int]()

        async def one(number: int) -> None:
            backoff = Backoff(ConnectionTiming())
            while True:
                try:
                    async with gate:
                        peer = await connect(gateway, number, self.keys[number])
                    break
                except (RefusedError, OSError) as error:
                    after = error.retry_after if isinstance(error, RefusedError) else 0.0
                    reason = str(error)[:300]
                    refused[reason] = refused.get(reason, 0) + 1
                if not retry:
                    return
                await asyncio.sleep(after + backoff.next_delay())
            peers.append(peer)
            on_welcome(peer)

        await asyncio.gather(*(one(number) for number in range(count)))
        return peers, refused

    async def run(self, group: str, message: str, devices: int, seconds: float, pause: float = 0.0) -> dict[str, Any]:
        """Let every agent of `group` send, wait for its Ack and send again; return the count and the latencies.

        `message` is "beat", "report" or the hash of an unchanged report. With a `pause` each agent waits `pause`
        seconds before it sends again, and the agents start one after the other, spread over the first pause.
        """
        peers, times = self.groups[group], list[float]()
        later = asyncio.get_running_loop().call_later
        make_message = self._create_message_factory(message, devices)
        now = time.perf_counter
        end = now() + seconds
        idle = asyncio.Event()
        open_sockets = len(peers)

        def send(peer: Peer) -> None:
            peer.sent_at = now()
            peer.send(make_message(peer))

        def on_answer(peer: Peer, _payload: bytes) -> None:
            nonlocal open_sockets
            at = now()
            times.append(at - peer.sent_at)
            if pause and at + pause < end:
                later(pause, send, peer)
                return
            if not pause and at < end:
                peer.sent_at = at
                peer.send(make_message(peer))
                return
            open_sockets -= 1
            if not open_sockets:
                idle.set()

        began = now()
        for number, peer in enumerate(peers):
            peer.on_message = on_answer
            if pause:
                later(pause * number / len(peers), send, peer)
            else:
                send(peer)
        async with asyncio.timeout(seconds + 30):
            await idle.wait()
        took = now() - began
        times.sort()
        return {"count": len(times), "seconds": took} | _percentiles(times)

    def _create_message_factory(self, message: str, devices: int) -> MessageFactory:
        if message == "beat":
            return lambda peer: BEAT.format(self._next_seq())
        content = "" if message == "report" else message

        @functools.cache
        def get_parts(number: int) -> tuple[str, str, str]:
            """Return the text of a report of bench host `number`; the names of its deployables begin with its node."""
            return messages.report_parts(messages.devices(devices, messages.host_name(number)))

        return lambda peer: messages.report(get_parts(peer.number), self._next_seq(), content)

    def _next_seq(self) -> int:
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

        def on_answer(_peer: Peer, _payload: bytes) -> None:
            nonlocal acked
            acked += 1
            if acked == count:
                everyone.set()

        def on_welcome(peer: Peer) -> None:
            nonlocal last
            last = now()
            if devices:
                peer.on_message = on_answer
                peer.send(messages.report(parts[peer.number], self._next_seq()))

        began = now()
        peers, refused = await self._connect(local_address(port), count, count, on_welcome, retry=True)
        self.groups[group] = peers
        if devices:
            async with asyncio.timeout(120):
                await everyone.wait()
        return {"connected_s": last - began, "acked_s": now() - began, "acked": acked, "refused": refused}

    async def reconnect_all(self, group: str, port: int, count: int, fingerprint: str) -> dict[str, Any]:
        """Connect all agents at once; from then on each sends heartbeats. A refused agent retries with the back-off.

        With a `fingerprint` they connect over TLS.
        """
        later, began = asyncio.get_running_loop().call_later, time.perf_counter()

        def beat(peer: Peer) -> None:
            if not peer.lost:
                peer.send(BEAT.format(self._next_seq()))
                later(BEAT_S, beat, peer)

        def on_welcome(peer: Peer) -> None:
            later(BEAT_S * random.random(), beat, peer)

        async with asyncio.timeout(RETURN_S):
            gateway = local_address(port, fingerprint)
            self.groups[group], refused = await self._connect(gateway, count, count, on_welcome, retry=True)
        return {"connected_s": time.perf_counter() - began, "refused": refused}

    async def connect_command_receivers(self, group: str, port: int, count: int) -> dict[str, Any]:
        """Connect agents that accept commands; remember when each command arrived, for `take_arrivals`."""
        self._prepare_keys(count)
        hello = wire.encode_message(wire.Hello("bench", "bench", ("bench_driver",), OPS))

        def on_command(peer: Peer, payload: bytes) -> None:
            at = time.monotonic()
            message = wire.decode_from_gateway(payload.decode())
            if isinstance(message, wire.Command):
                self._arrivals.append((message.number, at))
                peer.send(wire.encode_message(wire.Taken((message.number,))))

        def start(peer: Peer) -> None:
            peer.on_message = on_command
            peer.send(hello)

        self.groups[group], refused = await self._connect(local_address(port), count, MAX_HANDSHAKES, start)
        return {"refused": refused}

    async def start_sampling(self, group: str, devices: int, pause: float) -> dict[str, Any]:
        """Let a group send heartbeats every `pause` seconds from now on, and samples when the gateway asks."""
        self._sampling[group] = Sampling(self.groups[group], devices, pause)
        self._sampling[group].start()
        return {}

    async def measure_sampling(self, group: str, seconds: float) -> dict[str, Any]:
        """Return how many samples the group sends in the next `seconds`, and the latencies of its heartbeats."""
        found = await self._sampling[group].measure(seconds)
        return {"samples": found["samples"]} | _percentiles(found["times"])

    async def take_arrivals(self) -> dict[str, Any]:
        """Return (number, monotonic time) of each command that arrived since the last call."""
        found, self._arrivals = self._arrivals, []
        return {"arrivals": found}

    async def measure_visibility(self, **arguments: Any) -> dict[str, Any]:
        """Run `tests.bench.visibility.measure_visibility` as agent 0."""
        self._prepare_keys(1)
        return await visibility.measure_visibility(self.keys[0], **arguments)

    async def fetch(self, **arguments: Any) -> dict[str, Any]:
        """Run `tests.bench.api_clients.fetch`."""
        return await api_clients.fetch(**arguments)

    async def run_request_cycles(self, **arguments: Any) -> dict[str, Any]:
        """Run `tests.bench.api_clients.run_request_cycles`."""
        return await api_clients.run_request_cycles(**arguments)

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
    serve_calls(LoadGenerator)
