"""The manual's complete pages, in two editions: served below `/help/`, and as files that need no server.

Every page is rendered once per process; none of them depends on the reader.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from django.conf import settings
from django.contrib.staticfiles import finders
from django.template.loader import render_to_string

from cyborgweb.manual import contents, fields
from cyborgweb.manual.contents import FIELDS, FIRST, Entry

if TYPE_CHECKING:
    from cyborgweb.manual.pages import Page, Section

STYLES = ("console/console.css", "console/page.css", "help/manual.css")
FONTS = ("unfold/fonts/inter/styles.css",)
"""Fonts of the served edition only; the files use the fonts of the reader's machine."""
SCRIPT = "console/theme.js"
SEARCH = "search"
ALONE_SCRIPT, INDEX = "help/search.js", "index.js"
MOST = 40
"""Sections that a search shows at most."""


@dataclass(frozen=True)
class Edition:
    """Addresses in one edition. `root` is the relative path from the current page to the manual's folder, '' for the
    served edition.
    """

    root: str = ""

    def page(self, name: str) -> str:
        """Return the address of a page."""
        if self.root:
            return f"{self.root}{name}.html"
        return f"/help/{'' if name == FIRST else f'{name}/'}"

    def address(self, place: str) -> str:
        """Return the address of something below docs/: a page (`guide.md#words`) or a file."""
        path, _, anchor = place.partition("#")
        found = self.page(path.removesuffix(".md")) if path.endswith(".md") else f"{self.root or '/help/'}{path}"
        return f"{found}#{anchor}" if anchor else found

    def static(self, path: str) -> str:
        """Return the address of one of the console's static files."""
        return f"{self.root}assets/{Path(path).name}" if self.root else f"{settings.STATIC_URL}{path}"


SERVED = Edition()


@dataclass(frozen=True)
class Hit:
    """A section that the search found."""

    url: str
    page: str
    title: str
    text: str


def alone(name: str) -> Edition:
    """Return the edition in files, as seen from this page."""
    return Edition("../" * name.count("/") or "./")


def body(name: str, edition: Edition) -> Page:
    """Render a page without its frame. Raises KeyError if the table of contents does not have it."""
    from cyborgweb.manual import pages  # its parser takes a while to import, and most processes never show a page

    if name not in {entry.name for entry in contents.entries()}:
        raise KeyError(name)
    source = fields.markdown() if name == FIELDS else (contents.DOCS / f"{name}.md").read_text()
    return pages.render(name, source, edition.address)


@cache
def page(name: str, edition: Edition = SERVED) -> str:
    """Return a complete page; the result is cached. Raises KeyError if the table of contents does not have it."""
    made = body(name, edition)
    every = contents.entries()
    at = [entry.name for entry in every].index(name)
    return framed(
        edition,
        name,
        every[at].title,
        {
            "body": made.html,
            "on_this_page": [one for one in made.sections if one.level == 2],
            "previous": _linked(every[at - 1], edition) if at else None,
            "next": _linked(every[at + 1], edition) if at + 1 < len(every) else None,
        },
    )


def framed(edition: Edition, name: str, title: str, more: dict[str, object]) -> str:
    """Render a page in its frame, with the table of contents and the search."""
    parts: dict[str, list[tuple[str, str, bool]]] = {}
    for entry in contents.entries():
        parts.setdefault(entry.part, []).append((*_linked(entry, edition), entry.name == name))
    context = {
        "served": not edition.root,
        "title": title,
        "parts": parts,
        "first": edition.page(FIRST),
        "search": edition.page(SEARCH),
        "styles": [edition.static(path) for path in (*(() if edition.root else FONTS), *STYLES)],
        "script": edition.static(SCRIPT),
        "icon": edition.static("console/icon.svg"),
    }
    return render_to_string("help/page.html", context | more)


@cache
def sections() -> tuple[tuple[Entry, Section], ...]:
    """Return all sections that can be found, in the order of the contents."""
    return tuple((entry, one) for entry in contents.entries() for one in body(entry.name, SERVED).sections)


def find(term: str) -> list[Hit]:
    """Return at most `MOST` sections that contain every word of `term`; those with more of the words in their
    headings come first.
    """
    words = term.lower().split()
    found = []
    for entry, one in sections() if words else ():
        title, text = f"{entry.title} {one.title}".lower(), one.said.lower()
        if all(word in title or word in text for word in words):
            found.append((-sum(word in title for word in words), entry, one))
    found.sort(key=lambda hit: hit[0])
    return [
        Hit(SERVED.address(f"{entry.name}.md#{one.anchor}"), entry.title, one.title, excerpt(one.said, words))
        for _, entry, one in found[:MOST]
    ]


def excerpt(text: str, words: list[str]) -> str:
    """Return a line or two of text around the first of the words."""
    at = min((place for word in words if (place := text.lower().find(word)) >= 0), default=0)
    start = max(0, text.rfind(" ", 0, max(0, at - 60)))
    return ("…" if start else "") + text[start : start + 220].strip() + ("…" if start + 220 < len(text) else "")


def write(folder: Path) -> int:
    """Write the edition in files into `folder`, which is deleted first; return the number of pages."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "assets").mkdir(parents=True)
    for entry in contents.entries():
        path = folder / f"{entry.name}.html"
        path.parent.mkdir(exist_ok=True)
        path.write_text(page(entry.name, alone(entry.name)))
    for name in contents.files():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(contents.DOCS / name, folder / name)
    for name in (*STYLES, SCRIPT, ALONE_SCRIPT, "console/icon.svg"):
        shutil.copyfile(str(finders.find(name)), folder / "assets" / Path(name).name)
    index = [[f"{entry.name}.html#{one.anchor}", entry.title, one.title, one.said] for entry, one in sections()]
    (folder / "assets" / INDEX).write_text(f"const MANUAL = {json.dumps(index, ensure_ascii=False)};\n")
    edition = alone(SEARCH)
    scripts = [edition.static(INDEX), edition.static(ALONE_SCRIPT)]
    (folder / f"{SEARCH}.html").write_text(framed(edition, SEARCH, "Search", {"scripts": scripts, "hits": []}))
    return len(contents.entries())


def _linked(entry: Entry, edition: Edition) -> tuple[str, str]:
    return edition.page(entry.name), entry.title
