"""When load is read and what of it is told: the timetable by itself, then over a real socket."""

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
from agents.host.connection.identity import load_or_make
from agents.host.connection.link import Link
from agents.host.discovery.sampler import LONGEST_PAUSE_S, PAUSE_S, QUIET, Manners, Meter, Timetable
from agents.host.journal.journal import Journal, open_journal
from drivers.errors import Failed
from drivers.inventory import DriverReport, Health, Sample
from drivers.plan import Ask
from tests.agents.host.standin import QUICK, StandIn, found, until

OFTEN, ONCE = wire.Watch(0.5, 300.0), wire.Watch(0.0, 0.0)


def rounds(table: Timetable, until_s: float, takes_s: float = 0.0) -> list[float]:
    """When rounds begin up to a time, each taking so long."""
    began = []
    while table.due <= until_s:
        began.append(now := table.due)
        table.begins(now)
        table.ended(now + takes_s)
    return began


def test_at_rest_a_host_has_its_own_place_in_the_minute_and_keeps_it_after_a_look_by_all() -> None:
    table = Timetable()
    assert table.due == math.inf
    table.connected(1000.0, 0.25)
    assert rounds(table, 1150.0) == [1015.0, 1075.0, 1135.0]
    table.wished(1160.0, ONCE)
    assert rounds(table, 1260.0) == [1160.0, 1195.0, 1255.0]
    table.lost()
    assert table.due == math.inf


def test_while_somebody_looks_rounds_are_as_often_as_wished_and_then_rest_again() -> None:
    table = Timetable()
    table.connected(0.0, 0.5)
    table.wished(100.0, wire.Watch(2.0, 5.0))
    assert rounds(table, 200.0) == [100.0, 102.0, 104.0, 150.0]
    table.wished(200.0, wire.Watch(10.0, 15.0))
    table.wished(201.0, wire.Watch(1.0, 2.0))
    assert rounds(table, 209.0) == [201.0, 202.0, 203.0], "the later wish takes the place of the first"


def test_who_looks_on_gets_no_more_rounds_than_wished_and_a_census_meanwhile_one_at_once() -> None:
    table, often = Timetable(), wire.Watch(2.0, 10.0)
    table.connected(0.0, 0.5)
    table.wished(100.0, often)
    assert rounds(table, 105.0) == [100.0, 102.0, 104.0]
    table.wished(105.0, often)
    table.begins(table.due)
    table.wished(106.1, often)  # while a round is under way
    table.ended(106.2)
    assert rounds(table, 150.0) == [108.0, 110.0, 112.0, 114.0, 116.0, 150.0]
    table.wished(200.0, often)
    assert rounds(table, 210.0) == [200.0, 202.0, 204.0, 206.0, 208.0, 210.0]
    table.wished(210.0, often)  # in the last moment: what was due next was a minute away
    assert rounds(table, 213.0) == [212.0]
    table.wished(213.0, wire.Watch(2.0, 7.0))  # what a census says: nothing lasts longer by it
    assert rounds(table, 214.0) == [213.0]
    table.wished(214.0, wire.Watch(1.0, 20.0))
    assert rounds(table, 214.0) == [214.0], "more often is at once"
    table.wished(214.1, wire.Watch(1.0, 19.9))
    table.wished(214.2, wire.Watch(1.0, 30.0))
    assert table.due == 214.5, "a census is not put off by who looks on"


@pytest.mark.parametrize(
    ("wish", "began"),
    [
        (wire.Watch(-1e300, 1.0), [0.0, 0.5, 1.0]),
        (wire.Watch(math.inf, 1e300), [0.0, 60.0, 120.0, 180.0, 240.0, 300.0]),
        (wire.Watch(1.0, -5.0), [0.0]),
    ],
)
def test_a_wish_is_bounded(wish: wire.Watch, began: list[float]) -> None:
    table = Timetable()
    table.connected(-1.0, 0.9)
    table.wished(0.0, wish)
    told = rounds(table, 400.0)
    assert told[: len(began)] == began
    assert all(later - sooner > 1.0 for sooner, later in zip(told[len(began) - 1 :], told[len(began) :], strict=False))


def test_a_round_that_takes_long_leaves_out_those_that_fell_into_its_time() -> None:
    table = Timetable()
    table.connected(0.0, 0.0)
    table.wished(10.0, wire.Watch(1.0, 10.0))
    assert rounds(table, 15.0, takes_s=2.5) == [10.0, 13.0]
    for moment in (20.0, 20.1, 20.2):  # however many wishes come, the next round keeps its distance
        table.wished(moment, ONCE)
        if moment == 20.0:
            table.begins(20.0)
    table.ended(20.3)
    assert table.due == 20.5


def test_a_round_whose_gateway_is_lost_is_the_last() -> None:
    table = Timetable()
    table.connected(0.0, 0.0)
    table.begins(0.0)
    table.lost()
    table.ended(1.0)
    assert table.due == math.inf


def test_a_driver_is_spared_as_long_as_it_was_slow_and_longer_with_every_failure() -> None:
    manners = Manners()
    manners.answered(began=10.0, now=11.5)
    assert manners.free == 11.5 + QUIET * 1.5
    assert [manners.failed(100.0) for _ in range(9)][:3] == [PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S]
    assert manners.failed(100.0) == LONGEST_PAUSE_S
    manners.answered(began=0.0, now=0.0)
    assert manners.failed(100.0) == PAUSE_S


def test_what_a_driver_was_not_asked_for_and_what_no_message_holds_is_left_out() -> None:
    class Liar:
        async def samples(self, asks: Sequence[Ask]) -> tuple[Sample, ...]:
            many = tuple(Sample("a", f"metric_{n}", 1.0) for n in range(100))
            return (Sample("b", "power_watts", 1.0), Sample("a", "power_watts", math.inf), *many)

    report = wire.Report(1, 1, "x" * 40, (found(keys=["a"]),))
    told = asyncio.run(Meter({"fake_driver": Liar()}, lambda: report)._round())
    assert [one.key for one in told.loads] == ["a"] and "power_watts" not in told.loads[0].values
    assert wire.decode_from_agent(wire.encode(told)) == told, "the gateway takes it"


def test_what_the_gateway_does_not_take_is_left_out_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    loads = tuple(wire.DeviceLoad(f"pci:é{n}", {"power_watts": float(n)}) for n in range(5000))
    meter = Meter({}, lambda: None)
    for _ in range(2):
        text = meter.frame(wire.Samples(loads), 10_000)
        told = msgspec.json.decode(text, type=wire.Samples).loads
        assert 9_000 < len(text.encode()) <= 10_000 and told == loads[: len(told)]
    assert len(meter.frame(wire.Samples(loads), 10**7).encode()) <= wire.MAX_SAMPLES
    assert len(caplog.records) == 1
    assert meter.frame(wire.Samples(()), 1) == wire.encode(wire.Samples(()))


@dataclass(eq=False)
class Gauge:
    """A driver as far as load goes; `asked` are the devices of each round."""

    answers: Callable[[Ask], float] = lambda ask: 1.0
    asked: list[list[str]] = field(default_factory=list)

    async def samples(self, asks: Sequence[Ask]) -> tuple[Sample, ...]:
        """As the runner's."""
        self.asked.append([ask.key for ask in asks])
        return tuple(Sample(ask.key, "power_watts", self.answers(ask)) for ask in asks)


@dataclass
class Host:
    """A link over a journal with a meter, as `main` wires them."""

    journal: Journal
    link: Link
    gauge: Gauge

    def sees(self, *drivers: DriverReport) -> None:
        """The host was looked at."""
        self.journal.record(drivers)
        self.link.offer()


@asynccontextmanager
async def host(directory: Path, server: StandIn, gauge: Gauge | None = None) -> AsyncIterator[Host]:
    """It rests for a minute unless it is asked."""
    journal = open_journal(directory, "cmp1.example")
    keys = load_or_make(directory, "cmp1.example", "cmp1")
    gauge = gauge or Gauge()
    meter = Meter({"fake_driver": gauge}, lambda: journal.report, draw=lambda: 0.99)
    hello = wire.Hello(agent_version="1", boot_id="b", drivers=("fake_driver",))
    link = Link(journal, keys, server.gateway(), hello, lambda _: None, replace(QUICK, draw=lambda: 0.5), meter=meter)
    meter.on_news = link.wake.set
    tasks = [asyncio.ensure_future(link.run()), asyncio.ensure_future(meter.run())]
    try:
        yield Host(journal, link, gauge)
        assert not any(task.done() for task in tasks), tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        journal.close()


def tell(story: Callable[[], Awaitable[None]]) -> None:
    """In an event loop."""
    asyncio.run(asyncio.wait_for(story(), 60))


def sick(status: Health) -> DriverReport:
    """The one device, as it is."""
    report = found(keys=["a"])
    return msgspec.structs.replace(report, devices=(msgspec.structs.replace(report.devices[0], status=status),))


def test_a_look_is_answered_at_once_and_goes_on_as_wished(tmp_path: Path) -> None:
    async def story() -> None:
        async with StandIn().open() as server, host(tmp_path, server) as agent:
            agent.sees(found(keys=["a", "b"]), found("another_driver", keys=["c"]))
            await until(lambda: agent.journal.acknowledged and server.beats)
            assert agent.gauge.asked == [] and server.samples == []
            await server.order(ONCE)
            await until(lambda: server.samples)
            assert server.samples[0].loads == tuple(wire.DeviceLoad(key, {"power_watts": 1.0}) for key in "ab")
            await server.order(OFTEN)
            await until(lambda: len(server.samples) >= 3)
            agent.sees(found(keys=["b"]))
            await until(lambda: agent.gauge.asked[-1] == ["b"])

    tell(story)


def test_a_wish_ends_with_its_connection(tmp_path: Path) -> None:
    async def story() -> None:
        async with StandIn().open() as server, host(tmp_path, server) as agent:
            agent.sees(found(keys=["a"]))
            await until(lambda: agent.journal.acknowledged)
            await server.order(OFTEN)
            await until(lambda: server.samples)
            await server.sockets[-1].close()
            await until(lambda: len(server.hellos) == 2)
            count = len(server.samples)
            server.beats.clear()
            await until(lambda: len(server.beats) >= 24)  # long enough for two rounds of the old wish
            assert len(server.samples) == count

    tell(story)


def test_load_that_meets_a_report_that_is_owed_is_dropped(tmp_path: Path) -> None:
    async def story() -> None:
        server = StandIn(acknowledge=False)
        async with (
            server.open(),
            host(tmp_path, server, Gauge(answers=lambda ask: float(len(agent.gauge.asked)))) as agent,
        ):
            agent.sees(found(keys=["a"]))
            await until(lambda: server.reports)
            await server.order(ONCE)
            await until(lambda: len(agent.gauge.asked) == 1)
            server.beats.clear()
            await until(lambda: len(server.beats) >= 2)
            assert server.samples == []
            await server.sockets[-1].send(wire.encode(wire.Ack(seq=server.reports[-1].seq)))
            await until(lambda: agent.journal.acknowledged)
            await server.order(ONCE)
            await until(lambda: server.samples)
            assert [one.loads[0].values["power_watts"] for one in server.samples] == [2.0], "the first is not sent late"

    tell(story)


def test_a_driver_that_fails_is_left_alone_and_the_round_is_told_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(ask: Ask) -> float:
        raise Failed("fake_driver: it did not return its load within 2 s")

    async def story() -> None:
        async with StandIn().open() as server, host(tmp_path, server, Gauge(answers=fails)) as agent:
            agent.sees(found(keys=["a"]))
            await until(lambda: agent.journal.acknowledged)
            for count in (1, 2):
                await server.order(ONCE)
                await until(lambda count=count: len(server.samples) == count)  # type: ignore[misc]
            assert {one.loads for one in server.samples} == {()} and len(agent.gauge.asked) == 1

    tell(story)
    assert "within 2 s; its load is not sampled for the next 60 s" in caplog.text


def test_a_fault_is_reported_without_the_delay_that_spreads_other_reports(tmp_path: Path) -> None:
    async def story() -> None:
        server = StandIn()
        async with server.open(), host(tmp_path, server) as agent:
            agent.sees(sick("degraded"))
            await until(lambda: agent.journal.acknowledged)
            server.jitter_s, server.applied_hash = 300.0, ""
            await server.sockets[-1].close()
            await until(lambda: len(server.hellos) == 2)
            for status in ("ok", "degraded"):  # what was known before is no news, and a recovery has time
                agent.sees(sick(status))  # type: ignore[arg-type]
                server.beats.clear()
                await until(lambda: len(server.beats) >= 2)
                assert len(server.reports) == 1
            agent.sees(sick("failed"))
            await until(lambda: len(server.reports) == 2)
            assert server.reports[-1].drivers[0].devices[0].status == "failed"

    tell(story)
