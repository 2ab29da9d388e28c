"""What the `cyborg` command ends with: exit codes, and errors of one line. Raised by every file of this package."""

from __future__ import annotations

from enum import IntEnum
from typing import IO, Any

import click


class Exit(IntEnum):
    """The exit codes; `docs/cli.md` tells them."""

    DONE = 0
    REFUSED = 1
    USAGE = 2
    NOT_FOUND = 3
    NOT_ALLOWED = 4
    AWAY = 5
    PARTIAL = 6
    INTERRUPTED = 130


class CliError(click.ClickException):
    """One sentence on standard error, and the exit code that goes with it."""

    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(printable(sentence))
        self.exit_code = code  # type: ignore[misc]  # click has it on the class, and reads it of the instance

    def show(self, file: IO[Any] | None = None) -> None:
        """On standard error, below the command's name as other tools do."""
        click.echo(f"cyborg: {self.message}", file=file, err=True)


def printable(text: str) -> str:
    """On one line, and without what would steer a terminal: hosts and tenants wrote some of it."""
    return "".join(
        sign if sign.isprintable() else " " if sign.isspace() else "\N{REPLACEMENT CHARACTER}" for sign in text
    )
