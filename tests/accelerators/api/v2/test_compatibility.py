"""Test `docs/compatibility.md` against the code: every route of v2 has a row, and the tests that a row names exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from accelerators.api.v2.urls import urlpatterns
from accelerators.api.v2.views import V2NotFoundView

ROOT = Path(__file__).resolve().parents[4]
PAGE = (ROOT / "docs" / "compatibility.md").read_text()
TEST_REFERENCE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
SPELLINGS = ((r"\A", ""), (r"(?:v2/)?", "/v2/"), (r"(?:\.json)?/?\Z", ""), (r"\Z", ""))
PATH_PARTS = (("(?:/[^/]+)?", "[/{any}]"), ("(?P<uuid>enable|disable)", r"{enable\|disable}"))


def list_table_rows() -> list[str]:
    """Return the rows of the page's tables, without their heads and rulers."""
    lines = PAGE.splitlines()
    return [
        line
        for line, after in zip(lines, [*lines[1:], ""], strict=True)
        if _is_table_row(line) and not after.startswith("|--")
    ]


def _is_table_row(line: str) -> bool:
    return line.startswith("|") and not line.startswith("|--")


def list_served_routes() -> set[str]:
    """Return `METHOD /path` of every route that v2 serves with a handler."""
    found = set()
    for route in urlpatterns:
        view = route.callback.view_class
        if view is not V2NotFoundView:
            path = _format_route(str(route.pattern))
            found |= {f"{method.upper()} {path}" for method in view.http_method_names if hasattr(view, method)}
    return found


def _format_route(pattern: str) -> str:
    for regex, text in (*SPELLINGS, *PATH_PARTS):
        pattern = pattern.replace(regex, text)
    pattern = re.sub(r"\(\?P<(\w+)>\[\^/\]\+\?\)", r"{\1}", pattern)
    return f"/{pattern.lstrip('/')}"


@cache
def list_function_names(path: str) -> set[str]:
    """Return the names of the functions in a file; an empty set if the file does not exist."""
    file = ROOT / path
    tree = ast.parse(file.read_text() if file.exists() else "")
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_row_of_the_compatibility_page_names_tests_that_exist() -> None:
    without = [row for row in list_table_rows() if not TEST_REFERENCE.search(row)]
    assert not without, "rows without a test"
    gone = [f"{path}::{name}" for path, name in TEST_REFERENCE.findall(PAGE) if name not in list_function_names(path)]
    assert not gone, "tests that do not exist"


def test_the_compatibility_page_lists_exactly_the_routes_of_v2() -> None:
    listed = {
        cell
        for row in list_table_rows()
        for cell in re.findall(r"`((?:GET|POST|PATCH|DELETE) /[^`?]*)`", re.split(r"(?<!\\)\|", row)[1])
    }
    assert listed == list_served_routes()
