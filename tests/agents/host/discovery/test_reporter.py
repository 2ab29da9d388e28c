"""Tests of the inventory reporter, which merges the answers of the drivers into one report in the journal."""

from __future__ import annotations

import asyncio
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
from tests.agents.host.fake_gateway import driver_report, wait_until
from tests.agents.host.journal.test_journal import full_disk


class ControlledDriver:
    """A driver that returns `answer`, and waits until `may_answer` is set."""

    def __init__(self, answer: DriverReport) -> None:
        self.answer = answer
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.discover_count = 0

    async def discover(self) -> DriverReport:
        self.discover_count += 1
        await self.may_answer.wait()
        return self.answer

    async def close(self) -> None:
        return None


@asynccontextmanager
async def run_reporter(
    journal: Journal, drivers: dict[str, ControlledDriver], max_bytes: int = wire.MAX_MESSAGE_BYTES
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


def reported_drivers(journal: Journal) -> dict[str, DriverReport]:
    return {driver.driver: driver for driver in journal.report.drivers} if journal.report else {}


def test_a_rescan_without_changes_makes_no_new_report(tmp_path: Path) -> None:
    async def story() -> None:
        journal, fake = open_journal(tmp_path, "h"), ControlledDriver(driver_report("fake", ["b", "a"]))
        async with run_reporter(journal, {"fake": fake}) as (reporter, offers):
            await wait_until(lambda: offers)
            fake.answer = driver_report("fake", ["a", "b"])
            reporter.request_discovery(["fake"])
            await wait_until(lambda: len(offers) == 2)
            assert offers == [1, 1]
            fake.answer = driver_report("fake", ["a"])
            reporter.request_discovery(["fake"])
            await wait_until(lambda: offers[-1] == 2)

    asyncio.run(story())


def test_a_serial_number_that_was_read_before_a_restart_stays_the_identity_of_the_card(tmp_path: Path) -> None:
    card = Device("serial:10ee:01:0", "FPGA", "10ee", "5000", "0000:01:00.0")
    unreadable = msgspec.structs.replace(card, key="pci:0000:01:00.0")
    twin = msgspec.structs.replace(card, address="0000:02:00.0")

    async def report(*devices: Device) -> list[str]:
        """Run an agent until it has reported what its driver finds, and return the keys."""
        journal = open_journal(tmp_path, "h")
        async with run_reporter(journal, {"pci": ControlledDriver(DriverReport("pci", devices=devices))}) as (
            _,
            offers,
        ):
            await wait_until(lambda: offers)
            return [device.key for device in reported_drivers(journal)["pci"].devices]

    assert asyncio.run(report(card)) == [card.key]
    assert asyncio.run(report()) == []
    assert asyncio.run(report(unreadable)) == [card.key]
    assert asyncio.run(report(card, twin)) == ["pci:0000:02:00.0", card.key]


def test_a_failing_driver_affects_only_its_own_devices_and_is_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        journal = open_journal(tmp_path, "h")
        good, bad = ControlledDriver(driver_report("good")), ControlledDriver(driver_report("bad"))
        async with run_reporter(journal, {"good": good, "bad": bad}) as (reporter, offers):
            await wait_until(lambda: offers)
            bad.answer = DriverReport("bad", error="it broke")
            good.answer = driver_report("good", ["a", "new"])
            reporter.request_discovery(["good", "bad"])
            await wait_until(lambda: journal.seq == 2)
            assert reported_drivers(journal)["bad"] == bad.answer
            assert len(reported_drivers(journal)["good"].devices) == 2
            bad.answer = driver_report("bad")
            await wait_until(lambda: journal.seq == 3)  # The reporter asks a failed driver again by itself.

    asyncio.run(story())
    assert caplog.text.count("driver bad: it broke") == 1
    assert "driver bad answers again" in caplog.text


def test_a_failing_backend_keeps_its_devices_and_no_other_driver_gets_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make_two_backends_report(error: str, *devices: Device) -> DriverReport:
        return DriverReport("many", devices=devices, backends=(Backend("a", "pci", error=error), Backend("b", "pci")))

    mine, other = Device("x", "GPU", "v", "m", backend="a"), Device("y", "GPU", "v", "m", backend="b")

    async def story() -> None:
        journal = open_journal(tmp_path, "h")
        many, rival = (
            ControlledDriver(make_two_backends_report("", mine, other)),
            ControlledDriver(driver_report("rival")),
        )
        async with run_reporter(journal, {"many": many, "rival": rival}) as (reporter, offers):
            await wait_until(lambda: offers)
            many.answer = make_two_backends_report("it hung", other)
            rival.answer = DriverReport("rival", devices=(Device("x", "GPU", "v", "m"),))
            reporter.request_discovery(["many", "rival"])
            await wait_until(
                lambda: (
                    reported_drivers(journal)["many"].backends[0].error and reported_drivers(journal)["rival"].faults
                )
            )
            assert reported_drivers(journal)["many"].devices == (mine, other), "as it was last known"
            assert not reported_drivers(journal)["rival"].devices
        journal = open_journal(tmp_path, "h")
        async with run_reporter(journal, {"rival": rival, "many": many}) as (reporter, offers):
            assert reporter.find_device("many", "x") == mine, "also after a restart"
            await wait_until(lambda: offers)
            assert (
                reported_drivers(journal)["many"].devices == (mine, other)
                and not reported_drivers(journal)["rival"].devices
            )
            many.answer = make_two_backends_report("", mine, other)
            # The reporter asks a driver with a failed backend again by itself.
            await wait_until(lambda: not reported_drivers(journal)["many"].backends[0].error)

    asyncio.run(story())
    assert caplog.text.count("driver many, backend a: it hung") == 2, "once each time it runs"


@pytest.mark.parametrize("part", ["driver", "backend"])
def test_a_failing_driver_or_backend_keeps_the_identity_of_its_card_from_a_card_with_its_number(
    tmp_path: Path, part: str
) -> None:
    card = Device("serial:10ee:01:0", "FPGA", "10ee", "5000", "0000:01:00.0", backend="a")
    twin = msgspec.structs.replace(card, address="0000:02:00.0", backend="")

    def make_report(error: str, *devices: Device) -> DriverReport:
        backends = (Backend("a", "pci", error=error if part == "backend" else ""),)
        return DriverReport("mine", error if part == "driver" else "", devices=devices, backends=backends)

    async def story() -> None:
        journal = open_journal(tmp_path, "h")
        mine, other = ControlledDriver(make_report("", card)), ControlledDriver(DriverReport("other"))
        async with run_reporter(journal, {"mine": mine, "other": other}) as (reporter, offers):
            await wait_until(lambda: offers)
            mine.answer = make_report("it hung")
            other.answer = DriverReport("other", devices=(twin,))
            reporter.request_discovery(["mine", "other"])
            await wait_until(lambda: reported_drivers(journal)["other"].devices)
            assert [device.key for device in reported_drivers(journal)["other"].devices] == ["pci:0000:02:00.0"]
            mine.answer = make_report("", card)
            reporter.request_discovery(["mine"])
            await wait_until(lambda: not any(b.error for b in reported_drivers(journal)["mine"].backends))
            await wait_until(lambda: not reported_drivers(journal)["mine"].error)
            assert [device.key for device in reported_drivers(journal)["mine"].devices] == [card.key]
            assert [device.key for device in reported_drivers(journal)["other"].devices] == ["pci:0000:02:00.0"]

    asyncio.run(story())


def test_a_hanging_driver_does_not_delay_the_reports_of_others(tmp_path: Path) -> None:
    async def story() -> None:
        journal = open_journal(tmp_path, "h")
        quick, hung = ControlledDriver(driver_report("quick")), ControlledDriver(driver_report("hung"))
        async with run_reporter(journal, {"quick": quick, "hung": hung}) as (reporter, offers):
            await wait_until(lambda: offers)
            hung.may_answer.clear()
            quick.answer = driver_report("quick", ["new"])
            reporter.request_discovery(["quick", "hung"])
            await wait_until(lambda: journal.seq == 2)
            assert reported_drivers(journal)["hung"] == driver_report("hung"), "as it was"
            reporter.request_discovery(["hung"])
            hung.answer = driver_report("hung", ["late"])
            hung.may_answer.set()
            await wait_until(lambda: journal.seq == 3 and hung.discover_count == 3)

    asyncio.run(story())


def test_the_first_report_waits_for_every_driver(tmp_path: Path) -> None:
    async def story() -> None:
        journal = open_journal(tmp_path, "h")
        quick, slow = ControlledDriver(driver_report("quick")), ControlledDriver(driver_report("slow"))
        slow.may_answer.clear()
        async with run_reporter(journal, {"quick": quick, "slow": slow}) as (reporter, offers):
            await wait_until(lambda: quick.discover_count == 1)
            reporter.request_discovery(["quick"])
            await wait_until(lambda: quick.discover_count == 2)
            assert journal.report is None
            slow.may_answer.set()
            await wait_until(lambda: offers)
            assert set(reported_drivers(journal)) == {"quick", "slow"}

    asyncio.run(story())


def test_a_device_found_by_two_drivers_belongs_to_the_one_enabled_first(tmp_path: Path) -> None:
    async def story() -> None:
        journal = open_journal(tmp_path, "h")
        drivers = {name: ControlledDriver(driver_report(name)) for name in ("zebra", "ant")}
        async with run_reporter(journal, drivers) as (_, offers):
            await wait_until(lambda: offers)
            assert [device.key for device in reported_drivers(journal)["zebra"].devices] == ["a"]
            assert reported_drivers(journal)["ant"].devices == ()
            assert [fault.subject for fault in reported_drivers(journal)["ant"].faults] == ["a"]

    asyncio.run(story())


def test_a_failing_driver_keeps_its_devices_from_others_also_after_a_restart(tmp_path: Path) -> None:
    async def story() -> None:
        drivers = {
            "failing": ControlledDriver(driver_report("failing", ["a"])),
            "greedy": ControlledDriver(driver_report("greedy", ["b"])),
        }
        journal = open_journal(tmp_path, "h")
        async with run_reporter(journal, drivers) as (reporter, offers):
            await wait_until(lambda: offers)
        drivers = {
            "failing": ControlledDriver(DriverReport("failing", error="no")),
            "greedy": ControlledDriver(driver_report("greedy", "ab")),
        }
        journal = open_journal(tmp_path, "h")
        async with run_reporter(journal, drivers) as (reporter, offers):
            await wait_until(lambda: offers)
            assert [device.key for device in reported_drivers(journal)["greedy"].devices] == ["b"]
            assert [fault.subject for fault in reported_drivers(journal)["greedy"].faults] == ["a"]
            reporter.request_discovery(["greedy"])
            await wait_until(lambda: len(offers) > 1)
            assert journal.seq == offers[0]
        journal = open_journal(tmp_path, "h")
        async with run_reporter(journal, drivers) as (reporter, offers):
            assert reporter.find_device("failing", "a"), "and after one more"
            await wait_until(lambda: offers)
            assert [device.key for device in reported_drivers(journal)["greedy"].devices] == ["b"]

    asyncio.run(story())


def test_a_failing_driver_has_one_retry_timer_however_often_it_was_asked(
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
        bad = ControlledDriver(DriverReport("bad", error="it broke"))
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


def test_a_report_that_the_full_disk_could_not_store_is_logged_and_retried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        journal, fake = open_journal(tmp_path, "h"), ControlledDriver(driver_report("fake"))
        with full_disk():
            async with asyncio.timeout(10), run_reporter(journal, {"fake": fake}) as (_, offers):
                await wait_until(lambda: "the journal cannot store a report" in caplog.text)
                assert not offers
                disk_has_room()
                await wait_until(lambda: offers == [1])

    def disk_has_room() -> None:
        import resource

        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    asyncio.run(story())


def test_a_report_is_reduced_to_the_limit_of_the_gateway_and_names_the_omitted_driver(tmp_path: Path) -> None:
    async def story() -> None:
        journal = open_journal(tmp_path, "h")
        drivers = {
            "big": ControlledDriver(driver_report("big", map(str, range(200)))),
            "small": ControlledDriver(driver_report("small")),
        }
        async with run_reporter(journal, drivers) as (reporter, offers):
            await wait_until(lambda: offers)
            assert reported_drivers(journal)["big"].error == ""
            reporter.set_message_limit(4000)
            assert journal.seq == 2
            assert reported_drivers(journal)["big"].error.startswith("the report is too large: ")
            assert "and 4000 are allowed. This driver's part is left out" in reported_drivers(journal)["big"].error
            assert reported_drivers(journal)["small"] == driver_report("small")
            reporter.set_message_limit(wire.MAX_MESSAGE_BYTES)
            assert len(reported_drivers(journal)["big"].devices) == 200

    asyncio.run(story())


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(2500, 20_000))
def test_a_reduced_report_fits_the_limit_and_omits_the_largest_drivers(sizes: list[int], limit: int) -> None:
    drivers = tuple(driver_report(f"d{n}", map(str, range(size))) for n, size in enumerate(sizes))
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
def test_the_order_of_devices_and_handles_does_not_change_the_content_hash(
    deployables: list[Deployable], random: object
) -> None:
    def report(order: list[Deployable]) -> DriverReport:
        devices = tuple(Device(k, "GPU", "v", "m", deployables=tuple(order)) for k in ("b", "a"))
        return DriverReport("d", devices=devices)

    shuffled = [msgspec.structs.replace(d, handles=tuple(reversed(d.handles))) for d in reversed(deployables)]
    one, two = canonicalize_report(report(deployables)), canonicalize_report(report(shuffled))
    assert wire.hash_report_content((one,)) == wire.hash_report_content((two,))
    assert canonicalize_report(one) == one


def test_a_report_with_a_nul_character_becomes_an_error_of_its_driver() -> None:
    report = canonicalize_report(driver_report("bad", ["a\0b"]))
    assert (report.devices, report.error) == ((), "its answer holds a NUL character, which cannot be stored")
