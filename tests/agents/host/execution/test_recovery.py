"""Tests of recovery after a kill, restart, reboot or hanging write: no command runs twice and none is lost (L2)."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agents import wire
from agents.host.discovery.driver_set import DriverSet
from agents.host.discovery.reporter import InventoryReporter
from agents.host.journal.command_log import AppliedEffect, CommandLog
from agents.host.journal.journal import Journal
from drivers.errors import Busy, DriverError, Gone
from drivers.inventory import DriverReport
from drivers.isolation.host_writer import HostWriter
from drivers.isolation.threads import run_in_thread
from drivers.plan import Ask, Check, Lifetime, Plan, Step, Write
from tests.agents.host.execution.executor_host import (
    CARD_PATH,
    HANDLE,
    ScriptedDriver,
    make_command,
    plan_always,
    plan_error,
    plan_once,
    reported_health,
    run_host,
    write_step,
)
from tests.agents.host.fake_gateway import FakeGateway, wait_until
from tests.support.modelmachine import ModelMachine

ATTACH = {"uuid": "u1", "handle": HANDLE, "consumer": "vm1"}


def make_file_driver(root: Path) -> ScriptedDriver:
    """Return a driver that plans nothing once its file is there: `attach` writes a state file, `install` `numvfs`."""

    def has(path: str, value: str) -> bool:
        file = root / path.lstrip("/")
        return file.exists() and file.read_text() == value

    def attach(ask: Ask) -> Plan:
        path = f"/state/{ask.uuid}"
        return Plan() if has(path, ask.consumer) else Plan((Step("make it", Write(path, ask.consumer)),))

    def install(_: Ask) -> Plan:
        return Plan() if has(f"{CARD_PATH}/numvfs", "4") else Plan((write_step("numvfs", "4"),))

    return ScriptedDriver({"attach": attach, "install": install})


def kill_at_point(number: int) -> None:
    """Make this process kill itself before or after a write to journal or host: at the `number`th such point."""
    remaining = [number]

    def count_down() -> None:
        remaining[0] -= 1
        if remaining[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            count_down()
            answer = function(*arguments)
            count_down()
            return answer

        return wrapped

    for name in ("store_command", "mark_started", "store_effect", "store_result", "acknowledge_result"):
        setattr(CommandLog, name, around(getattr(CommandLog, name)))
    write = HostWriter.write

    async def written(self: HostWriter, path: str, value: str, timeout_s: float) -> None:
        count_down()
        await write(self, path, value, timeout_s)
        count_down()

    HostWriter.write = written  # type: ignore[method-assign]


async def run_connected_host(root: Path, gateway: Any, until_true: Callable[[], object]) -> None:
    async with run_host(root, make_file_driver(root), gateway=gateway, connect=True):
        await wait_until(until_true)


KILL_POINTS = 14
"""Before and after each of: store the command, mark it started, store the attachment as begun, write the file, store
the attachment as applied, store the result, acknowledge it."""


@pytest.mark.system
def test_a_command_runs_once_and_gets_a_result_when_the_agent_is_killed_at_any_point(tmp_path: Path) -> None:
    outcomes: list[str] = []

    async def story(point: int) -> None:
        root = tmp_path / str(point)
        root.mkdir()
        server = FakeGateway()
        async with server.open():
            server.after_welcome = [wire.encode_message(make_command(1, "attach", **ATTACH))]
            child = os.fork()
            if child == 0:
                os.close(2)
                kill_at_point(point)
                asyncio.run(run_connected_host(root, server.gateway(), lambda: False))
                os._exit(1)
            code = await asyncio.get_running_loop().run_in_executor(None, os.waitpid, child, 0)
            assert os.WIFSIGNALED(code[1])
            for socket in server.sockets:
                await socket.close()
            before = list(server.results)
            server.results.clear()
            made = (root / "state/u1").exists()
            driver = make_file_driver(root)
            async with run_host(root, driver, gateway=server.gateway(), connect=True) as host:
                await wait_until(lambda: server.results)
                (result,) = server.results
                outcomes.append(result.outcome)
                assert not before or before[0].outcome == result.outcome
                if made:
                    assert result.outcome == "succeeded"
                assert (result.outcome == "succeeded") == (root / "state/u1").exists()
                assert [one.op for one, _ in host.journal.command_log.list_interrupted()] == []
                await wait_until(lambda: not host.journal.command_log.unacknowledged)
                claimed = host.journal.command_log.list_attachments("drv", "card")
                assert claimed == {"u1": "vm1"} or not made

    for point in range(1, KILL_POINTS + 1):
        asyncio.run(story(point))
    assert set(outcomes) == {"succeeded", "unknown"}


@pytest.mark.slow
def test_a_command_received_but_not_started_before_a_restart_runs_when_it_is_sent_again(tmp_path: Path) -> None:
    async def story() -> None:
        driver = make_file_driver(tmp_path)
        async with run_host(tmp_path, driver) as host:
            host.journal.command_log.store_command(make_command(1, "install"))
        async with run_host(tmp_path, driver) as host:
            assert (host.journal.command_log.unacknowledged, driver.plan_calls) == ({}, [])
            assert (await host.run_commands(make_command(1, "install"))).outcome == "succeeded"

    asyncio.run(story())


@pytest.mark.parametrize(
    ("boot", "there", "outcome", "words"),
    [
        (
            "boot1",
            "4",
            "succeeded",
            "interrupted, because the agent stopped while it ran, but completed: nothing is left to be done",
        ),
        (
            "boot1",
            "0",
            "unknown",
            "interrupted, because the agent stopped while it ran; its outcome is unknown: still to be done",
        ),
        ("boot2", "0", "unknown", "interrupted, because the host was rebooted while it ran; its outcome is unknown"),
    ],
)
def test_an_interrupted_command_is_checked_by_its_driver_and_not_run_again(
    tmp_path: Path, boot: str, there: str, outcome: str, words: str
) -> None:
    async def story() -> None:
        driver = make_file_driver(tmp_path)
        async with run_host(tmp_path, driver) as host:
            host.journal.command_log.store_command(make_command(1, "install"))
            host.journal.command_log.mark_started(make_command(1, "install"), "boot1")
            host.file_content("numvfs", there)
        async with run_host(tmp_path, driver, boot=boot) as host:
            result = await host.wait_for_result(1)
            assert result.outcome == outcome
            assert result.text.startswith(words)
            assert (host.file_content("numvfs"), result.hash != "") == (there, True)

    asyncio.run(story())


def test_the_driver_that_checks_an_interrupted_program_command_is_told_which_image_was_wanted(tmp_path: Path) -> None:
    def is_loaded(ask: Ask) -> Plan:
        return Plan() if ask.image and ask.image.sha256 == "a" * 64 else Plan((write_step("mode", "1"),))

    async def story() -> None:
        driver = ScriptedDriver({"program": is_loaded})
        command = make_command(1, "program", image=wire.ImageRef("image-1", 5, "a" * 64, "bits"))
        async with run_host(tmp_path, driver) as host:
            host.journal.command_log.store_command(command)
            host.journal.command_log.mark_started(command, "boot1")
        async with run_host(tmp_path, driver) as host:
            assert (await host.wait_for_result(1)).outcome == "succeeded"

    asyncio.run(story())


@pytest.mark.parametrize("op", ["rescan", "install"])
def test_an_interrupted_command_that_no_driver_can_check_ends_as_unknown(tmp_path: Path, op: str) -> None:
    async def story() -> None:
        one = make_command(1, op, driver="uninstalled")
        async with run_host(tmp_path, ScriptedDriver()) as host:
            host.journal.command_log.store_command(one)
            host.journal.command_log.mark_started(one, "boot1")
        async with run_host(tmp_path, ScriptedDriver()) as host:
            result = await host.wait_for_result(1)
            text = "interrupted, because the agent stopped while it ran; its outcome is unknown"
            assert (result.outcome, result.text) == ("unknown", text)

    asyncio.run(story())


@pytest.mark.slow
@pytest.mark.parametrize("boot", ["boot1", "boot2"])
def test_an_interrupted_attachment_counts_as_attached_and_is_not_repeated_at_the_next_start(
    tmp_path: Path, boot: str
) -> None:
    async def story() -> None:
        driver = ScriptedDriver(
            {"attach": plan_always(write_step("mode", "1", seen=(Check(f"{CARD_PATH}/numvfs", "9"),), timeout_s=60))}
        )
        async with run_host(tmp_path, driver) as host:
            host.executor.accept_command(make_command(1, "attach", **ATTACH))
            await wait_until(lambda: host.file_content("mode") == "1")
        host.file_content("mode", "0")
        driver.plans["attach"] = plan_always(write_step("mode", "1"))
        async with run_host(tmp_path, driver, boot=boot) as host:
            assert (await host.wait_for_result(1)).outcome == "unknown"
            assert host.file_content("mode") == "0"
            assert host.journal.command_log.list_attachments("drv", "card") == {"u1": "vm1"}

    asyncio.run(story())


@pytest.mark.slow
def test_installation_and_attachments_are_restored_after_a_reboot_before_the_first_report(tmp_path: Path) -> None:
    async def story() -> None:
        driver = make_file_driver(tmp_path)
        async with run_host(tmp_path, driver) as host:
            await host.run_commands(make_command(1, "install"), make_command(2, "attach", **ATTACH))
        await_looks = driver.discover_count
        (tmp_path / "state/u1").unlink()
        (tmp_path / CARD_PATH.lstrip("/") / "numvfs").write_text("0")
        driver.plan_calls.clear()
        async with run_host(tmp_path, driver, boot="boot2") as host:
            assert (host.file_content("numvfs"), host.file_content("/state/u1")) == ("4", "vm1")
            assert [act for act, _ in driver.plan_calls] == ["install", "install", "attach"]
            assert {ask.backend for _, ask in driver.plan_calls} == {"cards"}
            assert driver.discover_count == await_looks + 1
            assert {one.boot_id for one in host.journal.command_log.list_effects()} == {"boot2"}
            assert reported_health(host) == ("ok", "")

    asyncio.run(story())


@pytest.mark.slow
@pytest.mark.parametrize("is_found", [True, False])
def test_a_device_is_restored_where_it_is_found_if_the_reboot_gave_it_another_address(
    tmp_path: Path, is_found: bool
) -> None:
    async def story() -> None:
        moved = "0000:05:00.0"

        def install(ask: Ask) -> Plan | DriverError:
            """Plan at the address of the ask, if the card is there."""
            path = f"/sys/bus/pci/devices/{ask.address}/numvfs"
            if ask.address != driver.devices.get("card"):
                return Gone("the device is not there any more")
            has_steps = (tmp_path / path.lstrip("/")).read_text() != "4"
            return Plan((Step("make VFs", Write(path, "4")),) if has_steps else ())

        driver = ScriptedDriver({"install": install})
        async with run_host(tmp_path, driver) as host:
            assert (await host.run_commands(make_command(1, "install"))).outcome == "succeeded"
            host.file_content(f"/sys/bus/pci/devices/{moved}/numvfs", "0")
        driver.devices = {"card": moved} if is_found else {"other": moved}
        async with run_host(tmp_path, driver, boot="boot2") as host:
            result = await host.run_commands(make_command(2, "reset"))
            assert result.outcome == ("succeeded" if is_found else "refused")
            assert host.file_content(f"/sys/bus/pci/devices/{moved}/numvfs") == ("4" if is_found else "0")
            mark = host.reporter.failure_marks.get(("drv", "card"), "")
            assert mark == (
                ""
                if is_found
                else "after the reboot its install could not be restored: the device is not there any more"
            )
            acts = [act for act, _ in driver.plan_calls]
            assert not is_found or acts[-2:] == ["install", "reset"], "the device is restored before its next command"

    asyncio.run(story())


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyError("drv"), sqlite3.DatabaseError("disk I/O error")])
def test_a_command_runs_although_the_agent_itself_failed_to_look_for_its_device_again_after_a_reboot(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        driver = make_file_driver(tmp_path)
        async with run_host(tmp_path, driver) as host:
            assert (await host.run_commands(make_command(1, "install"))).outcome == "succeeded"
        host.file_content("numvfs", "0")
        driver.plans["install"] = plan_error(Gone("the device is not there any more"))
        is_queued, discover = asyncio.Event(), InventoryReporter.discover_and_record

        async def fail_once(reporter: InventoryReporter, name: str) -> wire.Report:
            """Fail in the first call, as soon as a command waits."""
            monkeypatch.setattr(InventoryReporter, "discover_and_record", discover)
            await is_queued.wait()
            raise error

        monkeypatch.setattr(InventoryReporter, "discover_and_record", fail_once)
        async with run_host(tmp_path, driver, boot="boot2") as host:
            host.executor.accept_command(make_command(2, "reset"))
            is_queued.set()
            assert (await host.wait_for_result(2)).outcome == "succeeded"
            reason = "after the reboot its install could not be restored: the device is not there any more"
            assert host.reporter.failure_marks == {("drv", "card"): reason}, "the reason of the first attempt stays"
        assert "drv, card: the agent itself failed" in caplog.text

    asyncio.run(story())


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyError("drv"), sqlite3.DatabaseError("disk I/O error")])
def test_a_device_that_the_agent_itself_failed_to_restore_after_a_reboot_is_reported_as_failed(
    tmp_path: Path, error: Exception
) -> None:
    async def story() -> None:
        driver = make_file_driver(tmp_path)
        async with run_host(tmp_path, driver) as host:
            assert (await host.run_commands(make_command(1, "install"))).outcome == "succeeded"
        host.file_content("numvfs", "0")

        def fail(_: Ask) -> Plan:
            raise error

        driver.plans["install"] = fail
        async with run_host(tmp_path, driver, boot="boot2") as host:
            reason = f"the agent itself failed while it restored the device: {type(error).__name__}: {error}"
            assert reported_health(host) == ("failed", reason)
            driver.plans["install"] = make_file_driver(tmp_path).plans["install"]
            assert (await host.run_commands(make_command(2, "install"))).outcome == "succeeded"
            assert (reported_health(host), host.file_content("numvfs")) == (("ok", ""), "4")

    asyncio.run(story())


@pytest.mark.slow
def test_the_partitions_of_a_device_are_restored_after_a_reboot(tmp_path: Path) -> None:
    async def story() -> None:
        def divide(ask: Ask) -> Plan:
            wanted = ask.layout["vfs"]
            return Plan() if (tmp_path / numbers).read_text() == wanted else Plan((write_step("numvfs", wanted),))

        numbers, driver = f"{CARD_PATH}/numvfs".lstrip("/"), ScriptedDriver({"partition": divide})
        async with run_host(tmp_path, driver) as host:
            assert (await host.run_commands(make_command(1, "partition", layout={"vfs": "2"}))).outcome == "succeeded"
            host.file_content("numvfs", "0")
        async with run_host(tmp_path, driver, boot="boot2") as host:
            assert (host.file_content("numvfs"), reported_health(host)) == ("2", ("ok", ""))

    asyncio.run(story())


@pytest.mark.slow
def test_a_device_is_failed_while_its_attachment_cannot_be_restored_after_a_reboot(tmp_path: Path) -> None:
    async def story() -> None:
        driver = make_file_driver(tmp_path)
        async with run_host(tmp_path, driver) as host:
            await host.run_commands(make_command(1, "install"), make_command(2, "attach", **ATTACH))
        (tmp_path / "state/u1").unlink()
        attach, driver.plans["attach"] = driver.plans["attach"], plan_error(Busy("no room"))
        words = "after the reboot the handle u1 of vm1 could not be restored: no room"
        async with run_host(tmp_path, driver, boot="boot2") as host:
            assert reported_health(host) == ("failed", words)
            assert reported_health(host, "other") == ("ok", "")
        async with run_host(tmp_path, driver, boot="boot2") as host:
            assert reported_health(host) == ("failed", words), "also after the next restart"
            driver.plans["attach"] = attach
            assert (await host.run_commands(make_command(3, "install"))).outcome == "succeeded"
            assert host.file_content("/state/u1") == "vm1"
            assert reported_health(host) == ("ok", "")

    asyncio.run(story())


def roster_with(driver: ScriptedDriver) -> Callable[[Journal], DriverSet]:
    return lambda journal: DriverSet(["drv"], {}, journal.desired_drivers, lambda *_: driver, lambda: ("drv",))  # type: ignore[arg-type,return-value]


@pytest.mark.slow
def test_a_driver_disabled_during_a_reboot_restores_its_device_when_it_is_enabled(tmp_path: Path) -> None:
    async def story() -> None:
        driver = make_file_driver(tmp_path)
        off, on = (make_command(n, "configure", key="", wish=wire.Wish(n, enabled=n == 3)) for n in (2, 3))
        async with run_host(tmp_path, driver, roster=roster_with(driver)) as host:
            assert (await host.run_commands(make_command(1, "install"))).outcome == "succeeded"
            assert (await host.run_commands(off)).text == "drv is disabled"
        (tmp_path / CARD_PATH.lstrip("/") / "numvfs").write_text("0")
        async with run_host(tmp_path, driver, boot="boot2", roster=roster_with(driver)) as host:
            assert host.file_content("numvfs") == "0"
            assert (await host.run_commands(on)).outcome == "succeeded"
            assert (host.file_content("numvfs"), reported_health(host)) == ("4", ("ok", ""))
            assert {one.boot_id for one in host.journal.command_log.list_effects()} == {"boot2"}

    asyncio.run(story())


def test_a_rescan_succeeds_when_its_driver_is_disabled_meanwhile(tmp_path: Path) -> None:
    async def story() -> None:
        driver = make_file_driver(tmp_path)
        async with run_host(tmp_path, driver, roster=roster_with(driver)) as host:
            free, discover = asyncio.Event(), driver.discover

            async def slow() -> DriverReport:
                await free.wait()
                return await discover()

            driver.discover = slow  # type: ignore[method-assign]
            looks = driver.discover_count
            host.executor.accept_command(make_command(1, "rescan", key=""))
            await wait_until(lambda: driver.release_count)
            host.executor.accept_command(make_command(2, "configure", key="", wish=wire.Wish(1, enabled=False)))
            await wait_until(lambda: host.journal.desired_drivers.get_desired_state("drv"))
            free.set()
            assert ((await host.wait_for_result(1)).outcome, driver.discover_count > looks) == ("succeeded", True)

    asyncio.run(story())


@pytest.mark.slow
def test_a_slow_restoration_after_a_reboot_fails_the_device_and_does_not_delay_the_report(tmp_path: Path) -> None:
    async def story() -> None:
        driver = ScriptedDriver({"install": plan_once(write_step("mode", "1"))})
        async with run_host(tmp_path, driver) as host:
            await host.run_commands(make_command(1, "install"))
        endless = write_step("mode", "2", seen=(Check(f"{CARD_PATH}/numvfs", "never"),), timeout_s=60)
        driver.plans["install"] = plan_once(endless)
        async with run_host(tmp_path, driver, boot="boot2", prepare_s=0.1) as host:
            assert reported_health(host) == ("failed", "it could not be restored within 0.1 s after the reboot")

    asyncio.run(story())


def test_a_cancellation_that_arrives_with_the_result_of_a_thread_is_raised() -> None:
    async def story() -> None:
        threads: list[threading.Thread] = []
        task = asyncio.ensure_future(run_in_thread(lambda: threads.append(threading.current_thread())))
        await asyncio.sleep(0)
        while not threads:
            time.sleep(0.001)
        threads[0].join()  # The result is queued in the loop now, and the cancellation is queued right behind it.
        asyncio.get_running_loop().call_soon(task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(story())


def test_a_device_is_failed_and_takes_no_command_while_a_write_hangs_in_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.host.execution.executor.STUCK_POLL_S", 0.02)

    async def story() -> None:
        model = ModelMachine(tmp_path)
        model.load("nvme", "1b36:0010")
        model.pci("0000:01:00.0", "1b36", "0010", "010802", vfs=4)
        file = f"{CARD_PATH}/sriov_numvfs"
        driver = ScriptedDriver({"install": plan_once(Step("make VFs", Write(file, "2"), timeout_s=0.1))})
        async with run_host(tmp_path, driver, hand=lambda _: model.hand()) as host:
            with model.slow(file):
                result = await host.run_commands(make_command(1, "install"))
                assert result.outcome == "unknown"
                assert "the write hangs in the kernel, so nothing more is done" in result.text
                assert reported_health(host)[1].startswith(
                    "a write to it hangs in the kernel, and the agent does nothing to it until that ends: "
                )
                result = await host.run_commands(make_command(2, "reset"))
                assert result.text == "an earlier write to this device still hangs in the kernel"
            await wait_until(lambda: reported_health(host) == ("ok", ""))
            assert (await host.run_commands(make_command(3, "reset"))).outcome == "succeeded"

    asyncio.run(story())


def test_a_read_only_sys_and_a_missing_privilege_are_named_in_the_result(tmp_path: Path) -> None:
    async def story() -> None:
        model = ModelMachine(tmp_path)
        model.load("nvme", "1b36:0010")
        model.pci("0000:01:00.0", "1b36", "0010", "010802", vfs=4)
        driver = ScriptedDriver()
        async with run_host(tmp_path, driver, hand=lambda _: model.hand()) as host:
            for number, (name, words) in enumerate((("read_only", "Read-only"), ("privileged", "denied")), 1):
                setattr(model, name, name == "read_only")
                driver.plans["install"] = plan_once(Step("make VFs", Write(f"{CARD_PATH}/sriov_numvfs", "2")))
                result = await host.run_commands(make_command(number, "install"))
                assert result.outcome == "failed"
                assert words in result.text
                model.read_only = False

    asyncio.run(story())


IMAGE_BYTES = b"bitstream"
IMAGE = wire.ImageRef("image-1", len(IMAGE_BYTES), hashlib.sha256(IMAGE_BYTES).hexdigest(), "bits")


def plan_program(lifetime: Lifetime) -> Callable[[Ask], Plan]:
    """Return a function that always plans one step, as for a device that does not show what it contains."""
    step = Step("load it", Write("/state/image", ""), image="copy")
    return lambda _: Plan((step,), "loaded", lifetime)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lifetime", "attached", "health"),
    [
        ("flash", False, "ok"),
        ("flash", True, "ok"),
        ("volatile", False, "ok"),
        ("volatile", True, "failed"),
    ],
)
def test_after_a_reboot_only_a_device_whose_attached_handles_lost_their_program_is_failed(
    tmp_path: Path, lifetime: Lifetime, attached: bool, health: str
) -> None:
    async def story() -> None:
        driver = make_file_driver(tmp_path)
        driver.plans["program"] = plan_program(lifetime)
        server = FakeGateway(images={"image-1": IMAGE_BYTES})
        async with server.open(), run_host(tmp_path, driver, gateway=server.gateway()) as host:
            result = await host.run_commands(make_command(1, "program", image=IMAGE))
            assert (result.outcome, result.detail) == ("succeeded", {"lifetime": lifetime, "boot_id": "boot1"})
            noted = [effect.slot for effect in host.journal.command_log.list_effects()]
            assert noted == (["program"] if lifetime == "volatile" else [])
            if attached:
                await host.run_commands(make_command(2, "attach", **ATTACH))
        async with run_host(tmp_path, driver, boot="boot2") as host:
            status, reason = reported_health(host)
            assert status == health
            assert ("the image bits could not be restored: the device has lost it" in reason) == (health == "failed")
            slots = {effect.slot for effect in host.journal.command_log.list_effects()}
            assert ("program" in slots) == (health == "failed"), "an image that is lost or in flash needs no note"

    asyncio.run(story())


@pytest.mark.slow
def test_an_image_in_flash_that_an_older_release_noted_does_not_fail_the_device_after_a_reboot(tmp_path: Path) -> None:
    async def story() -> None:
        driver = make_file_driver(tmp_path)
        driver.plans["program"] = plan_program("flash")
        async with run_host(tmp_path, driver) as host:
            await host.run_commands(make_command(1, "attach", **ATTACH))
            host.journal.command_log.store_effect(AppliedEffect("drv", "card", "program", Ask("card"), "boot1"))
        async with run_host(tmp_path, driver, boot="boot2") as host:
            assert reported_health(host) == ("ok", "")

    asyncio.run(story())
