"""Tests of every call of the protocol with a driver process: answers are checked, and the next call always works."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from drivers.errors import KINDS
from drivers.inventory import Fault
from drivers.isolation.driver_main import CallName, DriverAnswer
from drivers.isolation.runner import DriverProcess
from drivers.machine import Machine, OpenNodes
from drivers.plan import Ask, Plan
from tests.drivers.isolation.scripted_driver import WRITES, start_actor

pytestmark = pytest.mark.slow

VFS = "/sys/bus/pci/devices/0000:3b:00.0/sriov_numvfs"


def run_story(process: DriverProcess, story: Callable[[], Awaitable[None]]) -> None:
    """Run the story and close the process."""

    async def whole() -> None:
        try:
            await story()
        finally:
            await process.close()

    asyncio.run(whole())


async def plan_error(process: DriverProcess, expression: str) -> tuple[str, str]:
    """Return the class name and the text of the error that a plan raises, or two empty texts."""
    try:
        await process.plan("install", Ask("k", layout={"do": expression}))
    except Exception as error:  # noqa: BLE001 - the class of any error is returned
        return type(error).__name__, str(error)
    return "", ""


WRONG_PLANS = [
    ("throw(RuntimeError('no card'))", "Failed", "actor: it raised RuntimeError: no card"),
    ("throw(DriverError('no card'))", "Failed", "actor: no card"),
    *((f"throw({kind}('no card'))", kind, "actor: no card") for kind in KINDS),
    ("throw(type('Own', (Busy,), {})('no card'))", "Busy", "actor: no card"),
    ("throw(Busy(''))", "Busy", "gave no reason"),
    ("throw(Busy('x' * 10**7))", "Busy", "actor: xxxx"),
    ("throw(Busy('a\\0b\\ud800'))", "Busy", "actor: a b?"),
    ("None", "Failed", "describes its plan wrongly"),
    ("object()", "Failed", "describes its plan wrongly"),
    ("Plan((Step('a step', Write('/state/a', '\\0')),))", "Failed", "NUL"),
    ("Plan((Step('\\ud800', Write('/state/a', '1')),))", "Failed", "describes its plan wrongly"),
    ("Plan((Step('', Write('/state/a', '1')),))", "Failed", "describes its plan wrongly"),
    ("to('/state/a', timeout_s=float('nan'))", "Failed", "describes its plan wrongly"),
    ("to('/state/a', timeout_s=1e9)", "Failed", "describes its plan wrongly"),
    ("Plan((Step('a step', Write('/state/a', '1')),) * 10**6)", "Failed", "planned 1000000 steps, more than 256"),
    ("to('/state/../etc/passwd')", "Failed", "describes its plan wrongly"),
    ("to('/etc/passwd')", "Failed", "describes its plan wrongly"),
    ("to('state/a')", "Failed", "describes its plan wrongly"),
    ("to('/sys/power/state')", "Denied", "wants to write /sys/power/state"),
    ("to('/state/a/b')", "Denied", "wants to write /state/a/b"),
    ("to('/state/a', undo=(Write('/sys/power/state', 'mem'),))", "Denied", "wants to write /sys/power/state"),
    ("os.fork()", "Failed", "PermissionError: [Errno 1]"),
    ("os.system('true') and 1", "Failed", "describes its plan wrongly"),
    ("subprocess.run(['true'])", "Failed", "PermissionError: [Errno 1]"),
    ("open('{file}', 'a')", "Failed", "PermissionError: [Errno 13]"),
    ("open('{new}', 'w')", "Failed", "PermissionError: [Errno 13]"),
    ("os.truncate('{file}', 0)", "Failed", "PermissionError: [Errno 13]"),
    ("os.unlink('{file}')", "Failed", "PermissionError: [Errno 13]"),
    ("os.rename('{file}', '{new}')", "Failed", "PermissionError: [Errno 13]"),
    ("os.mkdir('{new}')", "Failed", "PermissionError: [Errno 13]"),
    ("os.kill(os.getppid(), 0)", "Failed", "PermissionError: [Errno 1]"),
    ("os.ftruncate(os.memfd_create('x'), 2**40)", "Failed", "File too large"),
    ("socket.create_connection(('127.0.0.1', {port}))", "Failed", "PermissionError: [Errno 13]"),
]


def test_a_wrong_or_forbidden_plan_is_refused_with_the_reason_and_the_process_survives(tmp_path: Path) -> None:
    file, new = tmp_path / "file", tmp_path / "new"
    file.write_text("as it was")
    process = start_actor()

    async def story() -> None:
        pids = set()
        with socket.create_server(("127.0.0.1", 0)) as server:
            places = {"{file}": str(file), "{new}": str(new), "{port}": str(server.getsockname()[1])}
            for words, kind, reason in WRONG_PLANS:
                do = words
                for place, value in places.items():
                    do = do.replace(place, value)
                known, text = await plan_error(process, do)
                assert (known, reason in text) == (kind, True), f"{do[:80]}: {known}: {text[:200]}"
                assert len(text) <= 4096
                pids.add(process.pid)
        assert len(pids) == 1, "an answer that is wrong costs no process"
        plan = await process.plan("install", Ask("k", layout={"do": f"to({VFS!r})"}))
        assert plan.steps[0].write.path == VFS
        assert process.manifest.writes == WRITES

    run_story(process, story)
    assert file.read_text() == "as it was" and not new.exists()


FATAL_PLANS = [
    ("bytearray(2**30)", "needed more than 512 MiB of memory"),
    ("[threading.Thread(target=time.sleep, args=(60,)).start() for _ in range(10**6)]", "can't start new thread"),
    ("os.execv('/bin/sh', ['sh', '-c', 'echo x > {new} || exit 7'])", "exit status"),
    ("os.execv('/bin/sh', ['sh', '-c', 'sleep 60 & sleep 60'])", "exit status"),
]


def test_a_plan_that_ends_the_process_gives_the_reason_and_a_new_process_answers(tmp_path: Path) -> None:
    new = tmp_path / "new"
    process = start_actor()

    async def story() -> None:
        for do, reason in FATAL_PLANS:
            kind, text = await plan_error(process, do.replace("{new}", str(new)))
            assert (kind, reason in text) == ("Failed", True), f"{do}: {text}"
            process.release()
            assert (await process.discover()).error == ""

    run_story(process, story)
    assert not new.exists()


def test_a_plan_that_hangs_is_killed_at_the_deadline_and_a_new_process_answers() -> None:
    process = start_actor(deadline_s=0.5)

    async def story() -> None:
        kind, text = await plan_error(process, "time.sleep(60)")
        assert (kind, "did not answer within 0.5 s and was killed" in text) == ("Failed", True), text
        async with asyncio.timeout(30):
            # On a busy machine the new process may need longer than the deadline to start.
            while (await process.discover()).error:
                process.release()

    run_story(process, story)


@pytest.mark.parametrize(
    ("see", "reason"),
    [
        ("Findings((None,) * 10**6)", "returned 1000000 devices, more than 4096"),
        ("None", "discover returned NoneType in place of Findings"),
        ("Findings(None)", "it raised TypeError"),
        ("Findings(backends=(Backend('a b', 'pci'),))", "describes its backends wrongly"),
        ("Findings(backends=(Backend('a', 'pci'),) * 257)", "describes its backends wrongly"),
    ],
)
def test_a_report_with_too_many_or_wrong_findings_has_the_reason_as_error(see: str, reason: str) -> None:
    process = start_actor(see)

    async def story() -> None:
        for _ in range(2):
            assert reason in (await process.discover()).error

    run_story(process, story)


def test_invalid_devices_become_faults_and_do_not_affect_valid_ones() -> None:
    device = "Device('{}', 'GPU', '10de', 'T4')"
    devices = [device.format(key) for key in ("good", "\\ud800", "a\\0b", "", "x" * 300)]
    faults = "Fault('', 'r'), Fault('s' * 300, '\\ud800')"
    process = start_actor(f"Findings(({', '.join(devices)}, None), ({faults}))")

    async def story() -> None:
        report = await process.discover()
        assert [device.key for device in report.devices] == ["good"]
        assert [fault.subject[:9] for fault in report.faults] == [
            "…",
            "s" * 9,
            "?",
            "a b",
            "Device",
            "x" * 9,
            "NoneType",
        ]

    run_story(process, story)


def test_concurrent_calls_of_a_driver_run_in_their_order() -> None:
    process = start_actor("time.sleep(0.05) or Findings()")
    done: list[str] = []

    async def story() -> None:
        async def look(name: str) -> None:
            await process.discover()
            done.append(name)

        async def plan() -> None:
            assert await process.plan("install", Ask("k", layout={"do": "Plan()"})) == Plan()
            done.append("plan")

        await asyncio.gather(look("first"), plan(), look("second"))

    run_story(process, story)
    assert done == ["first", "plan", "second"]


def test_a_release_reaches_the_driver_once_before_its_next_call() -> None:
    process = start_actor("Findings(faults=(Fault(str(releases), 'r'),))")

    async def story() -> None:
        said = [(await process.discover()).faults[0].subject]
        process.release()
        said += [(await process.discover()).faults[0].subject for _ in range(2)]
        assert said == ["0", "1", "1"]

    run_story(process, story)


def test_the_agent_looks_at_the_hosts_processes_in_place_of_the_driver() -> None:
    machine = Machine("n")
    machine.open_nodes = OpenNodes({"c226:0": ("Xorg",)})
    process = start_actor("Findings(faults=(Fault('seen', repr(machine.list_open_nodes().users)),))", machine=machine)

    async def story() -> None:
        assert (await process.discover()).faults == (Fault("seen", "{'c226:0': ('Xorg',)}"),)

    run_story(process, story)


def test_health_also_gets_the_open_nodes_because_the_driver_may_have_to_discover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine("n")
    machine.open_nodes = OpenNodes({"c226:0": ("Xorg",)})
    process, sent = start_actor(machine=machine), []
    send_request = process._send_request

    async def record(call: CallName, deadline_s: float, **fields: object) -> DriverAnswer:
        sent.append((call, fields.get("open_nodes")))
        return await send_request(call, deadline_s, **fields)

    monkeypatch.setattr(process, "_send_request", record)

    async def story() -> None:
        await process.health(Ask("k", layout={"do": "1"}))
        assert sent == [("health", machine.open_nodes)]

    run_story(process, story)


def test_an_error_of_the_look_at_the_hosts_processes_is_told_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine("n")

    def fail() -> OpenNodes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(machine, "list_open_nodes", fail)
    process = start_actor("Findings(faults=(Fault('seen', machine.list_open_nodes().unseen),))", machine=machine)

    async def story() -> None:
        report = await process.discover()
        assert report.faults == (Fault("seen", "the processes of the host cannot be looked at: Input/output error"),)

    run_story(process, story)


def test_a_look_at_the_hosts_processes_that_hangs_delays_a_call_only_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, end, starts = Machine("n"), threading.Event(), []

    def hang() -> OpenNodes:
        starts.append(threading.current_thread())
        end.wait()
        return OpenNodes({"c226:0": ("Xorg",)})

    monkeypatch.setattr(machine, "list_open_nodes", hang)
    monkeypatch.setattr("drivers.isolation.runner.SCAN_S", 0.2)
    process = start_actor("Findings(faults=(Fault('seen', repr(machine.list_open_nodes())),))", machine=machine)

    async def story() -> None:
        for _ in range(2):
            report = await process.discover()
            assert "takes more than 0.2 s" in report.error and not report.faults, "the devices stay as they were"
            assert "restart the host if one hangs for ever" in report.error, "the text says what to do next"
            await process.probe()  # other calls are made, and the driver is told that nothing was seen
            process.manifest = msgspec.structs.replace(process.manifest, subsystems=("pci",))
        assert len(starts) == 1 and starts[0].daemon, "one thread hangs, and nothing waits for it"
        end.set()
        await asyncio.to_thread(starts[0].join, 5)
        assert "Xorg" in (await process.discover()).faults[0].reason

    guard = threading.Timer(20, end.set)  # without a time-out the test fails instead of hanging
    guard.start()
    run_story(process, story)
    guard.cancel()


def test_a_call_that_the_driver_lacks_raises_unsupported() -> None:
    process = start_actor()

    async def story() -> None:
        for call in (process.plan("reset", Ask("k")), process.health(Ask("k"))):
            with pytest.raises(KINDS["Unsupported"]):
                await call
        assert await process.probe() == process.manifest.unconfined

    run_story(process, story)


def test_missing_kernel_confinement_is_probed_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    code = (
        "import sys\nfrom drivers.isolation import driver_main, sandbox\n"
        "sandbox.LANDLOCK_CREATE_RULESET = 100_000\nsandbox.SYSCALL_NUMBERS.clear()\nsys.exit(driver_main.main())"
    )
    process = DriverProcess("fake_driver", "n", {}, command=[sys.executable, "-c", code, "fake_driver"])

    async def story() -> None:
        first, second = await process.probe()
        assert "from writing to this host: Function not implemented" in first
        assert "from starting processes: no filter is known for" in second
        await process.close()
        process.release()
        assert (await process.discover()).error == ""

    run_story(process, story)
    assert len(caplog.records) == 2
