"""Collect the drivers' reports, resolve conflicts between them, and record the host's report in the journal.

The steps are: ask the drivers, settle the devices' keys and which driver has which device, sort, shrink to the message
limit, record. Each driver is asked on its own: one that fails, hangs or answers nonsense changes only its own part of
the report (promise L6).
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
from drivers.pci import identity, ownership

log = logging.getLogger("cyborg.report")

GATHER_S = 2.0
"""Seconds to wait for other drivers that are being asked too, so that one report holds all their answers."""
JOURNAL_RETRY_S = 5.0
"""Seconds between two attempts to write to a journal whose disk is full."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0
"""Back-off in seconds for a driver that failed: the first pause, and the limit up to which each failure doubles it."""
LARGEST_NUMBER, LONGEST_BOOT_ID = 2**53, "0" * 64
"""The epoch and seq, and the boot id, to use when the size of a report is computed; no real ones are longer."""


class DiscoverySource(Protocol):
    """One driver in its own process: `drivers.isolation.runner.DriverProcess`."""

    async def discover(self) -> DriverReport:
        """Return the devices that the driver finds. Never raises: a failure is the report's `error`."""

    async def close(self) -> None:
        """End the driver's process."""


class InventoryReporter:
    """Asks the drivers on request, keeps the last answer of each, and keeps the journal's report up to date."""

    def __init__(
        self,
        drivers: Mapping[str, DiscoverySource],
        journal: Journal,
        *,
        max_bytes: int = wire.MAX_MESSAGE_BYTES,
        gather_s: float = GATHER_S,
        retry_s: float = JOURNAL_RETRY_S,
        first_backoff_s: float = FIRST_BACKOFF_S,
        complete_reports: Callable[[Iterable[DriverReport]], tuple[DriverReport, ...]] = tuple,
    ) -> None:
        self._drivers = drivers
        self._complete_reports = complete_reports
        """Completes the drivers' reports with what the agent knows: `driver_set.DriverSet.complete_reports`."""
        self._journal = journal
        self._on_current: Callable[[], None] | None = None
        self._max_bytes = max_bytes
        self._gather_s = gather_s
        self._retry_s = retry_s
        self._first_backoff_s = first_backoff_s
        self._last_answers: dict[str, DriverReport] = {}
        # The last settled reports, from before a restart too. By them a driver keeps a contested device while it still
        # names that device, and all its devices while it fails.
        journaled = journal.report.drivers if journal.report else ()
        self._last_settled = {driver.driver: driver for driver in journaled if driver.driver in drivers}
        self._discovery_requested = {name: asyncio.Event() for name in drivers}
        self._task_group: asyncio.TaskGroup | None = None
        self._busy_drivers: set[str] = set()
        self._record_needed = asyncio.Event()
        self._all_idle = asyncio.Event()
        self.failure_marks: dict[tuple[str, str], str] = {}
        """(driver, device key) → why the agent reports the device as failed, whatever its driver reports."""
        self._discoveries_begun: dict[str, int] = {}
        """How many discoveries were begun, by driver; the next two: the last one answered, the last one journaled."""
        self._discoveries_answered: dict[str, int] = {}
        self._discoveries_recorded: dict[str, int] = {}
        self._recorded_event = asyncio.Event()

    def request_discovery(self, names: Iterable[str]) -> None:
        """Request that these drivers look for devices again, and return at once.

        A driver that is looking for devices now does so once more afterwards. A driver that was started
        since is included from now on; one that was stopped is removed from the report.
        """
        for name in names:
            if name not in self._discovery_requested:
                self._discovery_requested[name] = asyncio.Event()
                if self._task_group:
                    self._task_group.create_task(self._run_driver(name))
            self._discovery_requested[name].set()

    async def discover_and_record(self, name: str) -> wire.Report:
        """Make a driver look again, wait until the journal has the answer, and return the journal's report.

        Waits without a time limit, also while the journal cannot be written.
        """
        needed = self._discoveries_begun.get(name, 0) + 1  # a discovery that runs now may have begun before the change
        self.request_discovery([name])
        while self._discoveries_recorded.get(name, 0) < needed or (report := self._journal.report) is None:
            await self._recorded_event.wait()
        return report

    @property
    def last_report(self) -> wire.Report | None:
        """The journal's report: the last one that was sent, or the next one to be sent; None when there is none."""
        return self._journal.report

    def find_device(self, driver: str, key: str) -> Device | None:
        """Return a device as last reported, also from before a restart; None when it is not known."""
        devices = self._last_settled[driver].devices if driver in self._last_settled else ()
        return next((device for device in devices if device.key == key), None)

    def set_failure_mark(self, driver: str, key: str, reason: str) -> None:
        """Report the device as failed with this reason from now on; the reason '' ends that."""
        if reason:
            self.failure_marks[driver, key] = reason
        else:
            self.failure_marks.pop((driver, key), None)
        self._record_needed.set()

    def set_message_limit(self, max_bytes: int) -> None:
        """Set the message limit in bytes; if it differs, record the report again so that it fits."""
        if max_bytes != self._max_bytes:
            self._max_bytes = max_bytes
            if not self._record_report():
                self._record_needed.set()  # `_record_answers` tries again

    async def run(self, on_current: Callable[[], None]) -> None:
        """Ask all drivers, then again after each `request_discovery`. Runs until it is cancelled.

        `on_current` is called each time the journal is up to date with the answers, also when nothing changed.
        """
        self._on_current = on_current
        self.request_discovery(self._drivers)
        if not self._drivers:  # a host without drivers sends a report too
            self._all_idle.set()
            self._record_needed.set()
        async with asyncio.TaskGroup() as self._task_group:
            for name in self._discovery_requested:
                self._task_group.create_task(self._run_driver(name))
            self._task_group.create_task(self._record_answers())

    async def _run_driver(self, name: str) -> None:
        """Ask one driver whenever a discovery is requested, and with back-off while it or one of its backends fails."""
        pause = self._first_backoff_s
        retry_timer: asyncio.TimerHandle | None = None
        while True:
            await self._discovery_requested[name].wait()
            self._discovery_requested[name].clear()
            self._busy_drivers.add(name)
            self._all_idle.clear()
            self._discoveries_begun[name] = discovery_number = self._discoveries_begun.get(name, 0) + 1
            report = await self._discover_devices(name)
            self._discoveries_answered[name] = discovery_number
            self._busy_drivers.discard(name)
            self._record_needed.set()
            if not self._busy_drivers:
                self._all_idle.set()
            has_failed = bool(report and (report.error or any(backend.error for backend in report.backends)))
            if retry_timer:
                retry_timer.cancel()  # at most one retry is scheduled, however often it is asked
            retry_timer = (
                asyncio.get_running_loop().call_later(pause, self._discovery_requested[name].set)
                if has_failed
                else None
            )
            pause = min(pause * 2, MAX_BACKOFF_S) if has_failed else self._first_backoff_s

    async def _discover_devices(self, name: str) -> DriverReport | None:
        """Ask the driver, store its answer and return the answer.

        If the driver's process was replaced meanwhile, the new one is asked. If the driver no longer runs, forget its
        answers and return None.
        """
        while driver := self._drivers.get(name):
            report = await driver.discover()
            if self._drivers.get(name) is driver:
                self._log_differences(report, self._last_answers.get(name))
                self._last_answers[name] = report
                return report
        self._last_answers.pop(name, None)
        self._last_settled.pop(name, None)
        return None

    async def _record_answers(self) -> None:
        """After each answer wait up to GATHER_S for the other drivers, and record; retry while the disk refuses."""
        while True:
            await self._record_needed.wait()
            try:
                async with asyncio.timeout(self._gather_s):
                    await self._all_idle.wait()
            except TimeoutError:
                log.info("the report does not wait longer for new answers of %s", ", ".join(sorted(self._busy_drivers)))
            self._record_needed.clear()
            while not self._record_report():
                await asyncio.sleep(self._retry_s)

    def _record_report(self) -> bool:
        """Record a report of all last answers in the journal; return False when the disk refused, else True.

        Does nothing (and returns True) until every running driver has answered once.
        """
        if self._drivers.keys() - self._last_answers.keys():
            return True
        # The devices of a driver or backend that failed are added first, so that no other device gets their identities.
        complete_answers = ownership.carry_devices_over(
            [self._last_answers[name] for name in self._drivers], self._last_settled
        )
        answers, identities = identity.settle_keys(complete_answers, self._journal.identities)
        settled = ownership.resolve_conflicts(answers, self._last_settled)
        self._last_settled = {report.driver: report for report in settled}
        complete = self._complete_reports(
            apply_failure_marks(canonicalize_report(report), self.failure_marks) for report in settled
        )
        drivers = fit_reports(complete, self._max_bytes)
        try:
            self._journal.store_identities(identities)
            changed = self._journal.record_report(drivers)
        except sqlite3.OperationalError as error:
            log.error("the journal cannot store a report (%s): nothing new is sent until it can", error)
            return False
        if changed:
            for driver, before in zip(drivers, complete, strict=True):
                if driver.error and not before.error:
                    log.error("driver %s: %s", driver.driver, driver.error)
            count = sum(len(driver.devices) for driver in drivers)
            log.info("report %d.%d is recorded; devices: %d", self._journal.epoch, self._journal.seq, count)
        if self._on_current is not None:
            self._on_current()
        self._discoveries_recorded = dict(self._discoveries_answered)
        self._recorded_event.set()
        self._recorded_event = asyncio.Event()
        return True

    def _log_differences(self, report: DriverReport, before: DriverReport | None) -> None:
        """Log the errors and faults that the driver's former answer did not have, and the end of its error."""
        former_error = before.error if before else ""
        if report.error and report.error != former_error:
            log.error("driver %s: %s", report.driver, report.error.removeprefix(f"{report.driver}: "))
        elif former_error and not report.error:
            log.info("driver %s answers again", report.driver)
        former_backend_errors = {backend.name: backend.error for backend in before.backends} if before else {}
        for backend in report.backends:
            if backend.error and backend.error != former_backend_errors.get(backend.name):
                log.error("driver %s, backend %s: %s", report.driver, backend.name, backend.error)
        former_faults = before.faults if before else ()
        for fault in report.faults:
            if fault not in former_faults:
                log.warning("driver %s, %s: %s", report.driver, fault.subject, fault.reason)


def canonicalize_report(report: DriverReport) -> DriverReport:
    """Return the report sorted, so that, for example, another order of a directory listing is not a change.

    A report with a NUL character is replaced by an error, because the conductor would refuse the whole message.
    """
    if b"\\u0000" in msgspec.json.encode(report):
        return DriverReport(report.driver, "its answer holds a NUL character, which cannot be stored")
    return DriverReport(
        driver=report.driver,
        error=report.error,
        devices=tuple(sorted(map(_sort_device, report.devices), key=lambda device: device.key)),
        faults=tuple(sorted(report.faults, key=lambda fault: (fault.subject, fault.reason))),
        backends=tuple(sorted(report.backends, key=lambda backend: backend.name)),
    )


def apply_failure_marks(report: DriverReport, marks: Mapping[tuple[str, str], str]) -> DriverReport:
    """Return the report with each device in `marks` shown as failed with the reason given there, cut to 4096
    characters."""
    if not any(driver == report.driver for driver, _ in marks):
        return report
    devices = (
        msgspec.structs.replace(device, status="failed", status_reason=reason[:4096])
        if (reason := marks.get((report.driver, device.key)))
        else device
        for device in report.devices
    )
    return msgspec.structs.replace(report, devices=tuple(devices))


def _sort_device(device: Device) -> Device:
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


def fit_reports(drivers: tuple[DriverReport, ...], max_bytes: int) -> tuple[DriverReport, ...]:
    """Shrink the drivers' reports until a message with all of them has at most `max_bytes` bytes.

    The largest report is emptied and gets an error instead, then the next one, until the rest fits. The conductor keeps
    what it knows of those drivers' devices and shows them as stale; the other drivers are not affected.
    """
    size = original_size = _message_size(drivers)
    left_out: set[str] = set()
    while size > max_bytes and len(left_out) < len(drivers):
        sizes = {d.driver: len(msgspec.json.encode(d)) for d in drivers if d.driver not in left_out}
        biggest = max(sizes, key=lambda name: sizes[name])
        left_out.add(biggest)
        drivers = tuple(
            _empty_large_report(d, original_size, max_bytes, sizes[biggest]) if d.driver == biggest else d
            for d in drivers
        )
        size = _message_size(drivers)
    return drivers


def _message_size(drivers: tuple[DriverReport, ...]) -> int:
    """Return the largest size that a Report message with this content can have, in bytes."""
    return len(
        wire.encode_message(
            wire.Report.from_driver_reports(LARGEST_NUMBER, LARGEST_NUMBER, "0" * 40, drivers, LONGEST_BOOT_ID)
        ).encode()
    )


def _empty_large_report(report: DriverReport, original_size: int, max_bytes: int, driver_size: int) -> DriverReport:
    """Empty a driver's report and set its error, which names the sizes, unless it has an error already."""
    return msgspec.structs.replace(
        report,
        devices=(),
        faults=(),
        backends=(),
        error=report.error
        or f"the report is too large: it has {original_size} bytes, and {max_bytes} are allowed. This driver's part is "
        f"left out ({driver_size} bytes, devices: {len(report.devices)}, faults: {len(report.faults)}): raise "
        "CYBORG_MAX_MESSAGE_BYTES on the conductor, or configure the driver to find less",
    )
