"""Tests of the preflight checks: attached handles, writes outside of the device, open device files, allowed acts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agents import wire
from agents.host.execution.preflight import check_affected_attachments, check_attachments, check_plan_paths
from agents.host.settings import extract_allowed_acts
from drivers.configuration import ConfigurationError
from drivers.errors import Busy, Denied, Gone, Timeout
from drivers.inventory import AttachHandle, DriverDeclaration
from drivers.isolation.driver_main import Manifest
from drivers.isolation.host_writer import HostWriter
from drivers.machine import OpenNodes
from drivers.plan import Ask, Check, Plan, Step, Write
from tests.agents.host.execution.executor_host import (
    CARD,
    CARD_PATH,
    HANDLE,
    OTHER_CARD,
    WRITABLE_PATHS,
    ScriptedDriver,
    make_command,
    plan_always,
    plan_error,
    plan_once,
    run_host,
    write_step,
)
from tests.agents.host.fake_gateway import wait_until
from tests.drivers.tree import FakeHost
from tests.support.modelmachine import ModelMachine

OTHER_CARD_PATH = f"/sys/bus/pci/devices/{OTHER_CARD}"


@pytest.mark.slow
def test_destructive_commands_are_refused_while_a_handle_is_attached_also_after_a_restart(tmp_path: Path) -> None:
    async def story() -> None:
        def attach(ask: Ask) -> Plan:
            path = f"/state/{ask.uuid}"
            made = (tmp_path / path.lstrip("/")).exists()
            return Plan() if made else Plan((Step("make it", Write(path, ask.consumer)),))

        driver = ScriptedDriver({"attach": attach, "detach": plan_once(Step("remove it", Write("/state/u1", "")))})
        wanted = {"uuid": "u1", "handle": HANDLE, "consumer": "vm1"}
        async with run_host(tmp_path, driver) as host:
            assert (await host.run_commands(make_command(1, "attach", **wanted))).outcome == "succeeded"
            assert host.file_content("/state/u1") == "vm1"
            assert (await host.run_commands(make_command(2, "attach", **wanted))).text == "nothing had to be done"
            for number, op in enumerate(("program", "partition", "reset", "uninstall"), 3):
                result = await host.run_commands(make_command(number, op))
                assert (result.outcome, result.text) == (
                    "refused",
                    "its handle u1 is attached to vm1: detach it first",
                )
            for number, op in ((7, "attach"), (8, "detach")):
                result = await host.run_commands(make_command(number, op, **(wanted | {"consumer": "vm2"})))
                assert result.text == "the handle u1 is attached to vm1: detach it first"
            assert (await host.run_commands(make_command(9, "reset", key="other"))).outcome == "succeeded"
        async with run_host(tmp_path, driver) as host:
            assert (await host.run_commands(make_command(10, "reset"))).outcome == "refused", "also after a restart"
            assert (await host.run_commands(make_command(11, "detach", **wanted))).outcome == "succeeded"
            assert not (tmp_path / "state/u1").exists()
            assert (await host.run_commands(make_command(12, "reset"))).outcome == "succeeded"

    asyncio.run(story())


@pytest.mark.slow
def test_a_failed_attachment_blocks_the_device_only_if_it_was_not_fully_undone(tmp_path: Path) -> None:
    async def story() -> None:
        bad = write_step("absent", "1")
        driver = ScriptedDriver({"attach": plan_once(write_step("mode", "1", undo="0"), bad)})
        async with run_host(tmp_path, driver) as host:
            assert (
                await host.run_commands(make_command(1, "attach", uuid="u", handle=HANDLE, consumer="vm1"))
            ).outcome == "failed"
            assert host.journal.command_log.list_effects() == []
            driver.plans["attach"] = plan_once(write_step("mode", "1"), bad)
            assert (
                await host.run_commands(make_command(2, "attach", uuid="u", handle=HANDLE, consumer="vm1"))
            ).outcome == "failed"
            assert (
                await host.run_commands(make_command(3, "reset"))
            ).text == "its handle u is attached to vm1: detach it first"

    asyncio.run(story())


@pytest.mark.parametrize(
    "wrong",
    [
        Write("/sys/kernel/x", "1"),
        Write(f"{OTHER_CARD_PATH}/mode", "1"),
        Write("/sys/bus/pci/drivers/vfio-pci/bind", OTHER_CARD),
        Write("/sys/bus/pci/drivers_probe", OTHER_CARD),
        Write(f"{CARD_PATH}/peer/mode", "1"),
    ],
)
def test_a_write_outside_of_the_device_is_refused(tmp_path: Path, wrong: Write) -> None:
    async def story() -> None:
        driver = ScriptedDriver({"install": plan_once(Step("reach out", wrong))})
        driver.manifest = msgspec.structs.replace(driver.manifest, writes=(*driver.manifest.writes, f"{CARD_PATH}/*/*"))
        async with run_host(tmp_path, driver) as host:
            os.symlink(tmp_path / OTHER_CARD_PATH.lstrip("/"), tmp_path / CARD_PATH.lstrip("/") / "peer")
            result = await host.run_commands(make_command(1, "install"))
            assert result.outcome == "refused"
            assert wrong.path in result.text
            assert host.file_content(f"{OTHER_CARD_PATH}/mode") == "0"

    asyncio.run(story())


def test_a_device_without_an_address_may_write_to_no_pci_device(tmp_path: Path) -> None:
    async def story() -> None:
        driver = ScriptedDriver({"install": plan_once(write_step("mode", "1"))}, devices={"card": ""})
        async with run_host(tmp_path, driver) as host:
            result = await host.run_commands(make_command(1, "install"))
            assert (result.outcome, "may affect more than this device" in result.text) == ("refused", True)
            assert host.file_content("mode") == "0"

    asyncio.run(story())


FPGA = "/sys/devices/platform/soc/ff706000.fpga"
ON_PCI = "/sys/devices/pci0000:00/0000:00:05.0"


def make_platform_fpga(root: Path) -> None:
    """Make a platform device with an FPGA manager, beside a neighbour and a PCI device, and a child on another bus."""
    host = FakeHost(root)
    host.file(host.pci("0000:00:05.0", "0x10ee", "0x5005", "0x120000") / "mode", "0")
    host.link(host.sys / "devices/pci0000:00/0000:00:05.0/subsystem", host.sys / "bus/pci")
    for name in ("ff706000.fpga", "ff800000.npu", "ff706000.fpga/i2c-1"):
        host.file(host.sys / f"devices/platform/soc/{name}/mode", "0")
        bus = "i2c" if "i2c" in name else "platform"
        (host.sys / f"bus/{bus}").mkdir(parents=True, exist_ok=True)
        host.link(host.sys / f"devices/platform/soc/{name}/subsystem", host.sys / f"bus/{bus}")
    host.file(host.sys / "devices/platform/soc/mode", "0")
    host.link(host.sys / "devices/platform/soc/subsystem", host.sys / "bus/platform")
    manager = host.sys / "devices/platform/soc/ff706000.fpga/fpga_manager/fpga0"
    host.file(manager / "firmware", "0")
    (host.sys / "class/fpga_manager").mkdir(parents=True)
    host.link(manager / "subsystem", host.sys / "class/fpga_manager")
    host.link(host.sys / "class/fpga_manager/fpga0", manager)
    for bus in ("platform", "i2c"):
        host.file(host.sys / f"bus/{bus}/drivers/socfpga/unbind", "0")


def run_on_platform_fpga(root: Path, write: Write, sys_path: str = FPGA) -> tuple[str, str]:
    """Return outcome and text of an `install` that makes one write for the device at `sys_path`."""
    key = f"sys:{sys_path.removeprefix('/sys/devices/')}"

    async def story() -> tuple[str, str]:
        driver = ScriptedDriver({"install": plan_once(Step("act", write))}, devices={key: ""})
        globs = ("/sys/devices/platform/soc/*", "/sys/devices/platform/soc/*/*", "/sys/devices/platform/soc/*/*/*")
        globs += ("/sys/class/fpga_manager/*/*", "/sys/bus/*/drivers/*/*", "/sys/devices/pci0000:00/*/*")
        driver.manifest = msgspec.structs.replace(driver.manifest, writes=(*driver.manifest.writes, *globs))
        async with run_host(root, driver) as host:
            result = await host.run_commands(make_command(1, "install", key=key))
            return result.outcome, result.text

    make_platform_fpga(root)
    return asyncio.run(story())


@pytest.mark.slow
@pytest.mark.parametrize(
    "write",
    [
        Write(f"{FPGA}/mode", "1"),
        Write("/sys/class/fpga_manager/fpga0/firmware", "region.rbf"),
        Write("/sys/bus/platform/drivers/socfpga/unbind", "ff706000.fpga"),
    ],
)
def test_a_device_that_is_not_on_pci_may_write_to_files_of_its_own(tmp_path: Path, write: Write) -> None:
    assert run_on_platform_fpga(tmp_path, write) == ("succeeded", "as wanted")


@pytest.mark.parametrize(
    ("write", "sys_path"),
    [
        (Write("/sys/devices/platform/soc/ff800000.npu/mode", "1"), FPGA),
        (Write("/sys/devices/platform/soc/mode", "1"), FPGA),
        (Write(f"{FPGA}/i2c-1/mode", "1"), FPGA),
        (Write("/sys/bus/platform/drivers/socfpga/unbind", "ff800000.npu"), FPGA),
        (Write("/sys/bus/i2c/drivers/socfpga/unbind", "ff706000.fpga"), FPGA),
        (Write(f"{FPGA}/mode", "1"), "/sys/devices/platform/soc"),
        (Write(f"{FPGA}/mode", "1"), "/sys/devices/platform"),
        (Write(f"{CARD_PATH}/mode", "1"), FPGA),
        (Write(f"{CARD_PATH}/mode", "1"), CARD_PATH),
        (Write(f"{ON_PCI}/mode", "1"), ON_PCI),
        (Write(f"{FPGA}/mode", "1"), "/sys/devices/platform/soc/ff800000.npu/../ff706000.fpga"),
    ],
)
def test_a_device_that_is_not_on_pci_may_not_write_to_a_parent_a_neighbour_or_a_pci_device(
    tmp_path: Path, write: Write, sys_path: str
) -> None:
    outcome, text = run_on_platform_fpga(tmp_path, write, sys_path)
    assert outcome == "refused" and "may affect more than this device" in text


@pytest.mark.slow
def test_a_plan_may_write_to_virtual_functions_of_its_device_and_bind_them(tmp_path: Path) -> None:
    async def story() -> None:
        virtual = "0000:01:00.1"
        home = tmp_path / f"sys/bus/pci/devices/{virtual}"
        steps = (
            Step("set its VF", Write(f"/sys/bus/pci/devices/{virtual}/mode", "1")),
            Step("bind its VF", Write("/sys/bus/pci/drivers/vfio-pci/bind", virtual)),
        )
        async with run_host(tmp_path, ScriptedDriver({"install": plan_once(*steps)})) as host:
            host.file_content(f"/sys/bus/pci/devices/{virtual}/mode", "0")
            host.file_content("/sys/bus/pci/drivers/vfio-pci/bind", "")
            os.symlink(home, tmp_path / CARD_PATH.lstrip("/") / "virtfn0")
            assert (await host.run_commands(make_command(1, "install"))).outcome == "succeeded"
            assert host.file_content("/sys/bus/pci/drivers/vfio-pci/bind") == virtual

    asyncio.run(story())


def test_S3_a_step_is_not_started_while_a_guest_has_the_device_open(tmp_path: Path) -> None:
    async def story() -> None:
        model = ModelMachine(tmp_path)
        model.load("nvme", "1b36:0010")
        model.pci("0000:01:00.0", "1b36", "0010", "010802", vfs=4)
        file = f"{CARD_PATH}/sriov_numvfs"
        driver = ScriptedDriver({"install": plan_once(Step("make VFs", Write(file, "2"), idle=("/dev/vfio/7",)))})
        async with run_host(tmp_path, driver, hand=lambda _: model.hand(), machine=model.machine) as host:
            with model.holding("/dev/vfio/7"):
                result = await host.run_commands(make_command(1, "install"))
            assert (result.outcome, host.file_content(file)) == ("refused", "0\n")
            assert result.text == "make VFs: not started, because /dev/vfio/7 is open: a process uses the device"

    asyncio.run(story())


def test_S3_the_guard_is_checked_right_before_each_step_and_not_only_before_the_first(tmp_path: Path) -> None:
    async def story() -> None:
        model = ModelMachine(tmp_path)
        model.load("nvme", "1b36:0010")
        model.pci("0000:01:00.0", "1b36", "0010", "010802", vfs=4)
        file = f"{CARD_PATH}/sriov_numvfs"
        steps = (
            Step("make VFs", Write(file, "2"), undo=(Write(file, "0"),)),
            Step("set the mode", Write(f"{CARD_PATH}/mode", "1"), idle=("/dev/vfio/7",)),
        )
        # A guest opens the device as soon as the first step has been done.
        model.event = lambda action, path: model.held.add("/dev/vfio/7")
        driver = ScriptedDriver({"install": plan_once(*steps)})
        async with run_host(tmp_path, driver, hand=lambda _: model.hand(), machine=model.machine) as host:
            result = await host.run_commands(make_command(1, "install"))
            assert (result.outcome, host.file_content(f"{CARD_PATH}/mode")) == ("failed", "0")
            assert "set the mode: not started, because /dev/vfio/7 is open: a process uses the device" in result.text
            assert host.file_content(file) == "0\n", "what was done before is taken back"
            written = [path for path, _ in model.writes]
            assert f"{CARD_PATH}/mode" not in written and written

    asyncio.run(story())


NUMVFS = f"{CARD_PATH}/sriov_numvfs"
VF_GROUP = "/dev/vfio/8000"


def make_model_with_guest_functions(root: Path, driver: str = "mlx5_vfio_pci") -> ModelMachine:
    """Return a model whose card has two virtual functions, bound to a variant driver of the VFIO family."""
    model = ModelMachine(root)
    model.load("mlx5_core", "1b36:0010")
    model.load(driver, vfio="group")
    model.pci("0000:01:00.0", "0x1b36", "0x0010", "0x010802", group=7, vfs=4)
    model.write(f"{CARD_PATH}/sriov_drivers_autoprobe", "0")
    model.write(NUMVFS, "2")
    for number in (1, 2):
        virtual = f"0000:01:00.{number}"
        model.write(f"/sys/bus/pci/devices/{virtual}/driver_override", driver)
        model.write(f"/sys/bus/pci/drivers/{driver}/bind", virtual)
    model.writes.clear()
    return model


VF_HANDLE = AttachHandle("PCI", '{"bus": "01", "device": "00", "domain": "0000", "function": "1"}')


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_S1_a_detach_does_not_succeed_while_a_guest_has_the_function_although_the_driver_does_not_look(
    tmp_path: Path, is_interrupted: bool
) -> None:
    async def story() -> None:
        model = make_model_with_guest_functions(tmp_path)
        command = make_command(1, "detach", handle=VF_HANDLE, uuid="u", consumer="c")
        async with run_host(tmp_path, ScriptedDriver(), machine=model.machine) as host:
            if is_interrupted:
                host.journal.command_log.store_command(command)
                host.journal.command_log.mark_started(command, "boot1")
            else:
                with model.holding(VF_GROUP):
                    result = await host.run_commands(command)
                assert (result.outcome, result.text[:36]) == ("refused", "a guest still uses 0000:01:00.1 (/de")
                no_function = AttachHandle("PCI", "{}")
                result = await host.run_commands(msgspec.structs.replace(command, number=2, id="2", handle=no_function))
                assert "is not the handle of a PCI function" in result.text
                (model.dev / VF_GROUP.removeprefix("/dev/")).unlink()
                result = await host.run_commands(msgspec.structs.replace(command, number=3, id="3"))
                assert "it is not known whether a guest uses 0000:01:00.1" in result.text
                model.file(model.dev / VF_GROUP.removeprefix("/dev/"), "")
                result = await host.run_commands(msgspec.structs.replace(command, number=4, id="4"))
                assert result.outcome == "succeeded"
        if is_interrupted:
            with model.holding(VF_GROUP):
                async with run_host(tmp_path, ScriptedDriver(), machine=model.machine) as host:
                    result = await host.wait_for_result(1)
                    assert result.outcome == "unknown" and "a guest still uses 0000:01:00.1" in result.text

    asyncio.run(story())


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_function_is_detached_although_its_driver_does_not_find_the_card_any_more(
    tmp_path: Path, is_interrupted: bool
) -> None:
    async def story() -> None:
        model = make_model_with_guest_functions(tmp_path)
        driver = ScriptedDriver({"detach": plan_error(Gone("the device is not card any more"))})
        command = make_command(1, "detach", handle=VF_HANDLE, uuid="u", consumer="c")
        if is_interrupted:
            async with run_host(tmp_path, driver, machine=model.machine) as host:
                host.journal.command_log.store_command(command)
                host.journal.command_log.mark_started(command, "boot1")
        async with run_host(tmp_path, driver, machine=model.machine) as host:
            if is_interrupted:
                result = await host.wait_for_result(1)
            else:
                with model.holding(VF_GROUP):
                    assert (await host.run_commands(command)).outcome == "refused"
                result = await host.run_commands(msgspec.structs.replace(command, number=2, id="2"))
            assert (result.outcome, "no guest uses 0000:01:00.1" in result.text) == ("succeeded", True), result.text

    asyncio.run(story())


@pytest.mark.parametrize("can_see", [True, False])
@pytest.mark.parametrize(
    ("op", "write"),
    [
        ("install", Write(NUMVFS, "0")),
        ("install", Write("/sys/bus/pci/drivers/mlx5_vfio_pci/unbind", "0000:01:00.1")),
        ("install", Write("/sys/bus/pci/drivers/mlx5_core/unbind", "0000:01:00.0")),
        ("reset", Write(f"{CARD_PATH}/reset", "1")),
        ("uninstall", Write(NUMVFS, "0")),
        ("partition", Write(f"{CARD_PATH}/mode", "1")),
    ],
)
def test_S3_no_step_takes_away_what_a_guest_uses_or_may_use_whatever_its_driver_planned(
    tmp_path: Path, op: str, write: Write, can_see: bool
) -> None:
    async def story() -> None:
        model = make_model_with_guest_functions(tmp_path)
        driver = ScriptedDriver({op: plan_once(Step("take it away", write))})  # type: ignore[dict-item]
        async with run_host(tmp_path, driver, hand=lambda _: model.hand(), machine=model.machine) as host:
            if can_see:
                with model.holding(VF_GROUP):
                    result = await host.run_commands(make_command(1, op))
                assert f"0000:01:00.1 cannot be changed: a guest uses it ({VF_GROUP} is open)" in result.text
            else:
                (model.dev / VF_GROUP.removeprefix("/dev/")).unlink()
                result = await host.run_commands(make_command(1, op))
                assert f"because the agent does not see {VF_GROUP}: run it with the host's /dev" in result.text
            assert (result.outcome, model.writes) == ("refused", [])
            assert result.text.startswith("take it away: not started, because")

    asyncio.run(story())


AUTOPROBE = f"{CARD_PATH}/sriov_drivers_autoprobe"


def make_model_with_disk(root: Path) -> ModelMachine:
    """Return a model with an NVMe controller that is bound to the host's driver and has two virtual functions."""
    model = ModelMachine(root)
    model.load("nvme", "1b36:0010")
    model.pci(CARD, "0x1b36", "0x0010", "0x010802", group=7, vfs=4)
    model.write(NUMVFS, "2")
    model.writes.clear()
    return model


def run_after_first_step(
    model: ModelMachine, root: Path, write: Write, op: str, happens: Callable[[], None]
) -> tuple[wire.Result, bool]:
    """Run an act with a harmless first step and this write as its second step; `happens` is called in between.

    Return the result, and whether the second step was written.
    """

    async def story() -> wire.Result:
        harmless = Step("switch it off", Write(AUTOPROBE, "0"), undo=(Write(AUTOPROBE, "1"),))
        driver = ScriptedDriver({op: plan_once(harmless, Step("take it away", write))})
        real_write = model.write

        def write_and_continue(path: str, value: str) -> None:
            real_write(path, value)
            if (path, value) == (AUTOPROBE, "0"):
                happens()

        model.write = write_and_continue  # type: ignore[method-assign]
        async with run_host(root, driver, hand=lambda _: model.hand(), machine=model.machine) as host:
            return await host.run_commands(make_command(1, op))

    result = asyncio.run(story())
    return result, (write.path, write.value) in model.writes


TAKING_AWAY = [
    ("install", Write("/sys/bus/pci/drivers/nvme/unbind", CARD), CARD),
    ("install", Write("/sys/bus/pci/drivers/nvme/unbind", CARD), "0000:01:00.1"),
    ("install", Write("/sys/bus/pci/drivers/nvme/unbind", "0000:01:00.1"), "0000:01:00.1"),
    ("install", Write(f"{CARD_PATH}/driver_override", "vfio-pci"), CARD),
    ("partition", Write(NUMVFS, "0"), "0000:01:00.1"),
    ("uninstall", Write(NUMVFS, "1"), "0000:01:00.2"),
    ("reset", Write(f"{CARD_PATH}/reset", "1"), CARD),
    ("reset", Write(f"{CARD_PATH}/reset", "1"), "0000:01:00.1"),
]


@pytest.mark.parametrize(("op", "write", "used"), TAKING_AWAY)
def test_S3_no_step_takes_away_what_the_host_has_begun_to_use_since_the_plan_was_made(
    tmp_path: Path, op: str, write: Write, used: str
) -> None:
    def mount_disk() -> None:
        """Mount a disk of the function that is used."""
        model.block("nvme0n1", "259:0", (model.sys / f"bus/pci/devices/{used}").resolve())
        model.mount("259:0", "/data", "/dev/nvme0n1")

    model = make_model_with_disk(tmp_path)
    result, is_written = run_after_first_step(model, tmp_path, write, op, mount_disk)
    assert (result.outcome, is_written) == ("failed", False)
    assert "cannot be changed: the host uses it: nvme0n1 is mounted at /data. Undone: switch it off" in result.text


def test_S3_no_step_takes_away_what_a_program_of_the_host_has_opened_since_the_plan_was_made(tmp_path: Path) -> None:
    model = make_model_with_disk(tmp_path)
    model.block("nvme0n1", "259:0", (model.sys / f"bus/pci/devices/{CARD}").resolve())
    op, write, _ = TAKING_AWAY[0]
    result, is_written = run_after_first_step(model, tmp_path, write, op, lambda: model.opened(77, "osd", "nvme0n1"))
    assert (result.outcome, is_written) == ("failed", False)
    assert "cannot be changed: the host uses it: osd has nvme0n1 open. Undone: switch it off" in result.text


@pytest.mark.parametrize(("op", "write", "used"), TAKING_AWAY)
def test_S3_no_step_takes_a_function_away_if_the_host_cannot_be_asked_in_time(
    tmp_path: Path, op: str, write: Write, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang() -> OpenNodes:
        raise Timeout("reading the host took more than 10 s")

    model = make_model_with_disk(tmp_path)
    monkeypatch.setattr(model.tree_machine, "list_open_nodes", hang)
    result, is_written = run_after_first_step(model, tmp_path, write, op, lambda: None)
    assert (result.outcome, is_written) == ("failed", False), "nothing was tried, so the outcome is known"
    assert "take it away: not started, because reading the host took more than 10 s. Undone" in result.text


@pytest.mark.parametrize(
    "write",
    [
        Write(NUMVFS, "0"),
        Write(f"{CARD_PATH}/driver_override", "\n"),
        Write("/sys/bus/pci/drivers/nvme/unbind", "0000:01:00.1"),
    ],
)
def test_virtual_functions_beside_the_hosts_use_of_their_card_may_be_taken_away(tmp_path: Path, write: Write) -> None:
    def mount_disk() -> None:
        """Mount a disk of the card itself, which keeps it."""
        model.block("nvme0n1", "259:0", (model.sys / f"bus/pci/devices/{CARD}").resolve())
        model.mount("259:0", "/", "/dev/nvme0n1")

    model = make_model_with_disk(tmp_path)
    result, is_written = run_after_first_step(model, tmp_path, write, "install", mount_disk)
    assert (result.outcome, is_written) == ("succeeded", True), result.text


@pytest.mark.slow
def test_S3_a_step_is_not_undone_while_a_guest_uses_what_that_would_take_away(tmp_path: Path) -> None:
    async def story() -> None:
        model = make_model_with_guest_functions(tmp_path)
        steps = (
            Step("set the mode", Write(f"{CARD_PATH}/mode", "1"), undo=(Write(NUMVFS, "0"),)),
            write_step("absent", "1"),
        )
        driver = ScriptedDriver({"install": plan_once(*steps)})
        async with run_host(tmp_path, driver, hand=lambda _: HostWriter(roots), machine=model.machine) as host:
            with model.holding(VF_GROUP):
                result = await host.run_commands(make_command(1, "install"))
            assert (result.outcome, host.file_content(NUMVFS)) == ("failed", "2\n")
            assert "Not undone: set the mode (0000:01:00.1 cannot be changed: a guest uses it" in result.text

    roots = {"/sys": str(tmp_path / "sys"), "/state": str(tmp_path / "state")}
    asyncio.run(story())


def test_S3_what_a_guest_has_begun_to_use_keeps_the_steps_that_it_rests_on_when_a_later_step_fails(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        model = make_model_with_guest_functions(tmp_path)
        virtual = "0000:01:00.1"
        override = f"/sys/bus/pci/devices/{virtual}/driver_override"
        bind = Write("/sys/bus/pci/drivers/mlx5_vfio_pci/bind", virtual)
        model.write("/sys/bus/pci/drivers/mlx5_vfio_pci/unbind", virtual)
        model.write(override, "\n")
        steps = (
            Step("name the driver", Write(override, "mlx5_vfio_pci"), undo=(Write(override, "\n"),)),
            Step("bind it", bind, undo=(Write("/sys/bus/pci/drivers/mlx5_vfio_pci/unbind", virtual),)),
            Step("set the mode", Write(AUTOPROBE, "1"), undo=(Write(AUTOPROBE, "0"),)),
            write_step("absent", "1"),
        )
        # A guest opens the function as soon as it is bound.
        model.event = lambda action, path: model.held.add(VF_GROUP) if action == "bind" else None
        driver = ScriptedDriver({"install": plan_once(*steps)})
        async with run_host(tmp_path, driver, hand=lambda _: model.hand(), machine=model.machine) as host:
            result = await host.run_commands(make_command(1, "install"))
        assert result.outcome == "failed"
        assert ". Undone: set the mode. Not undone: bind it (0000:01:00.1 cannot be changed: a guest" in result.text
        assert result.text.endswith(", name the driver"), (
            "after the guest, the host's driver must not take the function"
        )
        assert model.machine.read(override) == "mlx5_vfio_pci"

    asyncio.run(story())


def test_writes_that_take_nothing_away_are_allowed_beside_a_guest(tmp_path: Path) -> None:
    async def story() -> None:
        model = make_model_with_guest_functions(tmp_path)
        write = Write(f"{CARD_PATH}/sriov_drivers_autoprobe", "1")
        driver = ScriptedDriver({"install": plan_once(Step("probe", write))})
        async with run_host(tmp_path, driver, hand=lambda _: model.hand(), machine=model.machine) as host:
            with model.holding(VF_GROUP):
                assert (await host.run_commands(make_command(1, "install"))).outcome == "succeeded"

    asyncio.run(story())


@pytest.mark.slow
@pytest.mark.parametrize(("number", "outcome"), [("00", "succeeded"), ("01", "refused")])
def test_an_attachment_of_a_pulled_card_is_detached_but_only_at_the_address_of_its_handle(
    tmp_path: Path, number: str, outcome: str
) -> None:
    async def story() -> None:
        place = f'{{"bus": "01", "device": "{number}", "domain": "0000", "function": "0"}}'
        wanted = {"key": "card", "uuid": "u", "handle": AttachHandle("MDEV", place), "consumer": "vm1"}
        driver = ScriptedDriver()
        async with run_host(tmp_path, driver) as host:
            await host.run_commands(make_command(1, "attach", **wanted))
            del driver.devices["card"]
            await host.run_commands(make_command(2, "rescan"))
            driver.plans["detach"] = plan_once(write_step("mode", "1"))
            assert (await host.run_commands(make_command(3, "detach", **wanted))).outcome == outcome
            assert host.file_content("mode") == ("1" if outcome == "succeeded" else "0")
            left = host.journal.command_log.find_attachment("drv")
            assert (left is None) is (outcome == "succeeded")

    asyncio.run(story())


def test_a_device_attached_to_another_consumer_cannot_be_programmed() -> None:
    mine, other = Ask(key="k", uuid="u1", consumer="vm1"), Ask(key="k", uuid="u2", consumer="vm2")
    check_attachments("program", mine, {"u1": "vm1"})  # The same attachment again, which programs the device first.
    check_attachments("install", Ask(key="k"), {"u1": "vm1"})
    check_attachments("attach", other, {"u1": "vm1"})
    check_attachments("detach", Ask(key="k", uuid="u1"), {"u1": "vm1"})
    with pytest.raises(Busy, match="its handle u1 is attached to vm1"):
        check_attachments("program", other, {"u1": "vm1"})


@pytest.mark.parametrize(
    ("path", "value", "is_allowed"),
    [
        ("/etc/mdevctl.d/0000:01:00.0/u1", "", True),
        ("/etc/mdevctl.d/0000:01:00.0/u1", "{}", False),
        ("/etc/mdevctl.d/0000:02:00.0/u1", "", False),
        ("/etc/mdevctl.d/u1", "", False),
    ],
)
def test_only_definitions_of_the_devices_own_mediated_devices_may_be_removed(
    path: str, value: str, is_allowed: bool
) -> None:
    plan = Plan((Step("remove it", Write(path, value)),))
    writable = ("/etc/mdevctl.d/*", "/etc/mdevctl.d/*/*")
    if is_allowed:
        check_plan_paths(plan, writable, {"0000:01:00.0"}, str)
    else:
        with pytest.raises(Denied, match="may affect more than this device"):
            check_plan_paths(plan, writable, {"0000:01:00.0"}, str)


def test_acts_are_read_and_removed_from_the_driver_tables_and_a_wrong_list_is_refused() -> None:
    tables: dict[str, dict[str, Any]] = {"a": {"acts": ["attach", "detach"], "rules": []}, "b": {}}
    assert extract_allowed_acts(tables) == {"a": frozenset({"attach", "detach"})}
    assert tables == {"a": {"rules": []}, "b": {}}
    for wrong in ("attach", ["dance"], [1]):
        with pytest.raises(ConfigurationError, match="is not a list of install, uninstall"):
            extract_allowed_acts({"a": {"acts": wrong}})


def test_the_table_for_all_drivers_can_have_only_acts_and_is_no_drivers_table() -> None:
    tables: dict[str, dict[str, Any]] = {"*": {"acts": ["attach"]}, "a": {"rules": []}}
    assert extract_allowed_acts(tables) == {"*": frozenset({"attach"})}
    assert tables == {"a": {"rules": []}}
    with pytest.raises(ConfigurationError, match="can have only acts; move rules to a driver's table"):
        extract_allowed_acts({"*": {"acts": [], "rules": []}})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scope", "other", "refused"),
    [
        ("device", "0000:01:00.1", False),
        ("card", "0000:01:00.1", True),
        ("card", "0000:02:00.0", False),
        ("bus", "0000:01:1f.0", True),
        ("host", "0000:02:00.0", True),
    ],
)
def test_S1_an_act_is_refused_while_a_handle_of_another_device_that_it_affects_is_attached(
    tmp_path: Path, scope: str, other: str, refused: bool
) -> None:
    async def story() -> None:
        manifest = Manifest("drv", writes=WRITABLE_PATHS, declares=DriverDeclaration(affects={"reset": scope}))
        plans = {
            "attach": plan_always(),
            "detach": plan_always(),
            "reset": plan_always(write_step("mode", "1")),
        }
        driver = ScriptedDriver(plans, {"card": CARD, "other": other}, manifest=manifest)
        async with run_host(tmp_path, driver) as host:
            await host.run_commands(make_command(1, "attach", key="other", uuid="u", handle=HANDLE, consumer="vm1"))
            result = await host.run_commands(make_command(2, "reset"))
            assert (result.outcome, host.file_content("mode")) == (("refused", "0") if refused else ("succeeded", "1"))
            if refused:
                assert "reset would also affect the device other, which has an attached handle" in result.text
            await host.run_commands(make_command(3, "detach", key="other", uuid="u", handle=HANDLE, consumer="vm1"))
            assert (await host.run_commands(make_command(4, "reset"))).outcome == "succeeded"

    asyncio.run(story())


@pytest.mark.parametrize(("scope", "refused"), [("device", False), ("card", False), ("bus", True), ("host", True)])
def test_S3_an_act_is_refused_while_a_guest_has_a_function_of_another_device_that_it_affects(
    tmp_path: Path, scope: str, refused: bool
) -> None:
    async def story() -> None:
        model = make_model_with_guest_functions(tmp_path)
        model.pci("0000:01:02.0", "0x1234", "0x0001", "0x120000", group=9)
        path = "/sys/bus/pci/devices/0000:01:02.0/reset"
        manifest = Manifest("drv", writes=WRITABLE_PATHS, declares=DriverDeclaration(affects={"reset": scope}))
        plans = {"reset": plan_once(Step("reset it", Write(path, "1")))}
        driver = ScriptedDriver(plans, {"card": "0000:01:02.0"}, manifest=manifest)  # type: ignore[arg-type]
        async with run_host(tmp_path, driver, hand=lambda _: model.hand(), machine=model.machine) as host:
            with model.holding(VF_GROUP):
                result = await host.run_commands(make_command(1, "reset"))
            assert (result.outcome, bool(model.writes)) == (("refused", False) if refused else ("succeeded", True))
            assert ("0000:01:00.1 cannot be changed: a guest uses it" in result.text) is refused

    asyncio.run(story())


@pytest.mark.parametrize("late", [False, True])
def test_S3_the_functions_of_a_wide_scope_are_asked_before_a_plan_and_again_before_the_step_that_resets(
    tmp_path: Path, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        model = make_model_with_guest_functions(tmp_path)
        card = model.pci("0000:01:02.0", "0x1234", "0x0001", "0x120000", group=9)
        path, asked = "/sys/bus/pci/devices/0000:01:02.0", []
        monkeypatch.setattr(model.tree_machine, "is_open", lambda node: asked.append(node) or node in model.held)
        manifest = Manifest("drv", writes=WRITABLE_PATHS, declares=DriverDeclaration(affects={"reset": "bus"}))
        steps = [Step(f"set {number}", Write(f"{path}/driver_override", str(number))) for number in range(20)]
        driver = ScriptedDriver(
            {"reset": plan_once(*steps, Step("reset it", Write(f"{path}/reset", "1")))},
            {"card": "0000:01:02.0"},
            manifest=manifest,
        )
        write = model.write

        def start_guest(path: str, value: str) -> None:
            """Start a guest on another function of the bus while the first step is done."""
            model.held.add(VF_GROUP) if late else None
            write(path, value)

        monkeypatch.setattr(model, "write", start_guest)
        async with run_host(tmp_path, driver, hand=lambda _: model.hand(), machine=model.machine) as host:
            result = await host.run_commands(make_command(1, "reset"))
        assert asked.count(VF_GROUP) == 2, "not before each of the 21 steps"
        assert model.resets == ([] if late else [card.name])
        assert result.outcome == ("failed" if late else "succeeded")

    asyncio.run(story())


@pytest.mark.slow
def test_S1_a_wide_act_stops_before_the_step_at_which_another_device_has_got_an_attachment(tmp_path: Path) -> None:
    async def story() -> None:
        manifest = Manifest("drv", writes=WRITABLE_PATHS, declares=DriverDeclaration(affects={"reset": "host"}))
        first = write_step("mode", "1", seen=(Check(f"{CARD_PATH}/numvfs", "9"),), timeout_s=60, undo="0")
        driver = ScriptedDriver({"reset": plan_once(first, write_step("last", "1"))}, manifest=manifest)
        async with run_host(tmp_path, driver) as host:
            host.file_content("last", "0")
            host.executor.accept_command(make_command(1, "reset"))
            await wait_until(lambda: host.file_content("mode") == "1")
            attach = make_command(2, "attach", key="other", uuid="u", handle=HANDLE, consumer="vm1")
            assert (await host.run_commands(attach)).outcome == "succeeded"
            host.file_content("numvfs", "9")
            result = await host.wait_for_result(1)
            assert (result.outcome, host.file_content("last"), host.file_content("mode")) == ("failed", "0", "0")
            assert "reset would also affect the device other, which has an attached handle" in result.text

    asyncio.run(story())


def test_S1_a_detach_from_a_card_that_is_not_found_any_more_counts_as_affecting_the_whole_host(tmp_path: Path) -> None:
    async def story() -> None:
        manifest = Manifest("drv", writes=WRITABLE_PATHS, declares=DriverDeclaration(affects={"detach": "card"}))
        plans = {"attach": plan_always(), "detach": plan_always(write_step("mode", "1"))}
        driver = ScriptedDriver(plans, {"other": OTHER_CARD}, manifest=manifest)
        async with run_host(tmp_path, driver) as host:
            await host.run_commands(make_command(1, "attach", key="other", uuid="u", handle=HANDLE, consumer="vm1"))
            here = AttachHandle("MDEV", '{"bus": "01", "device": "00", "domain": "0000", "function": "0"}')
            result = await host.run_commands(make_command(2, "detach", uuid="u1", handle=here, consumer="vm1"))
            assert result.outcome == "refused"
            assert "detach would also affect the device other, which has an attached handle" in result.text

    asyncio.run(story())


def test_an_attached_device_whose_address_is_not_known_counts_as_affected() -> None:
    check_affected_attachments("reset", "device", CARD, [("other", None)])
    check_affected_attachments("reset", "card", CARD, [])
    for scope, address in (("card", CARD), ("bus", None)):
        with pytest.raises(Busy, match="reset would also affect the device other"):
            check_affected_attachments("reset", scope, address, [("other", None)])
