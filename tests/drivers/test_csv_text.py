"""Test that no text in a CSV file becomes a formula, whatever separator the spreadsheet expects."""

from __future__ import annotations

import csv
import io
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from drivers.csv_text import disarm_formulas

SEPARATORS = (",", ";", "\t", "|")
SIGNS = ("=", "+", "-", "@", "＝", "＋", "－", "＠", "\t", "\r", "\n")
ROWS = st.lists(st.lists(st.text(alphabet="=+-@;,\t\r\n|\"' a", max_size=12), min_size=1, max_size=4), max_size=4)


def list_formulas(written: str, separator: str) -> list[str]:
    """Return the cells of a CSV file that are formulas for a spreadsheet with this separator."""
    rows = csv.reader(io.StringIO(written, newline=""), delimiter=separator)
    return [cell for row in rows for cell in row if cell.lstrip(' "').startswith(SIGNS)]


@given(ROWS, st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]))
@example([["x;=1+1"]], csv.QUOTE_ALL)
@example([["a", 'b;"=1"']], csv.QUOTE_MINIMAL)
@example([["a\n@SUM(1)", "\t=1"]], csv.QUOTE_ALL)
def test_no_separator_makes_a_formula_of_a_cell(rows: list[list[str]], quoting: int) -> None:
    out = io.StringIO()
    writer = csv.writer(out, quoting=quoting)  # type: ignore[arg-type]
    writer.writerows([disarm_formulas(cell) for cell in row] for row in rows)
    for separator in SEPARATORS:
        assert list_formulas(out.getvalue(), separator) == []


@pytest.mark.parametrize(
    "text", ["", "0000:3b:00.0", "a-b", "a, -b", "[1, -2]", '{"a": "=1"}', "a|b;c\td", "x = 1", "https://a/?b=c"]
)
def test_text_that_cannot_become_a_formula_is_unchanged(text: str) -> None:
    assert disarm_formulas(text) == text


@pytest.mark.parametrize("cell", ["\t\x0b", '\n"', "; ", '|"', "\t \x0b"])
def test_a_long_cell_of_blanks_is_read_once(cell: str) -> None:
    start = time.process_time()
    disarm_formulas(cell * 20_000)
    assert time.process_time() - start < 1  # reading the rest of the cell at each separator takes ten seconds


@pytest.mark.parametrize("text", ["=1", " =1", '"=1', "-2", "x;=1", "x; +1", "x|@a", "x\n-y", "\r", "＝1", 'x;"'])
def test_a_quote_is_put_before_each_formula(text: str) -> None:
    assert "'" in disarm_formulas(text) and disarm_formulas(text).replace("'", "") == text
