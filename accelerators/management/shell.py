"""What the commands at a shell have in common: teaching below the options, uuids, tables, and who is asking.

Called by `manage.py` commands of this room and of `placement_sync`.
"""

from __future__ import annotations

import argparse
import getpass
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar
from uuid import UUID

from django.core.management.base import BaseCommand, CommandParser

from accelerators.domain.caller import Caller


class Taught(BaseCommand):
    """A command whose `--help` ends with `teaching`, its lines kept."""

    teaching: ClassVar[str]

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """With the teaching below the options."""
        kwargs |= {"formatter_class": argparse.RawDescriptionHelpFormatter, "epilog": self.teaching}
        return super().create_parser(prog_name, subcommand, **kwargs)


def person() -> Caller:
    """Who is at the shell: whoever may run `manage.py` may do everything."""
    return Caller(getpass.getuser(), "", frozenset(), "")


def uuid(hint: str = "") -> Callable[[str], UUID]:
    """An argument's type; `hint` ends what is said of a text that is none."""

    def read(text: str) -> UUID:
        try:
            return UUID(text.strip())
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no uuid{hint}") from None

    return read


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines with the columns under each other; the first row is the heading."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
