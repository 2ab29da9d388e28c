"""Tests of pci_driver's plans, carried out by the agent's own executor with its preflight checks, journal and undo."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from drivers.errors import DriverError
from drivers.inventory import AttachHandle, DriverReport
from drivers.isolation.driver_main import Manifest
from drivers.pci import sriov
from drivers.pci.functions import PciDriver
from drivers.plan import Act, Ask, Plan, Vitals
from tests.agents.host.execution.executor_host import CARD, CARD_PATH, HostUnderTest, make_command, run_host
from tests.support.modelmachine import ModelMachine

KEY = f"pci:{CARD}"
COMPANION = f"{CARD[:-1]}1"


class InProcessDriver:
    """Runs pci_driver without a process of its own; the executor sees no difference."""

    def __init__(self, host: ModelMachine, **rule: object) -> None:
        self._host, self._driver = host, PciDriver()
        self._settings: dict[str, object] = {"rules": [{"vendor": "1b36", **rule}]}
        self.manifest = Manifest(name="drv", writes=PciDriver.writes)

    async def discover(self) -> DriverReport:
        try:
            return DriverReport("drv", devices=self._driver.discover(self._host.machine, self._settings).devices)
        except DriverError as error:
            return DriverReport("drv", error=str(error))

    async def plan(self, act: Act, ask: Ask) -> Plan:
        plan: Plan = getattr(self._driver, act)(self._host.machine, self._settings, ask)
        return plan

    async def health(self, ask: Ask) -> Vitals:
        return self._driver.health(self._host.machine, self._settings, ask)

    def release(self) -> None:
        return None

    async def close(self) -> None:
        return None


def run_on_host(
    root: Path, story: Callable[[ModelMachine, HostUnderTest], Awaitable[None]], gives: int = 4, vfs: int = 4
) -> None:
    """Run the coroutine `story` on a host with a card that can have `vfs` virtual functions.

    The card's kernel driver makes at most `gives` of them. With `vfs` 0 the card can have none, and there is a sound
    function of the same card in its IOMMU group.
    """

    async def told() -> None:
        host = ModelMachine(root)
        host.load("nvme", "1b36:0010", gives=gives)
        host.pci(CARD, "0x1b36", "0x0010", "0x010802", group=7, vfs=vfs)
        if not vfs:
            host.load("snd", "1b36:00aa")
            host.pci(COMPANION, "0x1b36", "0x00aa", "0x040300", group=7)
        driver = InProcessDriver(host, bind="vfio-pci", **({"vfs": vfs} if vfs else {}))
        doubles: dict[str, Any] = {"hand": lambda _: host.hand(), "machine": host.machine}
        async with run_host(root, driver, **doubles) as agent_host:  # type: ignore[arg-type]
            await story(host, agent_host)

    asyncio.run(told())


def test_the_executor_installs_and_uninstalls_virtual_functions_and_resets_the_card(tmp_path: Path) -> None:
    async def story(host: ModelMachine, agent_host: HostUnderTest) -> None:
        result = await agent_host.run_commands(make_command(1, "install", key=KEY))
        assert (result.outcome, result.text) == ("succeeded", "4 virtual functions, bound to vfio-pci")
        assert {host.driver_of(f"0000:01:00.{number}") for number in range(1, 5)} == {"vfio-pci"}
        device = agent_host.reporter.find_device("drv", KEY)
        assert device and (device.deployables[0].num_accelerators, device.to_install) == (4, "")
        result = await agent_host.run_commands(make_command(2, "uninstall", key=KEY))
        assert result.outcome == "succeeded"
        assert [agent_host.file_content("sriov_numvfs"), agent_host.file_content("sriov_drivers_autoprobe")] == [
            "0\n",
            "1\n",
        ]
        assert (await agent_host.run_commands(make_command(3, "reset", key=KEY))).outcome == "succeeded"
        assert host.resets == [CARD]

    run_on_host(tmp_path, story)


def test_a_partition_that_makes_too_few_virtual_functions_fails_and_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sriov, "CREATE_S", 0.2)
    monkeypatch.setattr(sriov, "PER_FUNCTION_S", 0.0)

    async def story(host: ModelMachine, agent_host: HostUnderTest) -> None:
        result = await agent_host.run_commands(make_command(1, "partition", key=KEY, layout={"vfs": "3"}))
        assert result.outcome == "failed"
        assert f"{CARD_PATH}/sriov_numvfs is '2', wanted '3'" in result.text
        assert agent_host.file_content("sriov_numvfs") == "0\n"

    run_on_host(tmp_path, story, gives=2)


def test_the_executor_binds_a_companion_function_with_its_card_and_gives_it_back(tmp_path: Path) -> None:
    async def story(host: ModelMachine, agent_host: HostUnderTest) -> None:
        result = await agent_host.run_commands(make_command(1, "install", key=KEY))
        assert (result.outcome, result.text) == ("succeeded", "bound to vfio-pci")
        assert [host.driver_of(address) for address in (CARD, COMPANION)] == ["vfio-pci", "vfio-pci"]
        result = await agent_host.run_commands(make_command(2, "uninstall", key=KEY))
        assert result.outcome == "succeeded", result.text
        assert [host.driver_of(address) for address in (CARD, COMPANION)] == ["nvme", "snd"]

    run_on_host(tmp_path, story, vfs=0)


def test_a_function_of_a_card_that_was_replaced_at_its_address_is_detached_and_nothing_else_is_done_to_the_new_card(
    tmp_path: Path,
) -> None:
    async def story(host: ModelMachine, agent_host: HostUnderTest) -> None:
        config = host.sys / f"bus/pci/devices/{CARD}/config"
        ids = config.read_bytes().ljust(256, b"\0")
        for serial in (1, 2):
            host.file(config, ids + make_serial_capability(serial))
            await agent_host.run_commands(make_command(serial, "rescan"))
        handle = AttachHandle("PCI", '{"bus": "01", "device": "00", "domain": "0000", "function": "0"}')
        old = f"serial:1b36:{1:016x}:0"
        detach = make_command(3, "detach", handle=handle, uuid="u", consumer="c", key=old)
        result = await agent_host.run_commands(detach)
        assert (result.outcome, result.text) == ("succeeded", f"no guest uses {CARD}")
        for number, op in enumerate(("uninstall", "partition", "reset"), 4):
            assert (await agent_host.run_commands(make_command(number, op, key=old))).outcome == "refused"
        assert host.writes == []

    run_on_host(tmp_path, story)


def make_serial_capability(number: int) -> bytes:
    """Return the extended capability with this Device Serial Number, as configuration space has it at 0x100."""
    return (0x0003 | 1 << 16).to_bytes(4, "little") + number.to_bytes(8, "little")
