"""Refresh a list until the user ends it with Ctrl-C: in place on a terminal, otherwise by printing changed rows."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import click

from cyborgweb.cli.exit_codes import CliError, ExitCode
from cyborgweb.cli.following import MAX_OUTAGE_S
from cyborgweb.cli.output import OutputOptions, format_row_lines

CLEAR_SCREEN, MOVE_HOME, CLEAR_LINE_END, CLEAR_BELOW = "\x1b[2J", "\x1b[H", "\x1b[K", "\x1b[J"
"""Control sequences of ECMA-48, which every terminal knows."""


def watch_rows(
    fetch: Callable[[], Iterable[Mapping[str, Any]]], columns: Sequence[str], output: OutputOptions, empty_text: str
) -> None:
    """Print the rows that `fetch` returns every `output.watch_s` seconds, and return when the user presses Ctrl-C.

    A table on a terminal is refreshed in place; `empty_text` stands there if it has no rows. Otherwise rows that are
    new or have changed are appended: a table and CSV have their header once, JSON and YAML are JSON objects, one a
    line. A pause is at least as long as the fetch before it took. While `fetch` raises CliError with AWAY, it is called
    again for up to MAX_OUTAGE_S seconds. Raises CliError when these have passed, and any other CliError of `fetch`.
    """
    is_in_place = output.format == "table" and sys.stdout.isatty()
    appender = RowAppender(columns, output)
    is_away, answered_at = False, time.monotonic()
    try:
        if is_in_place:
            click.echo(CLEAR_SCREEN, nl=False)
        while True:
            began_at = time.monotonic()
            try:
                rows = list(fetch())
            except CliError as problem:
                if problem.exit_code != ExitCode.AWAY or time.monotonic() - answered_at > MAX_OUTAGE_S:
                    raise
                if not is_away:
                    click.echo(f"{problem.message} It is asked again.", err=True)
                is_away = True
            else:
                is_away, answered_at = False, time.monotonic()
                if is_in_place:
                    _refresh(format_row_lines(rows, columns, output) or [empty_text])
                else:
                    appender.append(rows)
            time.sleep(max(output.watch_s or 0, time.monotonic() - began_at))
    except KeyboardInterrupt:
        click.echo(err=True)


def _refresh(lines: Sequence[str]) -> None:
    """Write the lines over those on the terminal. Lines for which it has no room are counted in the last line."""
    room = shutil.get_terminal_size().lines - 1
    if len(lines) > room:
        lines = [*lines[: room - 1], f"… and {len(lines) - room + 1} more lines"]
    text = "".join(f"{line}{CLEAR_LINE_END}\n" for line in lines)
    click.echo(f"{MOVE_HOME}{text}{CLEAR_BELOW}", nl=False)


class RowAppender:
    """Print the rows of a list that are new or have changed since the call of `append` before."""

    def __init__(self, columns: Sequence[str], output: OutputOptions) -> None:
        self._columns, self._output = columns, output
        self._shown_keys: set[str] = set()
        self._has_header = False

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print the rows that the list did not have at the call before; a table's header is printed once."""
        if self._output.format in ("json", "yaml"):
            json_output = replace(self._output, format="json")
            texts = ["\n".join(format_row_lines([row], self._columns, json_output)) for row in rows]
            header, lines = [], [json.dumps(json.loads(text)[0]) for text in texts]
        else:
            all_lines = format_row_lines(rows, self._columns, self._output)
            header, lines = all_lines[:1], all_lines[1:]
        keys = [" ".join(line.split()) for line in lines]  # the widths of a table's columns may have changed
        changed_lines = [line for line, key in zip(lines, keys, strict=True) if key not in self._shown_keys]
        if header and not self._has_header:
            changed_lines, self._has_header = header + changed_lines, True
        if changed_lines:
            click.echo("\n".join(changed_lines))
        self._shown_keys = {*keys}
