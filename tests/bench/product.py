"""The whole product as `make up` starts it, on the bench's state directory: one command with all its children."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.lab import Lab
from tests.bench.remote_calls import ROOT, MeasurementError

AGENTS = re.compile(r"agents: https://127\.0\.0\.1:(\d+) \(certificate sha256:([0-9a-f]{64})\)")
CONSOLE = re.compile(r"console: http://127\.0\.0\.1:(\d+)/")
FREE_PORTS = {"CYBORG_LISTEN": "127.0.0.1:0", "CYBORG_AGENT_LISTEN": "127.0.0.1:0"}
PATIENCE_S = 60.0
STOP_S = 15.0


@dataclass
class RunningProduct:
    """A running installation."""

    supervisor: int
    port: int
    tls_port: int
    fingerprint: str
    """The fingerprint of the certificate at `tls_port`, which only agents use."""

    def child(self, word: str, of: int = 0) -> int:
        """Return the process id of the child whose command line has `word`; raise MeasurementError without one."""
        found = [pid for pid in list_children(of or self.supervisor) if word in get_command_line(pid)]
        if not found:
            raise MeasurementError(f"{word} does not run")
        return found[0]


@contextmanager
def run_product(lab: Lab, **settings: str) -> Iterator[RunningProduct]:
    """Run `python -m cyborgweb.server.supervisor` inside the context; it dies with this process."""
    log_file = lab.home / "serve.log"
    process = start_supervisor(log_file, settings)
    try:
        found = wait_for(lambda: CONSOLE.search(log_file.read_text()), "its console's address", process)
        port = int(found[1])
        wait_for(lambda: _is_ready(port), "/readyz", process)
        agents = AGENTS.search(log_file.read_text())
        assert agents  # printed before the line of the console
        yield RunningProduct(process.pid, port, int(agents[1]), agents[2])
    finally:
        stop_supervisor(process)


def start_supervisor(log_file: Path, settings: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start `python -m cyborgweb.server.supervisor` at free ports, with its output in `log_file`; it dies with us."""
    environment = os.environ | FREE_PORTS | {"PYTHONUNBUFFERED": "1"} | settings
    command = [sys.executable, "-m", "cyborgweb.server.supervisor", "--leash"]
    with log_file.open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environment)


def stop_supervisor(process: subprocess.Popen[bytes]) -> None:
    """Ask the supervisor to stop; kill it if it has not ended after STOP_S."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_for(
    condition: Callable[[], Any],
    what: str,
    process: subprocess.Popen[bytes] | None = None,
    patience_s: float = PATIENCE_S,
) -> Any:
    """Return the first true result of `condition`; raise MeasurementError after `patience_s` or if `process` ends."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end and (process is None or process.poll() is None):
        if found := condition():
            return found
        time.sleep(0.02)
    raise MeasurementError(f"{what}: not within {patience_s:.0f} s")


def _is_ready(port: int) -> bool:
    try:
        return get(port, "/readyz")[0] == 200
    except OSError:
        return False


def get(port: int, path: str, token: str = "") -> tuple[int, bytes]:
    """Send a GET; return status and body."""
    return _call("GET", port, path, token)


def post(port: int, path: str, token: str, body: object) -> tuple[int, bytes]:
    """Send a POST with a JSON body; return status and body."""
    return _call("POST", port, path, token, json.dumps(body), {"Content-Type": "application/json"})


def delete(port: int, path: str, token: str) -> tuple[int, bytes]:
    """Send a DELETE; return status and body."""
    return _call("DELETE", port, path, token)


def _call(
    method: str, port: int, path: str, token: str, body: str | None = None, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        client.request(method, path, body, {**(headers or {}), **({"X-Auth-Token": token} if token else {})})
        answer = client.getresponse()
        return answer.status, answer.read()
    finally:
        client.close()


def api_token() -> str:
    """Create an admin token with `manage.py api_token`, as an operator does, and return it."""
    done = subprocess.run(
        [sys.executable, "manage.py", "api_token", "bench"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    if done.returncode:
        raise MeasurementError(f"no API token: {done.stderr.strip()[-300:]}")
    return done.stdout.split()[-1]


def list_children(pid: int) -> list[int]:
    """Return the process ids of the children of all threads of a process, sorted."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        found += [int(word) for word in (thread / "children").read_text().split()]
    return sorted(found)


def get_command_line(pid: int) -> str:
    """Return the command line of a process; '' if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def pin_process(pid: int, cores: set[int]) -> None:
    """Pin all threads of a process to `cores`."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), cores)
