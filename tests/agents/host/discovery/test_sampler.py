"""Tests of load sampling by the agent: first its schedule by itself, then samples over a real WebSocket."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest

from agents import wire
from agents.host.connection.identity import load_or_create_keys
from agents.host.connection.link import GatewayLink
from agents.host.discovery.sampler import (
    FIRST_BACKOFF_S,
    MAX_BACKOFF_S,
    PAUSE_FACTOR,
    HostLoadSampler,
    SamplingBackoff,
    SamplingSchedule,
)
from agents.host.journal.journal import Journal, open_journal
from drivers.errors import Failed
from drivers.inventory import DriverReport, Health, Sample
from drivers.plan import Ask
from tests.agents.host.fake_gateway import QUICK, FakeGateway, driver_report, wait_until

WATCH_OFTEN, WATCH_ONCE = wire.Watch(0.5, 300.0), wire.Watch(0.0, 0.0)


def list_round_starts(table: SamplingSchedule, until_s: float, takes_s: float = 0.0) -> list[float]:
    """Return the start times of the rounds until `until_s`, if each round takes `takes_s` seconds."""
    began = []
    while table.due <= until_s:
        began.append(now := table.due)
        table.on_round_start(now)
        table.on_round_end(now + takes_s)
    return began


def test_an_unwatched_host_samples_once_a_minute_at_its_own_second_also_after_a_census() -> None:
    table = SamplingSchedule()
    assert table.due == math.inf
    table.on_connect(1000.0, 0.25)
    assert list_round_starts(table, 1150.0) == [1015.0, 1075.0, 1135.0]
    table.on_watch(1160.0, WATCH_ONCE)
    assert list_round_starts(table, 1260.0) == [1160.0, 1195.0, 1255.0]
    table.on_disconnect()
    assert table.due == math.inf


def test_a_watched_host_samples_at_the_requested_interval_until_the_watch_ends() -> None:
    table = SamplingSchedule()
    table.on_connect(0.0, 0.5)
    table.on_watch(100.0, wire.Watch(2.0, 5.0))
    assert list_round_starts(table, 200.0) == [100.0, 102.0, 104.0, 150.0]
    table.on_watch(200.0, wire.Watch(10.0, 15.0))
    table.on_watch(201.0, wire.Watch(1.0, 2.0))
    assert list_round_starts(table, 209.0) == [201.0, 202.0, 203.0], "the later watch takes the place of the first"


def test_renewing_a_watch_adds_no_round_and_a_census_gets_one_at_once() -> None:
    table, often = SamplingSchedule(), wire.Watch(2.0, 10.0)
    table.on_connect(0.0, 0.5)
    table.on_watch(100.0, often)
    assert list_round_starts(table, 105.0) == [100.0, 102.0, 104.0]
    table.on_watch(105.0, often)
    table.on_round_start(table.due)
    table.on_watch(106.1, often)  # A round is running.
    table.on_round_end(106.2)
    assert list_round_starts(table, 150.0) == [108.0, 110.0, 112.0, 114.0, 116.0, 150.0]
    table.on_watch(200.0, often)
    assert list_round_starts(table, 210.0) == [200.0, 202.0, 204.0, 206.0, 208.0, 210.0]
    table.on_watch(210.0, often)  # The first watch ends now, so the next round was due only a minute later.
    assert list_round_starts(table, 213.0) == [212.0]
    # A census sends such a watch: it gets one round at once and does not prolong the watch.
    table.on_watch(213.0, wire.Watch(2.0, 7.0))
    assert list_round_starts(table, 214.0) == [213.0]
    table.on_watch(214.0, wire.Watch(1.0, 20.0))
    assert list_round_starts(table, 214.0) == [214.0], "more often is at once"
    table.on_watch(214.1, wire.Watch(1.0, 19.9))
    table.on_watch(214.2, wire.Watch(1.0, 30.0))
    assert table.due == 214.5, "a census is not put off by who looks on"


@pytest.mark.parametrize(
    ("watch", "began"),
    [
        (wire.Watch(-1e300, 1.0), [0.0, 0.5, 1.0]),
        (wire.Watch(math.inf, 1e300), [0.0, 60.0, 120.0, 180.0, 240.0, 300.0]),
        (wire.Watch(1.0, -5.0), [0.0]),
    ],
)
def test_a_watch_with_extreme_values_is_limited(watch: wire.Watch, began: list[float]) -> None:
    table = SamplingSchedule()
    table.on_connect(-1.0, 0.9)
    table.on_watch(0.0, watch)
    told = list_round_starts(table, 400.0)
    assert told[: len(began)] == began
    assert all(later - sooner > 1.0 for sooner, later in zip(told[len(began) - 1 :], told[len(began) :], strict=False))


def test_rounds_that_fall_into_a_slow_round_are_skipped() -> None:
    table = SamplingSchedule()
    table.on_connect(0.0, 0.0)
    table.on_watch(10.0, wire.Watch(1.0, 10.0))
    assert list_round_starts(table, 15.0, takes_s=2.5) == [10.0, 13.0]
    for moment in (20.0, 20.1, 20.2):  # However many watches arrive, the next round keeps its distance.
        table.on_watch(moment, WATCH_ONCE)
        if moment == 20.0:
            table.on_round_start(20.0)
    table.on_round_end(20.3)
    assert table.due == 20.5


def test_no_round_follows_one_during_which_the_gateway_was_lost() -> None:
    table = SamplingSchedule()
    table.on_connect(0.0, 0.0)
    table.on_round_start(0.0)
    table.on_disconnect()
    table.on_round_end(1.0)
    assert table.due == math.inf


def test_a_slow_driver_is_paused_in_proportion_and_a_failing_one_ever_longer() -> None:
    manners = SamplingBackoff()
    manners.record_answer(started_at=10.0, now=11.5)
    assert manners.not_before == 11.5 + PAUSE_FACTOR * 1.5
    assert [manners.record_failure(100.0) for _ in range(9)][:3] == [
        FIRST_BACKOFF_S,
        2 * FIRST_BACKOFF_S,
        4 * FIRST_BACKOFF_S,
    ]
    assert manners.record_failure(100.0) == MAX_BACKOFF_S
    manners.record_answer(started_at=0.0, now=0.0)
    assert manners.record_failure(100.0) == FIRST_BACKOFF_S


def test_samples_of_unasked_devices_and_infinite_values_are_dropped() -> None:
    class Liar:
        async def samples(self, asks: Sequence[Ask]) -> tuple[Sample, ...]:
            many = tuple(Sample("a", f"metric_{n}", 1.0) for n in range(100))
            return (Sample("b", "power_watts", 1.0), Sample("a", "power_watts", math.inf), *many)

    report = wire.Report(1, 1, "x" * 40, (driver_report(keys=["a"]),))
    told = asyncio.run(HostLoadSampler({"fake_driver": Liar()}, lambda: report)._sample_all())
    assert [one.key for one in told.loads] == ["a"] and "power_watts" not in told.loads[0].values
    assert wire.decode_from_agent(wire.encode_message(told)) == told, "the gateway takes it"


def test_samples_over_the_message_limit_are_dropped_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    loads = tuple(wire.DeviceLoad(f"pci:é{n}", {"power_watts": float(n)}) for n in range(5000))
    meter = HostLoadSampler({}, lambda: None)
    for _ in range(2):
        text = meter.encode_samples(wire.Samples(loads), 10_000)
        told = msgspec.json.decode(text, type=wire.Samples).loads
        assert 9_000 < len(text.encode()) <= 10_000 and told == loads[: len(told)]
    assert len(meter.encode_samples(wire.Samples(loads), 10**7).encode()) <= wire.MAX_SAMPLES_BYTES
    assert len(caplog.records) == 1
    assert meter.encode_samples(wire.Samples(()), 1) == wire.encode_message(wire.Samples(()))


@dataclass(eq=False)
class FakeSampler:
    """The sampling part of a driver. `asked_keys` has the device keys of each round."""

    sample_value: Callable[[Ask], float] = lambda ask: 1.0
    asked_keys: list[list[str]] = field(default_factory=list)

    async def samples(self, asks: Sequence[Ask]) -> tuple[Sample, ...]:
        """Return one power sample for each device."""
        self.asked_keys.append([ask.key for ask in asks])
        return tuple(Sample(ask.key, "power_watts", self.sample_value(ask)) for ask in asks)


@dataclass
class SampledHost:
    """A host with a journal, a link to the fake gateway and a load sampler, wired as `main` does it."""

    journal: Journal
    link: GatewayLink
    gauge: FakeSampler

    def record_report(self, *drivers: DriverReport) -> None:
        """Store a report in the journal and offer it to the link."""
        self.journal.record_report(drivers)
        self.link.offer_report()


@asynccontextmanager
async def run_sampled_host(
    directory: Path, server: FakeGateway, gauge: FakeSampler | None = None
) -> AsyncIterator[SampledHost]:
    """Run a host that takes its first sample almost a minute after connecting, unless the gateway sends a Watch."""
    journal = open_journal(directory, "cmp1.example")
    keys = load_or_create_keys(directory, "cmp1.example", "cmp1")
    gauge = gauge or FakeSampler()
    meter = HostLoadSampler({"fake_driver": gauge}, lambda: journal.report, draw_fraction=lambda: 0.99)
    hello = wire.Hello(agent_version="1", boot_id="b", drivers=("fake_driver",))
    link = GatewayLink(
        journal, keys, server.gateway(), hello, lambda _: None, replace(QUICK, draw_fraction=lambda: 0.5), sampler=meter
    )
    meter.notify_sender = link.wake.set
    tasks = [asyncio.ensure_future(link.run()), asyncio.ensure_future(meter.run())]
    try:
        yield SampledHost(journal, link, gauge)
        assert not any(task.done() for task in tasks), tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        journal.close()


def run_story(story: Callable[[], Awaitable[None]]) -> None:
    """Run the coroutine in a new event loop for at most 60 s."""
    asyncio.run(asyncio.wait_for(story(), 60))


def report_with_health(status: Health) -> DriverReport:
    """Return a report of one device with this health."""
    report = driver_report(keys=["a"])
    return msgspec.structs.replace(report, devices=(msgspec.structs.replace(report.devices[0], status=status),))


@pytest.mark.slow
def test_a_watch_gets_samples_at_once_and_then_at_its_interval(tmp_path: Path) -> None:
    async def story() -> None:
        async with FakeGateway().open() as server, run_sampled_host(tmp_path, server) as agent:
            agent.record_report(driver_report(keys=["a", "b"]), driver_report("another_driver", keys=["c"]))
            await wait_until(lambda: agent.journal.acknowledged and server.beats)
            assert agent.gauge.asked_keys == [] and server.samples == []
            await server.send_to_agent(WATCH_ONCE)
            await wait_until(lambda: server.samples)
            assert server.samples[0].loads == tuple(wire.DeviceLoad(key, {"power_watts": 1.0}) for key in "ab")
            await server.send_to_agent(WATCH_OFTEN)
            await wait_until(lambda: len(server.samples) >= 3)
            agent.record_report(driver_report(keys=["b"]))
            await wait_until(lambda: agent.gauge.asked_keys[-1] == ["b"])

    run_story(story)


@pytest.mark.slow
def test_a_watch_ends_when_its_connection_is_lost(tmp_path: Path) -> None:
    async def story() -> None:
        async with FakeGateway().open() as server, run_sampled_host(tmp_path, server) as agent:
            agent.record_report(driver_report(keys=["a"]))
            await wait_until(lambda: agent.journal.acknowledged)
            await server.send_to_agent(WATCH_OFTEN)
            await wait_until(lambda: server.samples)
            await server.sockets[-1].close()
            await wait_until(lambda: len(server.hellos) == 2)
            count = len(server.samples)
            server.beats.clear()
            await wait_until(lambda: len(server.beats) >= 24)  # Long enough for two rounds of the watch that ended.
            assert len(server.samples) == count

    run_story(story)


@pytest.mark.slow
def test_samples_are_dropped_while_a_report_is_unacknowledged(tmp_path: Path) -> None:
    async def story() -> None:
        server = FakeGateway(acknowledge=False)
        async with (
            server.open(),
            run_sampled_host(
                tmp_path, server, FakeSampler(sample_value=lambda ask: float(len(agent.gauge.asked_keys)))
            ) as agent,
        ):
            agent.record_report(driver_report(keys=["a"]))
            await wait_until(lambda: server.reports)
            await server.send_to_agent(WATCH_ONCE)
            await wait_until(lambda: len(agent.gauge.asked_keys) == 1)
            server.beats.clear()
            await wait_until(lambda: len(server.beats) >= 2)
            assert server.samples == []
            await server.sockets[-1].send(wire.encode_message(wire.Ack(seq=server.reports[-1].seq)))
            await wait_until(lambda: agent.journal.acknowledged)
            await server.send_to_agent(WATCH_ONCE)
            await wait_until(lambda: server.samples)
            assert [one.loads[0].values["power_watts"] for one in server.samples] == [2.0], "the first is not sent late"

    run_story(story)


@pytest.mark.slow
def test_a_round_is_sent_without_a_failing_driver_which_is_then_paused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(ask: Ask) -> float:
        raise Failed("fake_driver: it did not return its load within 2 s")

    async def story() -> None:
        async with (
            FakeGateway().open() as server,
            run_sampled_host(tmp_path, server, FakeSampler(sample_value=fails)) as agent,
        ):
            agent.record_report(driver_report(keys=["a"]))
            await wait_until(lambda: agent.journal.acknowledged)
            for count in (1, 2):
                await server.send_to_agent(WATCH_ONCE)
                await wait_until(lambda count=count: len(server.samples) == count)  # type: ignore[misc]
            assert {one.loads for one in server.samples} == {()} and len(agent.gauge.asked_keys) == 1

    run_story(story)
    assert "within 2 s; its load is not sampled for the next 60 s" in caplog.text


def test_a_report_with_a_new_fault_is_sent_without_jitter(tmp_path: Path) -> None:
    async def story() -> None:
        server = FakeGateway()
        async with server.open(), run_sampled_host(tmp_path, server) as agent:
            agent.record_report(report_with_health("degraded"))
            await wait_until(lambda: agent.journal.acknowledged)
            server.jitter_s, server.applied_hash = 300.0, ""
            await server.sockets[-1].close()
            await wait_until(lambda: len(server.hellos) == 2)
            for status in ("ok", "degraded"):  # Neither a fault that was reported before nor a recovery is urgent.
                agent.record_report(report_with_health(status))  # type: ignore[arg-type]
                server.beats.clear()
                await wait_until(lambda: len(server.beats) >= 2)
                assert len(server.reports) == 1
            agent.record_report(report_with_health("failed"))
            await wait_until(lambda: len(server.reports) == 2)
            assert server.reports[-1].drivers[0].devices[0].status == "failed"

    run_story(story)
