"""Tests of the executor: commands run once and in order, their steps are checked and undone, and each gets a result."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
from pathlib import Path

import msgspec
import pytest

from agents import wire
from agents.host.execution import command_semantics
from drivers.errors import Busy, DriverError, Failed, Gone, Invalid, Timeout
from drivers.inventory import AttachHandle, Device, DriverReport, Health
from drivers.machine import Machine
from drivers.plan import Ask, Check, Plan, Step, Vitals, Write
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
from tests.agents.host.fake_gateway import wait_until
from tests.agents.host.journal.test_journal import full_disk


@pytest.mark.slow
def test_a_command_writes_reports_and_journals_before_its_result_is_given(tmp_path: Path) -> None:
    async def story() -> None:
        driver = ScriptedDriver(
            {"install": plan_once(write_step("numvfs", "4", seen=(Check(f"{CARD_PATH}/numvfs", "4"),)))}
        )
        async with run_host(tmp_path, driver) as host:
            before = host.journal.seq
            result = await host.run_commands(make_command(1, "install"))
            assert (result.outcome, host.file_content("numvfs")) == ("succeeded", "4")
            assert result.seq > before
            report = host.journal.report
            assert report is not None
            assert (result.epoch, result.seq, result.hash) == (report.epoch, report.seq, report.hash)
            assert [(one.slot, one.boot_id) for one in host.journal.command_log.list_effects()] == [
                ("install", "boot1")
            ]
            assert host.journal.command_log.get_first_values("drv", "card") == {f"{CARD_PATH}/numvfs": "0"}

    asyncio.run(story())


def test_a_command_that_the_driver_refuses_has_the_drivers_message_and_no_report(tmp_path: Path) -> None:
    async def story() -> None:
        async with run_host(tmp_path, ScriptedDriver({"program": plan_error(Invalid("not for this card"))})) as host:
            result = await host.run_commands(make_command(1, "program"))
            assert (result.outcome, result.text, result.seq) == ("refused", "not for this card", 0)

    asyncio.run(story())


@pytest.mark.slow
def test_a_failing_step_undoes_the_steps_before_it_and_names_those_without_undo(tmp_path: Path) -> None:
    async def story() -> None:
        steps = (write_step("numvfs", "4", undo="0"), write_step("mode", "b"), write_step("absent", "1", undo="0"))
        async with run_host(tmp_path, ScriptedDriver({"install": plan_once(*steps)})) as host:
            result = await host.run_commands(make_command(1, "install"))
            assert result.outcome == "failed"
            assert result.text == (
                f"set absent to 1: {CARD_PATH}/absent: No such file or directory. "
                "Undone: set numvfs to 4. Not undone: set mode to b"
            )
            assert (host.file_content("numvfs"), host.file_content("mode")) == ("0", "b")
            assert result.seq
            assert host.journal.command_log.list_effects() == []

    asyncio.run(story())


@pytest.mark.slow
def test_a_step_whose_check_stays_false_is_undone_and_the_result_names_the_check(tmp_path: Path) -> None:
    async def story() -> None:
        wanted = write_step(
            "numvfs", "4", undo="0", seen=(Check(f"{CARD_PATH}/virtfn3", "x", link=True),), timeout_s=0.5
        )
        async with run_host(tmp_path, ScriptedDriver({"install": plan_once(wanted)})) as host:
            result = await host.run_commands(make_command(1, "install"))
            assert result.outcome == "failed"
            assert result.text.startswith(f"set numvfs to 4: {CARD_PATH}/virtfn3 is 'absent', wanted 'x'. Undone")
            assert host.file_content("numvfs") == "0"

    asyncio.run(story())


@pytest.mark.slow
@pytest.mark.parametrize(("earlier", "outcome"), [((), "refused"), ((write_step("mode", "a", undo="0"),), "failed")])
def test_a_step_is_not_started_when_its_expected_value_differs(
    tmp_path: Path, earlier: tuple[Step, ...], outcome: str
) -> None:
    async def story() -> None:
        steps = (*earlier, write_step("numvfs", "4", expect=(Check(f"{CARD_PATH}/numvfs", "7"),)))
        async with run_host(tmp_path, ScriptedDriver({"install": plan_once(*steps)})) as host:
            result = await host.run_commands(make_command(1, "install"))
            assert (result.outcome, host.file_content("numvfs"), host.file_content("mode")) == (outcome, "0", "0")
            assert f"not started, because {CARD_PATH}/numvfs is '0', wanted '7'" in result.text

    asyncio.run(story())


@pytest.mark.slow
@pytest.mark.parametrize("op", ["install", "uninstall", "partition"])
def test_an_act_of_many_steps_is_planned_again_until_no_step_is_left_but_at_most_four_times(
    tmp_path: Path, op: str
) -> None:
    async def story() -> None:
        plans = [Plan((write_step("numvfs", "1"),)), Plan((write_step("mode", "2"),)), Plan(said="ready"), Plan()]
        driver = ScriptedDriver({op: lambda _: plans.pop(0)})
        async with run_host(tmp_path, driver) as host:
            assert (await host.run_commands(make_command(1, op))).text == "ready"
            numbers = itertools.count()
            driver.plans[op] = lambda _: Plan((write_step("mode", "3", undo="0", timeout_s=60 + next(numbers)),))
            result = await host.run_commands(make_command(2, op))
            assert result.outcome == "failed"
            assert "after 4 rounds of steps this is still to be done: set mode to 3. Undone" in result.text
            assert (host.file_content("numvfs"), host.file_content("mode")) == ("1", "0")

    asyncio.run(story())


@pytest.mark.slow
def test_an_uninstall_that_plans_the_same_step_again_is_done_when_the_effect_of_the_step_is_there(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        step, opposite = (write_step("mode", value, seen=(Check(f"{CARD_PATH}/mode", value),)) for value in "34")
        driver = ScriptedDriver({"uninstall": plan_always(step), "install": plan_always(step)})
        async with run_host(tmp_path, driver) as host:
            result = await host.run_commands(make_command(1, "uninstall"))
            assert (result.outcome, result.text) == ("succeeded", "set mode to 3")
            assert len(driver.plan_calls) == 2
            assert (await host.run_commands(make_command(2, "install"))).outcome == "failed", "it must be complete"
            driver.plans["uninstall"] = plan_always(step, opposite)
            result = await host.run_commands(make_command(3, "uninstall"))
            assert (result.outcome, "after 4 rounds" in result.text) == ("failed", True), "one effect is gone"

    asyncio.run(story())


@pytest.mark.slow
@pytest.mark.parametrize(("op", "outcome"), [("uninstall", "succeeded"), ("partition", "failed")])
def test_an_uninstall_that_makes_its_device_vanish_is_done_and_not_undone(
    tmp_path: Path, op: str, outcome: str
) -> None:
    async def story() -> None:
        answers: list[Plan | DriverError] = [Plan((write_step("mode", "3", undo="0"),)), Gone("there is no card")]
        driver = ScriptedDriver({op: lambda _: answers.pop(0)})
        async with run_host(tmp_path, driver) as host:
            assert (await host.run_commands(make_command(1, op))).outcome == outcome
            assert host.file_content("mode") == ("3" if outcome == "succeeded" else "0")
            answers.append(Gone("there is no card"))
            assert (await host.run_commands(make_command(2, op))).outcome == "refused", "no step was done"

    asyncio.run(story())


def test_an_act_that_needs_an_image_is_refused_untouched_when_the_command_has_none(tmp_path: Path) -> None:
    async def story() -> None:
        step = Step("copy it", Write("/state/image", ""), image="copy")
        async with run_host(tmp_path, ScriptedDriver({"program": plan_once(step)})) as host:
            result = await host.run_commands(make_command(1, "program"))
            assert (result.outcome, result.text) == ("refused", "copy it: the command has no image")

    asyncio.run(story())


@pytest.mark.slow
def test_commands_of_one_device_run_in_order_and_those_of_another_device_in_parallel(tmp_path: Path) -> None:
    async def story() -> None:
        slow = write_step("mode", "1", seen=(Check(f"{CARD_PATH}/numvfs", "9"),), timeout_s=10)
        driver = ScriptedDriver({"install": lambda ask: Plan((slow,)) if ask.key == "card" else Plan()})
        async with run_host(tmp_path, driver) as host:
            for one in (make_command(3, "reset"), make_command(2, "detach", uuid="u"), make_command(1, "install")):
                host.executor.accept_command(one)
            await host.run_commands(make_command(4, "reset", key="other"))
            await wait_until(lambda: host.executor.progress[1].text == "set mode to 1")
            assert sorted(act for act, _ in driver.plan_calls) == ["install", "reset"]
            driver.plans.clear()
            host.file_content("numvfs", "9")
            await host.wait_for_result(3)
            assert [(act, ask.key) for act, ask in driver.plan_calls[-2:]] == [("detach", "card"), ("reset", "card")]

    asyncio.run(story())


@pytest.mark.slow
def test_a_command_that_arrives_again_runs_once_and_gets_the_same_result(tmp_path: Path) -> None:
    async def story() -> None:
        driver = ScriptedDriver({"install": plan_once(write_step("mode", "1"))})
        one = make_command(1, "install")
        async with run_host(tmp_path, driver) as host:
            first = await host.run_commands(one, one, one)
            host.journal.command_log.acknowledge_result(1)
            assert host.journal.command_log.unacknowledged == {}
            assert await host.run_commands(one) == first
            host.journal.command_log.acknowledge_result(1)
        async with run_host(tmp_path, driver) as host:
            assert await host.run_commands(one) == first
            assert len(driver.plan_calls) == 2, "the plan, and that nothing is left"

    asyncio.run(story())


def test_a_command_older_than_one_started_for_the_same_handle_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        driver = ScriptedDriver()
        async with run_host(tmp_path, driver) as host:
            await host.run_commands(make_command(8, "detach", uuid="u", handle=HANDLE))
            result = await host.run_commands(make_command(7, "attach", uuid="u", handle=HANDLE))
            assert (result.outcome, result.text) == ("refused", "a later command (8) was already started here")
            assert (await host.run_commands(make_command(6, "attach", uuid="v", handle=HANDLE))).outcome == "succeeded"

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
def test_a_command_that_this_host_cannot_run_is_refused_with_the_reason(
    tmp_path: Path, more: dict[str, object], words: str
) -> None:
    async def story() -> None:
        driver = ScriptedDriver()
        async with run_host(tmp_path, driver, rules={"drv": frozenset({"install"})}) as host:
            result = await host.run_commands(msgspec.structs.replace(make_command(1, "install"), **more))
            assert result.outcome == "refused"
            assert words in result.text
            assert driver.plan_calls == []

    asyncio.run(story())


@pytest.mark.parametrize("rules", [{"*": {"detach"}}, {"*": {"detach"}, "other": {"install"}}])
def test_a_driver_without_its_own_acts_list_is_limited_by_the_list_for_all_drivers(
    tmp_path: Path, rules: dict[str, frozenset[str]]
) -> None:
    async def story() -> None:
        driver = ScriptedDriver()
        async with run_host(tmp_path, driver, rules=rules) as host:
            result = await host.run_commands(make_command(1, "install"))
            assert "do not allow the act 'install'" in result.text and driver.plan_calls == []
        async with run_host(tmp_path, driver, rules=rules | {"drv": frozenset({"install"})}) as host:
            assert (await host.run_commands(make_command(2, "install"))).outcome == "succeeded"

    asyncio.run(story())


def test_the_question_whether_a_function_is_unused_is_answered_whatever_acts_are_allowed(tmp_path: Path) -> None:
    async def story() -> None:
        driver = ScriptedDriver({"detach": lambda ask: Busy("a guest still uses it")})
        function = AttachHandle("PCI", '{"bus": "01", "device": "00", "domain": "0000", "function": "0"}')
        async with run_host(tmp_path, driver, rules={"drv": frozenset({"install"})}) as host:
            question = make_command(1, "detach", handle=function, uuid="u", consumer="c")
            result = await host.run_commands(question)
            assert (result.outcome, result.text) == ("refused", "a guest still uses it")
            driver.plans["detach"] = lambda ask: Plan(said="no guest uses it")
            answer = await host.run_commands(msgspec.structs.replace(question, number=2, id="2"))
            assert (answer.outcome, answer.text) == ("succeeded", "no guest uses it")
            pulled = await host.run_commands(msgspec.structs.replace(question, number=4, id="4", key="pulled"))
            assert (pulled.outcome, pulled.text) == ("succeeded", "no guest uses it"), "the driver answers"
            mdev = msgspec.structs.replace(question, number=3, id="3", handle=HANDLE)
            assert "do not allow the act 'detach'" in (await host.run_commands(mdev)).text

    asyncio.run(story())


def test_no_step_is_started_after_the_time_limit_of_the_command(tmp_path: Path) -> None:
    async def story() -> None:
        steps = (write_step("numvfs", "4"), write_step("mode", "1"))
        async with run_host(tmp_path, ScriptedDriver({"install": plan_once(*steps)})) as host:
            result = await host.run_commands(make_command(1, "install", end_s=0.0))
            assert (result.outcome, host.file_content("numvfs")) == ("refused", "0")
            assert "not started, because the time limit of the command has passed" in result.text

    asyncio.run(story())


@pytest.mark.slow
def test_a_command_is_refused_untouched_while_the_disk_of_the_journal_is_full(tmp_path: Path) -> None:
    async def story() -> None:
        driver = ScriptedDriver({"install": plan_always(write_step("mode", "1"))})
        async with run_host(tmp_path, driver) as host:
            with full_disk():
                result = await host.run_commands(make_command(1, "install"))
                assert result.outcome == "refused"
                assert "the agent cannot write to its journal" in result.text
            driver.plans["install"] = plan_once(write_step("mode", "1"))
            assert (await host.run_commands(make_command(2, "install"))).outcome == "succeeded"

    asyncio.run(story())


@pytest.mark.slow
def test_a_result_is_delayed_and_not_lost_when_the_disk_fills_during_a_step(tmp_path: Path) -> None:
    async def story() -> None:
        waits = write_step("mode", "1", seen=(Check(f"{CARD_PATH}/numvfs", "1"),))
        async with run_host(tmp_path, ScriptedDriver({"install": plan_once(waits)})) as host:
            host.executor.accept_command(make_command(1, "install"))
            await wait_until(lambda: host.file_content("mode") == "1")
            with full_disk():
                os.symlink("nowhere", tmp_path / "link")  # Operations that need no space still work.
                path = tmp_path / CARD_PATH.lstrip("/") / "numvfs"
                path.write_text("1")
                await wait_until(lambda: host.executor.progress)
                await asyncio.sleep(0.1)
                assert host.journal.command_log.unacknowledged == {}
            assert (await host.wait_for_result(1)).outcome == "succeeded"

    asyncio.run(story())


@pytest.mark.slow
def test_a_device_removed_between_steps_fails_the_command_and_the_undo_is_reported(tmp_path: Path) -> None:
    async def story() -> None:
        waits = write_step("mode", "1", seen=(Check(f"{CARD_PATH}/numvfs", ""),), undo="0")
        driver = ScriptedDriver({"install": plan_once(waits, write_step("numvfs", "2"))})
        async with run_host(tmp_path, driver) as host:
            host.executor.accept_command(make_command(1, "install"))
            await wait_until(lambda: host.file_content("mode") == "1")
            shutil.rmtree(tmp_path / CARD_PATH.lstrip("/"))
            del driver.devices["card"]
            result = await host.wait_for_result(1)
            assert result.outcome == "failed"
            assert f"set numvfs to 2: {CARD_PATH}/numvfs: No such file" in result.text
            assert f"Not undone: set mode to 1 ({CARD_PATH}/mode: No such file" in result.text

    asyncio.run(story())


@pytest.mark.slow
def test_a_file_whose_first_value_cannot_be_read_in_time_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(machine: Machine, path: str, limit: int = 0) -> str:
        if path.endswith("/numvfs"):  # as while another write holds the lock of the device
            raise Timeout("reading the host took more than 10 s")
        return real_read(machine, path)

    async def story() -> None:
        driver = ScriptedDriver({"install": plan_once(write_step("mode", "1", undo="0"), write_step("numvfs", "4"))})
        async with run_host(tmp_path, driver) as host:
            result = await host.run_commands(make_command(1, "install"))
            assert result.outcome == "failed"
            assert "set numvfs to 4: not started, because its first value cannot be read: reading" in result.text
            assert (host.file_content("mode"), host.file_content("numvfs")) == ("0", "0")

    real_read = Machine.read
    monkeypatch.setattr(Machine, "read", hang)
    asyncio.run(story())


@pytest.mark.slow
def test_a_write_that_hangs_ends_as_unknown_unless_its_check_is_true(tmp_path: Path) -> None:
    async def story() -> None:
        driver = ScriptedDriver({"install": plan_always(write_step("fifo", "4", timeout_s=0.3))})
        async with run_host(tmp_path, driver) as host:
            os.mkfifo(tmp_path / CARD_PATH.lstrip("/") / "fifo")  # The FIFO has no reader, so opening it blocks.
            host.journal.command_log.store_first_value("drv", "card", f"{CARD_PATH}/fifo", "")
            result = await host.run_commands(make_command(1, "install"))
            assert result.outcome == "unknown"
            assert "did not answer within 0.3 s; the outcome is unknown; still to be done: set fifo to 4" in result.text
            assert reported_health(host) == ("ok", "")
            driver.plans["install"] = plan_once(write_step("mode", "1"))
            assert (await host.run_commands(make_command(2, "install"))).outcome == "succeeded"
            there = (Check(f"{CARD_PATH}/mode", "1"),)
            driver.plans["install"] = plan_once(write_step("fifo", "4", timeout_s=0.3, seen=there))
            result = await host.run_commands(make_command(3, "install"))
            assert result.outcome == "succeeded", "the write hung, and what it was to bring about is there"

    asyncio.run(story())


def test_rescan_logs_report_and_health_return_their_details(tmp_path: Path) -> None:
    async def story() -> None:
        driver = ScriptedDriver()
        async with run_host(tmp_path, driver) as host:
            looks = driver.discover_count
            result = await host.run_commands(make_command(1, "rescan", driver="", key=""))
            assert (result.text, driver.release_count) == ("drv: 2 devices, 0 faults", 1)
            assert result.detail == {"drv": "there is no IOMMU"}
            assert driver.discover_count > looks
            assert result.seq == host.journal.seq
            assert (await host.run_commands(make_command(2, "logs", driver="", key=""))).detail == {
                "log": "line 1\nline 2"
            }
            result = await host.run_commands(make_command(4, "report", key=""))
            told = json.loads(result.detail["report"])
            assert (told["hash"], [one["driver"] for one in told["drivers"]]) == (host.journal.report.hash, ["drv"])
            assert result.text.startswith(f"report {host.journal.epoch}.{host.journal.seq}: ")
            result = await host.run_commands(make_command(3, "health"))
            assert (result.text, result.detail["status"], result.detail["signals"]) == (
                "degraded: warm",
                "degraded",
                "[]",
            )

    asyncio.run(story())


@pytest.mark.parametrize(("answered", "looks_again"), [("failed", True), ("ok", False)])
def test_a_driver_looks_again_when_a_health_check_finds_another_health_than_it_reported(
    tmp_path: Path, answered: Health, looks_again: bool
) -> None:
    async def story() -> None:
        driver = ScriptedDriver()

        async def health(ask: Ask) -> Vitals:
            return Vitals(answered, "off the bus")

        driver.health = health  # type: ignore[method-assign]
        async with run_host(tmp_path, driver) as host:
            looks = driver.discover_count
            result = await host.run_commands(make_command(1, "health"))
            assert result.outcome == "succeeded"
            assert (driver.discover_count > looks, result.seq == host.journal.seq) == (looks_again, looks_again)

    asyncio.run(story())


@pytest.mark.slow
def test_commands_do_not_time_out_when_the_wall_clock_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        waits = write_step("mode", "1", seen=(Check(f"{CARD_PATH}/numvfs", "1"),))
        async with run_host(tmp_path, ScriptedDriver({"install": plan_once(waits)})) as host:
            host.executor.accept_command(make_command(1, "install"))
            host.executor.accept_command(make_command(2, "reset", start_s=5))
            for jump in (0.0, 4e9):
                monkeypatch.setattr("time.time", lambda jump=jump: jump)
                beat = host.driver.discover_count
                host.reporter.request_discovery(["drv"])
                await wait_until(lambda beat=beat: host.driver.discover_count > beat)
            host.file_content("numvfs", "1")
            assert (await host.wait_for_result(1)).outcome == (await host.wait_for_result(2)).outcome == "succeeded"

    asyncio.run(story())


def test_an_exception_inside_the_agent_gives_an_unknown_result_with_its_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        driver = ScriptedDriver()
        driver.plans["install"] = lambda _: 1 / 0  # type: ignore[assignment,return-value]
        async with run_host(tmp_path, driver) as host:
            result = await host.run_commands(make_command(1, "install"))
            assert (result.outcome, result.text) == (
                "unknown",
                "the agent itself failed: ZeroDivisionError: division by zero",
            )

    asyncio.run(story())


def test_driver_errors_reach_the_result_with_control_characters_replaced(tmp_path: Path) -> None:
    async def story() -> None:
        driver = ScriptedDriver(
            {"attach": plan_error(Busy("in use by vm7")), "detach": plan_error(Failed("a\x00b\nc"))}
        )
        async with run_host(tmp_path, driver) as host:
            assert (await host.run_commands(make_command(1, "attach", uuid="u", handle=HANDLE))).text == "in use by vm7"
            assert (await host.run_commands(make_command(2, "detach", uuid="u", handle=HANDLE))).text == "a b c"

    asyncio.run(story())


def test_the_report_command_truncates_a_long_report_and_fails_without_one() -> None:
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
