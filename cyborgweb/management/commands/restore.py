"""`manage.py restore FOLDER`: restore a backup into an empty database, and make it safe to start (read only)."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError

from accelerators.management import shell
from cyborgweb.database.postgres import PostgresError
from cyborgweb.server import after_restore, backup

TEACHING = """\
Stop everything first. A restore never overwrites a database: CYBORG_DATABASE_URL must name an empty one, or the folder
postgres of the state directory must have been moved away. Agents need nothing: they reconnect by themselves.

  manage.py restore /backups/accelerators-2026-11-22

With --loaded the database has already been restored by other means (point-in-time recovery, a snapshot, pg_restore),
and only the following steps are done: migrate the tables to this release, advance sequences past all numbers that
agents may have seen, end all sessions, and switch read-only mode on.

Afterwards the product is in read-only mode, so that no bind hands out a unit that an instance got after the backup.
Start it, check what docs/backup.md lists, then: manage.py read_only off
"""
AFTER = "The product is in read-only mode. Start it, check what docs/backup.md lists, then: manage.py read_only off"


class Command(shell.Taught):
    teaching = TEACHING
    help = "Restore a backup into an empty database while everything is stopped."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        what = parser.add_mutually_exclusive_group(required=True)
        what.add_argument("folder", type=Path, nargs="?", help="folder that `manage.py backup` created")
        what.add_argument(
            "--loaded", action="store_true", help="the database was restored by other means: do only the steps after it"
        )

    def handle(self, *args: Any, folder: Path | None, **options: Any) -> None:
        try:
            about = backup.read(folder) if folder else None
            with backup.database(alone=True):
                backup.nobody_else()
                backup.has_tables(wanted=about is None)
                if folder and about:
                    backup.load(folder, about)
                    said = f"restored from the backup of {about.taken_at:%Y-%m-%d %H:%M:%S} UTC"
                else:
                    said = "restored by other means than manage.py restore"
                after_restore.settle(shell.person(), said)
        except (backup.BackupError, PostgresError) as error:
            raise CommandError(str(error)) from None
        self.stdout.write(f"{said}.\n{AFTER}")
