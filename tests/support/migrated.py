"""Prepare PostgreSQL data directories once, keep them in the cache folder, and copy them for each test run or product.

Creating a data directory and running all migrations takes five seconds; copying the result takes 0.1 s. The fast lane
uses the database `TEST_DATABASE`, a product of the system lane uses `cyborg`. Placement has a data directory of its
own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import django
import psycopg

from cyborgweb.database import postgres as embedded
from cyborgweb.database.postgres import Postgres, PostgresError, choose_socket_folder
from tests.support.cache import KEPT_ENTRIES, ROOT, cache_folder, delete_old_entries, fingerprint, locked, mark_used
from tests.support.environment import without_settings

TEST_DATABASE = "test_cyborg"
PACKAGES = ("accelerators", "agents", "placement_sync", "cyborgweb")


def start_migrated(server: Postgres) -> None:
    """Start `server` over a copy of the migrated data directory.

    If the copy does not start, or one of its databases is not complete, it is prepared anew once. Raises PostgresError.
    """
    entry = copy_migrated(server)
    try:
        _start_complete(server)
    except (PostgresError, psycopg.Error):
        server.stop()
        shutil.rmtree(server.data, ignore_errors=True)
        with locked("database"):
            (entry / "complete").unlink(missing_ok=True)
        copy_migrated(server)
        _start_complete(server)


def copy_migrated(server: Postgres) -> Path:
    """Put a copy of the migrated data directory where `server` expects its own; return the copied cache entry."""
    return copy_prepared(server, "database", read_migrations(), migrate)


def read_migrations() -> bytes:
    """Return everything that a migrated database depends on, as the `content` of `copy_prepared`."""
    files = (path for name in PACKAGES for kind in ("*.py", "*.sql") for path in (ROOT / name).rglob(kind))
    sources = sorted(path for path in files if _shapes_database(path))
    content = [part for path in sources for part in (str(path.relative_to(ROOT)).encode(), path.read_bytes())]
    lock = (ROOT / "requirements" / "server.txt").read_bytes()
    this_month = time.strftime("%Y-%m").encode()  # migrations create the partitions of the current month
    installed = f"{django.__version__} {psycopg.__version__}".encode()
    return b"\0".join([lock, installed, this_month, *content])


def _shapes_database(path: Path) -> bool:
    """Return True if `manage.py migrate` runs this file or derives rows from it (groups and their permissions)."""
    return path.name in ("apps.py", "models.py", "roles.py", "base.py") or bool(
        {"migrations", "models"} & {*path.parts}
    )


def copy_prepared(
    server: Postgres, name: str, content: bytes, fill: Callable[[Postgres], None], kept: int = KEPT_ENTRIES
) -> Path:
    """Put a copy of the prepared data directory `name` where `server` expects its own; start nothing.

    `content` stands for everything that the result depends on: when it changes, `fill` prepares a new data directory on
    a running server, and only the `kept` entries that were used last stay in the cache. Returns the cache entry.
    """
    binaries = embedded.find_binaries(server.pg_bin)
    made_by = f"{binaries.folder} {binaries.major} {sys.version} {os.getuid()}".encode()
    recipe = Path(__file__).read_bytes() + Path(embedded.__file__).read_bytes()
    entry = cache_folder() / f"{name}-{fingerprint(content, made_by, recipe)}"
    with locked(name):
        if not (entry / "complete").exists():
            _make(entry, server.pg_bin, fill)
            delete_old_entries(name, kept)
        server.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        command = ["cp", "-a", "--reflink=auto", entry / "data", server.data]
        if subprocess.run(command, check=False, capture_output=True).returncode:  # the cache entry is damaged
            shutil.rmtree(server.data, ignore_errors=True)
            _make(entry, server.pg_bin, fill)
            subprocess.run(command, check=True, capture_output=True)
        mark_used(entry)
    return entry


def _make(entry: Path, pg_bin: str, fill: Callable[[Postgres], None]) -> None:
    shutil.rmtree(entry, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="cyborg-prepared-") as folder:
        server = Postgres(Path(folder) / "postgres", pg_bin, durable=False)
        try:
            server.start()
            fill(server)
        finally:
            server.stop()
            shutil.rmtree(choose_socket_folder(server.home / "run"), ignore_errors=True)
        entry.mkdir(parents=True)
        shutil.move(server.data, entry / "data")
    (entry / "complete").touch()


def migrate(server: Postgres) -> None:
    """Create the two databases and run all migrations in them, as `manage.py migrate` does."""
    server.ensure_database("cyborg")
    chosen = {"CYBORG_STATE_DIR": str(server.home.parent)} | ({"CYBORG_PG_BIN": server.pg_bin} if server.pg_bin else {})
    command = [sys.executable, ROOT / "manage.py", "migrate", "--verbosity=0"]
    subprocess.run(command, check=True, cwd=ROOT, env=without_settings(**chosen))
    where = f"host={server.socket} user=postgres dbname=postgres"
    with psycopg.connect(where, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {TEST_DATABASE} TEMPLATE cyborg")


def _start_complete(server: Postgres) -> None:
    """Start `server`; raise PostgresError unless both databases have the migrations of all packages."""
    server.start()
    for name in ("cyborg", TEST_DATABASE):
        with psycopg.connect(host=str(server.socket), user="postgres", dbname=name) as connection:
            found = {row[0] for row in connection.execute("SELECT app FROM django_migrations")}
        if not found.issuperset(PACKAGES):
            raise PostgresError(f"database {name} of the cached data directory lacks migrations of {PACKAGES}")
