"""Collect the drivers' reports, resolve conflicts between them, and record the host's report in the journal.

The steps are: ask the drivers, settle which driver has which device, sort, shrink to the message limit, record. Each
driver is asked on its own: one that fails, hangs or answers nonsense changes only its own part of the report (promise
L6).
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
"""Seconds to wait for other drivers that are being asked too, so that one report holds all their answers."""
RETRY_S = 5.0
"""Seconds between two attempts to write to a journal whose disk is full."""
PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Back-off in seconds for a driver that failed: the first pause, and the limit up to which each failure doubles it."""
LARGEST = 2**53
"""The epoch and seq to use when the size of a report is computed; no real ones are longer."""


class Looker(Protocol):
    """One driver in its own process: `drivers.isolation.runner.DriverProcess`."""

    async def discover(self) -> DriverReport:
        """Return the devices that the driver finds. Never raises: a failure is the report's `error`."""

    async def close(self) -> None:
        """End the process."""


class Reporter:
    """Asks the drivers on request, keeps the last answer of each, and keeps the journal's report up to date."""

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
        """Completes the drivers' reports with what the agent knows: `driver_set.DriverSet.complete_reports`."""
        self._journal = journal
        self._offer: Callable[[], None] | None = None
        self._max_bytes = max_bytes
        self._together_s = together_s
        self._retry_s = retry_s
        self._pause_s = pause_s
        self._answers: dict[str, DriverReport] = {}
        # The last settled reports, from before a restart too. By them a driver keeps a contested device while it still
        # names that device, and all its devices while it fails.
        known = journal.report.drivers if journal.report else ()
        self._had = {driver.driver: driver for driver in known if driver.driver in drivers}
        self._wanted = {name: asyncio.Event() for name in drivers}
        self._group: asyncio.TaskGroup | None = None
        self._busy: set[str] = set()
        self._answered = asyncio.Event()
        self._idle = asyncio.Event()
        self.marks: dict[tuple[str, str], str] = {}
        """(driver, device key) → why the agent reports the device as failed, whatever its driver reports."""
        self._looks: dict[str, int] = {}
        """How many discoveries were begun, by driver; the next two: the last one answered, the last one journaled."""
        self._seen: dict[str, int] = {}
        self._told: dict[str, int] = {}
        self._news = asyncio.Event()

    def look(self, names: Iterable[str]) -> None:
        """Request that these drivers look for devices again, and return at once.

        A driver that is looking for devices now does so once more afterwards. A driver that was started
        since is included from now on; one that was stopped is removed from the report.
        """
        for name in names:
            if name not in self._wanted:
                self._wanted[name] = asyncio.Event()
                if self._group:
                    self._group.create_task(self._serve(name))
            self._wanted[name].set()

    async def looked(self, name: str) -> wire.Report:
        """Make a driver look again, wait until the journal has the answer, and return the journal's report.

        Waits without a time limit, also while the journal cannot be written.
        """
        wanted = self._looks.get(name, 0) + 1  # a discovery that runs now may have begun before the change
        self.look([name])
        while self._told.get(name, 0) < wanted or (report := self._journal.report) is None:
            await self._news.wait()
        return report

    @property
    def last(self) -> wire.Report | None:
        """The journal's report: the last one that was sent, or the next one to be sent; None when there is none."""
        return self._journal.report

    def device(self, driver: str, key: str) -> Device | None:
        """Return a device as last reported, also from before a restart; None when it is not known."""
        devices = self._had[driver].devices if driver in self._had else ()
        return next((device for device in devices if device.key == key), None)

    def mark(self, driver: str, key: str, reason: str) -> None:
        """Report the device as failed with this reason from now on; the reason '' ends that."""
        if reason:
            self.marks[driver, key] = reason
        else:
            self.marks.pop((driver, key), None)
        self._answered.set()

    def limit(self, max_bytes: int) -> None:
        """Set the message limit in bytes; if it differs, record the report again so that it fits."""
        if max_bytes != self._max_bytes:
            self._max_bytes = max_bytes
            if not self._record():
                self._answered.set()  # `_record_answers` tries again

    async def run(self, offer: Callable[[], None]) -> None:
        """Ask all drivers, then again after each `request_discovery`. Runs until it is cancelled.

        `on_current` is called each time the journal is up to date with the answers, also when nothing changed.
        """
        self._offer = offer
        self.look(self._drivers)
        if not self._drivers:  # a host without drivers sends a report too
            self._idle.set()
            self._answered.set()
        async with asyncio.TaskGroup() as self._group:
            for name in self._wanted:
                self._group.create_task(self._serve(name))
            self._group.create_task(self._publish())

    async def _serve(self, name: str) -> None:
        """Ask one driver whenever a discovery is requested, and with back-off while it or one of its backends fails."""
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
                again.cancel()  # at most one retry is scheduled, however often it is asked
            again = asyncio.get_running_loop().call_later(pause, self._wanted[name].set) if failed else None
            pause = min(pause * 2, LONGEST_PAUSE_S) if failed else self._pause_s

    async def _answer(self, name: str) -> DriverReport | None:
        """Ask the driver and store its answer; return it, or None and forget the driver when it no longer runs.

        If the driver's process was replaced meanwhile, the new one is asked.
        """
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
        """After each answer wait up to GATHER_S for the other drivers, and record; retry while the disk refuses."""
        while True:
            await self._answered.wait()
            try:
                async with asyncio.timeout(self._together_s):
                    await self._idle.wait()
            except TimeoutError:
                log.info("the report does not wait longer for new answers of %s", ", ".join(sorted(self._busy)))
            self._answered.clear()
            while not self._record():
                await asyncio.sleep(self._retry_s)

    def _record(self) -> bool:
        """Record a report of all last answers in the journal; return False when the disk refused, else True.

        Does nothing (and returns True) until every running driver has answered once.
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
            log.error("the journal cannot store a report (%s): nothing new is sent until it can", error)
            return False
        if changed:
            for driver, before in zip(drivers, whole, strict=True):
                if driver.error and not before.error:
                    log.error("driver %s: %s", driver.driver, driver.error)
            count = sum(len(driver.devices) for driver in drivers)
            log.info("report %d.%d is recorded; devices: %d", self._journal.epoch, self._journal.seq, count)
        if self._offer is not None:
            self._offer()
        self._told = dict(self._seen)
        self._news.set()
        self._news = asyncio.Event()
        return True

    def _tell(self, report: DriverReport, before: DriverReport | None) -> None:
        """Log the errors and faults that the driver's former answer did not have, and the end of its error."""
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
    """Return the report sorted, so that, for example, another order of a directory listing is not a change.

    A report with a NUL character is replaced by an error, because the conductor would refuse the whole message.
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
    """Return the report with each device in `failure_marks` shown as failed with the reason given there."""
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
    """Return the device with its deployables and their handles sorted."""
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
    """Shrink the drivers' reports until a message with all of them has at most `max_bytes` bytes.

    The largest report is emptied and gets an error instead, then the next one, until the rest fits. The conductor keeps
    what it knows of those drivers' devices and shows them as stale; the other drivers are not affected.
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
    """Return the largest size that a Report message with this content can have, in bytes."""
    return len(wire.encode(wire.Report.of(LARGEST, LARGEST, "0" * 40, drivers)).encode())


def _too_large(report: DriverReport, whole: int, max_bytes: int, part: int) -> DriverReport:
    """Empty a driver's report and set its error, which names the sizes, unless it has an error already."""
    return msgspec.structs.replace(
        report,
        devices=(),
        faults=(),
        backends=(),
        error=report.error
        or f"the report is too large: it has {whole} bytes, and {max_bytes} are allowed. This driver's part is left "
        f"out ({part} bytes, devices: {len(report.devices)}, faults: {len(report.faults)}): raise "
        "CYBORG_MAX_MESSAGE_BYTES on the conductor, or configure the driver to find less",
    )
