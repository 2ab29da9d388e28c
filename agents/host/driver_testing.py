"""A driver's rehearsal: what it sees on a host made of files, and its plans done there as the agent does them.

For the tests of drivers, those of other packages too (docs/writing-a-driver.md). The fence, the looks before and after
each step and the undoing are the agent's own; the driver runs in the test's process, so that it can be debugged.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from agents.host.execution.plan_runner import Performance, Site
from agents.host.journal.command_log import TABLES, Ledger
from drivers.base import Driver, Settings
from drivers.errors import Unsupported, from_os
from drivers.inventory import Device, DriverReport
from drivers.isolation.driver_main import Ready
from drivers.isolation.host_writer import Hand
from drivers.machine import Machine
from drivers.pci.ownership import settle
from drivers.plan import Act, Ask, Plan, Vitals

T = TypeVar("T")
Kernel = Callable[[Path, str], None]
"""What a write into a file of /sys does; an OSError is the kernel's refusal."""


def keep(file: Path, value: str) -> None:
    """A file that is there, as all are in /sys, keeps what is written into it."""
    with file.open("r+", encoding="utf-8") as open_file:
        open_file.truncate()
        open_file.write(value)


class Rehearsal:
    """One driver on the host below `root`, whose `sys`, `proc`, `dev` and `state` lie there as a Machine reads them."""

    def __init__(
        self, driver: Driver, root: Path, settings: Mapping[str, object] | None = None, *, kernel: Kernel = keep
    ) -> None:
        roots = {f"/{name}": str(root / name) for name in ("sys", "proc", "dev", "state")}
        self.machine = Machine("node-1", **{f"{path[1:]}_root": real for path, real in roots.items()})
        connection = sqlite3.connect(":memory:")
        connection.executescript(TABLES)
        self._planner = _Planner(driver, self.machine, dict(settings or {}))
        self._ledger = Ledger(connection)
        self._site = Site(
            drivers={driver.name: self._planner},
            machine=lambda _: self.machine,
            hand=lambda _: _Hand(roots, kernel),
            device=lambda _, key: self._device(key),
            ledger=self._ledger,
            boot="rehearsal",
        )

    def report(self) -> DriverReport:
        """What the agent would send. Raises msgspec.ValidationError, with the place, for what cannot be sent."""
        planner = self._planner
        found = planner.driver.discover(self.machine, planner.settings)
        report = DriverReport(planner.driver.name, "", found.devices, found.faults, found.backends)
        return settle([_sent(report, DriverReport)])[0]

    def health(self, key: str) -> Vitals:
        """How a device is. Raises the errors of `drivers.errors`."""
        return asyncio.run(self._planner.health(Ask(key)))

    def do(self, act: Act, ask: Ask) -> str:
        """Have an act done on the device `ask.key`; what is so then, in words.

        Raises `agents.host.execution.plan_runner.Ended`: `outcome` is *refused* (nothing was touched), *failed* or
        *unknown*.
        """
        name = self._planner.driver.name
        if act == "uninstall":
            ask = msgspec.structs.replace(ask, first=self._ledger.first(name, ask.key))
        return asyncio.run(Performance(self._site, name, ask, lambda percent, text: None).run(act))

    def _device(self, key: str) -> Device | None:
        return next((device for device in self.report().devices if device.key == key), None)


@dataclass
class _Planner:
    """As `drivers.isolation.runner.DriverProcess`, without the process."""

    driver: Driver
    machine: Machine
    settings: Settings

    @property
    def manifest(self) -> Ready:
        driver = self.driver
        return _sent(Ready(driver.name, driver.version, writes=driver.writes, acts=driver.acts), Ready)

    async def plan(self, act: Act, ask: Ask) -> Plan:
        if act not in self.driver.acts:
            raise Unsupported(f"it cannot {act} a device")
        plan: Plan = getattr(self.driver, act)(self.machine, self.settings, ask)
        return _sent(plan, Plan)

    async def probe(self) -> tuple[str, ...]:
        return self.driver.probe(self.machine, self.settings)

    async def health(self, ask: Ask) -> Vitals:
        vitals = self.driver.health(self.machine, self.settings, ask)
        load = self.driver.stats(self.machine, self.settings, ask)
        return _sent(msgspec.structs.replace(vitals, samples=(*vitals.samples, *load)), Vitals)

    def release(self) -> None:
        """Nothing to let go of."""


class _Hand(Hand):
    """Writes into /sys go to the rehearsal's kernel, all others where they always go."""

    def __init__(self, roots: Mapping[str, str], kernel: Kernel) -> None:
        super().__init__(roots)
        self._kernel = kernel

    async def write(self, path: str, value: str, timeout_s: float) -> None:
        if not path.startswith("/sys/"):
            return await super().write(path, value, timeout_s)
        try:
            self._kernel(Path(self._real(path)), value)
        except OSError as error:
            raise from_os(error, path) from None


def _sent(thing: object, kind: type[T]) -> T:
    """As it comes out of the pipe: structs are checked when they are decoded, not when they are made."""
    return msgspec.json.decode(msgspec.json.encode(thing), type=kind)
