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

from cyborgweb.cli.exit_codes import to_printable_line
from drivers.csv_text import disarm_formulas

FORMATS = ("table", "json", "yaml", "csv")
API_TIME = re.compile(r"\A(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(\.\d+)?(Z|\+00:00)\Z")
"""A time as the API writes it; tables show it to the second."""
COLUMN_GAP = 2
MIN_COLUMN_WIDTH = 8
"""The smallest width, in characters, to which a column is cut."""
MIN_SENTENCE_WIDTH = 24
"""The smallest width, in characters, to which a last column of sentences is wrapped."""
SENTENCE_COLUMNS = ("text", "error", "reason", "limits")
"""Names of columns that contain sentences. Such a column, if it is the last, is wrapped and never cut."""
SHORT_UUID_LENGTH = 13
"""How many characters of a uuid are shown when the table is too wide."""
UNCUT_COLUMNS = ("uuid", "id", "command")
"""Columns that are never cut further, because a shortened value would be useless."""


@dataclass
class OutputOptions:
    """The output options. `format` is one of FORMATS; `columns` are names of the verb's columns, or paths into a row,
    such as host.name, () for the verb's own columns. `watch_s` is the number of seconds after which a list is
    refreshed, None if it is printed once.
    """

    format: str = "table"
    columns: tuple[str, ...] = ()
    watch_s: float | None = None


def print_rows(
    rows: Iterable[Mapping[str, Any]], columns: Sequence[str], output: OutputOptions, empty_text: str = ""
) -> None:
    """Print rows on standard output in the chosen format.

    A column is a field, or `name=path` with a path into the row. `empty_text` is printed on standard error if a table
    has no rows. Raises UsageError if the user chose a column that the first row does not have.
    """
    lines = format_row_lines(rows, columns, output)
    if lines:
        click.echo("\n".join(lines))
    elif empty_text:
        click.echo(empty_text, err=True)


def format_row_lines(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], output: OutputOptions) -> list[str]:
    """Return the lines that `print_rows` prints; none for a table without rows. Raises UsageError as `print_rows` does.

    A table that is not limited to the width of a terminal, and CSV, have one line for the header and one for each row.
    """
    row_list = list(rows)
    path_by_name = dict(_parse_column(column) for column in columns)
    chosen_paths = {name: path_by_name.get(name, name) for name in output.columns} or path_by_name
    if row_list and (
        unknown_columns := [path for path in chosen_paths.values() if path.split(".")[0] not in row_list[0]]
    ):
        known_columns = ", ".join(dict.fromkeys((*path_by_name, *row_list[0])))
        raise click.UsageError(f"There is no column {', '.join(unknown_columns)}. The columns are {known_columns}.")
    if output.format in ("json", "yaml"):
        complete_rows = (
            [{name: _value_at_path(row, path) for name, path in chosen_paths.items()} for row in row_list]
            if output.columns
            else row_list
        )
        return _serialize(complete_rows, output.format).removesuffix("\n").split("\n")
    cells = [[_value_at_path(row, path) for path in chosen_paths.values()] for row in row_list]
    if output.format == "csv":
        return _format_csv([[*chosen_paths], *cells]).removesuffix("\n").split("\n")
    if not row_list:
        return []
    text_cells = [[format_cell(value) for value in row] for row in cells]
    return [*format_table_lines(_prepend_header(chosen_paths, text_cells, output), _terminal_width())]


def _prepend_header(names: Iterable[str], cells: list[list[str]], output: OutputOptions) -> list[list[str]]:
    """Return the table's rows with the header row first.

    On a terminal, empty columns are left out unless the user chose the columns.
    """
    rows = [[*names], *cells]
    if output.columns or not _terminal_width():
        return rows
    is_column_filled = [any(column) for column in zip(*cells, strict=True)]
    return [list(compress(row, is_column_filled)) for row in rows]


def print_row(row: Mapping[str, Any], output: OutputOptions) -> None:
    """Print one row on standard output: as a table, a line for each non-empty field; as CSV, a line for each field; as
    JSON or YAML, the whole object.

    If `output` has columns, only these fields are printed, also empty ones. Raises UsageError for an unknown field.
    """
    chosen_values = {name: _value_at_path(row, name) for name in output.columns} or dict(row)
    if unknown := [name for name in chosen_values if name.split(".")[0] not in row]:
        raise click.UsageError(f"There is no field {', '.join(unknown)}. The fields are {', '.join(row)}.")
    if output.format in ("json", "yaml"):
        click.echo(_serialize(chosen_values, output.format), nl=False)
    elif output.format == "csv":
        click.echo(_format_csv([["field", "value"], *chosen_values.items()]), nl=False)
    else:
        name_width = max(map(len, chosen_values))
        shown_values = {
            name: value for name, value in chosen_values.items() if output.columns or value not in (None, "", [], {})
        }
        for name, value in shown_values.items():
            for n, line in enumerate(format_lines(value)):
                click.echo(f"{'' if n else name:{name_width}}  {line}".rstrip())


def format_table_lines(rows: Sequence[Sequence[str]], width: int) -> Iterable[str]:
    """Yield the lines of a table, at most `width` characters wide if possible; 0 means no limit.

    The first row is the header. If the table is too wide, uuids are cut to SHORT_UUID_LENGTH characters, which still
    identify a device; then columns are cut, the widest first. A last column of sentences (SENTENCE_COLUMNS) is wrapped
    instead.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width and sum(widths) + COLUMN_GAP * (len(widths) - 1) > width and "uuid" in rows[0]:
        uuid_index = rows[0].index("uuid")
        rows = [[*row[:uuid_index], row[uuid_index][:SHORT_UUID_LENGTH], *row[uuid_index + 1 :]] for row in rows]
        widths[uuid_index] = min(widths[uuid_index], SHORT_UUID_LENGTH)
    sentence_index = len(widths) - 1 if rows[0][-1] in SENTENCE_COLUMNS else None
    cuttable_indexes = [n for n, name in enumerate(rows[0]) if name not in UNCUT_COLUMNS and n != sentence_index]
    if sentence_index and width:
        widths[sentence_index] = min(
            widths[sentence_index],
            max(MIN_SENTENCE_WIDTH, width - sum(widths[:sentence_index]) - COLUMN_GAP * sentence_index),
        )
    while width and cuttable_indexes and sum(widths) + COLUMN_GAP * (len(widths) - 1) > width:
        widest = max(cuttable_indexes, key=widths.__getitem__)
        if widths[widest] <= MIN_COLUMN_WIDTH:
            break
        widths[widest] -= 1
    for row in rows:
        cell_lines = [
            _split_cell(text, wide, n == sentence_index) for n, (text, wide) in enumerate(zip(row, widths, strict=True))
        ]
        for line in zip_longest(*cell_lines, fillvalue=""):
            yield (" " * COLUMN_GAP).join(map(str.ljust, line, widths)).rstrip()


def format_cell(value: Any) -> str:
    """Format a value on one line for people: '' for None, yes or no for a bool, a list with commas, an object as
    `_format_object` does, and a time of the API to the second.
    """
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case list():
            return ", ".join(map(format_cell, value))
        case dict():
            return _format_object(value)
    return to_printable_line(API_TIME.sub(r"\1 \2Z", str(value)))


def format_lines(value: Any) -> list[str]:
    """Format a value for people, as one or more lines.

    A list of objects or of texts with blanks gives one line for each element, a text one line for each of its lines.
    """
    match value:
        case list() if any(isinstance(one, dict) or " " in str(one) for one in value):
            return [_format_values(one) if isinstance(one, dict) else format_cell(one) for one in value]
        case {"uuid": uuid, "name": name}:
            return [f"{format_cell(name)} ({format_cell(uuid)})"]
        case str() if "\n" in value:
            return [to_printable_line(line) for line in value.splitlines()]
    return [format_cell(value)]


def _format_object(value: Mapping[str, Any]) -> str:
    """Format an object on one line: by its name if it has one, else as a PCI address or as `key=value` pairs."""
    match value:
        case {"name": name}:
            return format_cell(name)
        case {"domain": domain, "bus": bus, "device": device, "function": function}:
            return to_printable_line(f"{domain}:{bus}:{device}.{function}")
    return " ".join(f"{key}={format_cell(inner)}" for key, inner in value.items())


def _format_values(value: Mapping[str, Any]) -> str:
    """Format the non-empty values of an object on one line, without their keys."""
    return (" " * COLUMN_GAP).join(filter(None, map(format_cell, value.values())))


def _parse_column(column: str) -> tuple[str, str]:
    """Split `name=path` into name and path; without `=`, both are the column's text."""
    name, _, path = column.partition("=")
    return name, path or name


def _value_at_path(row: Any, path: str) -> Any:
    """Return the value at a dotted path in a row; None if the path does not exist."""
    for name in path.split("."):
        row = row.get(name) if isinstance(row, Mapping) else None
    return row


def _split_cell(text: str, width: int, is_sentence: bool) -> list[str]:
    """Return the lines of a cell of this width: wrapped if `is_sentence` (a column of sentences), else cut with "…"."""
    if len(text) <= width:
        return [text]
    return textwrap.wrap(text, width) if is_sentence else [f"{text[: width - 1]}…"]


def _terminal_width() -> int:
    """Return the number of characters in a line of the terminal; 0 if standard output is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def _serialize(value: Any, format_name: str) -> str:
    """Return the value as JSON if `format_name` is `json`, else as YAML; the text ends with a line end."""
    if format_name == "json":
        return json.dumps(value, indent=2) + "\n"
    import yaml

    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))


def _format_csv(rows: Iterable[Iterable[Any]]) -> str:
    """Return the rows as CSV with Unix line ends; each value is formatted by `_format_csv_cell`."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([_format_csv_cell(value) for value in row] for row in rows)
    return out.getvalue()


def _format_csv_cell(value: Any) -> Any:
    """Return a CSV cell: None and numbers unchanged, anything else as text that no spreadsheet takes for a formula."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    return disarm_formulas(to_printable_line(value) if isinstance(value, str) else format_cell(value))
