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
Everything is stopped first. Nothing is restored over another database: CYBORG_DATABASE_URL names an empty one, or the
folder postgres of the state directory is moved away. Agents need nothing: they come back by themselves.

  manage.py restore /backups/accelerators-2026-11-22

With --loaded the database has been restored by other means (point-in-time recovery, a snapshot, pg_restore), and only
what comes after is done: tables of this release, numbers that nobody was told yet, nobody logged in, read only.

Afterwards everything is read only, so that no bind hands out what an instance got after the backup. Start, look at what
docs/backup.md says, then: manage.py read_only off
"""
AFTER = "All is read only. Start it, look at what docs/backup.md says, then: manage.py read_only off"


class Command(shell.Taught):
    teaching = TEACHING
    help = "Restore a backup into an empty database, while everything is stopped."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        what = parser.add_mutually_exclusive_group(required=True)
        what.add_argument("folder", type=Path, nargs="?", help="what `manage.py backup` made")
        what.add_argument("--loaded", action="store_true", help="it was restored by other means: do what comes after")

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
