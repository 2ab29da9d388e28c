"""The product as a user starts it: `python -m cyborgweb.server.supervisor` over a state directory, looked at from
outside.

Used by every test of this lane. Whatever happens to the test, the supervisor is on a leash and dies with it.
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

from cyborgweb.database.postgres import Postgres, socket_folder
from tests.support.migrated import copy_migrated
from tests.support.webserver import until
from tests.system import processes
from tests.system.processes import Process

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0
ANSWER_S = 10.0
STOP_S = 10.0
"""The promise: how long the supervisor may take to stop everything."""
SERVES = {
    "web": "cyborgweb.server.web",
    "ingest": "manage.py cluster ingest",
    "work": "manage.py cluster work",
    "agent": "agents.host.main",
}
"""What in a child's command tells who it is."""


def environment(**more: str) -> dict[str, str]:
    """The tester's environment without what configures the product, plus `more`."""
    dropped = ("CYBORG_", "DJANGO_", "Q_CLUSTER", "PYTEST_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped) or k == "CYBORG_PG_BIN"}
    return kept | {"PYTHONDONTWRITEBYTECODE": "1", "CYBORG_LISTEN": "127.0.0.1:0"} | more


@dataclass
class Product:
    """One installation. `state` is its state directory, `before` the words before the command (such as setpriv).

    A new installation begins with a copy of a migrated database (`tests.support.migrated`), which saves each test some
    seconds. `from_nothing` has the product make its database itself, as on a user's machine; so has `before`, because
    the copy belongs to the tester.
    """

    state: Path
    settings: dict[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    from_nothing: bool = False
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    seen: set[Process] = field(default_factory=set)
    database: Path | None = None
    """The folder of the database's socket, where the product has not started the database itself."""
    _log_from: int = 0

    def __post_init__(self) -> None:
        self.log_file = next(path for path in self.state.parents if path.is_dir()) / "said.log"

    def begin(self) -> None:
        """Start the supervisor in a process group of its own; does not wait."""
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
            copy_migrated(server)

    def start(self) -> Product:
        """Start it, and wait until it answers with 200."""
        self._prepare_database()
        self.begin()
        self.until_serving()
        return self

    def until_serving(self) -> None:
        """Wait for the console's address on the log, then for /healthz."""
        self.port = int(self.until_said(r"console: http://[^ ]*:(\d+)/admin/", START_S)[1])
        until(lambda: self.get("/healthz")[0] == 200, START_S)

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
        """The supervisor."""
        assert self.process
        return self.process.pid

    def log(self) -> str:
        """What it has said since its last start."""
        with self.log_file.open("rb") as file:
            file.seek(self._log_from)
            return file.read().decode(errors="replace")

    def mark(self) -> int:
        """A place on the log, for `until_said`."""
        return len(self.log())

    def until_said(self, pattern: str, deadline_s: float = 30.0, after: int = 0) -> re.Match[str]:
        """Wait until the log says it; fails with the log when the supervisor ends first."""

        def found() -> re.Match[str] | None:
            said = re.search(pattern, self.log()[after:])
            assert said or self.process is None or self.process.poll() is None, self.log()[-4000:]
            return said

        return self.until(found, deadline_s, pattern)

    def until(self, condition: Callable[[], Any], deadline_s: float, what: str | Callable[[], str]) -> Any:
        """Wait for a condition; a failure says `what` was waited for, and shows the end of the log."""
        try:
            return until(condition, deadline_s)
        except AssertionError as error:
            said = what if isinstance(what, str) else what()
            raise AssertionError(f"{said}: {error}\n{self.log()[-4000:]}") from None

    def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        """Status and body; (0, b"") where nobody answers."""
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
        """A decoded answer; {} unless it is 200."""
        status, body = self.get(path, X_Auth_Token=token)
        return json.loads(body) if status == 200 else {}

    def rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows; psycopg.OperationalError while the database is away."""
        where = str(self.database or socket_folder(self.state / "postgres" / "run"))
        with psycopg.connect(host=where, user="postgres", dbname="cyborg", connect_timeout=5) as connection:
            return connection.execute(statement, values).fetchall()

    def rows_or_empty(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Do the same, but return [] while the database is away.

        Only for a condition that is waited for, that [] does not fulfil, and during which the database may be killed.
        """
        try:
            return self.rows(statement, *values)
        except psycopg.OperationalError:
            return []

    def manage(self, *words: str) -> list[str]:
        """`manage.py …`: its lines."""
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

    def child(self, name: str) -> Process | None:
        """The process the supervisor started as `name`; None while there is none."""
        found = [p for p in processes.everything() if p.parent == self.pid and SERVES[name] in p.command]
        return found[-1] if found else None

    def postmaster(self) -> Process | None:
        """PostgreSQL's first process."""
        data = f"{self.state}/postgres/data"
        found = [p for p in processes.everything() if p.parent == self.pid and data in p.command]
        return found[-1] if found else None

    def workers(self, cluster: str, count: int) -> list[Process]:
        """The `count` workers of a cluster: django-q2's sentinel starts them before its monitor and its pusher."""
        guard = self.child(cluster)
        sentinels = [p for p in processes.below(guard.pid) if p.parent == guard.pid] if guard else []
        forks = [p for p in processes.below(sentinels[0].pid)] if sentinels else []
        return forks[:count] if len(forks) >= count + 2 else []

    def descendants(self, top: Process) -> list[Process]:
        """Everything below one of its processes."""
        return processes.below(top.pid)

    def drivers(self) -> list[Process]:
        """The agent's driver processes."""
        agent = self.child("agent")
        return [p for p in processes.below(agent.pid) if "drivers.isolation.driver_main" in p.command] if agent else []

    def remember(self) -> set[Process]:
        """Note all that runs for it now, so that `left` knows also what bears no trace of the state directory."""
        self.seen |= set(processes.below(self.pid)) | set(processes.touching(self.state))
        return self.seen

    def left(self) -> list[Process]:
        """What still runs of it, the supervisor included."""
        return list(set(processes.touching(self.state)) | set(processes.alive(self.seen)))

    def interrupt(self, sig: signal.Signals = signal.SIGTERM) -> int:
        """Signal the process group as a terminal does; the exit code, within the promised time."""
        assert self.process
        if self.process.poll() is None:
            self.remember()
            os.killpg(self.process.pid, sig)
        begin = time.monotonic()
        try:
            status = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there {STOP_S} s after {sig.name}\n{self.log()[-4000:]}") from None
        print(f"the supervisor has stopped: {time.monotonic() - begin:.2f} s of at most {STOP_S} s")
        return status

    def kill(self) -> None:
        """SIGKILL to the supervisor alone; nobody gets to say goodbye. `remember` first, which takes a while."""
        assert self.process
        self.process.kill()
        self.process.wait()

    def nothing_left(self, deadline_s: float = STOP_S) -> None:
        """Wait until nothing of it runs."""
        self.until(lambda: not self.left(), deadline_s, lambda: f"still running: {self.left()}")


@contextmanager
def running(product: Product) -> Iterator[Product]:
    """Started; at the end stopped, and nothing left, whatever happened between."""
    try:
        yield product.start()
    finally:
        try:
            if product.process and product.process.poll() is None:
                product.interrupt()
        finally:
            sweep(product)


def sweep(product: Product) -> None:
    """See that nothing is left; what is left all the same is killed before the failure is told."""
    try:
        product.nothing_left()
    finally:
        for one in product.left():
            os.kill(one.pid, signal.SIGKILL)
        if product.process:
            product.process.wait()
