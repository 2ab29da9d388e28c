"""Tests of the agent as an operator starts it: in a process of its own, with real drivers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agents import credentials, wire
from agents.host.connection.identity import KEY_FILE as KEY
from agents.host.main import _close_drivers, lock_state_dir
from drivers.configuration import ConfigurationError
from tests.agents.host.fake_gateway import FakeGateway, wait_until
from tests.support.environment import without_settings
from tests.support.webserver import PATIENCE

COMMAND = [sys.executable, "-m", "agents.host.main"]
ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.system
STOP_S = 2.0


def agent_environment(directory: Path, **more: str) -> dict[str, str]:
    keys = {
        "CYBORG_AGENT_STATE_DIR": str(directory / "state"),
        "CYBORG_HOST_NODE": "cmp1",
        "CYBORG_UEVENT_DEBOUNCE_MS": "20",
    }
    return without_settings() | keys | more


def run_to_end(directory: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        env=agent_environment(directory, **more),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def join_token(server: FakeGateway) -> str:
    return credentials.encode_join_string(server.address, server.fingerprint, "cmp1.example", "s3cret")


def collect_log_lines(process: asyncio.subprocess.Process) -> list[str]:
    """Return a list that a background task fills with the lines of the agent's log."""
    lines: list[str] = []

    async def read() -> None:
        assert process.stderr is not None
        async for line in process.stderr:
            lines.append(line.decode())

    process.reader = asyncio.ensure_future(read())  # type: ignore[attr-defined]
    return lines


@asynccontextmanager
async def running_agent(directory: Path, **more: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        "--die-with-parent",
        env=agent_environment(directory, **more),
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def child_pids(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def resident_megabytes(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no RSS")


def count_wakeups(pid: int) -> int:
    """Return how often the threads of a process gave up the CPU to wait."""
    texts = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status"))
    return sum(int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in texts)


def test_the_agent_does_not_import_django() -> None:
    code = "import sys, agents.host.main; assert 'django' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_help_names_the_join_command_and_settings_keys(tmp_path: Path) -> None:
    done = run_to_end(tmp_path, "--help")
    assert done.returncode == 0
    for words in (
        "cyborg-agent check",
        "cyborg-agent --once",
        "manage.py join_token HOST",
        "CYBORG_JOIN_TOKEN_FILE",
        "CYBORG_RESCAN_S",
    ):
        assert words in done.stdout


def test_once_prints_the_devices_and_writes_no_file(tmp_path: Path) -> None:
    done = run_to_end(tmp_path, "--once", CYBORG_HOST_NAME="cmp1.example")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("cmp1.example: 1 device\n")
    assert "DRIVER" in done.stdout
    assert "FPGA" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_once_with_json_prints_the_driver_reports(tmp_path: Path) -> None:
    done = run_to_end(tmp_path, "--once", "--json")
    (report,) = json.loads(done.stdout)
    assert report["driver"] == "fake_driver"
    assert report["devices"][0]["type"] == "FPGA"


def test_check_reaches_the_conductor_says_what_to_mend_and_writes_no_file(tmp_path: Path) -> None:
    async def story() -> None:
        async with FakeGateway().open() as server:
            keys = {"CYBORG_JOIN_TOKEN": join_token(server)}
            for words, status in ((["check", "--json"], 0), (["check"], 0)):
                done = await asyncio.to_thread(run_to_end, tmp_path, *words, **keys)
                assert (done.returncode, done.stderr) == (status, ""), done.stdout
                if "--json" in words:
                    results = {one["name"]: one["status"] for one in json.loads(done.stdout)["checks"]}
                    assert (results["route"], results["clock"], results["driver:fake_driver"]) == ("ok", "ok", "ok")
            assert not server.credentials and not server.hellos, "it did not join"
        done = await asyncio.to_thread(run_to_end, tmp_path, "check", **keys)
        assert done.returncode == 1
        assert "failed   route" in done.stdout and "→ start the conductor" in done.stdout

    asyncio.run(story())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["chekc"], ["check", "--once"]])
def test_an_unknown_command_and_two_at_once_are_wrong_usage(tmp_path: Path, words: list[str]) -> None:
    done = run_to_end(tmp_path, *words)
    assert done.returncode == 2 and done.stderr.startswith("usage: cyborg-agent")


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({}, "this host has not joined yet: set CYBORG_JOIN_TOKEN"),
        ({"CYBORG_JOIN_TOKEN": "rubbish"}, "the join token is not readable"),
        ({"CYBORG_ENABLED_DRIVERS": "no_driver"}, "there is no driver 'no_driver'; known: amd_gpu_driver, fake_driver"),
        ({"CYBORG_RESCAN_S": "x"}, "CYBORG_RESCAN_S='x' is not usable"),
        ({"CYBORG_DRIVER_SETTINGS": "/nowhere.toml"}, "CYBORG_DRIVER_SETTINGS=/nowhere.toml cannot be read"),
        ({"CYBORG_AGENT_STATE_DIR": "/proc/nowhere"}, "CYBORG_AGENT_STATE_DIR=/proc/nowhere cannot be used"),
    ],
)
def test_unusable_configuration_ends_the_agent_with_one_sentence_and_status_2(
    tmp_path: Path, keys: dict[str, str], sentence: str
) -> None:
    if "CYBORG_ENABLED_DRIVERS" in keys:
        keys = keys | {"CYBORG_JOIN_TOKEN": credentials.encode_join_string("http://127.0.0.1:1", "", "h", "s")}
    done = run_to_end(tmp_path, **keys)
    assert done.returncode == 2
    assert done.stderr.startswith("cyborg-agent: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_second_agent_over_the_same_state_directory_is_refused(tmp_path: Path) -> None:
    handle = lock_state_dir(tmp_path / "state")
    with pytest.raises(ConfigurationError, match="another agent already uses"):
        lock_state_dir(tmp_path / "state")
    done = run_to_end(tmp_path, CYBORG_JOIN_TOKEN=credentials.encode_join_string("http://127.0.0.1:1", "", "h", "s"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "stop it, or give this one its own CYBORG_AGENT_STATE_DIR" in done.stderr
    os.close(handle)
    os.close(lock_state_dir(tmp_path / "state"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_agent_and_all_driver_processes(tmp_path: Path, number: signal.Signals) -> None:
    async def story() -> None:
        async with (
            FakeGateway().open() as server,
            running_agent(tmp_path, CYBORG_JOIN_TOKEN=join_token(server)) as agent,
        ):
            log = collect_log_lines(agent)
            await wait_until(lambda: server.reports)
            drivers = child_pids(agent.pid)
            assert drivers
            agent.send_signal(number)
            assert await asyncio.wait_for(agent.wait(), PATIENCE * STOP_S) == 0
            await wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in drivers))
            await wait_until(lambda: any("stopped" in line for line in log))
            assert not [line for line in log if "Traceback" in line]

    asyncio.run(story())


def test_an_agent_without_a_running_driver_stops_without_an_error() -> None:
    asyncio.run(_close_drivers({}))


def test_a_watched_agent_sends_samples_of_its_devices(tmp_path: Path) -> None:
    async def story() -> None:
        async with (
            FakeGateway().open() as server,
            running_agent(tmp_path, CYBORG_JOIN_TOKEN=join_token(server)) as agent,
        ):
            collect_log_lines(agent)
            await wait_until(lambda: server.reports)
            drivers = child_pids(agent.pid)
            await server.send_to_agent(wire.Watch(1.0, 60.0))
            await wait_until(lambda: len(server.samples) >= 2)
            (load,) = server.samples[0].loads
            (device,) = server.reports[0].drivers[0].devices
            assert load.key == device.key and 0 <= load.values["utilization_percent"] <= 100
            assert child_pids(agent.pid) == drivers

    asyncio.run(story())


def test_the_key_is_stored_before_the_first_request(tmp_path: Path) -> None:
    class Looking(FakeGateway):
        def _request(self, connection: object, request: object) -> object:  # type: ignore[override]
            seen.append((tmp_path / "state" / KEY).exists())
            return super()._request(connection, request)  # type: ignore[arg-type]

    seen: list[bool] = []

    async def story() -> None:
        async with Looking().open() as server, running_agent(tmp_path, CYBORG_JOIN_TOKEN=join_token(server)) as agent:
            collect_log_lines(agent)
            await wait_until(lambda: server.hellos)
        assert all(seen)

    asyncio.run(story())


@pytest.mark.system
def test_a_killed_agent_reuses_no_report_number_and_reports_the_last_state(tmp_path: Path) -> None:
    control = tmp_path / "fake.json"
    settings = tmp_path / "drivers.toml"
    settings.write_text(f'[fake_driver]\ncontrol_file = "{control}"\n')

    def devices(count: int) -> None:
        new = control.with_suffix(".new")
        new.write_text(json.dumps({"count": count}))
        new.replace(control)

    async def story() -> None:
        async with FakeGateway().open() as server:
            keys = {"CYBORG_JOIN_TOKEN": join_token(server), "CYBORG_DRIVER_SETTINGS": str(settings)}
            for turn in range(4):
                devices(1 + turn)
                async with running_agent(tmp_path, **keys) as agent:
                    collect_log_lines(agent)
                    before = len(server.hellos)
                    await wait_until(lambda before=before: len(server.hellos) > before)
                    devices(10 + turn)
                    agent.kill()
            devices(3)
            async with running_agent(tmp_path, **keys) as agent:
                collect_log_lines(agent)
                await wait_until(lambda: server.reports and len(server.reports[-1].drivers[0].devices) == 3)
            named: dict[tuple[int, int], str] = {}
            for report in server.reports:
                assert named.setdefault((report.epoch, report.seq), report.hash) == report.hash
            epochs = [credential.epoch for credential in server.credentials]
            assert epochs == sorted(set(epochs))

    asyncio.run(story())


@pytest.mark.system
def test_an_idle_agent_needs_at_most_50_mb_and_few_wakeups(tmp_path: Path) -> None:
    async def story() -> None:
        async with (
            FakeGateway(beat_s=2.0).open() as server,
            running_agent(tmp_path, CYBORG_JOIN_TOKEN=join_token(server)) as agent,
        ):
            collect_log_lines(agent)
            await wait_until(lambda: server.reports and server.beats)
            everyone = [agent.pid, *child_pids(agent.pid)]
            before, beats = sum(map(count_wakeups, everyone)), len(server.beats)
            await wait_until(lambda: len(server.beats) >= beats + 2)
            woken = sum(map(count_wakeups, everyone)) - before
            print(f"agent {resident_megabytes(agent.pid):.1f} MB; with its driver woken {woken} times in two beats")
            assert resident_megabytes(agent.pid) <= 50
            assert woken <= 50

    asyncio.run(story())
