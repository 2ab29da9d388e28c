"""Exit codes of the `cyborg` command, and its error, which is shown as one line."""

from __future__ import annotations

from enum import IntEnum
from typing import IO, Any

import click

from cyborgweb.errors import CyborgwebError


class ExitCode(IntEnum):
    """Exit codes of the command, documented in `docs/cli.md`.

    AWAY: the server cannot be reached or trusted, or is busy. PARTIAL: several targets ended with different codes.
    """

    DONE = 0
    REFUSED = 1
    USAGE = 2
    NOT_FOUND = 3
    NOT_ALLOWED = 4
    AWAY = 5
    PARTIAL = 6
    INTERRUPTED = 130


class CliError(CyborgwebError, click.ClickException):
    """An error that ends the command with one sentence on standard error and the given exit code.

    `reason` is the stable code of an error of the API, '' for any other error. It is printed after the sentence.
    `current` is the present version of what could not be changed because somebody else had changed it, else None.
    """

    def __init__(self, code: int, sentence: str, reason: str = "", current: dict[str, Any] | None = None) -> None:
        super().__init__(to_printable_line(sentence))
        self.reason, self.current = to_printable_line(reason), current
        self.exit_code = code  # type: ignore[misc]  # click declares it on the class, but reads it from the instance

    def format_message(self) -> str:
        """Return the sentence, followed by `reason` in brackets if there is one."""
        return f"{self.message} [{self.reason}]" if self.reason else self.message

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the error's message, after the command's name, on `file`; on standard error if it is None."""
        click.echo(f"cyborg: {self.format_message()}", file=file, err=True)


def to_printable_line(text: str) -> str:
    """Return `text` on one line: white space becomes blanks, other characters that cannot be printed become U+FFFD.

    The text may come from hosts and tenants, and their control characters could change the terminal.
    """
    return "".join(
        sign if sign.isprintable() else " " if sign.isspace() else "\N{REPLACEMENT CHARACTER}" for sign in text
    )
