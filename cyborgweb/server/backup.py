"""A backup is a folder: the database as `pg_dump` has it, files nobody can make again, and `backup.json` about both.

Called by `manage.py backup`, while everything runs, and by `manage.py restore`, while nothing does. What a restored
database needs before anybody uses it is `cyborgweb.server.after_restore`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from django.db import connection, connections
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from psycopg.conninfo import make_conninfo

from cyborgweb.database import libpq
from cyborgweb.database.postgres import Postgres, program
from cyborgweb.server import tls
from cyborgweb.settings.keys import keys
from drivers.files import sync_directory, write_private

DUMP, ABOUT = "database.dump", "backup.json"
SECRET = "secret-key"
KEPT = (SECRET, tls.FILE, "policy.yaml", "drivers.toml")
"""Files of the state directory that belong to a backup, where they are."""
LOOK_S = 0.2
Progress = Callable[[int], None]
TABLES = """SELECT count(*) FROM pg_class
WHERE relkind IN ('r', 'p') AND relnamespace = current_schema()::regnamespace"""
OTHERS = """SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
  AND coalesce(backend_type, 'client backend') = 'client backend'"""


class BackupError(RuntimeError):
    """It cannot be backed up, or restored, like this; one sentence that says what to do."""


class About(msgspec.Struct, frozen=True):
    """What `backup.json` says. `migrations` are those that had been applied: of which release the database was."""

    taken_at: datetime
    postgresql: int
    migrations: tuple[str, ...]
    files: tuple[str, ...]


def take(folder: Path, progress: Progress) -> About:
    """Make the folder, complete or not at all; `progress` is told the dump's bytes. Raises BackupError,
    PostgresError."""
    if folder.exists():
        raise BackupError(f"{folder} is there already: a backup is a folder of its own")
    made = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(made, ignore_errors=True)  # left by one that was broken off
    try:
        made.mkdir(mode=0o700, parents=True)
        at, state = datetime.now(UTC), keys().state
        (made / DUMP).touch(mode=0o600)
        words = ["--format=custom", "--no-owner", "--no-privileges", "--file", str(made / DUMP)]
        _run("pg_dump", words, made / DUMP, progress)
        files = tuple(name for name in KEPT if (state / name).exists())
        for name in files:
            write_private(made / name, (state / name).read_bytes())
        applied = sorted(".".join(one) for one in MigrationRecorder(connection).applied_migrations())
        about = About(at, _server(), tuple(applied), files)
        write_private(made / ABOUT, msgspec.json.format(msgspec.json.encode(about)))
        made.rename(folder)
        sync_directory(folder.parent)
    except OSError as error:
        raise BackupError(f"{made} cannot be written: {error.strerror}") from None
    return about


def read(folder: Path) -> About:
    """What the folder holds. Raises BackupError, also for a backup of a later release than this."""
    try:
        about = msgspec.json.decode((folder / ABOUT).read_bytes(), type=About)
    except OSError as error:
        raise BackupError(f"{folder} is no backup: {ABOUT} cannot be read ({error.strerror})") from None
    except msgspec.DecodeError as error:
        raise BackupError(f"{folder} is no backup of this release: {ABOUT}: {error}") from None
    known = {".".join(one) for one in MigrationLoader(None).disk_migrations}
    if later := sorted(set(about.migrations) - known):
        raise BackupError(f"{folder} is of a later release, which knows {later[-1]}: restore it with that one")
    return about


def load(folder: Path, about: About) -> None:
    """Fill the empty database, all or nothing, and put back the files that are missing.

    The secret key is always the backup's: what is encrypted in its database was so with that one.
    """
    words = ["--single-transaction", "--exit-on-error", "--no-owner", "--no-privileges", str(folder / DUMP)]
    _run("pg_restore", words)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    for name in set(about.files) & set(KEPT):
        if name == SECRET or not (keys().state / name).exists():
            write_private(keys().state / name, (folder / name).read_bytes())


def nobody_else() -> None:
    """Raises BackupError while somebody is connected to the database."""
    if others := _count(OTHERS):
        raise BackupError(
            f"{others} other connections to the database: stop every web process, cluster and supervisor first"
        )


def has_tables(wanted: bool) -> None:
    """Raises BackupError unless it is so that the database has tables, or that it is empty."""
    there = _count(TABLES) > 0
    if wanted and not there:
        raise BackupError("the database is empty: nothing has been restored yet")
    if there and not wanted:
        raise BackupError(
            "the database is not empty, and nothing is ever restored over another one: name an empty one in"
            f" CYBORG_DATABASE_URL, or move the folder {keys().state / 'postgres'} away"
        )


@contextmanager
def database(alone: bool) -> Iterator[None]:
    """The database answers: the embedded one is started for so long where the product does not run.

    `alone`: raises BackupError where it does. Raises PostgresError when it cannot be started.
    """
    settings = keys()
    if settings.database_url and not alone:
        yield
        return
    settings.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (settings.state / "lock").open("a") as lock:
        runs = not _taken(lock.fileno())
        if runs and alone:
            raise BackupError(f"the product runs on {settings.state}: stop it first")
        if runs or settings.database_url:
            yield
            return
        postgres = Postgres(settings.state / "postgres", settings.pg_bin)
        try:
            postgres.start()
            postgres.ensure_database("cyborg")
            yield
        finally:
            connections.close_all()
            postgres.stop()


def _taken(lock: int) -> bool:
    """The supervisor's own lock of its state directory, if nobody has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _run(name: str, words: list[str], written: Path | None = None, progress: Progress | None = None) -> None:
    """One of PostgreSQL's programs on our database. The password is in its environment, which others cannot read."""
    where = libpq.parameters()
    environment = os.environ | {"PGPASSWORD": where.pop("password", "")}
    command = [program(name, _server(), keys().pg_bin), "--dbname", make_conninfo("", **where), *words]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as running:
        said = ""
        while running.returncode is None:
            try:
                _, said = running.communicate(timeout=LOOK_S)
            except subprocess.TimeoutExpired:
                if written and progress and written.exists():
                    progress(written.stat().st_size)
    if running.returncode:
        raise BackupError(f"{name} failed: {said.strip()[-500:]}")


def _server() -> int:
    """The major version of the server we are connected to."""
    connection.ensure_connection()
    return int(connection.connection.info.server_version) // 10_000


def _count(statement: str) -> int:
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return int(cursor.fetchone()[0])
