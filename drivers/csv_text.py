"""Make text safe in CSV files that people open with a spreadsheet. The server and the `cyborg` command both use it."""

from __future__ import annotations

import re

FORMULA_START = re.compile(
    r'(?:\A|(?<=[;|\t\r\n]))(?=[ "]*[\t\r\n]|(?:[^\S\t\r\n]|")*[=+\-@＝＋－＠])'  # a sign at the beginning of a cell
    r'|(?<=[;|\t\r\n])(?="*\Z)'  # our closing quote would open a cell that reaches into the next one
)
"""The places in a text where a spreadsheet may begin a cell that it takes for a formula.

A cell may begin at the start of the text or after a separator of some locale. A reader whose separator is `;` sees
quotes in the middle of a cell as plain characters, so quoting alone does not keep a text with `;` in one cell. Commas
are left out: they separate our own cells, and a text that contains them is quoted. The signs are those of OWASP's page
on CSV injection, with the full-width forms of the printable ones. No alternative reads past the next separator, so the
time is in proportion to the length of the text."""


def disarm_formulas(text: str) -> str:
    """Return the text with `'` before everything in it that a spreadsheet may take for a formula, whether it separates
    cells by comma, semicolon, tab or `|`. Other text is returned unchanged.
    """
    return FORMULA_START.sub("'", text)
