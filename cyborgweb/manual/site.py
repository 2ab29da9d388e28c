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
from cyborgweb.manual.contents import FIELDS_PAGE, FIRST_PAGE, ContentsEntry

if TYPE_CHECKING:
    from cyborgweb.manual.pages import ManualSection, RenderedPage

STYLES = ("console/console.css", "console/page.css", "help/manual.css")
FONTS = ("unfold/fonts/inter/styles.css",)
"""Fonts of the served edition only; the files use the fonts of the reader's machine."""
THEME_SCRIPT = "console/theme.js"
SEARCH_PAGE = "search"
SEARCH_SCRIPT, SEARCH_INDEX = "help/search.js", "index.js"
MAX_HITS = 40
"""Maximum number of sections that a search shows."""


@dataclass(frozen=True)
class ManualEdition:
    """The addresses in one edition of the manual: the one served below `/help/`, or the one written as files.

    `root` is the relative path from the current page to the manual's folder, '' for the served edition.
    """

    root: str = ""

    def page_url(self, name: str) -> str:
        """Return the address, in this edition, of a manual page, given by its path below docs/ without the
        extension.
        """
        if self.root:
            return f"{self.root}{name}.html"
        return f"/help/{'' if name == FIRST_PAGE else f'{name}/'}"

    def docs_url(self, place: str) -> str:
        """Return the address, in this edition, of something below docs/: a page (`guide.md#words`) or a file."""
        path, _, anchor = place.partition("#")
        url = self.page_url(path.removesuffix(".md")) if path.endswith(".md") else f"{self.root or '/help/'}{path}"
        return f"{url}#{anchor}" if anchor else url

    def static_url(self, path: str) -> str:
        """Return the address, in this edition, of one of the console's static files.

        The edition that is written as files has a copy of the file in its folder `assets/`.
        """
        return f"{self.root}assets/{Path(path).name}" if self.root else f"{settings.STATIC_URL}{path}"


SERVED_EDITION = ManualEdition()


@dataclass(frozen=True)
class ManualHit:
    """A section that the search found: its address, the title of its page, its own title, and an excerpt."""

    url: str
    page: str
    title: str
    text: str


def file_edition(name: str) -> ManualEdition:
    """Return the edition of the manual that is written as files, with addresses relative to the page `name`."""
    return ManualEdition("../" * name.count("/") or "./")


def render_body(name: str, edition: ManualEdition) -> RenderedPage:
    """Render a page of the manual without its frame. Raises KeyError if the table of contents does not have it."""
    from cyborgweb.manual import pages  # its parser takes a while to import, and most processes never show a page

    if name not in {entry.name for entry in contents.load_entries()}:
        raise KeyError(name)
    source = fields.render_fields_page() if name == FIELDS_PAGE else (contents.DOCS_FOLDER / f"{name}.md").read_text()
    return pages.render_page(name, source, edition.docs_url)


@cache
def complete_page(name: str, edition: ManualEdition = SERVED_EDITION) -> str:
    """Return the HTML of a complete page of the manual; it is cached for the life of the process.

    Raises KeyError if the table of contents does not have the page.
    """
    rendered = render_body(name, edition)
    all_entries = contents.load_entries()
    position = [entry.name for entry in all_entries].index(name)
    return render_frame(
        edition,
        name,
        all_entries[position].title,
        {
            "body": rendered.html,
            "on_this_page": [one for one in rendered.sections if one.level == 2],
            "previous": _link_to(all_entries[position - 1], edition) if position else None,
            "next": _link_to(all_entries[position + 1], edition) if position + 1 < len(all_entries) else None,
        },
    )


def render_frame(edition: ManualEdition, name: str, title: str, extra_context: dict[str, object]) -> str:
    """Return the HTML of a manual page in its frame, with the table of contents and the search. `extra_context` holds
    the page's own content.
    """
    parts: dict[str, list[tuple[str, str, bool]]] = {}
    for entry in contents.load_entries():
        parts.setdefault(entry.part, []).append((*_link_to(entry, edition), entry.name == name))
    context = {
        "served": not edition.root,
        "title": title,
        "parts": parts,
        "first": edition.page_url(FIRST_PAGE),
        "search": edition.page_url(SEARCH_PAGE),
        "styles": [edition.static_url(path) for path in (*(() if edition.root else FONTS), *STYLES)],
        "script": edition.static_url(THEME_SCRIPT),
        "icon": edition.static_url("console/icon.svg"),
    }
    return render_to_string("cyborgweb/manual/page.html", context | extra_context)


@cache
def all_sections() -> tuple[tuple[ContentsEntry, ManualSection], ...]:
    """Return all sections of the manual, which the search covers, each with its page, in the order of the contents.

    Renders all pages once per process.
    """
    return tuple(
        (entry, one) for entry in contents.load_entries() for one in render_body(entry.name, SERVED_EDITION).sections
    )


def search_sections(term: str) -> list[ManualHit]:
    """Return at most `MAX_HITS` sections of the manual that contain every word of `term`; none for an empty term.

    Sections with more of the words in their headings come first.
    """
    words = term.lower().split()
    ranked = []
    for entry, section in all_sections() if words else ():
        title, text = f"{entry.title} {section.title}".lower(), section.plain_text.lower()
        if all(word in title or word in text for word in words):
            ranked.append((-sum(word in title for word in words), entry, section))
    ranked.sort(key=lambda hit: hit[0])
    return [
        ManualHit(
            SERVED_EDITION.docs_url(f"{entry.name}.md#{one.anchor}"),
            entry.title,
            one.title,
            excerpt_around(one.plain_text, words),
        )
        for _, entry, one in ranked[:MAX_HITS]
    ]


def excerpt_around(text: str, words: list[str]) -> str:
    """Return at most 220 characters of `text`, beginning about 60 characters before the earliest of the `words`.

    “…” stands for what is left out at either end and is not counted. `words` must be in lower case. If none of them
    occurs, the excerpt is the beginning of the text.
    """
    at = min((place for word in words if (place := text.lower().find(word)) >= 0), default=0)
    start = max(0, text.rfind(" ", 0, max(0, at - 60)))
    return ("…" if start else "") + text[start : start + 220].strip() + ("…" if start + 220 < len(text) else "")


def write_files(folder: Path) -> int:
    """Delete `folder`, write the manual as files into it, with a search page, and return the number of pages.

    Raises OSError if a file cannot be written.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "assets").mkdir(parents=True)
    for entry in contents.load_entries():
        path = folder / f"{entry.name}.html"
        path.parent.mkdir(exist_ok=True)
        path.write_text(complete_page(entry.name, file_edition(entry.name)))
    for name in contents.list_public_files():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(contents.DOCS_FOLDER / name, folder / name)
    for name in (*STYLES, THEME_SCRIPT, SEARCH_SCRIPT, "console/icon.svg"):
        shutil.copyfile(str(finders.find(name)), folder / "assets" / Path(name).name)
    index = [
        [f"{entry.name}.html#{one.anchor}", entry.title, one.title, one.plain_text] for entry, one in all_sections()
    ]
    (folder / "assets" / SEARCH_INDEX).write_text(f"const MANUAL = {json.dumps(index, ensure_ascii=False)};\n")
    edition = file_edition(SEARCH_PAGE)
    scripts = [edition.static_url(SEARCH_INDEX), edition.static_url(SEARCH_SCRIPT)]
    (folder / f"{SEARCH_PAGE}.html").write_text(
        render_frame(edition, SEARCH_PAGE, "Search", {"scripts": scripts, "hits": []})
    )
    return len(contents.load_entries())


def _link_to(entry: ContentsEntry, edition: ManualEdition) -> tuple[str, str]:
    """Return the address of a manual page in this edition, and its title."""
    return edition.page_url(entry.name), entry.title
