"""Killed at any moment, restarted, rebooted, stuck: nothing is done twice, nothing is forgotten."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agents import wire
from agents.host.discovery.driver_set import DriverSet
from agents.host.execution.plan_runner import run_in_thread
from agents.host.journal.command_log import CommandLog
from agents.host.journal.journal import Journal
from drivers.errors import Busy
from drivers.inventory import DriverReport
from drivers.isolation.host_writer import HostWriter
from drivers.plan import Ask, Check, Plan, Step, Write
from tests.agents.host.standin import StandIn, until
from tests.agents.host.workshop import HANDLE, HOME, Scripted, always, command, errors, once, status, step, workshop
from tests.support.modelmachine import ModelMachine

ATTACH = {"uuid": "u1", "handle": HANDLE, "consumer": "vm1"}


def real(root: Path) -> Scripted:
    """A driver that looks at the files: `attach` makes one, `install` writes another."""

    def has(path: str, value: str) -> bool:
        file = root / path.lstrip("/")
        return file.exists() and file.read_text() == value

    def attach(ask: Ask) -> Plan:
        path = f"/state/{ask.uuid}"
        return Plan() if has(path, ask.consumer) else Plan((Step("make it", Write(path, ask.consumer)),))

    def install(_: Ask) -> Plan:
        return Plan() if has(f"{HOME}/numvfs", "4") else Plan((step("numvfs", "4"),))

    return Scripted({"attach": attach, "install": install})


def killing(number: int) -> None:
    """SIGKILL this process right before, or right after, the `number`th thing it journals or writes to the host."""
    left = [number]

    def passed() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            passed()
            answer = function(*arguments)
            passed()
            return answer

        return wrapped

    for name in ("store_command", "mark_started", "store_effect", "store_result", "acknowledge_result"):
        setattr(CommandLog, name, around(getattr(CommandLog, name)))
    write = HostWriter.write

    async def written(self: HostWriter, path: str, value: str, timeout_s: float) -> None:
        passed()
        await write(self, path, value, timeout_s)
        passed()

    HostWriter.write = written  # type: ignore[method-assign]


async def attached(root: Path, gateway: Any, until_true: Callable[[], object]) -> None:
    async with workshop(root, real(root), gateway=gateway, connect=True):
        await until(until_true)


POINTS = 14
"""Two for each of: heard, begun, first attachment, write, applied, ended, acknowledged."""


@pytest.mark.system
def test_killed_between_any_two_of_its_steps_a_command_is_done_once_and_answered(tmp_path: Path) -> None:
    outcomes: list[str] = []

    async def story(point: int) -> None:
        root = tmp_path / str(point)
        root.mkdir()
        server = StandIn()
        async with server.open():
            server.after_welcome = [wire.encode_message(command(1, "attach", **ATTACH))]
            child = os.fork()
            if child == 0:
                os.close(2)
                killing(point)
                asyncio.run(attached(root, server.gateway(), lambda: False))
                os._exit(1)
            code = await asyncio.get_running_loop().run_in_executor(None, os.waitpid, child, 0)
            assert os.WIFSIGNALED(code[1])
            for socket in server.sockets:
                await socket.close()
            before = list(server.results)
            server.results.clear()
            made = (root / "state/u1").exists()
            driver = real(root)
            async with workshop(root, driver, gateway=server.gateway(), connect=True) as host:
                await until(lambda: server.results)
                (result,) = server.results
                outcomes.append(result.outcome)
                assert not before or before[0].outcome == result.outcome
                if made:
                    assert result.outcome == "succeeded"
                assert (result.outcome == "succeeded") == (root / "state/u1").exists()
                assert [one.op for one, _ in host.journal.command_log.list_interrupted()] == []
                await until(lambda: not host.journal.command_log.unacknowledged)
                claimed = host.journal.command_log.list_attachments("drv", "card")
                assert claimed == {"u1": "vm1"} or not made

    for point in range(1, POINTS + 1):
        asyncio.run(story(point))
    assert set(outcomes) == {"succeeded", "unknown"}


def test_a_command_that_was_taken_and_not_begun_waits_to_be_sent_again(tmp_path: Path) -> None:
    async def story() -> None:
        driver = real(tmp_path)
        async with workshop(tmp_path, driver) as host:
            host.journal.command_log.store_command(command(1, "install"))
        async with workshop(tmp_path, driver) as host:
            assert (host.journal.command_log.unacknowledged, driver.asked) == ({}, [])
            assert (await host.do(command(1, "install"))).outcome == "succeeded"

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
def test_an_interrupted_command_is_looked_at_and_not_run_again(
    tmp_path: Path, boot: str, there: str, outcome: str, words: str
) -> None:
    async def story() -> None:
        driver = real(tmp_path)
        async with workshop(tmp_path, driver) as host:
            host.journal.command_log.store_command(command(1, "install"))
            host.journal.command_log.mark_started(command(1, "install"), "boot1")
            host.file("numvfs", there)
        async with workshop(tmp_path, driver, boot=boot) as host:
            result = await host.result(1)
            assert result.outcome == outcome
            assert result.text.startswith(words)
            assert (host.file("numvfs"), result.hash != "") == (there, True)

    asyncio.run(story())


@pytest.mark.parametrize("op", ["rescan", "install"])
def test_an_interrupted_command_that_nobody_can_look_into_is_answered_too(tmp_path: Path, op: str) -> None:
    async def story() -> None:
        one = command(1, op, driver="uninstalled")
        async with workshop(tmp_path, Scripted()) as host:
            host.journal.command_log.store_command(one)
            host.journal.command_log.mark_started(one, "boot1")
        async with workshop(tmp_path, Scripted()) as host:
            result = await host.result(1)
            text = "interrupted, because the agent stopped while it ran; its outcome is unknown"
            assert (result.outcome, result.text) == ("unknown", text)

    asyncio.run(story())


@pytest.mark.parametrize("boot", ["boot1", "boot2"])
def test_an_interrupted_attachment_counts_as_made_and_is_not_made_by_the_next_start(tmp_path: Path, boot: str) -> None:
    async def story() -> None:
        driver = Scripted({"attach": always(step("mode", "1", seen=(Check(f"{HOME}/numvfs", "9"),), timeout_s=60))})
        async with workshop(tmp_path, driver) as host:
            host.executor.accept_command(command(1, "attach", **ATTACH))
            await until(lambda: host.file("mode") == "1")
        host.file("mode", "0")
        driver.plans["attach"] = always(step("mode", "1"))
        async with workshop(tmp_path, driver, boot=boot) as host:
            assert (await host.result(1)).outcome == "unknown"
            assert host.file("mode") == "0"
            assert host.journal.command_log.list_attachments("drv", "card") == {"u1": "vm1"}

    asyncio.run(story())


def test_after_a_reboot_what_was_made_is_there_again_before_the_first_report(tmp_path: Path) -> None:
    async def story() -> None:
        driver = real(tmp_path)
        async with workshop(tmp_path, driver) as host:
            await host.do(command(1, "install"), command(2, "attach", **ATTACH))
        await_looks = driver.looks
        (tmp_path / "state/u1").unlink()
        (tmp_path / HOME.lstrip("/") / "numvfs").write_text("0")
        driver.asked.clear()
        async with workshop(tmp_path, driver, boot="boot2") as host:
            assert (host.file("numvfs"), host.file("/state/u1")) == ("4", "vm1")
            assert [act for act, _ in driver.asked] == ["install", "install", "attach"]
            assert {ask.backend for _, ask in driver.asked} == {"cards"}
            assert driver.looks == await_looks + 1
            assert {one.boot_id for one in host.journal.command_log.list_effects()} == {"boot2"}
            assert status(host) == ("ok", "")

    asyncio.run(story())


def test_after_a_reboot_a_device_is_divided_again_as_it_was(tmp_path: Path) -> None:
    async def story() -> None:
        def divide(ask: Ask) -> Plan:
            wanted = ask.layout["vfs"]
            return Plan() if (tmp_path / numbers).read_text() == wanted else Plan((step("numvfs", wanted),))

        numbers, driver = f"{HOME}/numvfs".lstrip("/"), Scripted({"partition": divide})
        async with workshop(tmp_path, driver) as host:
            assert (await host.do(command(1, "partition", layout={"vfs": "2"}))).outcome == "succeeded"
            host.file("numvfs", "0")
        async with workshop(tmp_path, driver, boot="boot2") as host:
            assert (host.file("numvfs"), status(host)) == ("2", ("ok", ""))

    asyncio.run(story())


def test_what_cannot_be_put_back_makes_its_device_failed_until_it_can(tmp_path: Path) -> None:
    async def story() -> None:
        driver = real(tmp_path)
        async with workshop(tmp_path, driver) as host:
            await host.do(command(1, "install"), command(2, "attach", **ATTACH))
        (tmp_path / "state/u1").unlink()
        attach, driver.plans["attach"] = driver.plans["attach"], errors(Busy("no room"))
        words = "after the reboot the handle u1 of vm1 could not be restored: no room"
        async with workshop(tmp_path, driver, boot="boot2") as host:
            assert status(host) == ("failed", words)
            assert status(host, "other") == ("ok", "")
        async with workshop(tmp_path, driver, boot="boot2") as host:
            assert status(host) == ("failed", words), "also after the next restart"
            driver.plans["attach"] = attach
            assert (await host.do(command(3, "install"))).outcome == "succeeded"
            assert host.file("/state/u1") == "vm1"
            assert status(host) == ("ok", "")

    asyncio.run(story())


def changeable(driver: Scripted) -> Callable[[Journal], DriverSet]:
    return lambda journal: DriverSet(["drv"], {}, journal.desired_drivers, lambda *_: driver, lambda: ("drv",))  # type: ignore[arg-type,return-value]


def test_what_a_driver_had_made_that_was_off_at_a_reboot_is_there_again_when_it_is_on(tmp_path: Path) -> None:
    async def story() -> None:
        driver = real(tmp_path)
        off, on = (command(n, "configure", key="", wish=wire.Wish(n, enabled=n == 3)) for n in (2, 3))
        async with workshop(tmp_path, driver, roster=changeable(driver)) as host:
            assert (await host.do(command(1, "install"))).outcome == "succeeded"
            assert (await host.do(off)).text == "drv is disabled"
        (tmp_path / HOME.lstrip("/") / "numvfs").write_text("0")
        async with workshop(tmp_path, driver, boot="boot2", roster=changeable(driver)) as host:
            assert host.file("numvfs") == "0"
            assert (await host.do(on)).outcome == "succeeded"
            assert (host.file("numvfs"), status(host)) == ("4", ("ok", ""))
            assert {one.boot_id for one in host.journal.command_log.list_effects()} == {"boot2"}

    asyncio.run(story())


def test_a_driver_that_is_taken_away_while_it_looks_is_no_fault_of_the_agent(tmp_path: Path) -> None:
    async def story() -> None:
        driver = real(tmp_path)
        async with workshop(tmp_path, driver, roster=changeable(driver)) as host:
            free, discover = asyncio.Event(), driver.discover

            async def slow() -> DriverReport:
                await free.wait()
                return await discover()

            driver.discover = slow  # type: ignore[method-assign]
            looks = driver.looks
            host.executor.accept_command(command(1, "rescan", key=""))
            await until(lambda: driver.released)
            host.executor.accept_command(command(2, "configure", key="", wish=wire.Wish(1, enabled=False)))
            await until(lambda: host.journal.desired_drivers.get_wish("drv"))
            free.set()
            assert ((await host.result(1)).outcome, driver.looks > looks) == ("succeeded", True)

    asyncio.run(story())


def test_what_takes_too_long_after_a_reboot_does_not_hold_the_first_report(tmp_path: Path) -> None:
    async def story() -> None:
        driver = Scripted({"install": once(step("mode", "1"))})
        async with workshop(tmp_path, driver) as host:
            await host.do(command(1, "install"))
        endless = step("mode", "2", seen=(Check(f"{HOME}/numvfs", "never"),), timeout_s=60)
        driver.plans["install"] = once(endless)
        async with workshop(tmp_path, driver, boot="boot2", prepare_s=0.1) as host:
            assert status(host) == ("failed", "it could not be restored within 0.1 s after the reboot")

    asyncio.run(story())


def test_a_cancellation_that_meets_the_answer_of_a_look_is_not_forgotten() -> None:
    async def story() -> None:
        threads: list[threading.Thread] = []
        task = asyncio.ensure_future(run_in_thread(lambda: threads.append(threading.current_thread())))
        await asyncio.sleep(0)
        while not threads:
            time.sleep(0.001)
        threads[0].join()  # its answer waits for the loop, and the cancellation comes right behind it
        asyncio.get_running_loop().call_soon(task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(story())


def test_a_device_whose_write_hangs_in_the_kernel_is_left_alone_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.host.execution.executor.STUCK_POLL_S", 0.02)

    async def story() -> None:
        model = ModelMachine(tmp_path)
        model.load("nvme", "1b36:0010")
        model.pci("0000:01:00.0", "1b36", "0010", "010802", vfs=4)
        file = f"{HOME}/sriov_numvfs"
        driver = Scripted({"install": once(Step("make VFs", Write(file, "2"), timeout_s=0.1))})
        async with workshop(tmp_path, driver, hand=lambda _: model.hand()) as host:
            with model.slow(file):
                result = await host.do(command(1, "install"))
                assert result.outcome == "unknown"
                assert "the write hangs in the kernel, so nothing more is done" in result.text
                assert status(host)[1].startswith(
                    "a write to it hangs in the kernel, and the agent does nothing to it until that ends: "
                )
                result = await host.do(command(2, "reset"))
                assert result.text == "an earlier write to this device still hangs in the kernel"
            await until(lambda: status(host) == ("ok", ""))
            assert (await host.do(command(3, "reset"))).outcome == "succeeded"

    asyncio.run(story())


def test_a_read_only_sys_and_a_missing_privilege_are_said(tmp_path: Path) -> None:
    async def story() -> None:
        model = ModelMachine(tmp_path)
        model.load("nvme", "1b36:0010")
        model.pci("0000:01:00.0", "1b36", "0010", "010802", vfs=4)
        driver = Scripted()
        async with workshop(tmp_path, driver, hand=lambda _: model.hand()) as host:
            for number, (name, words) in enumerate((("read_only", "Read-only"), ("privileged", "denied")), 1):
                setattr(model, name, name == "read_only")
                driver.plans["install"] = once(Step("make VFs", Write(f"{HOME}/sriov_numvfs", "2")))
                result = await host.do(command(number, "install"))
                assert result.outcome == "failed"
                assert words in result.text
                model.read_only = False

    asyncio.run(story())
