"""`manage.py manual FOLDER`: write the manual as HTML files that need no server."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand

from cyborgweb.manual import site


class Command(BaseCommand):
    """Write the manual as HTML files; the former content of the folder is deleted."""

    help = "Write the manual as HTML files that need no server. The former content of the folder is deleted."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the folder, whose former content will be deleted."""
        parser.add_argument("folder", type=Path)

    def handle(self, *args: Any, folder: Path, **options: Any) -> None:
        """Delete the folder, write the manual into it, and print the number of pages."""
        number = site.write_files(folder)
        self.stdout.write(f"{number} pages: {folder / 'index.html'}")
