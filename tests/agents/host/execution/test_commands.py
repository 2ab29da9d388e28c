"""Tests of commands at the agent: acknowledgement, results, image downloads, the command log in the journal."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from agents import wire
from agents.host.journal import journal as journals
from agents.host.journal.command_log import KEEP_ACKNOWLEDGED
from agents.host.journal.journal import JOURNAL_FILE, open_journal
from agents.host.log_buffer import MAX_TEXT_BYTES, LogTail
from drivers.inventory import AttachHandle
from drivers.plan import Ask, Check, Image, Plan, Step, Write
from tests.agents.host.execution.executor_host import (
    CARD_PATH,
    HANDLE,
    ScriptedDriver,
    make_command,
    plan_once,
    run_host,
    write_step,
)
from tests.agents.host.fake_gateway import FakeGateway, wait_until
from tests.agents.host.test_main import collect_log_lines, join_token, running_agent

Change = Callable[[wire.ImageRef], wire.ImageRef]


@pytest.mark.slow
def test_a_command_is_acknowledged_and_its_result_names_the_last_report(tmp_path: Path) -> None:
    async def story() -> None:
        server = FakeGateway()
        async with server.open():
            driver = ScriptedDriver({"install": plan_once(write_step("numvfs", "1"), write_step("mode", "1"))})
            async with run_host(tmp_path, driver, gateway=server.gateway(), connect=True):
                await wait_until(lambda: server.hellos)
                assert {"attach", "logs", "rescan", "health"} <= set(server.hellos[0].ops)
                await server.send_to_agent(make_command(1, "install"), make_command(2, "logs", driver="", key=""))
                await wait_until(lambda: {one.number for one in server.results} == {1, 2})
                assert sorted(server.taken) == [1, 2]
                assert {one.number for one in server.progress} <= {1, 2}
                last = next(one for one in server.results if one.number == 1)
                assert (last.epoch, last.seq) == (server.reports[-1].epoch, server.reports[-1].seq)

    asyncio.run(story())


@pytest.mark.slow
def test_a_result_waits_for_its_report_and_is_resent_until_it_is_acknowledged(tmp_path: Path) -> None:
    async def story() -> None:
        server = FakeGateway(acknowledge_results=False)
        async with server.open():
            driver = ScriptedDriver({"install": plan_once(write_step("mode", "1"))})
            async with run_host(tmp_path, driver, gateway=server.gateway(), connect=True) as host:
                await wait_until(lambda: host.journal.acknowledged)
                server.acknowledge = False
                await server.send_to_agent(make_command(1, "install"))
                await wait_until(lambda: host.journal.command_log.unacknowledged)
                beats = len(server.beats)
                await wait_until(lambda: len(server.beats) > beats + 2)
                assert server.results == []
                # This jitter spreads reports, but not a report that a result waits for.
                server.acknowledge, server.jitter_s = True, 300.0
                await server.sockets[-1].close()
                await wait_until(lambda: len(server.results) == 1)
                await server.sockets[-1].close()
                await wait_until(lambda: len(server.results) == 2)
            async with run_host(tmp_path, driver, gateway=server.gateway(), connect=True) as host:
                await wait_until(lambda: len(server.results) == 3)
                server.acknowledge_results = True
                await server.send_to_agent(make_command(1, "install"))
                await wait_until(lambda: not host.journal.command_log.unacknowledged)
            assert len({(one.number, one.outcome, one.hash) for one in server.results}) == 1

    asyncio.run(story())


@pytest.mark.slow
def test_a_command_goes_on_without_the_gateway_and_its_result_is_sent_after_reconnecting(tmp_path: Path) -> None:
    async def story() -> None:
        server = FakeGateway()
        waits = write_step("mode", "1", seen=(Check(f"{CARD_PATH}/numvfs", "1"),))
        driver = ScriptedDriver({"install": plan_once(waits)})
        async with server.open():
            pass
        async with run_host(tmp_path, driver, gateway=server.gateway(), connect=True) as host:
            async with server.open():
                await wait_until(lambda: server.hellos)
                await server.send_to_agent(make_command(1, "install"))
                await wait_until(lambda: host.file_content("mode") == "1")
            host.file_content("numvfs", "1")
            await host.wait_for_result(1)
            async with server.open():
                await wait_until(lambda: server.results)
            assert server.results[0].outcome == "succeeded"

    asyncio.run(story())


def image_ref(data: bytes) -> wire.ImageRef:
    return wire.ImageRef("image-1", len(data), hashlib.sha256(data).hexdigest(), "bits", {"accel:device": "fake"})


def plan_image_copy(ask: Ask) -> Plan:
    assert ask.image is not None
    return Plan((Step("copy it", Write("/state/image", ""), image="copy"),))


@pytest.mark.slow
def test_an_image_is_fetched_for_program_and_mdev_attach_and_deleted_afterwards(tmp_path: Path) -> None:
    async def story() -> None:
        data = b"bitstream" * 50_000
        server = FakeGateway(images={"image-1": data})
        async with server.open():
            driver = ScriptedDriver({"program": plan_image_copy})
            async with run_host(tmp_path, driver, gateway=server.gateway()) as host:
                assert (
                    await host.run_commands(make_command(1, "program", image=image_ref(data)))
                ).outcome == "succeeded"
                assert (tmp_path / "state/image").read_bytes() == data
                assert list((tmp_path / "images").iterdir()) == []
                asked = driver.plan_calls[0][1].image
                assert isinstance(asked, Image)
                assert (asked.name, asked.properties) == ("bits", {"accel:device": "fake"})
                handle = AttachHandle("PCI", "{}")
                await host.run_commands(
                    make_command(2, "attach", image=image_ref(data), handle=handle, uuid="u", consumer="vm")
                )
                assert [act for act, _ in driver.plan_calls] == ["program", "program"], "libvirt does the rest"
                assert [one.slot for one in host.journal.command_log.list_effects()] == ["program"]
                await host.run_commands(
                    make_command(3, "attach", image=image_ref(data), handle=HANDLE, uuid="u", consumer="vm")
                )
                assert [act for act, _ in driver.plan_calls[2:]] == ["program", "attach"]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: msgspec.structs.replace(one, sha256="0" * 64), "has the SHA-256"),
        (lambda one: msgspec.structs.replace(one, size=one.size + 1), "ended after 5 of 6 bytes"),
        (lambda one: msgspec.structs.replace(one, size=one.size - 1), "is longer than the 4 bytes"),
        (lambda one: msgspec.structs.replace(one, size=2**50), "has room for"),
        (lambda one: msgspec.structs.replace(one, id="../../x"), "has an id or a SHA-256 that this agent cannot use"),
        (lambda one: msgspec.structs.replace(one, id="image-2"), "cannot be downloaded"),
    ],
)
def test_an_image_that_differs_from_its_reference_is_refused_before_the_driver_plans(
    tmp_path: Path, change: Change, words: str
) -> None:
    async def story() -> None:
        server = FakeGateway(images={"image-1": b"12345"})
        async with server.open():
            driver = ScriptedDriver({"program": plan_image_copy})
            async with run_host(tmp_path, driver, gateway=server.gateway()) as host:
                result = await host.run_commands(make_command(1, "program", image=change(image_ref(b"12345"))))
                assert result.outcome == "refused"
                assert words in result.text
                assert driver.plan_calls == []
                assert not list(tmp_path.glob("images/*"))

    asyncio.run(story())


def test_a_journal_of_format_1_is_migrated_and_one_of_an_unknown_format_is_moved_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with sqlite3.connect(tmp_path / JOURNAL_FILE) as connection:
        connection.execute(journals._CREATE_JOURNAL_TABLE)
        connection.execute("INSERT INTO journal (id, host, epoch, address) VALUES (1, 'h', 7, 'http://gw:1')")
        connection.execute("PRAGMA user_version = 1")
    connection.close()
    for _ in range(2):
        journal = open_journal(tmp_path, "h", clock=lambda: 1.0)
        assert (journal.gateway.address, journal.command_log.unacknowledged) == ("http://gw:1", {})
        journal.close()
    assert journal.epoch == 9
    with sqlite3.connect(tmp_path / JOURNAL_FILE) as connection:
        connection.execute("PRAGMA user_version = 3")
    connection.close()
    assert open_journal(tmp_path, "h").gateway.address == ""
    assert [path for path in tmp_path.iterdir() if "corrupt" in path.name]
    assert "its format is version 3, and this release supports up to 2" in caplog.text


def test_only_the_latest_acknowledged_results_are_kept_and_without_their_details(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, "h")
    journal._connection.execute("PRAGMA synchronous = OFF")
    ledger = journal.command_log
    ledger.store_command(make_command(0, "install"))
    ledger.mark_started(make_command(0, "install"), "boot")
    for number in range(1, KEEP_ACKNOWLEDGED + 3):
        one = make_command(number, "logs")
        assert ledger.store_command(one) == "new"
        ledger.store_result(one, wire.Result(number, "succeeded", "done", {"log": "x" * 1000}))
        ledger.acknowledge_result(number)
    assert ledger.store_command(make_command(KEEP_ACKNOWLEDGED, "logs")) == "done"
    assert ledger.unacknowledged[KEEP_ACKNOWLEDGED] == wire.Result(KEEP_ACKNOWLEDGED, "succeeded", "done")
    assert [one.number for one, _ in ledger.list_interrupted()] == [0], "what was begun is never forgotten"
    (count,) = journal._connection.execute("SELECT count(*) FROM command").fetchone()
    assert count == KEEP_ACKNOWLEDGED + 1
    journal.close()


def test_the_log_buffer_keeps_the_last_lines_within_its_size() -> None:
    import logging

    tail = LogTail("%(message)s")
    for number in range(300):
        tail.emit(logging.LogRecord("n", logging.INFO, "f", 1, f"{number} " + "é" * 2000, None, None))
    assert tail.read_text().splitlines()[-1].startswith("299 é")
    assert len(tail.read_text().encode()) <= MAX_TEXT_BYTES


@pytest.mark.system
def test_the_agent_process_installs_attaches_and_detaches_after_kill_9(tmp_path: Path) -> None:
    control, settings = tmp_path / "fake.json", tmp_path / "drivers.toml"
    control.write_text(json.dumps({"install": ["firmware"], "handle_type": "MDEV", "handles": 2}))
    settings.write_text(f'[fake_driver]\ncontrol_file = "{control}"\nacts = ["install", "attach", "detach", "reset"]\n')
    wanted = {"uuid": "0b0f2f24-7a1a-4c64-9c9d-0d1f6a2b3c4d", "consumer": "7d3c6f61-7a1a-4c64-9c9d-0d1f6a2b3c4e"}

    async def story() -> None:
        server = FakeGateway()
        async with server.open():
            keys = {"CYBORG_JOIN_TOKEN": join_token(server), "CYBORG_DRIVER_SETTINGS": str(settings)}

            async def result(number: int, op: str, **more: object) -> wire.Result:
                device = server.reports[-1].drivers[0].devices[0]
                await server.send_to_agent(make_command(number, op, driver="fake_driver", key=device.key, **more))
                await wait_until(lambda: server.results and server.results[-1].number == number)
                return server.results[-1]

            async with running_agent(tmp_path, **keys) as agent:
                collect_log_lines(agent)
                await wait_until(lambda: server.reports)
                assert server.reports[-1].drivers[0].devices[0].to_install
                assert (await result(1, "install")).outcome == "succeeded"
                device = server.reports[-1].drivers[0].devices[0]
                assert device.to_install == ""
                handle = device.deployables[0].handles[0]
                assert (await result(2, "attach", handle=handle, **wanted)).outcome == "succeeded"
                assert (await result(3, "reset")).text.endswith(f"{wanted['consumer']}: detach it first")
                assert "do not allow the act 'program'" in (await result(4, "program")).text
                agent.send_signal(signal.SIGKILL)
                await agent.wait()
            hellos = len(server.hellos)
            async with running_agent(tmp_path, **keys) as agent:
                collect_log_lines(agent)
                await wait_until(lambda: len(server.hellos) > hellos)
                assert (await result(5, "detach", handle=handle, **wanted)).outcome == "succeeded"
                assert (await result(6, "reset")).outcome == "succeeded"
                log = (await result(7, "logs")).detail["log"]
                assert "command 6, reset" in log
                assert "s3cret" not in log

    asyncio.run(story())


@pytest.mark.slow
def test_the_write_worker_imports_neither_asyncio_nor_msgspec_nor_django() -> None:
    code = "import sys, drivers.isolation.write_worker; assert not {'asyncio', 'msgspec', 'django'} & set(sys.modules)"
    subprocess.run([sys.executable, "-I", "-c", code], check=True)
