"""`manage.py backup FOLDER`: back up the database and the secrets that cannot be made again, while the product runs."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError

from accelerators.management import shell
from cyborgweb.database.postgres import PostgresError
from cyborgweb.server import backup

EPILOG = """\
The command creates the folder. It holds the database as it was when the command began, the secret key, and the agents'
certificate if it was created here. A person who can read the folder can read all of this: keep it secret, on another
machine.

  manage.py backup /backups/accelerators-2026-11-22
  manage.py restore /backups/accelerators-2026-11-22

docs/backup.md lists what the backup does not hold, and what to check after a restore.
"""


class Command(shell.OperatorCommand):
    """Back up the database and the secrets."""

    epilog = EPILOG
    help = "Back up the database and the secrets while the product runs."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the folder to create."""
        parser.add_argument("folder", type=Path, help="folder to create; it must not exist yet")

    def handle(self, *args: Any, folder: Path, **options: Any) -> None:
        """Create the backup and print its time, its size and its files. Raises CommandError if that fails."""
        try:
            with backup.keep_database_running(exclusive=False):
                description = backup.create_backup(folder.absolute(), _print_progress)
        except (backup.BackupError, PostgresError) as error:
            raise CommandError(str(error)) from None
        size = (folder / backup.DUMP_FILE).stat().st_size
        files = ", ".join(description.files) or "no other files"
        self.stdout.write(
            f"{folder}: the database of {description.taken_at:%Y-%m-%d %H:%M:%S} UTC, "
            f"{_format_megabytes(size)}; {files}"
        )


def _print_progress(written_bytes: int) -> None:
    """Show the size of the dump so far on standard error; do nothing if standard error is no terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{_format_megabytes(written_bytes)} written\r")
        sys.stderr.flush()


def _format_megabytes(size: int) -> str:
    """Return a number of bytes in megabytes (10^6 bytes) with one decimal."""
    return f"{size / 1e6:.1f} MB"
