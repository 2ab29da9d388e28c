"""Commands at work on a host: once, in order, fenced, undone, answered."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

import msgspec
import pytest

from agents import wire
from agents.host.execution import command_semantics
from drivers.errors import Busy, Failed, Invalid
from drivers.inventory import Device, DriverReport
from drivers.plan import Check, Plan, Step
from tests.agents.host.standin import until
from tests.agents.host.test_journal import disk_full
from tests.agents.host.workshop import HANDLE, HOME, Scripted, always, command, errors, once, status, step, workshop


def test_an_act_is_done_seen_and_reported_before_it_is_answered(tmp_path: Path) -> None:
    async def story() -> None:
        driver = Scripted({"install": once(step("numvfs", "4", seen=(Check(f"{HOME}/numvfs", "4"),)))})
        async with workshop(tmp_path, driver) as host:
            before = host.journal.seq
            result = await host.do(command(1, "install"))
            assert (result.outcome, host.file("numvfs")) == ("succeeded", "4")
            assert result.seq > before
            report = host.journal.report
            assert report is not None
            assert (result.epoch, result.seq, result.hash) == (report.epoch, report.seq, report.hash)
            assert [(one.slot, one.boot_id) for one in host.journal.command_log.list_effects()] == [
                ("install", "boot1")
            ]
            assert host.journal.command_log.get_first_values("drv", "card") == {f"{HOME}/numvfs": "0"}

    asyncio.run(story())


def test_what_the_driver_refuses_touches_nothing_and_is_answered_in_its_words(tmp_path: Path) -> None:
    async def story() -> None:
        async with workshop(tmp_path, Scripted({"program": errors(Invalid("not for this card"))})) as host:
            result = await host.do(command(1, "program"))
            assert (result.outcome, result.text, result.seq) == ("refused", "not for this card", 0)

    asyncio.run(story())


def test_a_failing_step_takes_back_those_before_it(tmp_path: Path) -> None:
    async def story() -> None:
        steps = (step("numvfs", "4", undo="0"), step("mode", "b"), step("absent", "1", undo="0"))
        async with workshop(tmp_path, Scripted({"install": once(*steps)})) as host:
            result = await host.do(command(1, "install"))
            assert result.outcome == "failed"
            assert result.text == (
                f"set absent to 1: {HOME}/absent: No such file or directory. "
                "Undone: set numvfs to 4. Not undone: set mode to b"
            )
            assert (host.file("numvfs"), host.file("mode")) == ("0", "b")
            assert result.seq
            assert host.journal.command_log.list_effects() == []

    asyncio.run(story())


def test_what_does_not_come_true_is_named_and_taken_back(tmp_path: Path) -> None:
    async def story() -> None:
        wanted = step("numvfs", "4", undo="0", seen=(Check(f"{HOME}/virtfn3", "x", link=True),), timeout_s=0.5)
        async with workshop(tmp_path, Scripted({"install": once(wanted)})) as host:
            result = await host.do(command(1, "install"))
            assert result.outcome == "failed"
            assert result.text.startswith(f"set numvfs to 4: {HOME}/virtfn3 is 'absent', wanted 'x'. Undone")
            assert host.file("numvfs") == "0"

    asyncio.run(story())


@pytest.mark.parametrize(("earlier", "outcome"), [((), "refused"), ((step("mode", "a", undo="0"),), "failed")])
def test_a_step_is_not_begun_when_something_is_not_as_expected(
    tmp_path: Path, earlier: tuple[Step, ...], outcome: str
) -> None:
    async def story() -> None:
        steps = (*earlier, step("numvfs", "4", expect=(Check(f"{HOME}/numvfs", "7"),)))
        async with workshop(tmp_path, Scripted({"install": once(*steps)})) as host:
            result = await host.do(command(1, "install"))
            assert (result.outcome, host.file("numvfs"), host.file("mode")) == (outcome, "0", "0")
            assert f"not started, because {HOME}/numvfs is '0', wanted '7'" in result.text

    asyncio.run(story())


def test_install_is_planned_until_nothing_is_left(tmp_path: Path) -> None:
    async def story() -> None:
        plans = [Plan((step("numvfs", "1"),)), Plan((step("mode", "2"),)), Plan(said="ready"), Plan()]
        driver = Scripted({"install": lambda _: plans.pop(0)})
        async with workshop(tmp_path, driver) as host:
            assert (await host.do(command(1, "install"))).text == "ready"
            driver.plans["install"] = always(step("mode", "3", undo="0"))
            result = await host.do(command(2, "install"))
            assert result.outcome == "failed"
            assert "after 4 rounds of steps this is still to be done: set mode to 3. Undone" in result.text
            assert (host.file("numvfs"), host.file("mode")) == ("1", "0")

    asyncio.run(story())


def test_a_device_takes_its_commands_in_order_and_others_go_on_beside_it(tmp_path: Path) -> None:
    async def story() -> None:
        slow = step("mode", "1", seen=(Check(f"{HOME}/numvfs", "9"),), timeout_s=10)
        driver = Scripted({"install": lambda ask: Plan((slow,)) if ask.key == "card" else Plan()})
        async with workshop(tmp_path, driver) as host:
            for one in (command(3, "reset"), command(2, "detach", uuid="u"), command(1, "install")):
                host.executor.accept_command(one)
            await host.do(command(4, "reset", key="other"))
            assert [act for act, _ in driver.asked] == ["install", "reset"]
            await until(lambda: host.executor.progress.get(1))
            assert host.executor.progress[1].text == "set mode to 1"
            driver.plans.clear()
            host.file("numvfs", "9")
            await host.result(3)
            assert [(act, ask.key) for act, ask in driver.asked[-2:]] == [("detach", "card"), ("reset", "card")]

    asyncio.run(story())


def test_a_command_heard_again_runs_once_and_is_answered_again(tmp_path: Path) -> None:
    async def story() -> None:
        driver = Scripted({"install": once(step("mode", "1"))})
        one = command(1, "install")
        async with workshop(tmp_path, driver) as host:
            first = await host.do(one, one, one)
            host.journal.command_log.acknowledge_result(1)
            assert host.journal.command_log.unacknowledged == {}
            assert await host.do(one) == first
            host.journal.command_log.acknowledge_result(1)
        async with workshop(tmp_path, driver) as host:
            assert await host.do(one) == first
            assert len(driver.asked) == 2, "the plan, and that nothing is left"

    asyncio.run(story())


def test_an_overtaken_command_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        driver = Scripted()
        async with workshop(tmp_path, driver) as host:
            await host.do(command(8, "detach", uuid="u", handle=HANDLE))
            result = await host.do(command(7, "attach", uuid="u", handle=HANDLE))
            assert (result.outcome, result.text) == ("refused", "a later command (8) was already started here")
            assert (await host.do(command(6, "attach", uuid="v", handle=HANDLE))).outcome == "succeeded"

    asyncio.run(story())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"op": "dance"}, "this release of the agent does not support the command 'dance': update the agent"),
        ({"driver": "gone_driver"}, "the driver 'gone_driver' is not enabled on this host"),
        ({"key": "pci:none"}, "the driver drv finds no device pci:none on this host"),
        ({"op": "program"}, "the settings of drv on this host do not allow the act 'program'"),
        ({"start_s": -1.0}, "the command could not be started within -1 s"),
        ({"op": "rescan", "driver": "x"}, "the driver 'x' is not enabled on this host"),
    ],
)
def test_what_is_not_for_this_host_is_refused_in_a_sentence(
    tmp_path: Path, more: dict[str, object], words: str
) -> None:
    async def story() -> None:
        driver = Scripted()
        async with workshop(tmp_path, driver, rules={"drv": frozenset({"install"})}) as host:
            result = await host.do(msgspec.structs.replace(command(1, "install"), **more))
            assert result.outcome == "refused"
            assert words in result.text
            assert driver.asked == []


@pytest.mark.parametrize("rules", [{"*": {"detach"}}, {"*": {"detach"}, "other": {"install"}}])
def test_a_driver_without_a_list_of_its_own_may_do_what_every_driver_may(
    tmp_path: Path, rules: dict[str, frozenset[str]]
) -> None:
    async def story() -> None:
        driver = Scripted()
        async with workshop(tmp_path, driver, rules=rules) as host:
            result = await host.do(command(1, "install"))
            assert "do not allow the act 'install'" in result.text and driver.asked == []
        async with workshop(tmp_path, driver, rules=rules | {"drv": frozenset({"install"})}) as host:
            assert (await host.do(command(2, "install"))).outcome == "succeeded"

    asyncio.run(story())

    asyncio.run(story())


def test_no_step_is_begun_when_nobody_waits_any_more(tmp_path: Path) -> None:
    async def story() -> None:
        steps = (step("numvfs", "4"), step("mode", "1"))
        async with workshop(tmp_path, Scripted({"install": once(*steps)})) as host:
            result = await host.do(command(1, "install", end_s=0.0))
            assert (result.outcome, host.file("numvfs")) == ("refused", "0")
            assert "not started, because the time limit of the command has passed" in result.text

    asyncio.run(story())


def test_a_full_disk_refuses_before_anything_is_touched(tmp_path: Path) -> None:
    async def story() -> None:
        driver = Scripted({"install": always(step("mode", "1"))})
        async with workshop(tmp_path, driver) as host:
            with disk_full():
                result = await host.do(command(1, "install"))
                assert result.outcome == "refused"
                assert "the agent cannot write to its journal" in result.text
            driver.plans["install"] = once(step("mode", "1"))
            assert (await host.do(command(2, "install"))).outcome == "succeeded"

    asyncio.run(story())


def test_a_disk_that_fills_while_a_step_is_done_delays_the_answer_and_loses_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        waits = step("mode", "1", seen=(Check(f"{HOME}/numvfs", "1"),))
        async with workshop(tmp_path, Scripted({"install": once(waits)})) as host:
            host.executor.accept_command(command(1, "install"))
            await until(lambda: host.file("mode") == "1")
            with disk_full():
                os.symlink("nowhere", tmp_path / "link")  # what needs no room still works
                path = tmp_path / HOME.lstrip("/") / "numvfs"
                path.write_text("1")
                await until(lambda: host.executor.progress)
                await asyncio.sleep(0.1)
                assert host.journal.command_log.unacknowledged == {}
            assert (await host.result(1)).outcome == "succeeded"

    asyncio.run(story())


def test_a_device_that_vanishes_half_way_is_said_to_be_gone(tmp_path: Path) -> None:
    async def story() -> None:
        waits = step("mode", "1", seen=(Check(f"{HOME}/numvfs", ""),), undo="0")
        driver = Scripted({"install": once(waits, step("numvfs", "2"))})
        async with workshop(tmp_path, driver) as host:
            host.executor.accept_command(command(1, "install"))
            await until(lambda: host.file("mode") == "1")
            shutil.rmtree(tmp_path / HOME.lstrip("/"))
            del driver.devices["card"]
            result = await host.result(1)
            assert result.outcome == "failed"
            assert f"set numvfs to 2: {HOME}/numvfs: No such file" in result.text
            assert f"Not undone: set mode to 1 ({HOME}/mode: No such file" in result.text

    asyncio.run(story())


def test_a_write_that_hangs_ends_with_its_worker_and_is_answered_as_unknown(tmp_path: Path) -> None:
    async def story() -> None:
        driver = Scripted({"install": always(step("fifo", "4", timeout_s=0.3))})
        async with workshop(tmp_path, driver) as host:
            os.mkfifo(tmp_path / HOME.lstrip("/") / "fifo")  # nobody reads, so opening it waits
            host.journal.command_log.store_first_value("drv", "card", f"{HOME}/fifo", "")
            result = await host.do(command(1, "install"))
            assert result.outcome == "unknown"
            assert "did not answer within 0.3 s; the outcome is unknown; still to be done: set fifo to 4" in result.text
            assert status(host) == ("ok", "")
            driver.plans["install"] = once(step("mode", "1"))
            assert (await host.do(command(2, "install"))).outcome == "succeeded"
            there = (Check(f"{HOME}/mode", "1"),)
            driver.plans["install"] = once(step("fifo", "4", timeout_s=0.3, seen=there))
            result = await host.do(command(3, "install"))
            assert result.outcome == "succeeded", "the write hung, and what it was to bring about is there"

    asyncio.run(story())


def test_rescan_logs_and_health(tmp_path: Path) -> None:
    async def story() -> None:
        driver = Scripted()
        async with workshop(tmp_path, driver) as host:
            looks = driver.looks
            result = await host.do(command(1, "rescan", driver="", key=""))
            assert (result.text, driver.released) == ("drv: 2 devices, 0 faults", 1)
            assert result.detail == {"drv": "there is no IOMMU"}
            assert driver.looks > looks
            assert result.seq == host.journal.seq
            assert (await host.do(command(2, "logs", driver="", key=""))).detail == {"log": "line 1\nline 2"}
            result = await host.do(command(4, "report", key=""))
            told = json.loads(result.detail["report"])
            assert (told["hash"], [one["driver"] for one in told["drivers"]]) == (host.journal.report.hash, ["drv"])
            assert result.text.startswith(f"report {host.journal.epoch}.{host.journal.seq}: ")
            result = await host.do(command(3, "health"))
            assert (result.text, result.detail["status"], result.detail["signals"]) == (
                "degraded: warm",
                "degraded",
                "[]",
            )

    asyncio.run(story())


def test_the_clock_on_the_wall_may_jump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        waits = step("mode", "1", seen=(Check(f"{HOME}/numvfs", "1"),))
        async with workshop(tmp_path, Scripted({"install": once(waits)})) as host:
            host.executor.accept_command(command(1, "install"))
            host.executor.accept_command(command(2, "reset", start_s=5))
            for jump in (0.0, 4e9):
                monkeypatch.setattr("time.time", lambda jump=jump: jump)
                beat = host.driver.looks
                host.reporter.request_discovery(["drv"])
                await until(lambda beat=beat: host.driver.looks > beat)
            host.file("numvfs", "1")
            assert (await host.result(1)).outcome == (await host.result(2)).outcome == "succeeded"

    asyncio.run(story())


def test_what_the_agent_itself_gets_wrong_is_answered_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        driver = Scripted()
        driver.plans["install"] = lambda _: 1 / 0  # type: ignore[assignment,return-value]
        async with workshop(tmp_path, driver) as host:
            result = await host.do(command(1, "install"))
            assert (result.outcome, result.text) == (
                "unknown",
                "the agent itself failed: ZeroDivisionError: division by zero",
            )

    asyncio.run(story())


def test_errors_of_one_kind_stay_of_that_kind(tmp_path: Path) -> None:
    async def story() -> None:
        driver = Scripted({"attach": errors(Busy("in use by vm7")), "detach": errors(Failed("a\x00b\nc"))})
        async with workshop(tmp_path, driver) as host:
            assert (await host.do(command(1, "attach", uuid="u", handle=HANDLE))).text == "in use by vm7"
            assert (await host.do(command(2, "detach", uuid="u", handle=HANDLE))).text == "a b c"

    asyncio.run(story())


def test_a_long_report_is_cut_and_says_so_and_no_report_too() -> None:
    devices = tuple(Device(f"card {n}", "GPU", "v", "m" * 200) for n in range(2000))
    report = wire.Report(3, 7, "h", (DriverReport("drv", devices=devices), DriverReport("other")))
    told = command_semantics.render_last_report(report, "")
    assert told.text.startswith("report 3.7: ") and "name a driver to see less" in told.text
    assert len(told.detail["report"]) == command_semantics.MAX_RAW_REPORT
    assert (
        len(wire.encode_message(wire.Result(1, "succeeded", told.text, told.detail)).encode()) < wire.MAX_MESSAGE_BYTES
    )
    assert json.loads(command_semantics.render_last_report(report, "other").detail["report"])["drivers"] == [
        {"driver": "other"}
    ]
    assert command_semantics.render_last_report(None, "").outcome == "failed"
