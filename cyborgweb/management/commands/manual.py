"""`manage.py manual FOLDER`: write the manual as HTML files that need no server."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand

from cyborgweb.manual import site


class Command(BaseCommand):
    help = "Write the manual as HTML files that need no server. The former content of the folder is deleted."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("folder", type=Path)

    def handle(self, *args: Any, folder: Path, **options: Any) -> None:
        number = site.write(folder)
        self.stdout.write(f"{number} pages: {folder / 'index.html'}")
