"""The fleet's agents, all in one process: real keys, the real wire, the agent's back-off and journal, no hardware.

`installation.Fleet` starts the process; commands and answers are JSON lines. The content of a host is a generation: its
devices have the model `g<number>`, so the tables show which report they come from.
"""

from __future__ import annotations

import asyncio
import random
import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agents import wire
from agents.host.backoff import Backoff, ConnectionTiming, PendingAcks
from drivers.inventory import DriverReport
from tests.bench import messages
from tests.bench.peer import Address, Peer, RefusedError, connect, create_key, local_address
from tests.bench.remote_calls import serve_calls

DRIVER = "bench_driver"
LOAD = {"utilization_percent": 50.0, "memory_used_bytes": 1e9, "temperature_celsius": 61.0, "power_watts": 75.0}
OVERSIZED = 1_200_000
"""Characters of an oversized report, which a bad driver sometimes causes: more than the gateway accepts."""
TICK_S = 1.0


@dataclass
class FleetCounters:
    """Counters of all hosts together."""

    counts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    """Failed attempts and refusals, by HTTP status, error class, code of the refusal, `closed` or `silence`."""
    timings: list[ReportTiming] = field(default_factory=list)
    """All reports that were sent since `take_timings` was called last."""


@dataclass
class ReportTiming:
    """When a report was sent, and when it, or a later one of its host, was acknowledged (monotonic clock)."""

    host: str
    epoch: int
    seq: int
    sent_at: float
    acknowledged_at: float | None = None


@dataclass(frozen=True)
class SentReport:
    """One report that was sent; `model` is the model of its devices, '' if its driver failed."""

    epoch: int
    seq: int
    generation: int
    content: str
    model: str


@dataclass
class SimulatedAgent:
    """One agent: the content of its journal (epoch, seq, generation, acknowledged report) and its socket."""

    number: int
    devices: int
    counters: FleetCounters
    bad: bool = False
    gateway: Address = field(default_factory=lambda: Address(0))
    timing: ConnectionTiming = field(default_factory=ConnectionTiming)
    epoch: int = field(default_factory=lambda: int(time.time()))
    """From the clock, as for an agent that has lost its journal: higher than the epochs of earlier fleets."""
    seq: int = 0
    generation: int = 0
    acknowledged: int = -1
    """The highest generation whose report was acknowledged."""
    failing: bool = False
    oversized: bool = False
    peer: Peer | None = None
    task: asyncio.Task[None] | None = None
    _report_from: float = 0.0
    _pending: PendingAcks = field(default_factory=lambda: PendingAcks(8.0, ConnectionTiming()))
    _acknowledged: SentReport | None = None
    _sent_since: list[SentReport] = field(default_factory=list)
    """Reports sent after the last acknowledged one; each of them may have been stored."""
    _unacknowledged: list[ReportTiming] = field(default_factory=list)
    _samples: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.key = create_key(self.number)
        self._changed = asyncio.Event()

    @property
    def name(self) -> str:
        """Return the name of the agent's host."""
        return messages.host_name(self.number)

    @property
    def connected(self) -> bool:
        """Return whether the agent has its Welcome and its connection is open."""
        return self.peer is not None and not self.peer.lost

    @property
    def owes_report(self) -> bool:
        """Return whether the present content was not acknowledged yet."""
        return self.acknowledged < self.generation

    def discover(self) -> tuple[DriverReport, ...]:
        """Return what the host's driver discovers now: devices of the present generation, or an error."""
        if self.failing:
            return (DriverReport(DRIVER, "its hardware does not answer (simulated)"),)
        return (DriverReport(DRIVER, "", messages.devices(self.devices, self.name, f"g{self.generation}")),)

    def build_hello(self) -> wire.Hello:
        """Return the first message of a connection."""
        return wire.Hello("fleet", f"boot-{self.epoch}", (DRIVER,))

    def change(self) -> None:
        """Start a new generation, which has to be reported."""
        self.generation += 1
        self._changed.set()

    async def run(self) -> None:
        """Connect, send and receive, and reconnect for ever, as `agents.host.connection.link` does."""
        backoff, clock = Backoff(self.timing), asyncio.get_running_loop().time
        while True:
            began, after = clock(), 0.0
            try:
                async with asyncio.timeout(2 * self.timing.open_timeout_s):
                    peer = await connect(self.gateway, self.number, self.key, self.epoch, self.name)
                await self._exchange_messages(peer)
            except RefusedError as error:
                after = error.retry_after
                self.counters.refused[str(error.status or "closed")] += 1
            except TimeoutError:
                self.counters.refused["silence"] += 1
            except OSError as error:
                self.counters.refused[type(error).__name__] += 1
            finally:
                self._disconnect()
            if clock() - began >= self.timing.stable_after_s:
                backoff.reset()
            await asyncio.sleep(after + backoff.next_delay())

    def _disconnect(self) -> None:
        if self._samples:
            self._samples.cancel()
            self._samples = None
        if self.peer and self.peer.transport:
            self.peer.transport.abort()
        self.peer = None

    async def _exchange_messages(self, peer: Peer) -> None:
        loop = asyncio.get_running_loop()
        welcome = wire.decode_from_gateway(peer.welcome)
        if not isinstance(welcome, wire.Welcome):
            raise RefusedError(f"instead of a Welcome: {welcome}")
        if welcome.epoch > self.epoch:
            self.epoch, self.seq = welcome.epoch + 1, 0
        self.peer = peer
        self._pending = PendingAcks(welcome.beat_s, self.timing)
        self._pending.last_ack_at = loop.time()
        self._report_from = loop.time() + self.timing.draw_fraction() * welcome.jitter_s
        peer.on_message, peer.on_lost = self._handle_message, lambda _: self._changed.set()
        peer.send(wire.encode_message(self.build_hello()))
        beat_at, beat = loop.time() + self.timing.draw_fraction() * welcome.beat_s, 0
        while not peer.lost:
            now = loop.time()
            if self._pending.describe_overdue(now):
                self.counters.counts["silences"] += 1
                return
            if now >= beat_at:
                beat, beat_at = beat + 1, now + welcome.beat_s
                self._pending.record_sent("Beat", beat, now)
                peer.send(f'{{"type":"Beat","seq":{beat}}}')
                self.counters.counts["beats"] += 1
            self._send_report(peer, now)
            self._changed.clear()
            until = min(
                beat_at, self._pending.next_deadline(), self._report_from if now < self._report_from else beat_at
            )
            timer = loop.call_at(until, self._changed.set)
            await self._changed.wait()
            timer.cancel()

    def _send_report(self, peer: Peer, now: float) -> None:
        if (
            not self.owes_report
            or self._pending.pending_report_seq is not None
            or (now < self._report_from and not self.failing)
        ):
            return
        if self.oversized:
            self.oversized = False
            self.counters.counts["oversized"] += 1
            peer.send(wire.encode_message(wire.Report(self.epoch, self.seq, "0" * 40, (), ())) + " " * OVERSIZED)
            return
        driver_reports = self.discover()
        content = wire.hash_report_content(driver_reports)
        self.seq += 1
        model = "" if self.failing else f"g{self.generation}"
        self._sent_since.append(SentReport(self.epoch, self.seq, self.generation, content, model))
        self._pending.record_sent("Report", self.seq, now)
        self._unacknowledged.append(ReportTiming(self.name, self.epoch, self.seq, time.monotonic()))
        self.counters.timings.append(self._unacknowledged[-1])
        peer.send(wire.encode_message(wire.Report.from_driver_reports(self.epoch, self.seq, content, driver_reports)))
        self.counters.counts["reports"] += 1

    def _handle_message(self, peer: Peer, payload: bytes) -> None:
        message = wire.decode_from_gateway(payload)
        if isinstance(message, wire.Ack):
            self._pending.record_ack(message.of, message.seq, asyncio.get_running_loop().time())
            if message.of == "Report" and self._sent_since and message.seq == self._sent_since[-1].seq:
                self._acknowledged = self._sent_since[-1]
                self._sent_since.clear()
                self.acknowledged = max(self.acknowledged, self._acknowledged.generation)
                self.counters.counts["acknowledged"] += 1
                for timing in self._unacknowledged:
                    timing.acknowledged_at = time.monotonic()
                self._unacknowledged.clear()
                if self.owes_report:
                    self._changed.set()
        elif isinstance(message, wire.Watch):
            if self._samples:
                self._samples.cancel()
            end = asyncio.get_running_loop().time() + message.for_s
            self._send_samples(peer, max(message.every_s, 0.5), end)
        elif isinstance(message, wire.Probe):
            peer.send(wire.encode_message(wire.Alive(message.nonce)))
        elif isinstance(message, wire.Refuse):
            self.counters.refused[message.code] += 1

    def _send_samples(self, peer: Peer, every_s: float, end: float) -> None:
        loop = asyncio.get_running_loop()
        found = messages.devices(self.devices)
        peer.send(wire.encode_message(wire.Samples(tuple(wire.DeviceLoad(one.key, LOAD) for one in found))))
        self.counters.counts["samples"] += 1
        self._samples = loop.call_later(every_s, self._send_samples, peer, every_s, end) if loop.time() < end else None

    def state(self) -> tuple[str, int, int, str, str, int, list[tuple[str, str]]]:
        """Return the state for the verdict: name, then epoch, seq, hash and model of the last acknowledged report, the
        number of devices, and (hash, model) of each report that was sent after it."""
        last = self._acknowledged or SentReport(0, 0, -1, "", "")
        since = [(sent.content, sent.model) for sent in self._sent_since]
        return self.name, last.epoch, last.seq, last.content, last.model, self.devices, since


def count_open_files(count: int) -> int:
    """Return how many open files `count` agents need; a challenge's socket may exist shortly after its close."""
    return count + count // 2 + 200


class SimulatedFleet:
    """All agents, and the commands that `installation.Fleet` can give. They are of the class `agent_class`."""

    agent_class = SimulatedAgent

    def __init__(self) -> None:
        self.hosts: list[SimulatedAgent] = []
        self.counters = FleetCounters()
        self._unrest_task: asyncio.Task[None] | None = None

    async def start(self, ports: list[int], count: int, devices: int, bad: float) -> dict[str, Any]:
        """Create missing hosts up to `count`, give the share `bad` a bad driver, and let all connect at once."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = count_open_files(count)
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise OSError(f"{count} agents need {needed} open files, the limit is {hard}: raise `ulimit -Hn`")
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        places = [local_address(port) for port in ports]
        for number in range(len(self.hosts), count):
            self.hosts.append(self.agent_class(number, devices, self.counters, gateway=places[number % len(places)]))
        for host in self.hosts:
            host.bad = int((host.number + 1) * bad) > int(host.number * bad)
        return await self.power_on()

    async def power_on(self) -> dict[str, Any]:
        """Start every agent that is off; all connect at once."""
        for host in self.hosts:
            if host.task is None:
                host.task = asyncio.get_running_loop().create_task(host.run())
        return {}

    async def power_off(self, share: float = 1.0) -> dict[str, Any]:
        """Switch off a random `share` of the hosts: abort their sockets, and give each agent a new epoch."""
        tasks = []
        for host in self.hosts:
            if host.task and random.random() < share:
                host.task.cancel()
                tasks.append(host.task)
                host.task, host.epoch, host.seq = None, host.epoch + 1, 0
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
        return {"gone": len(tasks)}

    async def change(self, share: float = 1.0, good: bool = False) -> dict[str, Any]:
        """Change the content of a random `share` of the hosts; with `good` only of hosts without a bad driver."""
        chosen = [host for host in self.hosts if random.random() < share and not (good and host.bad)]
        for host in chosen:
            host.change()
        return {"changed": len(chosen)}

    async def set_unrest(
        self, changes_per_s: float = 0.0, kills_per_s: float = 0.0, bad_per_s: float = 0.0
    ) -> dict[str, Any]:
        """Cause changes, kills of agents and faults of bad drivers at these rates per second from now on. If all are 0,
        stop that and repair every driver."""
        if self._unrest_task:
            self._unrest_task.cancel()
            self._unrest_task = None
        if changes_per_s or kills_per_s or bad_per_s:
            self._unrest_task = asyncio.get_running_loop().create_task(
                self._cause_unrest(changes_per_s, kills_per_s, bad_per_s)
            )
        else:
            for host in self.hosts:
                if host.failing:
                    host.failing = False
                    host.change()
        return {}

    async def _cause_unrest(self, changes_per_s: float, kills_per_s: float, bad_per_s: float) -> None:
        bad = [host for host in self.hosts if host.bad]
        owed: dict[Callable[[SimulatedAgent], None], float] = {}
        while True:
            await asyncio.sleep(TICK_S)
            for do, a_second, of in (
                (SimulatedAgent.change, changes_per_s, self.hosts),
                (_restart, kills_per_s, self.hosts),
                (_cause_fault, bad_per_s, bad),
            ):
                owed[do] = owed.get(do, 0.0) + a_second * TICK_S
                for host in random.sample(of, min(int(owed[do]), len(of))):
                    do(host)
                owed[do] %= 1.0

    async def get_totals(self) -> dict[str, Any]:
        """Return the number of connected agents, of agents that owe a report, and the counters."""
        return {
            "connected": sum(host.connected for host in self.hosts),
            "owing": sum(host.owes_report for host in self.hosts),
            "good_owing": sum(host.owes_report for host in self.hosts if not host.bad),
            "counts": self.counters.counts,
            "refused": self.counters.refused,
        }

    async def reset_counters(self) -> dict[str, Any]:
        """Reset the counters, because another scenario begins."""
        self.counters.counts.clear()
        self.counters.refused.clear()
        return {}

    async def seed(self, number: int) -> dict[str, Any]:
        """Make all further random choices follow from this number."""
        random.seed(number)
        return {}

    async def take_timings(self) -> dict[str, Any]:
        """Return (host, epoch, seq, time sent, time acknowledged or None) of the reports since the last call."""
        found, self.counters.timings = self.counters.timings, []
        return {"timings": [(one.host, one.epoch, one.seq, one.sent_at, one.acknowledged_at) for one in found]}

    async def states(self) -> dict[str, Any]:
        """Return the state of every host for the verdict."""
        return {"states": [host.state() for host in self.hosts]}


def _restart(host: SimulatedAgent) -> None:
    """Simulate kill -9 of one agent and its immediate restart with a new epoch."""
    if host.task:
        host.task.cancel()
        host.epoch, host.seq = host.epoch + 1, 0
        host.task = asyncio.get_running_loop().create_task(host.run())
        host.counters.counts["kills"] += 1


def _cause_fault(host: SimulatedAgent) -> None:
    """Let a bad driver at random fail or recover, change its devices, or cause an oversized report."""
    kind = random.choice(("error", "flapping", "oversized"))
    host.failing = kind == "error" and not host.failing
    host.oversized = kind == "oversized"
    host.change()


if __name__ == "__main__":
    serve_calls(SimulatedFleet)
