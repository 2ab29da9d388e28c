"""Run the commands of `manage.py` that have the verbs of `cyborg`, in the process of the test."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout

from django.core.management import call_command


class TerminalOutput(io.StringIO):
    """An output on which a progress bar is drawn."""

    def isatty(self) -> bool:
        """Return True."""
        return True


def run_verb(noun: str, *words: str, terminal: bool = False) -> tuple[int, str, str]:
    """Return the exit status, the standard output and the standard error of `manage.py NOUN …`.

    Raises CommandError as the command does. With `terminal` the standard error is a terminal.
    """
    out, err, status = io.StringIO(), TerminalOutput() if terminal else io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            call_command(noun, "--", *words)
        except SystemExit as ended:
            status = int(ended.code or 0)
    return status, out.getvalue(), err.getvalue()
