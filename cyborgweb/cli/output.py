"""How the `cyborg` command shows rows: a table as wide as the terminal, JSON, YAML, CSV. Called by every verb.

Tables and CSV have columns; JSON and YAML give the API's rows whole, or with `--columns` those columns.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, zip_longest
from typing import Any

import click

from cyborgweb.cli.problems import printable

FORMATS = ("table", "json", "yaml", "csv")
FORMULA = ("=", "+", "-", "@")
"""Spreadsheets compute a cell that begins so; what hosts and tenants wrote must stay text."""
TIME = re.compile(r"\A(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(\.\d+)?(Z|\+00:00)\Z")
"""As the API writes times; people read them to the second."""
GAP = 2
LEAST = 8
"""No column is cut below so many signs."""
LEAST_SAID = 24
SAID = ("text", "error", "reason", "limits")
"""Columns of sentences; the last of a table is never cut."""
BEGINNING = 13
"""So many signs of a uuid."""
WHOLE = ("uuid", "id", "command")
"""Columns that are of no use when they are cut."""


@dataclass
class Output:
    """What was asked for. `columns` are names of the verb's columns, or paths into a row, such as host.name."""

    format: str = "table"
    columns: tuple[str, ...] = ()


def show(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], output: Output, nothing: str = "") -> None:
    """Rows on standard output. A column is a field, or `name=path` into the row; `nothing` is said of no rows.

    Raises UsageError for a column that there is not.
    """
    found = list(rows)
    paths = dict(_named(column) for column in columns)
    chosen = {name: paths.get(name, name) for name in output.columns} or paths
    if found and (unknown := [path for path in chosen.values() if path.split(".")[0] not in found[0]]):
        there_are = ", ".join(dict.fromkeys((*paths, *found[0])))
        raise click.UsageError(f"There is no column {', '.join(unknown)}; there are {there_are}.")
    if output.format in ("json", "yaml"):
        whole = [{name: _at(row, path) for name, path in chosen.items()} for row in found] if output.columns else found
        click.echo(_text(whole, output.format), nl=False)
        return
    cells = [[_at(row, path) for path in chosen.values()] for row in found]
    if output.format == "csv":
        click.echo(_csv([[*chosen], *cells]), nl=False)
    elif found:
        for line in table(_head(chosen, [[cell(value) for value in row] for row in cells], output), _width()):
            click.echo(line)
    elif nothing:
        click.echo(nothing, err=True)


def _head(names: Iterable[str], cells: list[list[str]], output: Output) -> list[list[str]]:
    """A table with its head; on a terminal without columns that say nothing, unless they were asked for."""
    rows = [[*names], *cells]
    if output.columns or not _width():
        return rows
    telling = [any(column) for column in zip(*cells, strict=True)]
    return [list(compress(row, telling)) for row in rows]


def show_one(row: Mapping[str, Any], output: Output) -> None:
    """One row: a line for each field that says something. JSON and YAML give an object, whole."""
    chosen = {name: _at(row, name) for name in output.columns} or dict(row)
    if unknown := [name for name in chosen if name.split(".")[0] not in row]:
        raise click.UsageError(f"There is no field {', '.join(unknown)}; there are {', '.join(row)}.")
    if output.format in ("json", "yaml"):
        click.echo(_text(chosen, output.format), nl=False)
    elif output.format == "csv":
        click.echo(_csv([["field", "value"], *chosen.items()]), nl=False)
    else:
        wide = max(map(len, chosen))
        telling = {name: value for name, value in chosen.items() if output.columns or value not in (None, "", [], {})}
        for name, value in telling.items():
            for n, line in enumerate(lines(value)):
                click.echo(f"{'' if n else name:{wide}}  {line}".rstrip())


def table(rows: Sequence[Sequence[str]], width: int) -> Iterable[str]:
    """Lines of a table no wider than `width`, 0: however wide it is; the first row is its head.

    A uuid is cut to a beginning that is name enough; then columns are cut, the widest first; what is said at the end of
    a line goes on below it instead.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width and sum(widths) + GAP * (len(widths) - 1) > width and "uuid" in rows[0]:
        short = rows[0].index("uuid")
        rows = [[*row[:short], row[short][:BEGINNING], *row[short + 1 :]] for row in rows]
        widths[short] = min(widths[short], BEGINNING)
    told = len(widths) - 1 if rows[0][-1] in SAID else None
    free = [n for n, name in enumerate(rows[0]) if name not in WHOLE and n != told]
    if told and width:
        widths[told] = min(widths[told], max(LEAST_SAID, width - sum(widths[:told]) - GAP * told))
    while width and free and sum(widths) + GAP * (len(widths) - 1) > width:
        widest = max(free, key=widths.__getitem__)
        if widths[widest] <= LEAST:
            break
        widths[widest] -= 1
    for row in rows:
        parts = [_parts(text, wide, n == told) for n, (text, wide) in enumerate(zip(row, widths, strict=True))]
        for line in zip_longest(*parts, fillvalue=""):
            yield (" " * GAP).join(map(str.ljust, line, widths)).rstrip()


def cell(value: Any) -> str:
    """A value on one line, as people read it."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case list():
            return ", ".join(map(cell, value))
        case dict():
            return _thing(value)
    return printable(TIME.sub(r"\1 \2Z", str(value)))


def lines(value: Any) -> list[str]:
    """A value on as many lines as it has parts."""
    match value:
        case list() if any(isinstance(one, dict) or " " in str(one) for one in value):
            return [_facts(one) if isinstance(one, dict) else cell(one) for one in value]
        case {"uuid": uuid, "name": name}:
            return [f"{cell(name)} ({cell(uuid)})"]
        case str() if "\n" in value:
            return [printable(line) for line in value.splitlines()]
    return [cell(value)]


def _thing(value: Mapping[str, Any]) -> str:
    """An object on one line: its name, its PCI address, or what there is."""
    match value:
        case {"name": name}:
            return cell(name)
        case {"domain": domain, "bus": bus, "device": device, "function": function}:
            return printable(f"{domain}:{bus}:{device}.{function}")
    return " ".join(f"{key}={cell(inner)}" for key, inner in value.items())


def _facts(value: Mapping[str, Any]) -> str:
    """A part of something, on one line."""
    return (" " * GAP).join(filter(None, map(cell, value.values())))


def _named(column: str) -> tuple[str, str]:
    name, _, path = column.partition("=")
    return name, path or name


def _at(row: Any, path: str) -> Any:
    """What stands at a path; None where it ends early."""
    for name in path.split("."):
        row = row.get(name) if isinstance(row, Mapping) else None
    return row


def _parts(text: str, wide: int, told: bool) -> list[str]:
    """A cell as lines of this width."""
    if len(text) <= wide:
        return [text]
    return textwrap.wrap(text, wide) if told else [f"{text[: wide - 1]}…"]


def _width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def _text(value: Any, form: str) -> str:
    if form == "json":
        return json.dumps(value, indent=2) + "\n"
    import yaml  # type: ignore[import-untyped]

    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))


def _csv(rows: Iterable[Iterable[Any]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([_plain(value) for value in row] for row in rows)
    return out.getvalue()


def _plain(value: Any) -> Any:
    """Numbers stay numbers, everything else is text that no spreadsheet computes."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    text = printable(value) if isinstance(value, str) else cell(value)
    return f"'{text}" if text.startswith(FORMULA) else text
