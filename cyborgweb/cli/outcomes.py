"""Run an action on several targets in turn, show one row for each, and compute the common exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cyborgweb.cli.output import Output, show
from cyborgweb.cli.problems import CliError, Exit

ENDS = (Exit.AWAY, Exit.NOT_ALLOWED)
"""Exit codes after which no further target is tried, because it would fail in the same way."""


def each(targets: Sequence[str], act: Callable[[str], dict[str, Any]]) -> list[dict[str, Any]]:
    """Call `act` on every target and return one row for each, with `outcome` `done` or `refused`.

    A CliError becomes a `refused` row with its message and exit code; after one of ENDS the remaining targets are not
    tried. With a single target the CliError is raised instead.
    """
    rows: list[dict[str, Any]] = []
    over: CliError | None = None
    for target in targets:
        try:
            if over:
                raise CliError(Exit(over.exit_code), f"Not tried: {over.message}")
            rows.append({"outcome": "done", "text": ""} | act(target))
        except CliError as problem:
            if len(targets) == 1:
                raise
            over = over or (problem if problem.exit_code in ENDS else None)
            rows.append({"target": target, "outcome": "refused", "text": problem.message, "code": problem.exit_code})
    return rows


def finish(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], output: Output) -> None:
    """Show the rows, then exit with their common exit code, or with PARTIAL if their codes differ.

    Returns if the code is DONE, which is also the code of no rows at all. A row without `code` counts as DONE.
    """
    codes = {row.get("code", Exit.DONE) for row in rows} or {Exit.DONE}
    named = [column.rpartition("=")[2] for column in columns]
    fields = dict.fromkeys(name for row in ({name: None for name in named}, *rows) for name in row if name != "code")
    show([{name: row.get(name) for name in fields} for row in rows], columns, output)
    code = codes.pop() if len(codes) == 1 else Exit.PARTIAL
    if code != Exit.DONE:
        sys.exit(code)
