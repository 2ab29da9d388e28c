"""The place where the bench works: a temporary state directory with one durable database, servers and a load generator.

Every process started here ends when this one ends, even if this one is killed. The generator runs on the last core,
servers run on the first. PostgreSQL is not pinned, so on two cores it shares them with both; for this reason most rows
are ratios and not rates.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cyborgweb.database.postgres import Postgres
from tests.bench.remote_calls import ROOT, ChildProcess, MeasurementError

CORES = sorted(os.sched_getaffinity(0))
SERVER_CORE, LOAD_CORE = {CORES[0]}, {CORES[-1]}
READY_S = 30


class Lab:
    """The folder `bench` in the state directory. Entering the context creates it; leaving removes it."""

    def __init__(self, state: Path) -> None:
        self.home = state.absolute() / "bench"
        self.postgres = Postgres(self.home / "postgres", os.environ.get("CYBORG_PG_BIN", ""))
        self._lock: IO[str] | None = None

    def __enter__(self) -> Lab:
        self.home.parent.mkdir(parents=True, exist_ok=True)
        self._lock = (self.home.parent / "bench.lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MeasurementError(f"another bench runs in {self.home}") from None
        self._remove()
        self.home.mkdir(mode=0o700)
        for name in [n for n in os.environ if n.startswith("CYBORG_") and n != "CYBORG_PG_BIN"]:
            del os.environ[name]
        os.environ |= {"CYBORG_STATE_DIR": str(self.home), "DJANGO_SETTINGS_MODULE": "cyborgweb.settings.base"}
        # A few agents stand for thousands here: a host's share of reports would be all that is measured.
        os.environ |= {"CYBORG_HOST_REPORTS_PER_S": "100000", "CYBORG_HOST_REPORT_BYTES_PER_S": str(2**30)}
        return self

    def __exit__(self, *_: object) -> None:
        self.postgres.stop()
        self._remove()
        if self._lock:
            self._lock.close()

    def _remove(self) -> None:
        for folder in (self.home, self.postgres.socket):
            shutil.rmtree(folder, ignore_errors=True)

    def start_database(self) -> None:
        """Start PostgreSQL with durable settings, set up Django in this process and migrate the database."""
        self.postgres.start()
        self.postgres.ensure_database("cyborg")
        import django
        from django.core.management import call_command

        django.setup()
        # The listener of this process would log each stop of the database.
        logging.getLogger("accelerators.runtime.pubsub").setLevel(logging.WARNING)
        call_command("migrate", verbosity=0, interactive=False, skip_checks=True)

    def stop_database(self) -> None:
        """Stop PostgreSQL and keep its data, so that another process can start it on the same data."""
        from django.db import connection

        connection.close()
        self.postgres.stop()

    def open_log(self, name: str) -> IO[bytes]:
        """Open the log file of a child process for appending."""
        return (self.home / f"{name}.log").open("ab")


@contextmanager
def pin_to_cores(cores: set[int]) -> Iterator[None]:
    """Pin this thread to `cores` inside the context."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass
class Server:
    """A child process that serves on `port`."""

    process: subprocess.Popen[bytes]
    port: int

    @property
    def pid(self) -> int:
        """Return the process id of the server."""
        return self.process.pid


@contextmanager
def run_server(lab: Lab, application: str, **environment: str) -> Iterator[Server]:
    """Run `tests.bench.server APPLICATION` on the server's core inside the context."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen(4096)
        port, fd = listener.getsockname()[1], listener.fileno()
        command = [sys.executable, "-m", "tests.bench.server", application, "--fd", str(fd)]
        with lab.open_log(application) as log:
            process = subprocess.Popen(
                command, stderr=log, stdout=log, cwd=ROOT, pass_fds=(fd,), env=_environment(**environment)
            )
    os.sched_setaffinity(process.pid, SERVER_CORE)
    try:
        _wait_until_ready(process, port, application)
        yield Server(process, port)
    finally:
        process.kill()
        process.wait()


def _environment(**more: str) -> dict[str, str]:
    return os.environ | {"CYBORG_PARENT": str(os.getpid()), "PYTHONUNBUFFERED": "1"} | more


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, name: str) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=READY_S) as client:
        client.sendall(b"GET /ws/agent/challenge HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")
        if not client.recv(64).startswith(b"HTTP/1.1 200"):
            raise MeasurementError(f"the server {name} does not answer (exit status {process.poll()})")


class Generator(ChildProcess):
    """The process `tests.bench.load_generator`: `generator.ask("run", group=…)` calls its method `run`."""

    def __init__(self, lab: Lab) -> None:
        with lab.open_log("load") as log:
            super().__init__("tests.bench.load_generator", log)
        os.sched_setaffinity(self.pid, LOAD_CORE)

    def connect(self, group: str, port: int, count: int) -> None:
        """Connect `count` agents; raise MeasurementError if one is refused."""
        if refused := self.ask("connect", group=group, port=port, count=count)["refused"]:
            raise MeasurementError(f"{group}: {sum(refused.values())} agents were refused: {refused}")
