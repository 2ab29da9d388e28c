"""Test a driver on a simulated host made of files: what it reports, and its plans carried out as the agent does it.

For the tests of drivers, also those in other packages (docs/writing-a-driver.md). The checks of plans, the checks
before and after each step, and the undoing are the agent's own code. The driver runs in the test's process instead of
one of its own, so that it can be debugged.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from agents.host.execution.plan_runner import HostContext, PlanRun
from agents.host.journal.command_log import CREATE_COMMAND_TABLES, CommandLog
from drivers.base import Driver, Settings
from drivers.errors import Unsupported, from_os
from drivers.inventory import Device, DriverReport
from drivers.isolation.driver_main import Manifest
from drivers.isolation.host_writer import HostWriter
from drivers.machine import MAX_READ, Machine, OpenNodes
from drivers.pci.ownership import resolve_conflicts
from drivers.plan import Act, Ask, Plan, Vitals

StructT = TypeVar("StructT")
Kernel = Callable[[Path, str], None]
"""A function that simulates a write into a file of /sys; it raises OSError to refuse the write, as a kernel does."""


def keep(file: Path, value: str) -> None:
    """Write `value` into a file that exists, as files in /sys do. Raises FileNotFoundError when it does not."""
    with file.open("r+", encoding="utf-8") as open_file:
        open_file.truncate()
        open_file.write(value)


class Rehearsal:
    """One driver on the simulated host in the directory `root`, which has `sys`, `proc`, `dev` and `state` in it.

    `settings` are the driver's settings. `kernel` is called for each write into /sys; the default just stores the value
    in the file.
    """

    def __init__(
        self, driver: Driver, root: Path, settings: Mapping[str, object] | None = None, *, kernel: Kernel = keep
    ) -> None:
        roots = {f"/{name}": str(root / name) for name in ("sys", "proc", "dev", "state")}
        self.machine = _SimulatedMachine("node-1", **{f"{path[1:]}_root": real for path, real in roots.items()})
        connection = sqlite3.connect(":memory:")
        connection.executescript(CREATE_COMMAND_TABLES)
        self._planner = _InProcessDriver(driver, self.machine, dict(settings or {}))
        self._command_log = CommandLog(connection)
        self._context = HostContext(
            drivers={driver.name: self._planner},
            machine_for=lambda _: self.machine,
            writer_for=lambda _: _SimulatedWriter(roots, kernel),
            find_device=lambda _, key: self._find_device(key),
            command_log=self._command_log,
            boot_id="rehearsal",
        )

    def report(self) -> DriverReport:
        """Return the driver's report as the agent would send it.

        Raises msgspec.ValidationError, with the path of the field, when the report could not be sent, and the errors of
        `drivers.errors`.
        """
        planner = self._planner
        discovered = planner.driver.discover(self.machine, planner.settings)
        report = DriverReport(planner.driver.name, "", discovered.devices, discovered.faults, discovered.backends)
        return resolve_conflicts([_encode_and_decode(report, DriverReport)])[0]

    def health(self, key: str) -> Vitals:
        """Return the health and the load of a device. Raises the errors of `drivers.errors`."""
        return asyncio.run(self._planner.health(Ask(key)))

    def do(self, act: Act, ask: Ask) -> str:
        """Carry out an act on the device `ask.key` and return a sentence about the result.

        Raises `agents.host.execution.plan_runner.PlanFailedError`: `outcome` is *refused* (nothing was touched),
        *failed* or *unknown*.
        """
        name = self._planner.driver.name
        if act == "uninstall":
            ask = msgspec.structs.replace(ask, first=self._command_log.get_first_values(name, ask.key))
        return asyncio.run(PlanRun(self._context, name, ask, lambda percent, text: None).run(act))

    def _find_device(self, key: str) -> Device | None:
        """Ask the driver for a new report and return the device with this key, None when the driver does not find
        it."""
        return next((device for device in self.report().devices if device.key == key), None)


class _SimulatedMachine(Machine):
    """A host on which nothing is mounted and no program runs, unless the folder has `/proc/self/mountinfo` and a first
    process: before some steps the agent asks what the host itself uses."""

    def read(self, path: str, limit: int = MAX_READ) -> str:
        """As `Machine.read`; a missing table of mounts is empty."""
        return "" if path == "/proc/self/mountinfo" and not self.exists(path) else super().read(path, limit)

    def list_open_nodes(self) -> OpenNodes:
        """As `Machine.list_open_nodes`; without a first process, no node is open."""
        return super().list_open_nodes() if self.exists("/proc/1") else OpenNodes()


@dataclass
class _InProcessDriver:
    """Stands in for `drivers.isolation.runner.DriverProcess`, but calls the driver directly, without a process."""

    driver: Driver
    machine: Machine
    settings: Settings

    @property
    def manifest(self) -> Manifest:
        """Return the driver's name, version, declared paths and acts, checked as those of a real process."""
        driver = self.driver
        return _encode_and_decode(
            Manifest(driver.name, driver.version, writes=driver.writes, acts=driver.acts), Manifest
        )

    async def plan(self, act: Act, ask: Ask) -> Plan:
        """Return the driver's plan. Raises Unsupported for an act that the driver does not declare, and the driver's
        errors."""
        if act not in self.driver.acts:
            raise Unsupported(f"it cannot {act} a device")
        plan: Plan = getattr(self.driver, act)(self.machine, self.settings, ask)
        return _encode_and_decode(plan, Plan)

    async def probe(self) -> tuple[str, ...]:
        """Return the reasons why the driver cannot use all features of the simulated host."""
        return self.driver.probe(self.machine, self.settings)

    async def health(self, ask: Ask) -> Vitals:
        """Return the device's health; the samples of `stats` are added to it. Raises the driver's errors."""
        vitals = self.driver.health(self.machine, self.settings, ask)
        load = self.driver.stats(self.machine, self.settings, ask)
        return _encode_and_decode(msgspec.structs.replace(vitals, samples=(*vitals.samples, *load)), Vitals)

    def release(self) -> None:
        """Do nothing: this driver is never quarantined."""


class _SimulatedWriter(HostWriter):
    """A writer that passes writes into /sys to the simulated kernel, and does all others as the real one does."""

    def __init__(self, roots: Mapping[str, str], kernel: Kernel) -> None:
        super().__init__(roots)
        self._kernel = kernel

    async def write(self, path: str, value: str, timeout_s: float) -> None:
        """Write a value: into /sys through the simulated kernel, elsewhere as the real writer does.

        Raises the DriverError for the kernel's OSError. The time-out does not apply to /sys.
        """
        if not path.startswith("/sys/"):
            return await super().write(path, value, timeout_s)
        try:
            self._kernel(Path(self._resolve_path(path)), value)
        except OSError as error:
            raise from_os(error, path) from None


def _encode_and_decode(thing: object, kind: type[StructT]) -> StructT:
    """Encode and decode `thing`, as the pipe between driver and agent does. Raises msgspec.ValidationError.

    This is needed because msgspec checks structs when they are decoded, not when they are created.
    """
    return msgspec.json.decode(msgspec.json.encode(thing), type=kind)
