"""The manual's table of contents, read from `docs/contents.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DOCS_FOLDER = Path(__file__).resolve().parents[2] / "docs"
OTHER_FILES = {"openapi.yaml", "policy.yaml.sample", "monitoring/alerts.yaml", "monitoring/grafana-dashboard.json"}
"""Files below docs/ that pages link to and that are neither pages nor pictures."""
FIRST_PAGE = "index"
FIELDS_PAGE = "fields"
"""The page that is generated from the code and is no file."""


@dataclass(frozen=True)
class ContentsEntry:
    """A page in the table of contents: the heading of its `part`, its path below docs/ without the extension (`name`),
    and its `title`.
    """

    part: str
    name: str
    title: str


@cache
def load_entries() -> tuple[ContentsEntry, ...]:
    """Return all pages of the manual in reading order, from `docs/contents.toml`, which is read once per process."""
    table = tomllib.loads((DOCS_FOLDER / "contents.toml").read_text())
    return tuple(
        ContentsEntry(part["title"], name, title) for part in table["part"] for name, title in part["pages"].items()
    )


@cache
def list_public_files() -> frozenset[str]:
    """Return the pictures and other files that the manual's pages may show or link to, as paths below docs/."""
    pictures = (path for path in (DOCS_FOLDER / "images").iterdir() if path.suffix in (".png", ".svg"))
    return frozenset(str(path.relative_to(DOCS_FOLDER)) for path in pictures) | OTHER_FILES
