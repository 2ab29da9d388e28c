"""Makes and restores backups.

A backup is a folder with a `pg_dump` of the database, the files that cannot be made again, and `backup.json`, which
describes both. It is taken while everything runs, and restored while nothing runs. After `restore_dump`,
`cyborgweb.server.after_restore` must prepare the database before anybody uses it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from django.db import DatabaseError, connection, connections
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from psycopg.conninfo import make_conninfo

from cyborgweb.database import libpq
from cyborgweb.database.postgres import Postgres, find_client_program
from cyborgweb.errors import CyborgwebError
from cyborgweb.server import tls
from cyborgweb.settings.keys import ANNOUNCEMENTS_FILE, AUDIT_KEY_FILE, get_keys
from drivers.files import sync_directory, write_private

DUMP_FILE, DESCRIPTION_FILE = "database.dump", "backup.json"
SECRET_KEY_FILE = "secret-key"
STATE_FILES = (
    *(SECRET_KEY_FILE, tls.CERTIFICATE_FILE, AUDIT_KEY_FILE),
    *(ANNOUNCEMENTS_FILE, "policy.yaml", "drivers.toml"),
)
"""Files of the state directory that are part of a backup if they exist."""
UNFINISHED_RESTORE_FILE = "restore-unfinished"
"""File of the state directory that exists from the beginning of a restore until the database may be used.

Its first line is the backup's folder, the others identify the backup and the database.
"""
PROGRESS_INTERVAL_S = 0.2
"""Seconds between two calls of `progress`."""
ProgressCallback = Callable[[int], None]
COUNT_TABLES = """SELECT count(*) FROM pg_class
WHERE relkind IN ('r', 'p') AND relnamespace = current_schema()::regnamespace"""
IDENTIFY_DATABASE = """SELECT system_identifier || '/' || oid
FROM pg_control_system(), pg_database WHERE datname = current_database()"""
COUNT_OTHER_CONNECTIONS = """SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
  AND coalesce(backend_type, 'client backend') = 'client backend'"""


class BackupError(CyborgwebError):
    """The backup or restore is not possible. The message says why and what to do, in one sentence."""


class BackupDescription(msgspec.Struct, frozen=True):
    """The content of `backup.json`. `migrations` are the applied ones (`app.name`), which show the database's release.

    `postgresql` is the server's major version; `files` are the names of the files of the state directory in the backup.
    """

    taken_at: datetime
    postgresql: int
    migrations: tuple[str, ...]
    files: tuple[str, ...]


def create_backup(folder: Path, progress: ProgressCallback) -> BackupDescription:
    """Write a backup to the new folder, completely or not at all, and return its description.

    `progress` is called with the size of the dump in bytes while it grows. Raises BackupError if the folder exists, if
    another backup of this database into the same folder runs, if `pg_dump` fails or if a file cannot be read or
    written; PostgresError if no `pg_dump` fits the server. After an error `<folder>.part` may be left, which the next
    call deletes.
    """
    with _lock_folder(folder):
        return _create_locked_backup(folder, progress)


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Hold an advisory lock of the database for this folder; raise BackupError if another backup holds it."""
    with connection.cursor() as cursor:
        key = str(folder.absolute())
        cursor.execute("SELECT pg_try_advisory_lock(hashtextextended(%s, 0))", [key])
        if not cursor.fetchone()[0]:
            raise BackupError(f"another backup is being written to {folder}: wait for its end, or name another folder")
        try:
            yield
        finally:
            with suppress(DatabaseError):  # the lock ends with a lost connection, too
                cursor.execute("SELECT pg_advisory_unlock(hashtextextended(%s, 0))", [key])


def _create_locked_backup(folder: Path, progress: ProgressCallback) -> BackupDescription:
    """Write the backup as `create_backup` says; nobody else writes one to this folder."""
    if folder.exists():
        raise BackupError(f"{folder} exists already: name a new folder for the backup")
    unfinished = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)  # left by an interrupted backup
    try:
        unfinished.mkdir(mode=0o700, parents=True)
        taken_at, state = datetime.now(UTC), get_keys().state_path
        (unfinished / DUMP_FILE).touch(mode=0o600)
        options = ["--format=custom", "--no-owner", "--no-privileges", "--file", str(unfinished / DUMP_FILE)]
        _run_client_program("pg_dump", options, unfinished / DUMP_FILE, progress)
        files = tuple(name for name in STATE_FILES if (state / name).exists())
        for name in files:
            write_private(unfinished / name, (state / name).read_bytes())
        applied = sorted(".".join(one) for one in MigrationRecorder(connection).applied_migrations())
        description = BackupDescription(taken_at, _get_server_major(), tuple(applied), files)
        write_private(unfinished / DESCRIPTION_FILE, msgspec.json.format(msgspec.json.encode(description)))
        unfinished.rename(folder)
        sync_directory(folder.parent)
    except OSError as error:
        raise BackupError(f"{unfinished} cannot be written: {error.strerror}") from None
    return description


def read_description(folder: Path) -> BackupDescription:
    """Return the description of the backup in the folder.

    Raises BackupError if it cannot be read, or if a later release made the backup.
    """
    try:
        description = msgspec.json.decode((folder / DESCRIPTION_FILE).read_bytes(), type=BackupDescription)
    except OSError as error:
        raise BackupError(f"{folder} is not a backup: {DESCRIPTION_FILE} cannot be read ({error.strerror})") from None
    except msgspec.DecodeError as error:
        raise BackupError(f"{folder} is not a backup of this release: {DESCRIPTION_FILE}: {error}") from None
    known_migrations = {".".join(one) for one in MigrationLoader(None).disk_migrations}
    if unknown_migrations := sorted(set(description.migrations) - known_migrations):
        raise BackupError(
            f"{folder} was made by a later release, which has the migration {unknown_migrations[-1]}:"
            " restore it with that release"
        )
    return description


def restore_dump(folder: Path, description: BackupDescription) -> None:
    """Restore the dump into the empty database, all or nothing, and then put back the files that the state directory
    does not have. If an interrupted call has already restored the dump (`is_restored`), only put back the files.

    The secret key is always replaced by the backup's, because the database's secrets are encrypted with that key. The
    caller must have checked that the database is empty or `is_restored`. Raises PostgresError if no `pg_restore` fits
    the server, and BackupError if a file of the backup cannot be read (nothing is restored then), if `pg_restore`
    fails, or if a file cannot be put back. In the last case the database is restored, and the message says how to go
    on. Until `forget_unfinished_restore`, `refuse_unfinished_restore` raises; not if `pg_restore` failed and the
    database is empty.
    """
    options = ["--single-transaction", "--exit-on-error", "--no-owner", "--no-privileges", str(folder / DUMP_FILE)]
    state = get_keys().state_path
    names = {SECRET_KEY_FILE, *(name for name in STATE_FILES if not (state / name).exists())} & {*description.files}
    has_dump = is_restored(description)
    try:
        contents = {name: (folder / name).read_bytes() for name in sorted(names)}
        if not has_dump:
            lines = [str(folder.absolute()), *_identify_restore(description)]
            write_private(state / UNFINISHED_RESTORE_FILE, "\n".join(lines).encode())
    except OSError as error:
        text = f"{error.filename or state} cannot be read or written: {error.strerror}. Nothing was restored"
        raise BackupError(text) from None
    if not has_dump:
        _load_dump(options)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    try:
        for name, content in contents.items():
            write_private(state / name, content)
    except OSError as error:
        raise BackupError(
            f"{state} cannot be written: {error.strerror}. The database is restored, {', '.join(contents)} may not be:"
            f" start nothing yet, make {state} writable, then run this command again: manage.py restore {folder}"
        ) from None


def _load_dump(options: list[str]) -> None:
    """Run `pg_restore`. If it fails, and the database is empty and will stay so, forget the unfinished restore."""
    try:
        _run_client_program("pg_restore", options)
    except CyborgwebError:
        with suppress(DatabaseError):  # a pg_restore that was killed may have restored everything before
            if not _query_count(COUNT_OTHER_CONNECTIONS) and not _query_count(COUNT_TABLES):
                forget_unfinished_restore()
        raise


def is_restored(description: BackupDescription) -> bool:
    """Return whether an unfinished restore of this node has loaded the dump of this backup into this database.

    A dump is loaded completely or not at all. It is loaded if the unfinished restore began with this backup and this
    database, which was empty then, and if all migrations of the backup were applied before the backup was taken: tables
    that were created in the meantime have later times.
    """
    path = get_keys().state_path / UNFINISHED_RESTORE_FILE
    if not path.exists() or path.read_text().splitlines()[1:] != _identify_restore(description):
        return False
    times = {".".join(key): one.applied for key, one in MigrationRecorder(connection).applied_migrations().items()}
    return bool(description.migrations) and all(
        name in times and times[name] <= description.taken_at for name in description.migrations
    )


def _identify_restore(description: BackupDescription) -> list[str]:
    """Return what a backup and the database that we are connected to are recognised by.

    A server's system identifier is chosen when its data directory is created, and a database's oid when the database is
    (https://www.postgresql.org/docs/current/functions-info.html#FUNCTIONS-INFO-CONTROLDATA).
    """
    with connection.cursor() as cursor:
        cursor.execute(IDENTIFY_DATABASE)
        return [description.taken_at.isoformat(), str(cursor.fetchone()[0])]


def forget_unfinished_restore() -> None:
    """Note that the restore is finished, or has changed nothing. Raises OSError."""
    (get_keys().state_path / UNFINISHED_RESTORE_FILE).unlink(missing_ok=True)


def refuse_unfinished_restore() -> None:
    """Raise BackupError if a restore on this node was interrupted before the database could be used safely."""
    path = get_keys().state_path / UNFINISHED_RESTORE_FILE
    if path.exists():
        folder = path.read_text().partition("\n")[0]
        raise BackupError(
            f"a restore of {folder} was interrupted: run `manage.py restore {folder}` again, which finishes it and"
            f" puts the secret key back. Only if you use another database now, or restored this one by other means,"
            f" delete {path}"
        )


def refuse_other_connections() -> None:
    """Raise BackupError if there are other client connections to the database."""
    if others := _query_count(COUNT_OTHER_CONNECTIONS):
        raise BackupError(
            f"the database has {others} other connection{'s' if others > 1 else ''}: stop every web process, cluster"
            " and supervisor first"
        )


def require_tables(expected: bool) -> None:
    """Raise BackupError if the database is empty but `expected` is True, or has tables but `expected` is False."""
    has_any = _query_count(COUNT_TABLES) > 0
    if expected and not has_any:
        raise BackupError("the database is empty: nothing has been restored yet")
    if has_any and not expected:
        raise BackupError(
            "the database is not empty, and a backup is never restored over another database: name an empty one in"
            f" CYBORG_DATABASE_URL, or move the folder {get_keys().state_path / 'postgres'} away"
        )


@contextmanager
def keep_database_running(exclusive: bool) -> Iterator[None]:
    """Make sure that the embedded database runs inside the `with` block.

    If the product does not run on this state directory, its embedded database is started, and stopped at the end; the
    directory's lock is held meanwhile, so the product cannot start. A database that CYBORG_DATABASE_URL names is never
    started here; with `exclusive` the lock is held for it, too. Raises BackupError if `exclusive` and the product runs;
    PostgresError if the embedded database cannot be started.
    """
    settings = get_keys()
    if settings.database_url and not exclusive:
        yield
        return
    settings.state_path.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (settings.state_path / "lock").open("a") as lock:
        is_running = not _try_lock(lock.fileno())
        if is_running and exclusive:
            raise BackupError(f"the product runs on {settings.state_path}: stop it first")
        if is_running or settings.database_url:
            yield
            return
        postgres = Postgres(settings.state_path / "postgres", settings.pg_bin)
        try:
            postgres.start()
            postgres.ensure_database("cyborg")
            yield
        finally:
            connections.close_all()
            postgres.stop()


def _try_lock(lock: int) -> bool:
    """Try to take the supervisor's lock of the state directory. Return whether it was free; does not wait."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _run_client_program(
    name: str, options: list[str], output_file: Path | None = None, progress: ProgressCallback | None = None
) -> None:
    """Run `pg_dump` or `pg_restore`, in a version that fits the server, on our database and wait for its end. If both
    `output_file` and `progress` are given, call `progress` with that file's size in bytes every `PROGRESS_INTERVAL_S`.

    The password is passed in its environment, which other users cannot read. Raises BackupError if the program ends
    with an error, PostgresError if no version that fits is installed.
    """
    parameters = libpq.get_connection_parameters()
    environment = os.environ | {"PGPASSWORD": parameters.pop("password", "")}
    command: list[str | Path] = [
        find_client_program(name, _get_server_major(), get_keys().pg_bin),
        "--dbname",
        make_conninfo("", **parameters),
        *options,
    ]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        stderr = ""
        while process.returncode is None:
            try:
                _, stderr = process.communicate(timeout=PROGRESS_INTERVAL_S)
            except subprocess.TimeoutExpired:
                if output_file and progress and output_file.exists():
                    progress(output_file.stat().st_size)
    if process.returncode:
        raise BackupError(f"{name} failed: {stderr.strip()[-500:]}")


def _get_server_major() -> int:
    """Return the major version of the PostgreSQL server to which we are connected."""
    connection.ensure_connection()
    return int(connection.connection.info.server_version) // 10_000


def _query_count(statement: str) -> int:
    """Return the number that the statement selects."""
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return int(cursor.fetchone()[0])
