"""From answers to the journal: each driver by itself, one order, one size."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents import wire
from agents.host.discovery.reporter import InventoryReporter, canonicalize_report, fit_reports
from agents.host.journal.journal import Journal, open_journal
from drivers.inventory import AttachHandle, Backend, Deployable, Device, DriverReport
from tests.agents.host.standin import found, until
from tests.agents.host.test_journal import disk_full


class Scripted:
    """A driver that answers what it is told to, when it is let."""

    def __init__(self, answer: DriverReport) -> None:
        self.answer = answer
        self.free = asyncio.Event()
        self.free.set()
        self.looks = 0

    async def discover(self) -> DriverReport:
        self.looks += 1
        await self.free.wait()
        return self.answer

    async def close(self) -> None:
        return None


@asynccontextmanager
async def reporting(
    journal: Journal, drivers: dict[str, Scripted], max_bytes: int = wire.MAX_MESSAGE_BYTES
) -> AsyncIterator[tuple[InventoryReporter, list[int]]]:
    reporter = InventoryReporter(
        drivers, journal, max_bytes=max_bytes, gather_s=0.2, retry_s=0.02, first_backoff_s=0.05
    )
    offers: list[int] = []
    task = asyncio.ensure_future(reporter.run(lambda: offers.append(journal.seq)))
    try:
        yield reporter, offers
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        journal.close()


def known(journal: Journal) -> dict[str, DriverReport]:
    return {driver.driver: driver for driver in journal.report.drivers} if journal.report else {}


def test_nothing_new_is_no_new_report(tmp_path: Path) -> None:
    async def story() -> None:
        journal, fake = open_journal(tmp_path, "h"), Scripted(found("fake", ["b", "a"]))
        async with reporting(journal, {"fake": fake}) as (reporter, offers):
            await until(lambda: offers)
            fake.answer = found("fake", ["a", "b"])
            reporter.request_discovery(["fake"])
            await until(lambda: len(offers) == 2)
            assert offers == [1, 1]
            fake.answer = found("fake", ["a"])
            reporter.request_discovery(["fake"])
            await until(lambda: offers[-1] == 2)

    asyncio.run(story())


def test_a_driver_that_fails_costs_only_its_own_devices(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        journal = open_journal(tmp_path, "h")
        good, bad = Scripted(found("good")), Scripted(found("bad"))
        async with reporting(journal, {"good": good, "bad": bad}) as (reporter, offers):
            await until(lambda: offers)
            bad.answer = DriverReport("bad", error="it broke")
            good.answer = found("good", ["a", "new"])
            reporter.request_discovery(["good", "bad"])
            await until(lambda: journal.seq == 2)
            assert known(journal)["bad"] == bad.answer
            assert len(known(journal)["good"].devices) == 2
            bad.answer = found("bad")
            await until(lambda: journal.seq == 3)  # asked again without a reason

    caplog.set_level(logging.INFO)
    asyncio.run(story())
    assert caplog.text.count("driver bad: it broke") == 1
    assert "driver bad answers again" in caplog.text


def test_a_backend_that_fails_costs_only_its_own_devices_and_nobody_gets_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def said(error: str, *devices: Device) -> DriverReport:
        return DriverReport("many", devices=devices, backends=(Backend("a", "pci", error=error), Backend("b", "pci")))

    mine, other = Device("x", "GPU", "v", "m", backend="a"), Device("y", "GPU", "v", "m", backend="b")

    async def story() -> None:
        journal = open_journal(tmp_path, "h")
        many, rival = Scripted(said("", mine, other)), Scripted(found("rival"))
        async with reporting(journal, {"many": many, "rival": rival}) as (reporter, offers):
            await until(lambda: offers)
            many.answer = said("it hung", other)
            rival.answer = DriverReport("rival", devices=(Device("x", "GPU", "v", "m"),))
            reporter.request_discovery(["many", "rival"])
            await until(lambda: known(journal)["many"].backends[0].error and known(journal)["rival"].faults)
            assert known(journal)["many"].devices == (mine, other), "as it was last known"
            assert not known(journal)["rival"].devices
        journal = open_journal(tmp_path, "h")
        async with reporting(journal, {"rival": rival, "many": many}) as (reporter, offers):
            assert reporter.find_device("many", "x") == mine, "also after a restart"
            await until(lambda: offers)
            assert known(journal)["many"].devices == (mine, other) and not known(journal)["rival"].devices
            many.answer = said("", mine, other)
            await until(lambda: not known(journal)["many"].backends[0].error)  # asked again without a reason

    asyncio.run(story())
    assert caplog.text.count("driver many, backend a: it hung") == 2, "once each time it runs"


def test_a_driver_that_hangs_does_not_hold_the_others_up(tmp_path: Path) -> None:
    async def story() -> None:
        journal = open_journal(tmp_path, "h")
        quick, hung = Scripted(found("quick")), Scripted(found("hung"))
        async with reporting(journal, {"quick": quick, "hung": hung}) as (reporter, offers):
            await until(lambda: offers)
            hung.free.clear()
            quick.answer = found("quick", ["new"])
            reporter.request_discovery(["quick", "hung"])
            await until(lambda: journal.seq == 2)
            assert known(journal)["hung"] == found("hung"), "as it was"
            reporter.request_discovery(["hung"])
            hung.answer = found("hung", ["late"])
            hung.free.set()
            await until(lambda: journal.seq == 3 and hung.looks == 3)

    asyncio.run(story())


def test_the_first_report_waits_for_every_driver(tmp_path: Path) -> None:
    async def story() -> None:
        journal = open_journal(tmp_path, "h")
        quick, slow = Scripted(found("quick")), Scripted(found("slow"))
        slow.free.clear()
        async with reporting(journal, {"quick": quick, "slow": slow}) as (reporter, offers):
            await until(lambda: quick.looks == 1)
            reporter.request_discovery(["quick"])
            await until(lambda: quick.looks == 2)
            assert journal.report is None
            slow.free.set()
            await until(lambda: offers)
            assert set(known(journal)) == {"quick", "slow"}

    asyncio.run(story())


def test_claims_are_settled_over_all_drivers_in_enabled_order(tmp_path: Path) -> None:
    async def story() -> None:
        journal = open_journal(tmp_path, "h")
        drivers = {name: Scripted(found(name)) for name in ("zebra", "ant")}
        async with reporting(journal, drivers) as (_, offers):
            await until(lambda: offers)
            assert [device.key for device in known(journal)["zebra"].devices] == ["a"]
            assert known(journal)["ant"].devices == ()
            assert [fault.subject for fault in known(journal)["ant"].faults] == ["a"]

    asyncio.run(story())


def test_what_a_failing_driver_held_stays_its_own_also_after_a_restart(tmp_path: Path) -> None:
    async def story() -> None:
        drivers = {"failing": Scripted(found("failing", ["a"])), "greedy": Scripted(found("greedy", ["b"]))}
        journal = open_journal(tmp_path, "h")
        async with reporting(journal, drivers) as (reporter, offers):
            await until(lambda: offers)
        drivers = {"failing": Scripted(DriverReport("failing", error="no")), "greedy": Scripted(found("greedy", "ab"))}
        journal = open_journal(tmp_path, "h")
        async with reporting(journal, drivers) as (reporter, offers):
            await until(lambda: offers)
            assert [device.key for device in known(journal)["greedy"].devices] == ["b"]
            assert [fault.subject for fault in known(journal)["greedy"].faults] == ["a"]
            reporter.request_discovery(["greedy"])
            await until(lambda: len(offers) > 1)
            assert journal.seq == offers[0]
        journal = open_journal(tmp_path, "h")
        async with reporting(journal, drivers) as (reporter, offers):
            assert reporter.find_device("failing", "a"), "and after one more"
            await until(lambda: offers)
            assert [device.key for device in known(journal)["greedy"].devices] == ["b"]

    asyncio.run(story())


def test_a_driver_that_fails_is_asked_again_once_however_often_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        timers: list[asyncio.TimerHandle] = []
        loop = asyncio.get_running_loop()
        call_later = loop.call_later

        def noted(delay: float, *rest: Any) -> asyncio.TimerHandle:
            timer = call_later(delay, *rest)
            if delay > 50:
                timers.append(timer)
            return timer

        monkeypatch.setattr(loop, "call_later", noted)
        bad = Scripted(DriverReport("bad", error="it broke"))
        journal = open_journal(tmp_path, "h")
        reporter = InventoryReporter({"bad": bad}, journal, gather_s=0.2, first_backoff_s=60)
        task = asyncio.ensure_future(reporter.run(lambda: None))
        for _ in range(4):
            await reporter.discover_and_record("bad")
        assert len(timers) > 1
        assert [timer.cancelled() for timer in timers] == [True] * (len(timers) - 1) + [False]
        timers[-1].cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        journal.close()

    asyncio.run(story())


def test_a_full_disk_is_said_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        journal, fake = open_journal(tmp_path, "h"), Scripted(found("fake"))
        with disk_full():
            async with asyncio.timeout(10), reporting(journal, {"fake": fake}) as (_, offers):
                await until(lambda: "the journal cannot store a report" in caplog.text)
                assert not offers
                disk_has_room()
                await until(lambda: offers == [1])

    def disk_has_room() -> None:
        import resource

        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    asyncio.run(story())


def test_a_gateway_that_takes_less_gets_a_report_that_fits_and_says_why(tmp_path: Path) -> None:
    async def story() -> None:
        journal = open_journal(tmp_path, "h")
        drivers = {"big": Scripted(found("big", map(str, range(200)))), "small": Scripted(found("small"))}
        async with reporting(journal, drivers) as (reporter, offers):
            await until(lambda: offers)
            assert known(journal)["big"].error == ""
            reporter.set_message_limit(4000)
            assert journal.seq == 2
            assert known(journal)["big"].error.startswith("the report is too large: ")
            assert "and 4000 are allowed. This driver's part is left out" in known(journal)["big"].error
            assert known(journal)["small"] == found("small")
            reporter.set_message_limit(wire.MAX_MESSAGE_BYTES)
            assert len(known(journal)["big"].devices) == 200

    asyncio.run(story())


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(2500, 20_000))
def test_what_is_cut_to_size_fits_and_keeps_what_it_can(sizes: list[int], limit: int) -> None:
    drivers = tuple(found(f"d{n}", map(str, range(size))) for n, size in enumerate(sizes))
    fitted = fit_reports(drivers, limit)
    message = wire.Report(epoch=2**53, seq=2**53, hash=wire.hash_report_content(fitted), drivers=fitted)
    assert len(wire.encode_message(message).encode()) <= limit
    assert [d.driver for d in fitted] == [d.driver for d in drivers]
    dropped = [len(d.devices) for d, f in zip(drivers, fitted, strict=True) if f.error]
    kept = [len(d.devices) for d, f in zip(drivers, fitted, strict=True) if not f.error]
    assert all(f == d for d, f in zip(drivers, fitted, strict=True) if not f.error)
    assert not dropped or not kept or min(dropped) >= max(kept)


names = st.text("abc", min_size=1, max_size=3)
handles = st.builds(
    AttachHandle, attach_type=st.sampled_from(["PCI", "DEV"]), info=names.map(lambda n: f'{{"n": "{n}"}}')
)
parts = st.builds(
    Deployable, name=names, num_accelerators=st.integers(0, 9), handles=st.lists(handles, max_size=4).map(tuple)
)


@given(st.lists(parts, max_size=5, unique_by=lambda d: d.name), st.randoms())
def test_the_order_of_a_listing_is_no_change(deployables: list[Deployable], random: object) -> None:
    def report(order: list[Deployable]) -> DriverReport:
        devices = tuple(Device(k, "GPU", "v", "m", deployables=tuple(order)) for k in ("b", "a"))
        return DriverReport("d", devices=devices)

    shuffled = [msgspec.structs.replace(d, handles=tuple(reversed(d.handles))) for d in reversed(deployables)]
    one, two = canonicalize_report(report(deployables)), canonicalize_report(report(shuffled))
    assert wire.hash_report_content((one,)) == wire.hash_report_content((two,))
    assert canonicalize_report(one) == one


def test_an_answer_with_a_nul_is_its_drivers_error_and_not_the_hosts() -> None:
    report = canonicalize_report(found("bad", ["a\0b"]))
    assert (report.devices, report.error) == ((), "its answer holds a NUL character, which cannot be stored")
