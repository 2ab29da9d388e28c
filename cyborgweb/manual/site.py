"""The manual's pages in their frame, in two editions: served under `/help/`, and as files that need no server.

Called by `views` and by `manage.py manual`. Every page is made once per process; nothing in it is about who reads it.
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
"""Only where they are served; files take what the reader's machine has."""
SCRIPT = "console/theme.js"
SEARCH = "search"
ALONE_SCRIPT, INDEX = "help/search.js", "index.js"
MOST = 40
"""So many sections a search shows."""


@dataclass(frozen=True)
class Edition:
    """Where things are. `root` is the way from the page on screen to the manual's folder; '' when it is served."""

    root: str = ""

    def page(self, name: str) -> str:
        """A page's address."""
        if self.root:
            return f"{self.root}{name}.html"
        return f"/help/{'' if name == FIRST else f'{name}/'}"

    def address(self, place: str) -> str:
        """Of something below docs/: a page (`guide.md#words`) or a file."""
        path, _, anchor = place.partition("#")
        found = self.page(path.removesuffix(".md")) if path.endswith(".md") else f"{self.root or '/help/'}{path}"
        return f"{found}#{anchor}" if anchor else found

    def static(self, path: str) -> str:
        """Of a file of the console's."""
        return f"{self.root}assets/{Path(path).name}" if self.root else f"{settings.STATIC_URL}{path}"


SERVED = Edition()


@dataclass(frozen=True)
class Hit:
    """A section that was found."""

    url: str
    page: str
    title: str
    text: str


def alone(name: str) -> Edition:
    """The edition in files, seen from this page."""
    return Edition("../" * name.count("/") or "./")


def body(name: str, edition: Edition) -> Page:
    """A page without its frame. Raises KeyError for what the contents do not have."""
    from cyborgweb.manual import pages  # its parser takes a while to import, and most processes never show a page

    if name not in {entry.name for entry in contents.entries()}:
        raise KeyError(name)
    source = fields.markdown() if name == FIELDS else (contents.DOCS / f"{name}.md").read_text()
    return pages.render(name, source, edition.address)


@cache
def page(name: str, edition: Edition = SERVED) -> str:
    """A whole page. Raises KeyError for what the contents do not have."""
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
    """A page's frame: the contents beside it, the search above."""
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
    """All that can be found, in the order of the contents."""
    return tuple((entry, one) for entry in contents.entries() for one in body(entry.name, SERVED).sections)


def find(term: str) -> list[Hit]:
    """Sections that have every word of `term`, those with more of them in their headings first."""
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
    """A line or two around the first of the words."""
    at = min((place for word in words if (place := text.lower().find(word)) >= 0), default=0)
    start = max(0, text.rfind(" ", 0, max(0, at - 60)))
    return ("…" if start else "") + text[start : start + 220].strip() + ("…" if start + 220 < len(text) else "")


def write(folder: Path) -> int:
    """The edition in files into `folder`, which is made anew; how many pages it has."""
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
