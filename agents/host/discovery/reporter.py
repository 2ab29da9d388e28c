"""From what the drivers answer to the journal: look, settle, put in order, cut to size, record.

Run by `main`. Each driver looks by itself: one that fails, hangs or lies changes its own part of the report
only (promise L6).
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import msgspec

from agents import wire
from agents.host.journal.journal import Journal
from drivers.inventory import Device, DriverReport
from drivers.pci import ownership

log = logging.getLogger("cyborg.report")

TOGETHER_S = 2.0
"""Drivers woken together are told together, unless one of them takes longer than this."""
RETRY_S = 5.0
"""Between two attempts to write to a journal whose disk is full."""
PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""A driver that failed is asked again after the first, doubled with every failure up to the second."""
LARGEST = 2**53
"""Stands for any epoch and sequence when a report is measured."""


class Looker(Protocol):
    """One driver in its own process: `drivers.isolation.runner.DriverProcess`."""

    async def discover(self) -> DriverReport:
        """What is there; never raises."""

    async def close(self) -> None:
        """End the process."""


class Reporter:
    """Holds the last answer of every driver and keeps the journal's report in step with them."""

    def __init__(
        self,
        drivers: Mapping[str, Looker],
        journal: Journal,
        *,
        max_bytes: int = wire.MAX_MESSAGE,
        together_s: float = TOGETHER_S,
        retry_s: float = RETRY_S,
        pause_s: float = PAUSE_S,
        told: Callable[[Iterable[DriverReport]], tuple[DriverReport, ...]] = tuple,
    ) -> None:
        self._drivers = drivers
        self._told_too = told
        """What the agent adds to the drivers' answers (`roster`)."""
        self._journal = journal
        self._offer: Callable[[], None] | None = None
        self._max_bytes = max_bytes
        self._together_s = together_s
        self._retry_s = retry_s
        self._pause_s = pause_s
        self._answers: dict[str, DriverReport] = {}
        # What was settled last, also before a restart: each driver keeps what it had while it names it, or fails.
        known = journal.report.drivers if journal.report else ()
        self._had = {driver.driver: driver for driver in known if driver.driver in drivers}
        self._wanted = {name: asyncio.Event() for name in drivers}
        self._group: asyncio.TaskGroup | None = None
        self._busy: set[str] = set()
        self._answered = asyncio.Event()
        self._idle = asyncio.Event()
        self.marks: dict[tuple[str, str], str] = {}
        """(driver, device key) → why the agent itself holds the device for failed, whatever its driver sees."""
        self._looks: dict[str, int] = {}
        """Looks begun; `_seen` says which of them the answers are of, `_told` which of them the journal holds."""
        self._seen: dict[str, int] = {}
        self._told: dict[str, int] = {}
        self._news = asyncio.Event()

    def look(self, names: Iterable[str]) -> None:
        """Have these drivers look again; one that is looking right now does so once more afterwards.

        One that runs for the first time is asked from then on, and of one that runs no more that is told.
        """
        for name in names:
            if name not in self._wanted:
                self._wanted[name] = asyncio.Event()
                if self._group:
                    self._group.create_task(self._serve(name))
            self._wanted[name].set()

    async def looked(self, name: str) -> wire.Report:
        """Have this driver look again; the journal's report as soon as it holds what was seen then."""
        wanted = self._looks.get(name, 0) + 1  # one that is under way may have begun too early
        self.look([name])
        while self._told.get(name, 0) < wanted or (report := self._journal.report) is None:
            await self._news.wait()
        return report

    @property
    def last(self) -> wire.Report | None:
        """What the conductor was told last, or is told next."""
        return self._journal.report

    def device(self, driver: str, key: str) -> Device | None:
        """What was last known of a device, also from before a restart."""
        devices = self._had[driver].devices if driver in self._had else ()
        return next((device for device in devices if device.key == key), None)

    def mark(self, driver: str, key: str, reason: str) -> None:
        """Report the device as failed for this reason; '' takes that back."""
        if reason:
            self.marks[driver, key] = reason
        else:
            self.marks.pop((driver, key), None)
        self._answered.set()

    def limit(self, max_bytes: int) -> None:
        """The gateway takes messages of `max_bytes`: every report from now on fits, the last one too."""
        if max_bytes != self._max_bytes:
            self._max_bytes = max_bytes
            if not self._record():
                self._answered.set()  # `_publish` tries again

    async def run(self, offer: Callable[[], None]) -> None:
        """Look with all drivers, then whenever asked; `offer` is called after each look. Ends when cancelled."""
        self._offer = offer
        self.look(self._drivers)
        if not self._drivers:  # that is told as well
            self._idle.set()
            self._answered.set()
        async with asyncio.TaskGroup() as self._group:
            for name in self._wanted:
                self._group.create_task(self._serve(name))
            self._group.create_task(self._publish())

    async def _serve(self, name: str) -> None:
        pause = self._pause_s
        again: asyncio.TimerHandle | None = None
        while True:
            await self._wanted[name].wait()
            self._wanted[name].clear()
            self._busy.add(name)
            self._idle.clear()
            self._looks[name] = look = self._looks.get(name, 0) + 1
            report = await self._answer(name)
            self._seen[name] = look
            self._busy.discard(name)
            self._answered.set()
            if not self._busy:
                self._idle.set()
            failed = bool(report and (report.error or any(backend.error for backend in report.backends)))
            if again:
                again.cancel()  # however often it is looked for other reasons, it is asked again once
            again = asyncio.get_running_loop().call_later(pause, self._wanted[name].set) if failed else None
            pause = min(pause * 2, LONGEST_PAUSE_S) if failed else self._pause_s

    async def _answer(self, name: str) -> DriverReport | None:
        """What the driver says, once it is the one that runs now; None when it runs no more."""
        while driver := self._drivers.get(name):
            report = await driver.discover()
            if self._drivers.get(name) is driver:
                self._tell(report, self._answers.get(name))
                self._answers[name] = report
                return report
        self._answers.pop(name, None)
        self._had.pop(name, None)
        return None

    async def _publish(self) -> None:
        while True:
            await self._answered.wait()
            try:
                async with asyncio.timeout(self._together_s):
                    await self._idle.wait()
            except TimeoutError:
                log.info("not waiting for %s: the others are reported", ", ".join(sorted(self._busy)))
            self._answered.clear()
            while not self._record():
                await asyncio.sleep(self._retry_s)

    def _record(self) -> bool:
        """Journal what is known now; False when the disk refused.

        Nothing before every driver has answered once.
        """
        if self._drivers.keys() - self._answers.keys():
            return True
        settled = ownership.settle([self._answers[name] for name in self._drivers], self._had)
        self._had = {report.driver: report for report in settled}
        whole = self._told_too(marked(canonical(report), self.marks) for report in settled)
        drivers = fit(whole, self._max_bytes)
        try:
            changed = self._journal.record(drivers)
        except sqlite3.OperationalError as error:
            log.error("the journal takes no report (%s): nothing new is sent until it does", error)
            return False
        if changed:
            for driver, before in zip(drivers, whole, strict=True):
                if driver.error and not before.error:
                    log.error("driver %s: %s", driver.driver, driver.error)
            count = sum(len(driver.devices) for driver in drivers)
            log.info("report %d.%d: %d devices", self._journal.epoch, self._journal.seq, count)
        if self._offer is not None:
            self._offer()
        self._told = dict(self._seen)
        self._news.set()
        self._news = asyncio.Event()
        return True

    def _tell(self, report: DriverReport, before: DriverReport | None) -> None:
        was = before.error if before else ""
        if report.error and report.error != was:
            log.error("driver %s: %s", report.driver, report.error.removeprefix(f"{report.driver}: "))
        elif was and not report.error:
            log.info("driver %s answers again", report.driver)
        ailing = {backend.name: backend.error for backend in before.backends} if before else {}
        for backend in report.backends:
            if backend.error and backend.error != ailing.get(backend.name):
                log.error("driver %s, backend %s: %s", report.driver, backend.name, backend.error)
        known = before.faults if before else ()
        for fault in report.faults:
            if fault not in known:
                log.warning("driver %s, %s: %s", report.driver, fault.subject, fault.reason)


def canonical(report: DriverReport) -> DriverReport:
    """The same content in one order, so that the order of a directory listing is no change.

    A NUL character costs its driver the whole answer: the conductor refuses any report that holds one.
    """
    if b"\\u0000" in msgspec.json.encode(report):
        return DriverReport(report.driver, "its answer holds a NUL character, which cannot be stored")
    return DriverReport(
        driver=report.driver,
        error=report.error,
        devices=tuple(sorted(map(_ordered, report.devices), key=lambda device: device.key)),
        faults=tuple(sorted(report.faults, key=lambda fault: (fault.subject, fault.reason))),
        backends=tuple(sorted(report.backends, key=lambda backend: backend.name)),
    )


def marked(report: DriverReport, marks: Mapping[tuple[str, str], str]) -> DriverReport:
    """The report with the agent's own reasons in it."""
    if not any(driver == report.driver for driver, _ in marks):
        return report
    devices = (
        msgspec.structs.replace(device, status="failed", status_reason=reason[:4096])
        if (reason := marks.get((report.driver, device.key)))
        else device
        for device in report.devices
    )
    return msgspec.structs.replace(report, devices=tuple(devices))


def _ordered(device: Device) -> Device:
    deployables = (
        msgspec.structs.replace(
            deployable, handles=tuple(sorted(deployable.handles, key=lambda h: (h.attach_type, h.info)))
        )
        for deployable in device.deployables
    )
    return msgspec.structs.replace(
        device, deployables=tuple(sorted(deployables, key=lambda deployable: deployable.name))
    )


def fit(drivers: tuple[DriverReport, ...], max_bytes: int) -> tuple[DriverReport, ...]:
    """The report, or one that fits into `max_bytes`: the biggest drivers' lists are replaced by errors.

    What the conductor knows of those stays and is shown stale; the other drivers' devices go on.
    """
    size = whole = _size(drivers)
    left_out: set[str] = set()
    while size > max_bytes and len(left_out) < len(drivers):
        parts = {d.driver: len(msgspec.json.encode(d)) for d in drivers if d.driver not in left_out}
        biggest = max(parts, key=lambda name: parts[name])
        left_out.add(biggest)
        drivers = tuple(_too_large(d, whole, max_bytes, parts[biggest]) if d.driver == biggest else d for d in drivers)
        size = _size(drivers)
    return drivers


def _size(drivers: tuple[DriverReport, ...]) -> int:
    return len(wire.encode(wire.Report.of(LARGEST, LARGEST, "0" * 40, drivers)).encode())


def _too_large(report: DriverReport, whole: int, max_bytes: int, part: int) -> DriverReport:
    return msgspec.structs.replace(
        report,
        devices=(),
        faults=(),
        backends=(),
        error=report.error
        or f"report too large: {whole} bytes of {max_bytes}; this driver's {len(report.devices)} devices "
        f"and {len(report.faults)} faults take {part} and are left out: raise CYBORG_MAX_MESSAGE_BYTES on "
        "the conductor, or have the driver find less",
    )
