"""Helpers of management commands: `--help` with examples, tables, and the caller."""

from __future__ import annotations

import argparse
import getpass
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from django.core.management.base import BaseCommand, CommandParser

from accelerators.domain.caller import ADMIN_ROLE, Caller


class OperatorCommand(BaseCommand):
    """A command whose `--help` ends with the text `epilog`, line breaks included."""

    epilog: ClassVar[str]

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Create the parser with `epilog` below the options."""
        kwargs |= {"formatter_class": argparse.RawDescriptionHelpFormatter, "epilog": self.epilog}
        return super().create_parser(prog_name, subcommand, **kwargs)


def current_operator() -> Caller:
    """Return the caller for the person who runs `manage.py`, named by the login name.

    No policy rule applies to this caller.
    """
    return Caller(getpass.getuser(), "", frozenset({ADMIN_ROLE}), "", is_local=True)


def format_table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table with aligned columns; the first row is the heading.

    Raises ValueError if the rows do not all have the same number of cells.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
