"""A host in a directory with a scripted driver and a running executor, for the tests of commands.

Writer, journal, reporter and preflight checks are the product's own; only the driver is scripted.
"""

from __future__ import annotations

import asyncio
import uuid as uuids
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from agents import wire
from agents.host.connection.authority import PlacementAuthority
from agents.host.connection.http import GatewayEndpoint
from agents.host.connection.identity import load_or_create_keys
from agents.host.connection.link import GatewayLink
from agents.host.discovery.driver_set import DriverSet
from agents.host.discovery.reporter import InventoryReporter
from agents.host.execution.command_semantics import SUPPORTED_OPS
from agents.host.execution.executor import Executor
from agents.host.execution.images import ImageCache
from agents.host.execution.placement_writer import DirectPlacementWriter
from agents.host.execution.plan_runner import HostContext, StepWriter
from agents.host.journal.journal import Journal, open_journal
from drivers.errors import DriverError
from drivers.inventory import AttachHandle, Device, DriverReport
from drivers.isolation.driver_main import Manifest
from drivers.isolation.host_writer import HostWriter
from drivers.machine import Machine
from drivers.plan import Act, Ask, Plan, Step, Vitals, Write
from tests.agents.host.fake_gateway import QUICK, wait_until

HOST = "cmp1.example"
CARD, OTHER_CARD = "0000:01:00.0", "0000:02:00.0"
CARD_PATH = f"/sys/bus/pci/devices/{CARD}"
WRITABLE_PATHS = ("/sys/bus/pci/devices/*/*", "/sys/bus/pci/drivers/*/*", "/sys/bus/pci/drivers_probe", "/state/*")
HANDLE = AttachHandle("MDEV", '{"asked_type": "t"}')


def write_step(file: str, value: str, *, undo: str = "", **more: object) -> Step:
    """Return a step that writes a file of the card, or an absolute path. `undo` is the value that its undo writes."""
    path = file if file.startswith("/") else f"{CARD_PATH}/{file}"
    back = (Write(path, undo),) if undo else ()
    return msgspec.structs.replace(Step(f"set {file} to {value}", Write(path, value), undo=back), **more)


def make_command(number: int, op: str, **more: object) -> wire.Command:
    """Return a command for the card, unless `more` names another device. The id follows from the number."""
    values = {"driver": "drv", "key": "card", "start_s": 30.0, "end_s": 60.0} | more
    return wire.Command(number=number, id=str(uuids.UUID(int=number)), op=op, **values)  # type: ignore[arg-type]


PlanFunction = Callable[[Ask], Plan | DriverError]


@dataclass
class ScriptedDriver:
    """A driver that calls a function of `plans`, by act, for each plan. If it returns an error, the error is raised."""

    plans: dict[str, PlanFunction] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=lambda: {"card": CARD, "other": OTHER_CARD})
    plan_calls: list[tuple[str, Ask]] = field(default_factory=list)
    discover_count: int = 0
    release_count: int = 0
    manifest: Manifest = field(default_factory=lambda: Manifest(name="drv", writes=WRITABLE_PATHS))

    async def discover(self) -> DriverReport:
        self.discover_count += 1
        return DriverReport(
            "drv",
            devices=tuple(
                Device(key, "GPU", "v", f"look {self.discover_count}", address, backend="cards")
                for key, address in self.devices.items()
            ),
        )

    async def plan(self, act: Act, ask: Ask) -> Plan:
        self.plan_calls.append((act, ask))
        answer = self.plans[act](ask) if act in self.plans else Plan()
        if isinstance(answer, DriverError):
            raise answer
        return answer

    async def health(self, ask: Ask) -> Vitals:
        return Vitals("degraded", "warm")

    async def probe(self) -> tuple[str, ...]:
        return ("there is no IOMMU",)

    def release(self) -> None:
        self.release_count += 1

    async def close(self) -> None:
        return None


@dataclass
class HostUnderTest:
    """The running parts of a host."""

    root: Path
    driver: ScriptedDriver
    journal: Journal
    reporter: InventoryReporter
    executor: Executor

    def file_content(self, name: str, value: str | None = None) -> str:
        """Return the content of a file of the card, or of an absolute path. If a value is given, write it first."""
        path = self.root / (name if name.startswith("/") else f"{CARD_PATH}/{name}").lstrip("/")
        if value is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(value)
        return path.read_text()

    async def wait_for_result(self, number: int) -> wire.Result:
        """Wait until the journal has an unacknowledged result of this command; return it."""
        owed = self.journal.command_log.unacknowledged
        await wait_until(lambda: number in owed)
        return owed[number]

    async def run_commands(self, *commands: wire.Command) -> wire.Result:
        """Give the commands to the executor; return the result of the last one."""
        for one in commands:
            self.executor.accept_command(one)
        return await self.wait_for_result(commands[-1].number)


def plan_once(*steps: Step) -> PlanFunction:
    """Return a function that plans these steps when it is called first, and nothing afterwards."""
    left = [Plan(steps, "as wanted")]
    return lambda _: left.pop() if left else Plan()


def plan_always(*steps: Step) -> PlanFunction:
    """Return a function that plans these steps at every call."""
    return lambda _: Plan(steps)


def plan_error(error: DriverError) -> PlanFunction:
    """Return a function that returns this error instead of a plan."""
    return lambda _: error


def reported_health(host: HostUnderTest, key: str = "card") -> tuple[str, str]:
    """Return the health of a device in the last report, and the reason."""
    assert host.journal.report is not None
    (device,) = (one for one in host.journal.report.drivers[0].devices if one.key == key)
    return device.status, device.status_reason


def make_card_files(root: Path) -> None:
    """Create two cards with two files each, unless they exist."""
    for address in (CARD, OTHER_CARD):
        home = root / f"sys/bus/pci/devices/{address}"
        home.mkdir(parents=True, exist_ok=True)
        for name in ("numvfs", "mode"):
            if not (home / name).exists():
                (home / name).write_text("0")


@asynccontextmanager
async def run_host(
    root: Path,
    driver: ScriptedDriver,
    *,
    boot: str = "boot1",
    gateway: GatewayEndpoint | None = None,
    connect: bool = False,
    hand: Callable[[str], StepWriter] | None = None,
    machine: Machine | None = None,
    rules: dict[str, frozenset[str]] | None = None,
    prepare_s: float = 5.0,
    direct: DirectPlacementWriter | None = None,
    roster: Callable[[Journal], DriverSet] | None = None,
) -> AsyncIterator[HostUnderTest]:
    """Run all parts of a host; with `connect` also its link to the gateway. The same root is the same host."""
    make_card_files(root)
    journal = open_journal(root, HOST)
    roots = {"/sys": str(root / "sys"), "/state": str(root / "state")}
    driver_roster = roster(journal) if roster else None
    drivers = driver_roster.running if driver_roster else {"drv": driver}
    reporter = InventoryReporter(drivers, journal, gather_s=0.2, retry_s=0.02, first_backoff_s=0.05)
    site = HostContext(
        drivers=drivers,
        machine_for=lambda _: machine or Machine("cmp1", sys_root=roots["/sys"], state_root=roots["/state"]),
        writer_for=hand or (lambda _: HostWriter(roots)),
        find_device=reporter.find_device,
        command_log=journal.command_log,
        boot_id=boot,
    )
    gateway = gateway or GatewayEndpoint("http://127.0.0.1:1", "")
    keys = load_or_create_keys(root, HOST, "cmp1")
    images = ImageCache(root / "images", lambda: gateway, keys, lambda: journal.epoch)
    executor = Executor(
        site,
        reporter,
        images,
        direct,
        driver_roster,
        allowed_acts=rules,
        read_log=lambda: "line 1\nline 2",
        retry_s=0.02,
    )
    hello = wire.Hello("1", boot, ("drv",), SUPPORTED_OPS, direct.find_obstacle() if direct else None)
    authority = direct.authority if direct else PlacementAuthority()
    link = GatewayLink(journal, keys, gateway, hello, reporter.set_message_limit, QUICK, executor, authority)
    executor.notify_sender = link.wake.set

    async def work() -> None:
        await executor.recover_after_restart(prepare_s)
        await asyncio.gather(reporter.run(link.offer_report), executor.run())

    coroutines = [work()] + ([link.run()] if connect else [])
    task = asyncio.gather(*coroutines)
    try:
        await wait_until(lambda: link.is_report_current or task.done())
        yield HostUnderTest(root, driver, journal, reporter, executor)
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        journal.close()
