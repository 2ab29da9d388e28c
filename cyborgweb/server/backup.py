"""Makes and restores backups.

A backup is a folder with a `pg_dump` of the database, the files that cannot be made again, and `backup.json`, which
describes both. It is taken while everything runs, and restored while nothing runs. After `load`,
`cyborgweb.server.after_restore` must prepare the database before anybody uses it.
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
"""Files of the state directory that are part of a backup if they exist."""
LOOK_S = 0.2
"""Seconds between two calls of `progress`."""
Progress = Callable[[int], None]
TABLES = """SELECT count(*) FROM pg_class
WHERE relkind IN ('r', 'p') AND relnamespace = current_schema()::regnamespace"""
OTHERS = """SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
  AND coalesce(backend_type, 'client backend') = 'client backend'"""


class BackupError(RuntimeError):
    """The backup or restore is not possible. The message says why and what to do, in one sentence."""


class About(msgspec.Struct, frozen=True):
    """The content of `backup.json`. `migrations` are the applied ones, which show the database's release.

    `postgresql` is the server's major version.
    """

    taken_at: datetime
    postgresql: int
    migrations: tuple[str, ...]
    files: tuple[str, ...]


def take(folder: Path, progress: Progress) -> About:
    """Write a backup to the new folder, completely or not at all, and return its description.

    `progress` is called with the size of the dump in bytes while it grows. Raises BackupError, PostgresError.
    """
    if folder.exists():
        raise BackupError(f"{folder} exists already: name a new folder for the backup")
    made = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(made, ignore_errors=True)  # left by an interrupted backup
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
    """Return the description of the backup in the folder. Raises BackupError, also if it is of a later release."""
    try:
        about = msgspec.json.decode((folder / ABOUT).read_bytes(), type=About)
    except OSError as error:
        raise BackupError(f"{folder} is not a backup: {ABOUT} cannot be read ({error.strerror})") from None
    except msgspec.DecodeError as error:
        raise BackupError(f"{folder} is not a backup of this release: {ABOUT}: {error}") from None
    known = {".".join(one) for one in MigrationLoader(None).disk_migrations}
    if later := sorted(set(about.migrations) - known):
        raise BackupError(
            f"{folder} was made by a later release, which has the migration {later[-1]}: restore it with that release"
        )
    return about


def load(folder: Path, about: About) -> None:
    """Restore the dump into the empty database, all or nothing, and put back the files that are missing.

    The secret key is always replaced by the backup's, because the database's secrets are encrypted with that key.
    Raises BackupError, PostgresError.
    """
    words = ["--single-transaction", "--exit-on-error", "--no-owner", "--no-privileges", str(folder / DUMP)]
    _run("pg_restore", words)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    for name in set(about.files) & set(KEPT):
        if name == SECRET or not (keys().state / name).exists():
            write_private(keys().state / name, (folder / name).read_bytes())


def nobody_else() -> None:
    """Raise BackupError if there are other client connections to the database."""
    if others := _count(OTHERS):
        raise BackupError(
            f"the database has {others} other connection{'s' if others > 1 else ''}: stop every web process, cluster"
            " and supervisor first"
        )


def has_tables(wanted: bool) -> None:
    """Raise BackupError if the database is empty but `wanted` is True, or has tables but `wanted` is False."""
    there = _count(TABLES) > 0
    if wanted and not there:
        raise BackupError("the database is empty: nothing has been restored yet")
    if there and not wanted:
        raise BackupError(
            "the database is not empty, and a backup is never restored over another database: name an empty one in"
            f" CYBORG_DATABASE_URL, or move the folder {keys().state / 'postgres'} away"
        )


@contextmanager
def database(alone: bool) -> Iterator[None]:
    """Make sure that the database runs inside the `with` block.

    If the product does not run, the embedded database is started, and stopped at the end. With `alone`, raise
    BackupError if the product runs on this state directory; its lock is held during the block. Raises PostgresError
    when the embedded database cannot be started.
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
    """Try to take the supervisor's lock of the state directory. Return whether it was free; does not wait."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _run(name: str, words: list[str], written: Path | None = None, progress: Progress | None = None) -> None:
    """Run `pg_dump` or `pg_restore` on our database, and call `progress` with the size of the file `written`.

    The password is passed in its environment, which other users cannot read. Raises BackupError if it fails.
    """
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
    """Return the major version of the PostgreSQL server to which we are connected."""
    connection.ensure_connection()
    return int(connection.connection.info.server_version) // 10_000


def _count(statement: str) -> int:
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return int(cursor.fetchone()[0])
