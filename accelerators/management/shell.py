"""Helpers of management commands: `--help` with examples, uuid arguments, tables, and the caller."""

from __future__ import annotations

import argparse
import getpass
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar
from uuid import UUID

from django.core.management.base import BaseCommand, CommandParser

from accelerators.domain.caller import Caller


class OperatorCommand(BaseCommand):
    """A command whose `--help` ends with the text `epilog`, line breaks included."""

    epilog: ClassVar[str]

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Create the parser with `epilog` below the options."""
        kwargs |= {"formatter_class": argparse.RawDescriptionHelpFormatter, "epilog": self.epilog}
        return super().create_parser(prog_name, subcommand, **kwargs)


def current_operator() -> Caller:
    """Return the caller for whoever runs `manage.py`, named by the login name. Such a person may do everything."""
    return Caller(getpass.getuser(), "", frozenset(), "")


def uuid_argument(hint: str = "") -> Callable[[str], UUID]:
    """Return an argparse type that parses a uuid; `hint` is appended to the error message."""

    def parse_uuid(text: str) -> UUID:
        try:
            return UUID(text.strip())
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a uuid{hint}") from None

    return parse_uuid


def format_table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table with aligned columns; the first row is the heading."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
