"""Print rows for the `cyborg` command: as a table that fits the terminal, JSON, YAML or CSV.

Tables and CSV print a verb's columns. JSON and YAML print the API's complete rows, or only the fields in `--columns`.
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
"""A spreadsheet takes a cell that begins with one of these for a formula. Text of hosts and tenants must stay text."""
TIME = re.compile(r"\A(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(\.\d+)?(Z|\+00:00)\Z")
"""A time as the API writes it; tables show it to the second."""
GAP = 2
LEAST = 8
"""The smallest width, in characters, to which a column is cut."""
LEAST_SAID = 24
"""The smallest width, in characters, to which a last column of sentences is wrapped."""
SAID = ("text", "error", "reason", "limits")
"""Names of columns that contain sentences. Such a column, if it is the last, is wrapped and never cut."""
BEGINNING = 13
"""How many characters of a uuid are shown when the table is too wide."""
WHOLE = ("uuid", "id", "command")
"""Columns that are never cut further, because a shortened value would be useless."""


@dataclass
class Output:
    """The output options. `columns` are names of the verb's columns, or paths into a row, such as host.name."""

    format: str = "table"
    columns: tuple[str, ...] = ()


def show(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], output: Output, nothing: str = "") -> None:
    """Print rows on standard output in the chosen format.

    A column is a field, or `name=path` with a path into the row. `nothing` is printed on standard error if a table has
    no rows. Raises UsageError for an unknown column.
    """
    found = list(rows)
    paths = dict(_named(column) for column in columns)
    chosen = {name: paths.get(name, name) for name in output.columns} or paths
    if found and (unknown := [path for path in chosen.values() if path.split(".")[0] not in found[0]]):
        there_are = ", ".join(dict.fromkeys((*paths, *found[0])))
        raise click.UsageError(f"There is no column {', '.join(unknown)}. The columns are {there_are}.")
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
    """Return the table's rows with the header row first.

    On a terminal, empty columns are left out unless the user chose the columns.
    """
    rows = [[*names], *cells]
    if output.columns or not _width():
        return rows
    telling = [any(column) for column in zip(*cells, strict=True)]
    return [list(compress(row, telling)) for row in rows]


def show_one(row: Mapping[str, Any], output: Output) -> None:
    """Print one row: in the table format a line for each non-empty field, in JSON and YAML the whole object.

    Raises UsageError for an unknown field.
    """
    chosen = {name: _at(row, name) for name in output.columns} or dict(row)
    if unknown := [name for name in chosen if name.split(".")[0] not in row]:
        raise click.UsageError(f"There is no field {', '.join(unknown)}. The fields are {', '.join(row)}.")
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
    """Yield the lines of a table, at most `width` characters wide if possible; 0 means no limit.

    The first row is the header. If the table is too wide, uuids are cut to BEGINNING characters, which still identify a
    device; then columns are cut, the widest first. A last column of sentences (SAID) is wrapped instead.
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
    """Format a value on one line for people."""
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
    """Format a value for people, one line for each part of a list or each line of a text."""
    match value:
        case list() if any(isinstance(one, dict) or " " in str(one) for one in value):
            return [_facts(one) if isinstance(one, dict) else cell(one) for one in value]
        case {"uuid": uuid, "name": name}:
            return [f"{cell(name)} ({cell(uuid)})"]
        case str() if "\n" in value:
            return [printable(line) for line in value.splitlines()]
    return [cell(value)]


def _thing(value: Mapping[str, Any]) -> str:
    """Format an object on one line: as its name, as its PCI address, else as `key=value` pairs."""
    match value:
        case {"name": name}:
            return cell(name)
        case {"domain": domain, "bus": bus, "device": device, "function": function}:
            return printable(f"{domain}:{bus}:{device}.{function}")
    return " ".join(f"{key}={cell(inner)}" for key, inner in value.items())


def _facts(value: Mapping[str, Any]) -> str:
    """Format the non-empty values of an object on one line, without their keys."""
    return (" " * GAP).join(filter(None, map(cell, value.values())))


def _named(column: str) -> tuple[str, str]:
    name, _, path = column.partition("=")
    return name, path or name


def _at(row: Any, path: str) -> Any:
    """Return the value at a dotted path in a row; None if the path does not exist."""
    for name in path.split("."):
        row = row.get(name) if isinstance(row, Mapping) else None
    return row


def _parts(text: str, wide: int, told: bool) -> list[str]:
    """Return the lines of a cell of this width: wrapped if `told` (a column of sentences), else cut with "…"."""
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
    """Return a CSV cell: None and numbers unchanged, anything else as text that no spreadsheet takes for a formula."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    text = printable(value) if isinstance(value, str) else cell(value)
    return f"'{text}" if text.startswith(FORMULA) else text
