"""Run the product as a user does (`python -m cyborgweb.server.supervisor` on a state directory), and observe it from
outside.

The supervisor is started with `--leash`, so it ends when the test process ends, however that happens.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cyborgweb.database.postgres import Postgres, choose_socket_folder
from tests.support import callguard
from tests.support.environment import without_settings
from tests.support.migrated import copy_migrated
from tests.support.webserver import until
from tests.system import processes
from tests.system.processes import ObservedProcess

ROOT = Path(__file__).resolve().parents[2]
GUARD = ROOT / "tests/support/startup"
START_S = 60.0
ANSWER_S = 10.0
STOP_S = 10.0
"""Seconds that the supervisor may take to stop everything, as promised."""
SERVES = {
    "web": "cyborgweb.server.web_server",
    "ingest": "manage.py cluster ingest",
    "work": "manage.py cluster work",
    "agent": "agents.host.main",
}
"""For each process of the supervisor, the part of its command line that identifies it."""


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without the variables that configure the product, plus `more`.

    Processes that are started with it refuse calls to other services inside transactions (`tests.support.callguard`).
    """
    product = {"PYTHONDONTWRITEBYTECODE": "1", "CYBORG_LISTEN": "127.0.0.1:0", "PYTHONPATH": str(GUARD)}
    return without_settings() | product | more


@dataclass
class Product:
    """One installation. `state` is its state directory, `before` the words to put before the command (such as setpriv).

    A new installation begins with a copy of a migrated database (`tests.support.migrated`), which saves each test some
    seconds. With `from_nothing` the product makes its database itself, as on a user's machine; also with `before`,
    because the copy belongs to the user who runs the tests.
    """

    state: Path
    settings: dict[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    from_nothing: bool = False
    copy_database: Callable[[Postgres], object] = copy_migrated
    """Puts the database of a new installation in place; `tests.support.migrated.copy_prepared` shows how."""
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    seen: set[ObservedProcess] = field(default_factory=set)
    database: Path | None = None
    """The folder of the database's socket, where the product has not started the database itself."""
    _log_from: int = 0

    def __post_init__(self) -> None:
        self.log_file = next(path for path in self.state.parents if path.is_dir()) / "said.log"

    def start_process(self) -> None:
        """Start the supervisor in its own process group; do not wait for it."""
        self._log_from = self.log_file.stat().st_size if self.log_file.exists() else 0
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.before, sys.executable, "-m", "cyborgweb.server.supervisor", "--leash", *self.options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=environment(CYBORG_STATE_DIR=str(self.state), **self.settings),
                process_group=0,
            )

    def _prepare_database(self) -> None:
        server = Postgres(self.state / "postgres", os.environ.get("CYBORG_PG_BIN", ""))
        own_database = "CYBORG_DATABASE_URL" not in self.settings
        if own_database and not (self.from_nothing or self.before or self.state.exists()):
            self.state.mkdir(parents=True, mode=0o700)
            self.copy_database(server)

    def start(self) -> Product:
        """Start the product, and wait until /healthz answers with 200."""
        self._prepare_database()
        self.start_process()
        self.until_serving()
        return self

    def until_serving(self) -> None:
        """Wait until the log names the console's address, keep its port, then wait until /healthz answers with 200."""
        self.port = int(self.wait_for_log(r"console: http://[^ ]*:(\d+)/admin/", START_S)[1])
        until(lambda: self.get("/healthz")[0] == 200, START_S)

    @contextmanager
    def required_during_test(self) -> Iterator[None]:
        """Fail the test if the product is dead before the block or dies during it."""
        self.require_running("before this test began")
        yield
        self.require_running("while this test ran")

    def require_running(self, when: str) -> None:
        """Fail the test, and say that the product died `when`, unless its supervisor runs and it answers."""
        assert self.process
        ended = self.process.poll

        def answers_or_ended() -> bool:
            return ended() is not None or self.get("/healthz")[0] == 200

        try:
            until(answers_or_ended, ANSWER_S)
            if ended() is None:
                return
            what = f"its supervisor ended with status {ended()}"
        except AssertionError:
            what = "its supervisor runs, but nobody answers at its address"
        pytest.fail(f"The shared product died {when}: {what}. Its log ends:\n{self.log()[-4000:]}", pytrace=False)

    @property
    def pid(self) -> int:
        """The process id of the supervisor."""
        assert self.process
        return self.process.pid

    def log(self) -> str:
        """Return the log since the last start."""
        with self.log_file.open("rb") as file:
            file.seek(self._log_from)
            return file.read().decode(errors="replace")

    def log_position(self) -> int:
        """Return the current position in the log, for the argument `after` of `wait_for_log`."""
        return len(self.log())

    def wait_for_log(self, pattern: str, deadline_s: float = 30.0, after: int = 0) -> re.Match[str]:
        """Wait until the log after `after` matches `pattern`; return the match.

        Fails with the end of the log if the supervisor ends first.
        """

        def found() -> re.Match[str] | None:
            said = re.search(pattern, self.log()[after:])
            assert said or self.process is None or self.process.poll() is None, self.log()[-4000:]
            return said

        return self.until(found, deadline_s, pattern)

    def until(self, condition: Callable[[], Any], deadline_s: float, what: str | Callable[[], str]) -> Any:
        """Wait for a condition and return its value; a failure names `what` and shows the end of the log."""
        try:
            return until(condition, deadline_s)
        except AssertionError as error:
            said = what if isinstance(what, str) else what()
            raise AssertionError(f"{said}: {error}\n{self.log()[-4000:]}") from None

    def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        """Send a GET and return status and body; (0, b"") if the connection fails."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path, headers={k.replace("_", "-"): v for k, v in headers.items()})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except OSError:
            return 0, b""
        finally:
            connection.close()

    def json(self, path: str, token: str) -> Any:
        """Send a GET with a token and return the decoded answer; {} unless the status is 200."""
        status, body = self.get(path, X_Auth_Token=token)
        return json.loads(body) if status == 200 else {}

    def rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows. Raises psycopg.OperationalError while the database is down."""
        where = str(self.database or choose_socket_folder(self.state / "postgres" / "run"))
        with psycopg.connect(host=where, user="postgres", dbname="cyborg", connect_timeout=5) as connection:
            return connection.execute(statement, values).fetchall()

    def rows_or_empty(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows; return [] while the database is down.

        Use it only in a condition that is polled and that [] does not satisfy, while the database may be killed.
        """
        try:
            return self.rows(statement, *values)
        except psycopg.OperationalError:
            return []

    def manage(self, *words: str) -> list[str]:
        """Run `manage.py` with these arguments and return its output lines; fail if it exits with an error."""
        done = subprocess.run(
            [*self.before, sys.executable, ROOT / "manage.py", *words],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            env=environment(CYBORG_STATE_DIR=str(self.state), **self.settings),
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def child(self, name: str) -> ObservedProcess | None:
        """Return the supervisor's child process `name` (a key of SERVES); None while there is none."""
        found = [p for p in processes.list_processes() if p.parent == self.pid and SERVES[name] in p.command]
        return found[-1] if found else None

    def postmaster(self) -> ObservedProcess | None:
        """Return PostgreSQL's main process; None while there is none."""
        data = f"{self.state}/postgres/data"
        found = [p for p in processes.list_processes() if p.parent == self.pid and data in p.command]
        return found[-1] if found else None

    def workers(self, cluster: str, count: int) -> list[ObservedProcess]:
        """Return the `count` workers of a cluster; [] until all of its processes run.

        django-q2's sentinel starts the workers before its monitor and its pusher, so they are its first children.
        """
        guard = self.child(cluster)
        sentinels = [p for p in processes.list_descendants(guard.pid) if p.parent == guard.pid] if guard else []
        forks = [p for p in processes.list_descendants(sentinels[0].pid)] if sentinels else []
        return forks[:count] if len(forks) >= count + 2 else []

    def descendants(self, top: ObservedProcess) -> list[ObservedProcess]:
        """Return all descendants of the process `top`."""
        return processes.list_descendants(top.pid)

    def drivers(self) -> list[ObservedProcess]:
        """Return the agent's driver processes."""
        agent = self.child("agent")
        return (
            [p for p in processes.list_descendants(agent.pid) if "drivers.isolation.driver_main" in p.command]
            if agent
            else []
        )

    def remember_processes(self) -> set[ObservedProcess]:
        """Record all processes of the product, and return all that were recorded so far.

        `list_left_processes` then also finds those that do not mention the state directory.
        """
        self.seen |= set(processes.list_descendants(self.pid)) | set(processes.list_users_of_folder(self.state))
        return self.seen

    def list_left_processes(self) -> list[ObservedProcess]:
        """Return the processes of the product that still run, including the supervisor."""
        return list(set(processes.list_users_of_folder(self.state)) | set(processes.still_running(self.seen)))

    def interrupt(self, sig: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal to the process group, as a terminal does, and return the supervisor's exit code.

        Fails if the supervisor has not ended within the promised time (STOP_S).
        """
        assert self.process
        if self.process.poll() is None:
            self.remember_processes()
            os.killpg(self.process.pid, sig)
        begin = time.monotonic()
        try:
            status = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there {STOP_S} s after {sig.name}\n{self.log()[-4000:]}") from None
        print(f"the supervisor has stopped: {time.monotonic() - begin:.2f} s of at most {STOP_S} s")
        return status

    def kill(self) -> None:
        """Kill the supervisor alone with SIGKILL, so that it cannot stop its children.

        Call `remember_processes` first; it is not called here because it takes a while.
        """
        assert self.process
        self.process.kill()
        self.process.wait()

    def wait_until_nothing_is_left(self, deadline_s: float = STOP_S) -> None:
        """Wait until no process of the product runs; fail with a list of those that do."""
        self.until(
            lambda: not self.list_left_processes(), deadline_s, lambda: f"still running: {self.list_left_processes()}"
        )


@contextmanager
def running(product: Product) -> Iterator[Product]:
    """Start the product for the block; at its end stop the product, and fail if any of its processes still runs, or if
    one has called another service inside a transaction."""
    try:
        yield product.start()
    finally:
        try:
            if product.process and product.process.poll() is None:
                product.interrupt()
        finally:
            wait_and_kill_remaining(product)
    assert callguard.MESSAGE not in product.log(), product.log()[-4000:]


def wait_and_kill_remaining(product: Product) -> None:
    """Wait until no process of the product runs; if some do not end in time, kill them and fail."""
    try:
        product.wait_until_nothing_is_left()
    finally:
        for one in product.list_left_processes():
            os.kill(one.pid, signal.SIGKILL)
        if product.process:
            product.process.wait()
