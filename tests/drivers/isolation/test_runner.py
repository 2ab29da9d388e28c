"""Tests that the agent gets one report with a reason, in bounded time, whatever a driver does to its process (L6)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from drivers.errors import Failed
from drivers.inventory import DriverReport
from drivers.isolation.runner import DriverProcess
from drivers.plan import Ask
from tests.support.webserver import PATIENCE

pytestmark = pytest.mark.slow

MAX_RSS_KB = 26 * 1024
SCRIPT_HEAD = """
import json, os, sys, time
def say(**what): print(json.dumps(what), flush=True)
def ok(question, **more): say(id=question["id"], report={"driver": "x", **more})
for line in sys.stdin:
    question = json.loads(line)
"""


def scripted_process(body: str) -> DriverProcess:
    """A driver process that runs `body` for each question."""
    code = SCRIPT_HEAD + "".join(f"    {line}\n" for line in body.splitlines())
    return DriverProcess("x", "n", {}, deadline_s=3.0, max_answer=65536, command=[sys.executable, "-S", "-c", code])


def discover_reports(driver: Callable[[], DriverProcess], times: int = 1) -> list[DriverReport]:
    async def story() -> list[DriverReport]:
        process = driver()
        try:
            return [await process.discover() for _ in range(times)]
        finally:
            await process.close()
            assert process.pid is None

    return asyncio.run(story())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise RuntimeError('no card')", "ended by itself (exit status 1) (its last message: RuntimeError: no card)"),
        ("os._exit(3)", "exit status 3"),
        ("sys.exit('a\\0b\\x1b[31m')", "(its last message: a b [31m)"),
        ("os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("while True: sys.stdout.write('x' * 9999)", "sent too much"),
        ("while True: print()", "sent too much"),
        ("while True: sys.stderr.write('x' * 9999)", "sent too much"),
        ("say(id=question['id'], report={'driver': 'x', 'devices': [{}] * 5000})", "answer is invalid"),
        ("say(id=question['id'], report={'driver': 'x', 'devices': [{}] * 10**6})", "sent too much"),
        ("print('[' * 60000, flush=True)", "answer is invalid"),
        ("os.write(1, b'\\xff\\xfe{}\\n')", "answer is invalid"),
        ("say(id=question['id'], error='\\ud800')", "answer is invalid"),
        ("say(id=question['id'], error='\\0')", "answer is invalid"),
        ("print('hello', flush=True)", "answer is invalid"),
        ("say(id=question['id'])", "answer is invalid"),
        ("say(id=7, report={'driver': 'x'})", "invalid: it is for request 7, not for 1"),
        ("say(id=question['id'], report={'driver': 'y'})", "invalid: it names the driver 'y'"),
        ("say(error='cannot be loaded'); sys.exit(1)", "cannot be loaded"),
        (
            "say(ready={'name': 'x'}); say(ready={'name': 'x', 'writes': ['/sys/*']})",
            "invalid: it is a second manifest",
        ),
        ("say(ready={'name': 'y'})", "its manifest names the driver 'y'"),
        ("say(ready={'name': 'x', 'api': 2})", "version 2 of the drivers' protocol, not 'x' and 1"),
        ("say(id=question['id'], plan={})", "invalid: it has neither a report nor an error"),
    ],
)
def test_a_misbehaving_driver_gives_a_report_with_the_reason_as_error(body: str, reason: str) -> None:
    began = time.monotonic()
    first, again = discover_reports(lambda: scripted_process(body), times=2)
    assert reason in first.error
    assert (first.driver, first.devices) == ("x", ())
    assert again == first, "the words change while it waits, so every look would be a new report"
    assert time.monotonic() - began < 10
    DriverReport(**json.loads(json.dumps({"driver": first.driver, "error": first.error})))


def test_a_driver_that_hangs_is_killed_at_the_deadline() -> None:
    pid = 0

    async def story() -> None:
        nonlocal pid
        process = DriverProcess("x", "n", {}, deadline_s=0.3, command=["sleep", "60"])
        look = asyncio.create_task(process.discover())
        while process.pid is None:
            await asyncio.sleep(0.01)
        pid = process.pid
        assert "did not answer within 0.3 s and was killed" in (await look).error
        await process.close()

    asyncio.run(story())
    assert not _is_running(pid)


def test_a_driver_that_cannot_be_started_gives_a_report_with_the_reason() -> None:
    (report,) = discover_reports(lambda: DriverProcess("x", "n", {}, command=["/nonexistent/python"]))
    assert "cannot be started" in report.error


def test_an_error_answer_does_not_restart_the_process() -> None:
    async def story() -> None:
        process = scripted_process("say(id=question['id'], error='no rules') if question['id'] == 1 else ok(question)")
        assert (await process.discover()).error == "x: no rules"
        pid = process.pid
        assert (await process.discover()).error == ""
        assert process.pid == pid
        await process.close()

    asyncio.run(story())


def test_a_driver_that_ends_is_restarted_after_growing_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivers.isolation.runner.FIRST_BACKOFF_S", 0.2)
    starts = tmp_path / "starts"

    async def story() -> None:
        count = f"open({str(starts)!r}, 'a').write('.')"
        process = scripted_process(f"{count}\nos._exit(1) if os.path.getsize({str(starts)!r}) < 3 else ok(question)")
        deadline = time.monotonic() + 10
        while (await process.discover()).error:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert starts.read_text() == "..."
        await process.close()

    began = time.monotonic()
    asyncio.run(story())
    assert time.monotonic() - began > 0.6  # 0.2 s, then 0.4 s.


def test_a_driver_that_broke_five_times_is_quarantined_until_it_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivers.isolation.runner.FIRST_BACKOFF_S", 0.01)
    starts = tmp_path / "starts"

    async def story() -> None:
        command = ["sh", "-c", f"printf . >> {starts}; echo no licence >&2; exit 1"]
        process = DriverProcess("x", "n", {}, command=command)
        async with asyncio.timeout(20):
            while "not started again" not in (error := (await process.discover()).error):
                await asyncio.sleep(0.01)
        assert "x: it failed 5 times within 10 minutes" in error
        assert "(its last message: no licence); fix the cause, then have this host rescan with x, or restart" in error
        await asyncio.sleep(0.2)  # Longer than any pause between the restarts.
        with pytest.raises(Failed, match="not started again"):
            await process.plan("install", Ask("k"))
        assert starts.read_text() == "....."
        process.release()
        assert "started again after a pause" in (await process.discover()).error
        assert starts.read_text() == "......"
        await process.close()

    asyncio.run(story())


def test_breaks_that_are_far_apart_do_not_quarantine_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivers.isolation.runner.FIRST_BACKOFF_S", 0.0)
    monkeypatch.setattr("drivers.isolation.runner.FAILURE_WINDOW_S", 0.0)
    reports = discover_reports(lambda: DriverProcess("x", "n", {}, command=["/nonexistent/python"]), times=6)
    assert {report.error for report in reports} == {reports[0].error}
    assert "started again" in reports[0].error


def test_a_driver_killed_between_two_discoveries_is_restarted_without_an_error() -> None:
    async def story() -> None:
        process = scripted_process("ok(question)")
        assert (await process.discover()).error == ""
        first = process.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        while process.pid is not None:
            await asyncio.sleep(0.01)
        assert (await process.discover()).error == ""
        assert process.pid not in (None, first)
        await process.close()

    asyncio.run(story())


def test_a_cancelled_discovery_does_not_affect_the_next_one(tmp_path: Path) -> None:
    asked = tmp_path / "asked"

    async def story() -> None:
        body = f"if question['id'] == 1: open({str(asked)!r}, 'w'); time.sleep(0.5)\nok(question)"
        process = scripted_process(body)
        look = asyncio.create_task(process.discover())
        async with asyncio.timeout(PATIENCE * 5):
            while not asked.exists():
                await asyncio.sleep(0.01)
        look.cancel()
        with pytest.raises(asyncio.CancelledError):
            await look
        assert (await process.discover()).error == ""
        await process.close()

    asyncio.run(story())


def test_processes_started_by_a_driver_end_when_it_is_closed(tmp_path: Path) -> None:
    child = tmp_path / "child"
    body = (
        f"import subprocess\nopen({str(child)!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid))\nok(question)"
    )
    discover_reports(lambda: scripted_process(body))
    _wait_until_ended(int(child.read_text()))


def test_processes_started_by_a_driver_end_when_it_exits_by_itself(tmp_path: Path) -> None:
    child = tmp_path / "child"
    body = (
        f"import subprocess\nopen({str(child)!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid))\nos._exit(4)"
    )
    (report,) = discover_reports(lambda: scripted_process(body))
    assert "exit status 4" in report.error
    _wait_until_ended(int(child.read_text()))


def test_a_driver_sees_none_of_the_agents_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CYBORG_JOIN_TOKEN", "secret")
    monkeypatch.setenv("OS_PASSWORD", "secret")
    (report,) = discover_reports(lambda: scripted_process("say(id=question['id'], error=' '.join(os.environ))"))
    assert "PATH" in report.error
    assert "CYBORG" not in report.error
    assert "OS_" not in report.error


def fake_driver_process(path: Path, deadline_s: float = 30.0, **script_: object) -> DriverProcess:
    path.write_text(json.dumps(script_))
    return DriverProcess("fake_driver", "n", {"control_file": str(path)}, deadline_s=deadline_s)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "it raised RuntimeError: told to raise"),
        ("hang", "did not answer within 2 s"),
        ("flood", "sent too much"),
        ("rubbish", "told to answer rubbish"),
        ("die", "exit status 3"),
    ],
)
def test_the_fake_driver_misbehaves_as_configured_and_still_declares_its_watched_file(
    tmp_path: Path, how: str, reason: str
) -> None:
    async def story() -> None:
        process = fake_driver_process(tmp_path / "fake.json", 2.0 if how == "hang" else 30.0, misbehave=how)
        assert reason in (await process.discover()).error
        assert process.watched == (str(tmp_path / "fake.json"),)
        await process.close()

    asyncio.run(story())


def test_an_invalid_device_becomes_a_fault_and_the_others_are_reported(tmp_path: Path) -> None:
    async def story() -> None:
        process = fake_driver_process(tmp_path / "fake.json", count=2, failing={"1": "x" * 5000})
        report = await process.discover()
        assert [device.address for device in report.devices] == ["0000:0c:00.0"]
        assert "describes this device wrongly" in report.faults[0].reason
        await process.close()

    asyncio.run(story())


def test_an_unknown_driver_gives_an_error_that_names_the_installed_ones() -> None:
    (report,) = discover_reports(lambda: DriverProcess("no_driver", "n", {}))
    assert "there is no driver 'no_driver'; installed are amd_gpu_driver, fake_driver, gaudi_driver," in report.error


@pytest.mark.parametrize(
    ("name", "settings"),
    [("fake_driver", {}), ("pci_driver", {"rules": [{"vendor": "????", "address": "*:*", "type": "FPGA"}]})],
)
def test_a_driver_process_needs_at_most_26_mb(name: str, settings: dict[str, object]) -> None:
    async def story() -> None:
        process = DriverProcess(name, "n", settings)
        for _ in range(3):
            assert (await process.discover()).error == ""
        assert process.pid is not None
        status = Path(f"/proc/{process.pid}/status").read_text()
        rss = int(status.split("VmRSS:")[1].split()[0])
        assert rss <= MAX_RSS_KB, f"{name} takes {rss} kB"
        await process.close()

    asyncio.run(story())


def test_a_driver_dies_with_an_agent_that_is_killed() -> None:
    code = (
        "import asyncio, os, signal\n"
        "from drivers.isolation.runner import DriverProcess\n"
        "async def story():\n"
        "    process = DriverProcess('fake_driver', 'n', {})\n"
        "    await process.discover()\n"
        "    os.write(1, str(process.pid).encode())\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(story())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    _wait_until_ended(int(done.stdout))


def _wait_until_ended(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE * 5
    while _is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
