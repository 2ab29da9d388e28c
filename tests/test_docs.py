"""Test README.md, the pages beside it and those of docs/ against the code.

Each file, function, test, command and setting that a page names exists, and each link has a target. The manual that is
built from these pages is tested in `tests/cyborgweb/manual/test_help.py`.
"""

from __future__ import annotations

import ast
import hashlib
import pkgutil
import re
from collections import Counter
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
from django.apps import apps
from django.core.management import get_commands

from cyborgweb.cli.main import cli
from cyborgweb.manual import contents, pages

ROOT = Path(__file__).resolve().parents[1]
FRONT = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES = [*FRONT, *sorted((ROOT / "docs").rglob("*.md"))]
FLOWS_PAGE = (ROOT / "docs/request-flows.md").read_text()
CODE_REFERENCE = re.compile(r"`((?:drivers|accelerators|agents|placement_sync|cyborgweb)(?:\.\w+)+)`")
DJANGO_PERMISSION = re.compile(r"(\w+)\.(?:add|change|delete|view)_(\w+)")
FILE_REFERENCE = re.compile(r"`((?:drivers|accelerators|agents|placement_sync|cyborgweb|tests|docs)/[\w/]+\.\w+)`")
TEST_REFERENCE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
MARKDOWN_LINK = re.compile(r"\]\(([^)\s]+)\)")
DIAGRAM_MESSAGE = re.compile(r"^\s+\w+--?(?:>>|x)\w+: (.+)", re.MULTILINE)
FENCED_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
HEADING_OR_DIAGRAM = re.compile(r"^#+ ([^\n]+)$|^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SVG = "{http://www.w3.org/2000/svg}"
PRODUCT_PACKAGES = ("drivers", "accelerators", "agents", "placement_sync", "cyborgweb")
MAX_PICTURE_BYTES = 150_000
"""The size limit of one picture."""


@cache
def list_function_names(path: str) -> set[str]:
    """Return the names of the functions in a file; an empty set if the file does not exist."""
    file = ROOT / path
    tree = ast.parse(file.read_text() if file.exists() else "")
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def build_slug(title: str) -> str:
    """The anchor of a heading, as GitHub has it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@cache
def list_heading_anchors(page: Path) -> set[str]:
    """Return the link anchors that GitHub gives to the headings of a page."""
    counts: Counter[str] = Counter()
    found = set()
    for title in re.findall(r"^#+ (.+)$", FENCED_BLOCK.sub("", page.read_text()), re.MULTILINE):
        slug = build_slug(title)
        found.add(f"{slug}-{counts[slug]}" if counts[slug] else slug)
        counts[slug] += 1
    return found


def list_diagrams() -> list[tuple[str, str]]:
    """The path of its drawing below docs/, and the text, of each Mermaid block of the manual."""
    found = []
    for page in PAGES[len(FRONT) :]:
        anchor = ""
        for title, block in HEADING_OR_DIAGRAM.findall(page.read_text()):
            if block:
                found.append((pages.diagram_path(page.stem, anchor), block))
            else:
                anchor = build_slug(title)
    return found


def list_numbered_rows(section: str) -> list[str]:
    """Return the numbered table rows of a section, as lines of Markdown."""
    return re.findall(r"^\| \d+ \|.*$", section, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_has_an_existing_target_and_anchor(page: Path) -> None:
    for link in MARKDOWN_LINK.findall(FENCED_BLOCK.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in list_heading_anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_files_and_tests_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    for name in CODE_REFERENCE.findall(text):
        if permission := DJANGO_PERMISSION.fullmatch(name):
            assert apps.get_model(*permission.groups()), name
        else:
            assert name.endswith(".toml") or pkgutil.resolve_name(name) is not None, name
    assert not [path for path in FILE_REFERENCE.findall(text) if not (ROOT / path).exists()], "files that do not exist"
    gone = [f"{path}::{name}" for path, name in TEST_REFERENCE.findall(text) if name not in list_function_names(path)]
    assert not gone, "tests that do not exist"


def test_every_arrow_of_a_flow_diagram_has_a_table_row_with_code_and_a_test() -> None:
    for section in FLOWS_PAGE.split("\n## ")[1:]:
        numbers = [int(row.split("|")[1]) for row in list_numbered_rows(section)]
        assert numbers == list(range(1, len(DIAGRAM_MESSAGE.findall(section)) + 1)), section.splitlines()[0]
        for row in list_numbered_rows(section):
            assert CODE_REFERENCE.search(row), row
            assert TEST_REFERENCE.search(row), row


def test_flow_diagrams_contain_no_semicolon_that_mermaid_would_reject() -> None:
    for _, block in list_diagrams():
        assert ";" not in block, "Mermaid takes it for the end of the line"


@pytest.mark.parametrize(("path", "block"), list_diagrams())
def test_the_drawing_of_a_mermaid_block_was_made_from_its_present_text(path: str, block: str) -> None:
    """A drawing has its participants first, then the conditions, then the numbered messages."""
    drawing = ElementTree.parse(ROOT / "docs" / path).getroot()
    texts = [one.text for one in drawing.iter(f"{SVG}text")]
    participants = re.findall(r"participant \w+ as (.+)", block)
    conditions = [f"if {condition}" for condition in re.findall(r"^\s+opt (.+)", block, re.MULTILINE)]
    messages = DIAGRAM_MESSAGE.findall(block)
    steps = [text for number, message in enumerate(messages, 1) for text in (str(number), message)]
    assert texts == [*participants, *conditions, *steps]
    assert drawing.findtext(f"{SVG}title") and drawing.findtext(f"{SVG}desc")
    digest = hashlib.sha256(block.encode()).hexdigest()
    recorded = drawing.findtext(f"{SVG}metadata")
    assert recorded == f"mermaid sha256 {digest}", "correct the drawing, then write this digest into it"


def test_the_table_of_contents_names_each_page_of_docs_exactly_once() -> None:
    existing_pages = {str(page.relative_to(contents.DOCS_FOLDER).with_suffix("")) for page in PAGES[len(FRONT) :]}
    existing_pages |= {contents.FIELDS_PAGE}
    listed_pages = [entry.name for entry in contents.load_entries()]
    assert sorted(listed_pages) == sorted(existing_pages), "docs/contents.toml names each page of docs/ once"


def test_pictures_of_docs_are_small_shown_on_a_page_and_have_alternative_text() -> None:
    text = "".join(page.read_text() for page in PAGES)
    text += "".join(f"{path})" for path, _ in list_diagrams())
    for picture in sorted((ROOT / "docs/images").iterdir()):
        assert picture.stat().st_size <= MAX_PICTURE_BYTES, f"{picture.name}: too large"
        assert f"images/{picture.name})" in text, f"{picture.name}: nobody shows it"
    assert not re.findall(r"!\[\]\(", text), "a picture without words"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_and_make_targets_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    assert not set(re.findall(r"manage\.py ([a-z_]{3,})", text)) - set(get_commands())
    assert not set(re.findall(r"\bcyborg ([a-z]+-[a-z-]+)", text)) - set(cli.commands)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert not set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) - targets


@cache
def read_product_code() -> str:
    """Return the code of all product packages as one text."""
    return "\n".join(path.read_text() for room in PRODUCT_PACKAGES for path in sorted((ROOT / room).rglob("*.py")))


def test_sentences_quoted_in_troubleshooting_occur_in_the_product_code() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    assert len(quoted) > 15
    assert not [sentence for sentence in quoted if sentence not in read_product_code()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_setting_that_a_page_names_exists_in_the_product_code(page: Path) -> None:
    named = re.findall(r"\bCYBORG_[A-Z_]*[A-Z]\b", page.read_text())
    options = [f"--{key.removeprefix('CYBORG_').lower()}" for key in named]
    known = [
        key in read_product_code() or option in read_product_code() for key, option in zip(named, options, strict=True)
    ]
    assert all(known), dict(zip(named, known, strict=True))
