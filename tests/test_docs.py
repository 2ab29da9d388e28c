"""The pages below docs/ against the code: what they name exists, and every link leads somewhere."""

from __future__ import annotations

import ast
import pkgutil
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FLOWS = (ROOT / "docs/request-flows.md").read_text()
CODE = re.compile(r"`((?:drivers|accelerators|agents|placement_sync|cyborgweb)(?:\.\w+)+)`")
FILE = re.compile(r"`((?:drivers|accelerators|agents|placement_sync|cyborgweb|tests|docs)/[\w/]+\.\w+)`")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
ARROW = re.compile(r"^\s+\w+--?(?:>>|x)\w+:", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@cache
def functions(path: str) -> set[str]:
    """The names of the functions in a file; none when it is not there."""
    file = ROOT / path
    tree = ast.parse(file.read_text() if file.exists() else "")
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@cache
def anchors(page: Path) -> set[str]:
    """What its headings are called in links, as GitHub has it."""
    counts: Counter[str] = Counter()
    found = set()
    for title in re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        found.add(f"{slug}-{counts[slug]}" if counts[slug] else slug)
        counts[slug] += 1
    return found


def rows(section: str) -> list[str]:
    """The numbered rows of its table."""
    return re.findall(r"^\| \d+ \|.*$", section, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_files_and_tests_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text()
    for name in CODE.findall(text):
        assert name.endswith(".toml") or pkgutil.resolve_name(name), name
    assert not [path for path in FILE.findall(text) if not (ROOT / path).exists()], "files that do not exist"
    gone = [f"{path}::{name}" for path, name in TEST.findall(text) if name not in functions(path)]
    assert not gone, "tests that do not exist"


def test_every_step_of_a_flow_is_a_row_with_code_and_a_test() -> None:
    for section in FLOWS.split("\n## ")[1:]:
        numbers = [int(row.split("|")[1]) for row in rows(section)]
        assert numbers == list(range(1, len(ARROW.findall(section)) + 1)), section.splitlines()[0]
        for row in rows(section):
            assert CODE.search(row), row
            assert TEST.search(row), row


def test_the_pictures_can_be_drawn() -> None:
    for picture in re.findall(r"^```mermaid\n(.*?)^```$", FLOWS, re.MULTILINE | re.DOTALL):
        assert ";" not in picture, "Mermaid takes it for the end of the line"
