"""`manage.py restore FOLDER`: restore a backup into an empty database, and make it safe to start (read only)."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError

from accelerators.management import shell
from cyborgweb.database.postgres import PostgresError
from cyborgweb.server import after_restore, backup

EPILOG = """\
Stop everything first. A restore never overwrites a database: CYBORG_DATABASE_URL must name an empty one, or the folder
postgres of the state directory must have been moved away. Agents need nothing: they reconnect by themselves.

  manage.py restore /backups/accelerators-2026-11-22

If the command was interrupted, run it again: it finishes the restore.

With --loaded the database has already been restored by other means (point-in-time recovery, a snapshot, pg_restore),
and only the following steps are done: migrate the tables to this release, advance sequences past all numbers that
agents may have seen, end all sessions, and switch read-only mode on.

Afterwards the product is in read-only mode, so that no bind hands out a unit that an instance got after the backup.
Start it, check what docs/backup.md lists, then: manage.py read_only off
"""
NEXT_STEPS = (
    "The product is in read-only mode. Start it, check what docs/backup.md lists, then: manage.py read_only off"
)


class Command(shell.OperatorCommand):
    """Restore a backup into an empty database, and switch read-only mode on."""

    epilog = EPILOG
    help = "Restore a backup into an empty database while everything is stopped."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the folder, or --loaded in its place."""
        source = parser.add_mutually_exclusive_group(required=True)
        source.add_argument("folder", type=Path, nargs="?", help="folder that `manage.py backup` created")
        source.add_argument(
            "--loaded", action="store_true", help="the database was restored by other means: do only the steps after it"
        )

    def handle(self, *args: Any, folder: Path | None, **options: Any) -> None:
        """Restore the backup, or do only the steps after it with --loaded, and print what to do next.

        Raises CommandError if the backup cannot be read, if the product runs, if other connections to the database are
        open, if the database is not empty and was not loaded by an interrupted restore of this backup (with --loaded:
        if it is empty, or if such a restore is not finished), or if the restore fails.
        """
        try:
            description = backup.read_description(folder) if folder else None
            with backup.keep_database_running(exclusive=True):
                backup.refuse_other_connections()
                if description is None:
                    backup.refuse_unfinished_restore()
                backup.require_tables(expected=description is None or backup.is_restored(description))
                if folder and description:
                    backup.restore_dump(folder, description)
                    reason = f"restored from the backup of {description.taken_at:%Y-%m-%d %H:%M:%S} UTC"
                else:
                    reason = "restored by other means than manage.py restore"
                unsealed_because = after_restore.prepare_restored_database(shell.current_operator(), reason)
        except (backup.BackupError, PostgresError) as error:
            raise CommandError(str(error)) from None
        self.stdout.write(f"{reason}.\n{NEXT_STEPS}")
        if unsealed_because:
            self.stdout.write(
                f"No seal records the restore, because {unsealed_because}. Run this where the key is, before the"
                f' product is started: manage.py seal_events --restored --reason "{reason}"'
            )
