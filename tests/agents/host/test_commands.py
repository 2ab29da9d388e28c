"""Commands over the wire: taken, told, answered until the gateway has it; images on their way; the ledger by itself."""

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
from tests.agents.host.standin import StandIn, until
from tests.agents.host.test_main import daemon, lines_of, token
from tests.agents.host.workshop import HANDLE, HOME, Scripted, command, once, step, workshop

Change = Callable[[wire.ImageRef], wire.ImageRef]


def test_a_command_is_taken_told_and_answered_after_its_report(tmp_path: Path) -> None:
    async def story() -> None:
        server = StandIn()
        async with server.open():
            driver = Scripted({"install": once(step("numvfs", "1"), step("mode", "1"))})
            async with workshop(tmp_path, driver, gateway=server.gateway(), connect=True):
                await until(lambda: server.hellos)
                assert {"attach", "logs", "rescan", "health"} <= set(server.hellos[0].ops)
                await server.order(command(1, "install"), command(2, "logs", driver="", key=""))
                await until(lambda: {one.number for one in server.results} == {1, 2})
                assert sorted(server.taken) == [1, 2]
                assert {one.number for one in server.progress} <= {1, 2}
                last = next(one for one in server.results if one.number == 1)
                assert (last.epoch, last.seq) == (server.reports[-1].epoch, server.reports[-1].seq)

    asyncio.run(story())


def test_a_result_waits_for_its_report_and_is_sent_until_it_is_acknowledged(tmp_path: Path) -> None:
    async def story() -> None:
        server = StandIn(acknowledge_results=False)
        async with server.open():
            driver = Scripted({"install": once(step("mode", "1"))})
            async with workshop(tmp_path, driver, gateway=server.gateway(), connect=True) as host:
                await until(lambda: host.journal.acknowledged)
                server.acknowledge = False
                await server.order(command(1, "install"))
                await until(lambda: host.journal.command_log.unacknowledged)
                beats = len(server.beats)
                await until(lambda: len(server.beats) > beats + 2)
                assert server.results == []
                server.acknowledge, server.jitter_s = True, 300.0  # a storm spreads reports, and not this one
                await server.sockets[-1].close()
                await until(lambda: len(server.results) == 1)
                await server.sockets[-1].close()
                await until(lambda: len(server.results) == 2)
            async with workshop(tmp_path, driver, gateway=server.gateway(), connect=True) as host:
                await until(lambda: len(server.results) == 3)
                server.acknowledge_results = True
                await server.order(command(1, "install"))
                await until(lambda: not host.journal.command_log.unacknowledged)
            assert len({(one.number, one.outcome, one.hash) for one in server.results}) == 1

    asyncio.run(story())


def test_while_the_conductor_is_away_work_goes_on_and_is_answered_when_it_is_back(tmp_path: Path) -> None:
    async def story() -> None:
        server = StandIn()
        waits = step("mode", "1", seen=(Check(f"{HOME}/numvfs", "1"),))
        driver = Scripted({"install": once(waits)})
        async with server.open():
            pass
        async with workshop(tmp_path, driver, gateway=server.gateway(), connect=True) as host:
            async with server.open():
                await until(lambda: server.hellos)
                await server.order(command(1, "install"))
                await until(lambda: host.file("mode") == "1")
            host.file("numvfs", "1")
            await host.result(1)
            async with server.open():
                await until(lambda: server.results)
            assert server.results[0].outcome == "succeeded"

    asyncio.run(story())


def ref(data: bytes) -> wire.ImageRef:
    return wire.ImageRef("image-1", len(data), hashlib.sha256(data).hexdigest(), "bits", {"accel:device": "fake"})


def programming(ask: Ask) -> Plan:
    assert ask.image is not None
    return Plan((Step("copy it", Write("/state/image", ""), image="copy"),))


def test_an_image_is_fetched_checked_used_and_deleted(tmp_path: Path) -> None:
    async def story() -> None:
        data = b"bitstream" * 50_000
        server = StandIn(images={"image-1": data})
        async with server.open():
            driver = Scripted({"program": programming})
            async with workshop(tmp_path, driver, gateway=server.gateway()) as host:
                assert (await host.do(command(1, "program", image=ref(data)))).outcome == "succeeded"
                assert (tmp_path / "state/image").read_bytes() == data
                assert list((tmp_path / "images").iterdir()) == []
                asked = driver.asked[0][1].image
                assert isinstance(asked, Image)
                assert (asked.name, asked.properties) == ("bits", {"accel:device": "fake"})
                handle = AttachHandle("PCI", "{}")
                await host.do(command(2, "attach", image=ref(data), handle=handle, uuid="u", consumer="vm"))
                assert [act for act, _ in driver.asked] == ["program", "program"], "libvirt does the rest"
                assert [one.slot for one in host.journal.command_log.list_effects()] == ["program"]
                await host.do(command(3, "attach", image=ref(data), handle=HANDLE, uuid="u", consumer="vm"))
                assert [act for act, _ in driver.asked[2:]] == ["program", "attach"]

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
def test_an_image_that_is_not_the_commands_never_reaches_the_device(tmp_path: Path, change: Change, words: str) -> None:
    async def story() -> None:
        server = StandIn(images={"image-1": b"12345"})
        async with server.open():
            driver = Scripted({"program": programming})
            async with workshop(tmp_path, driver, gateway=server.gateway()) as host:
                result = await host.do(command(1, "program", image=change(ref(b"12345"))))
                assert result.outcome == "refused"
                assert words in result.text
                assert driver.asked == []
                assert not list(tmp_path.glob("images/*"))

    asyncio.run(story())


def test_a_journal_of_the_first_format_is_brought_up_in_place(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / JOURNAL_FILE) as connection:
        connection.execute(journals._CREATE_JOURNAL_TABLE)
        connection.execute("INSERT INTO journal (id, host, epoch, address) VALUES (1, 'h', 7, 'http://gw:1')")
        connection.execute("PRAGMA user_version = 1")
    connection.close()
    for _ in range(2):
        journal = open_journal(tmp_path, "h", clock=lambda: 1.0)
        assert (journal.address, journal.command_log.unacknowledged) == ("http://gw:1", {})
        journal.close()
    assert journal.epoch == 9
    with sqlite3.connect(tmp_path / JOURNAL_FILE) as connection:
        connection.execute("PRAGMA user_version = 3")
    connection.close()
    assert open_journal(tmp_path, "h").address == ""
    assert [path for path in tmp_path.iterdir() if "corrupt" in path.name]


def test_what_was_acknowledged_is_remembered_for_a_while_without_its_details(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, "h")
    journal._connection.execute("PRAGMA synchronous = OFF")
    ledger = journal.command_log
    ledger.store_command(command(0, "install"))
    ledger.mark_started(command(0, "install"), "boot")
    for number in range(1, KEEP_ACKNOWLEDGED + 3):
        one = command(number, "logs")
        assert ledger.store_command(one) == "new"
        ledger.store_result(one, wire.Result(number, "succeeded", "done", {"log": "x" * 1000}))
        ledger.acknowledge_result(number)
    assert ledger.store_command(command(KEEP_ACKNOWLEDGED, "logs")) == "done"
    assert ledger.unacknowledged[KEEP_ACKNOWLEDGED] == wire.Result(KEEP_ACKNOWLEDGED, "succeeded", "done")
    assert [one.number for one, _ in ledger.list_interrupted()] == [0], "what was begun is never forgotten"
    (count,) = journal._connection.execute("SELECT count(*) FROM command").fetchone()
    assert count == KEEP_ACKNOWLEDGED + 1
    journal.close()


def test_the_logs_tail_is_bounded() -> None:
    import logging

    tail = LogTail("%(message)s")
    for number in range(300):
        tail.emit(logging.LogRecord("n", logging.INFO, "f", 1, f"{number} " + "é" * 2000, None, None))
    assert tail.read_text().splitlines()[-1].startswith("299 é")
    assert len(tail.read_text().encode()) <= MAX_TEXT_BYTES


@pytest.mark.system
def test_the_whole_agent_installs_attaches_and_knows_after_kill_9(tmp_path: Path) -> None:
    control, settings = tmp_path / "fake.json", tmp_path / "drivers.toml"
    control.write_text(json.dumps({"install": ["firmware"], "handle_type": "MDEV", "handles": 2}))
    settings.write_text(f'[fake_driver]\ncontrol_file = "{control}"\nacts = ["install", "attach", "detach", "reset"]\n')
    wanted = {"uuid": "0b0f2f24-7a1a-4c64-9c9d-0d1f6a2b3c4d", "consumer": "7d3c6f61-7a1a-4c64-9c9d-0d1f6a2b3c4e"}

    async def story() -> None:
        server = StandIn()
        async with server.open():
            keys = {"CYBORG_JOIN_TOKEN": token(server), "CYBORG_DRIVER_SETTINGS": str(settings)}

            async def result(number: int, op: str, **more: object) -> wire.Result:
                device = server.reports[-1].drivers[0].devices[0]
                await server.order(command(number, op, driver="fake_driver", key=device.key, **more))
                await until(lambda: server.results and server.results[-1].number == number)
                return server.results[-1]

            async with daemon(tmp_path, **keys) as agent:
                lines_of(agent)
                await until(lambda: server.reports)
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
            async with daemon(tmp_path, **keys) as agent:
                lines_of(agent)
                await until(lambda: len(server.hellos) > hellos)
                assert (await result(5, "detach", handle=handle, **wanted)).outcome == "succeeded"
                assert (await result(6, "reset")).outcome == "succeeded"
                log = (await result(7, "logs")).detail["log"]
                assert "command 6, reset" in log
                assert "s3cret" not in log

    asyncio.run(story())


def test_a_worker_needs_little_to_start() -> None:
    code = "import sys, drivers.isolation.write_worker; assert not {'asyncio', 'msgspec', 'django'} & set(sys.modules)"
    subprocess.run([sys.executable, "-I", "-c", code], check=True)
