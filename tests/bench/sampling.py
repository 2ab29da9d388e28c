"""Watched agents for `tests.bench.load_generator`: they send samples as the gateway asks them to, and heartbeats."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from agents import wire
from tests.bench.peer import Peer

HELLO = wire.encode_message(wire.Hello("bench", "bench", ("bench_driver",)))
BEAT = '{{"type":"Beat","seq":{}}}'
WATCH = b'{"type":"Watch"'
METRICS = (
    "utilization_percent",
    "memory_used_bytes",
    "memory_total_bytes",
    "temperature_celsius",
    "power_watts",
    "errors_correctable_total",
)


def encode_samples(devices: int) -> str:
    """Return one message with samples of `devices` devices, of a usual size."""
    loads = (wire.DeviceLoad(f"pci:0000:{n:02x}:00.0", dict.fromkeys(METRICS, 1234567.25)) for n in range(devices))
    return wire.encode_message(wire.Samples(tuple(loads)))


class Sampling:
    """The behaviour of a group of agents; `sent` counts samples, `times` are the latencies of acknowledgements."""

    def __init__(self, peers: Sequence[Peer], devices: int, pause: float) -> None:
        self._peers, self._text, self._pause = peers, encode_samples(devices), pause
        self._later = asyncio.get_running_loop().call_later
        self._watches: dict[Peer, tuple[float, float]] = {}
        self._next: dict[Peer, asyncio.TimerHandle] = {}
        self.sent = 0
        self.times: list[float] = []

    def start(self) -> None:
        """Let each agent send Hello and then heartbeats, spread over one pause."""
        for number, peer in enumerate(self._peers):
            peer.on_message = self._handle_message
            peer.send(HELLO)
            self._later(self._pause * number / len(self._peers), self._send_beat, peer)

    def _send_beat(self, peer: Peer) -> None:
        if not peer.lost:
            peer.seq += 1
            peer.sent_at = time.perf_counter()
            peer.send(BEAT.format(peer.seq))
            self._later(self._pause, self._send_beat, peer)

    def _handle_message(self, peer: Peer, payload: bytes) -> None:
        if not payload.startswith(WATCH):
            self.times.append(time.perf_counter() - peer.sent_at)
            return
        asked = wire.decode_from_gateway(payload)
        assert isinstance(asked, wire.Watch)
        now = time.perf_counter()
        every, until = self._watches.get(peer, (0.0, 0.0))
        self._watches[peer] = asked.every_s, now + asked.for_s
        if every != asked.every_s or until < now:  # otherwise the present timer goes on
            if peer in self._next:
                self._next[peer].cancel()
            self._send_samples(peer)

    def _send_samples(self, peer: Peer) -> None:
        every, until = self._watches[peer]
        if time.perf_counter() <= until and not peer.lost:
            peer.send(self._text)
            self.sent += 1
            self._next[peer] = self._later(every, self._send_samples, peer)

    async def measure(self, seconds: float) -> dict[str, Any]:
        """Return the number of samples sent in the next `seconds` and the latencies of acknowledgements."""
        self.times.clear()
        began = self.sent
        await asyncio.sleep(seconds)
        return {"samples": self.sent - began, "times": sorted(self.times)}
