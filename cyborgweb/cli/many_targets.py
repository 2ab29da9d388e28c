"""Run an action on several targets in turn, show one row for each, and compute the common exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click

from cyborgweb.cli.exit_codes import CliError, ExitCode
from cyborgweb.cli.output import OutputOptions, print_rows

STOPPING_CODES = (ExitCode.AWAY, ExitCode.NOT_ALLOWED)
"""Exit codes after which no further target is tried, because it would fail in the same way."""


def run_for_each(targets: Sequence[str], action: Callable[[str], dict[str, Any]]) -> list[dict[str, Any]]:
    """Call `action` on each target in turn, and return one row for each, with `outcome` `done` or `refused`.

    A CliError becomes a `refused` row with its message, reason and exit code; after one of STOPPING_CODES the remaining
    targets are not tried. With a single target the CliError is raised instead. Raises Exit in a dry run, after the
    requests of all targets were printed.
    """
    rows: list[dict[str, Any]] = []
    stopping_error: CliError | None = None
    dry_run_end: click.exceptions.Exit | None = None
    for target in targets:
        try:
            if stopping_error:
                text = f"Not tried: {stopping_error.message}"
                raise CliError(ExitCode(stopping_error.exit_code), text, stopping_error.reason)
            rows.append({"outcome": "done", "text": ""} | action(target))
        except click.exceptions.Exit as end:
            dry_run_end = end
        except CliError as problem:
            if len(targets) == 1:
                raise
            stopping_error = stopping_error or (problem if problem.exit_code in STOPPING_CODES else None)
            row = {"target": target, "outcome": "refused", "text": problem.message, "reason": problem.reason}
            rows.append(row | {"code": problem.exit_code})
    if dry_run_end:
        raise dry_run_end
    return rows


def find_common_code(rows: Iterable[Mapping[str, Any]]) -> int:
    """Return the exit code of rows: the one that all of them have, or PARTIAL if their codes differ.

    The code of no rows is DONE, and so is that of a row without `code`.
    """
    codes = {row.get("code", ExitCode.DONE) for row in rows} or {ExitCode.DONE}
    return codes.pop() if len(codes) == 1 else ExitCode.PARTIAL


def exit_unless_done(code: int) -> None:
    """Exit with this exit code unless it is DONE."""
    if code != ExitCode.DONE:
        sys.exit(code)


def show_and_exit(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], output: OutputOptions) -> None:
    """Show the rows, then exit with the code that `find_common_code` returns for them. Returns if it is DONE."""
    column_names = [column.rpartition("=")[2] for column in columns]
    fields = dict.fromkeys(
        name for row in ({name: None for name in column_names}, *rows) for name in row if name != "code"
    )
    print_rows([{name: row.get(name) for name in fields} for row in rows], columns, output)
    exit_unless_done(find_common_code(rows))
