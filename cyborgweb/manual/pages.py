"""Render a page of `docs/` as HTML, and extract its headings and its text for the search. No Django.

Markdown is CommonMark with tables, as other readers of docs/ expect. HTML in it is shown as text, except `<br>`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml
from markdown_it.token import Token

from cyborgweb.manual import contents

AddressFunction = Callable[[str], str]
"""Function that returns the address of something in docs/ in one edition of the manual: `guide.md#words`,
`images/host.png`.
"""


@dataclass
class ManualSection:
    """A heading and the text below it, up to the next heading."""

    level: int
    anchor: str
    title: str
    text: list[str] = field(default_factory=list)

    @property
    def plain_text(self) -> str:
        """Return the section's text on one line."""
        return " ".join(" ".join(self.text).split())


@dataclass(frozen=True)
class RenderedPage:
    """A rendered page of the manual without its frame. The first of its sections begins with the page's title."""

    name: str
    html: str
    sections: tuple[ManualSection, ...]


def render_page(name: str, source: str, address: AddressFunction) -> RenderedPage:
    """Render the Markdown in `source` as HTML, and extract its sections for the search.

    `address` turns a path below docs/ into the address in this edition. Relative links are resolved from the folder of
    the page `name`. Raises IndexError if a link leads out of docs/.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    for rule, render_rule in RENDER_RULES.items():
        parser.add_render_rule(rule, render_rule)
    tokens = parser.parse(source)
    sections: list[ManualSection] = []
    counts: Counter[str] = Counter()
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "heading_open" and following:
            title = _plain_text(following)
            sections.append(ManualSection(int(token.tag[1]), _build_anchor(title, counts), title))
            token.attrSet("id", sections[-1].anchor)
        elif token.type in ("inline", "fence") and sections:
            sections[-1].text.append(_plain_text(token) if token.type == "inline" else token.content)
        if token.type == "inline":
            _replace_link_targets(token.children or [], name, address)
    for section in sections:
        section.text = section.text[1:]  # without the heading itself
    return RenderedPage(name, parser.renderer.render(tokens, parser.options, {"page": name}), tuple(sections))


def resolve_link(name: str, link: str) -> str:
    """Return the path below docs/, with its anchor, to which a relative link on the manual's page `name` leads.

    Raises IndexError if it leads out of docs/.
    """
    path, _, anchor = link.partition("#")
    folder = PurePosixPath(name).parent
    parts: list[str] = []
    for part in (folder / path).parts if path else (f"{name}.md",):
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts) + (f"#{anchor}" if anchor else "")


def diagram_path(name: str, anchor: str) -> str:
    """Return the path below docs/ of the drawing that page `name` shows for the Mermaid block under this heading."""
    return f"images/{PurePosixPath(name).name}-{anchor}.svg"


def _replace_link_targets(tokens: Sequence[Token], name: str, address: AddressFunction) -> None:
    """Replace the relative targets of links and pictures on page `name` by their addresses in this edition, and note
    the path below docs/ in the token. Raises IndexError if a target is outside docs/.
    """
    for token in tokens:
        key = {"link_open": "href", "image": "src"}.get(token.type)
        link = str(token.attrGet(key) or "") if key else ""
        if key and link and "://" not in link:
            token.meta["docs"] = resolve_link(name, link)
            token.attrSet(key, link if link.startswith("#") else address(token.meta["docs"]))


def _build_anchor(title: str, counts: Counter[str]) -> str:
    """Return the heading's anchor as GitHub builds it, so that a link works in both places. A repeated heading gets a
    number, for which `counts` is updated.
    """
    slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
    counts[slug] += 1
    return slug if counts[slug] == 1 else f"{slug}-{counts[slug] - 1}"


def _plain_text(token: Token) -> str:
    """Return the text of a token without its markup."""
    return "".join(_iterate_text(token.children or []))


def _iterate_text(tokens: Sequence[Token]) -> Iterator[str]:
    """Yield the text of each token: a blank for a line break, and '' for markup such as emphasis."""
    for token in tokens:
        yield token.content if token.type in ("text", "code_inline", "image") else " " * (token.type == "softbreak")


def _render_text(self: Any, tokens: Sequence[Token], at: int, options: Any, env: Any) -> str:
    """Render text escaped, except that `<br>` stays a line break."""
    return escapeHtml(tokens[at].content).replace("&lt;br&gt;", "<br>")


def _render_code_block(self: Any, tokens: Sequence[Token], at: int, options: Any, env: Any) -> str:
    """Render a block of code, or for a Mermaid block the drawing that belongs to the heading above it (`diagram_path`).

    The text after the language in the block's first line is a file name and becomes the caption.
    """
    token = tokens[at]
    language, _, name = token.info.partition(" ")
    if language == "mermaid":
        heading = next(n for n in range(at, -1, -1) if tokens[n].type == "heading_open")
        path = diagram_path(env["page"], str(tokens[heading].attrGet("id")))
        drawing = _read_drawing(path, _plain_text(tokens[heading + 1]))
        return f'<div class="drawing" tabindex="0" role="group">{drawing}</div>\n'
    caption = f"<figcaption>{escapeHtml(name)}</figcaption>" if name else ""
    return f'<figure class="code">{caption}<pre tabindex="0"><code>{escapeHtml(token.content)}</code></pre></figure>\n'


def _render_image(self: Any, tokens: Sequence[Token], at: int, options: Any, env: Any) -> str:
    """Render a picture: an SVG drawing of docs/images/ inline, so that it uses the page's colours; any other by its
    address.
    """
    token = tokens[at]
    path = token.meta.get("docs", "")
    if path.endswith(".svg") and path in contents.list_public_files():
        return f'<span class="drawing" tabindex="0">{_read_drawing(path, token.content)}</span>'
    return f'<img src="{escapeHtml(str(token.attrGet("src")))}" alt="{escapeHtml(token.content)}" loading="lazy">'


def _read_drawing(path: str, label: str) -> str:
    """Return an SVG file of docs/ as an `<svg>` element of the page; `label` is its accessible name.

    Raises FileNotFoundError if there is no such file.
    """
    drawing = (contents.DOCS_FOLDER / path).read_text().partition("<svg ")[2].strip()
    return f'<svg role="img" aria-label="{escapeHtml(label)}" {drawing}'


def _render_table_heading(self: Any, tokens: Sequence[Token], at: int, options: Any, env: Any) -> str:
    """Render a heading cell of a table with `scope="col"`, for screen readers."""
    tokens[at].attrSet("scope", "col")
    return str(self.renderToken(tokens, at, options, env))


RENDER_RULES: dict[str, Callable[..., str]] = {
    "text": _render_text,
    "fence": _render_code_block,
    "image": _render_image,
    "th_open": _render_table_heading,
    "table_open": lambda *_: '<div class="scroll" tabindex="0"><table>\n',
    "table_close": lambda *_: "</table></div>\n",
}
