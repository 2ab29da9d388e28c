"""Several things asked one after the other: what came of each, and the exit code of all. Called by the verbs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cyborgweb.cli.output import Output, show
from cyborgweb.cli.problems import CliError, Exit

ENDS = (Exit.AWAY, Exit.NOT_ALLOWED)
"""After these, the next one would meet the same."""


def each(targets: Sequence[str], act: Callable[[str], dict[str, Any]]) -> list[dict[str, Any]]:
    """`act` on every target; what it returns is a row with `outcome`, a Problem makes one that says so.

    Raises the Problem of a single target as it is.
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
    """Show them, and end with their code: that of all, or PARTIAL where they differ; of no row nothing failed."""
    codes = {row.get("code", Exit.DONE) for row in rows} or {Exit.DONE}
    named = [column.rpartition("=")[2] for column in columns]
    fields = dict.fromkeys(name for row in ({name: None for name in named}, *rows) for name in row if name != "code")
    show([{name: row.get(name) for name in fields} for row in rows], columns, output)
    code = codes.pop() if len(codes) == 1 else Exit.PARTIAL
    if code != Exit.DONE:
        sys.exit(code)
