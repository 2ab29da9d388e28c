"""The manual's table of contents, read from `docs/contents.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
MORE = {"openapi.yaml", "policy.yaml.sample", "monitoring/alerts.yaml", "monitoring/grafana-dashboard.json"}
"""Files below docs/ that pages link to and that are neither pages nor pictures."""
FIRST = "index"
FIELDS = "fields"
"""The page that is generated from the code and is no file."""


@dataclass(frozen=True)
class Entry:
    """A page in the table of contents; `name` is its path below docs/ without the extension."""

    part: str
    name: str
    title: str


@cache
def entries() -> tuple[Entry, ...]:
    """Return all pages in reading order."""
    table = tomllib.loads((DOCS / "contents.toml").read_text())
    return tuple(Entry(part["title"], name, title) for part in table["part"] for name, title in part["pages"].items())


@cache
def files() -> frozenset[str]:
    """Return the pictures and other files that pages may show or link to, as paths below docs/."""
    pictures = (path for path in (DOCS / "images").iterdir() if path.suffix in (".png", ".svg"))
    return frozenset(str(path.relative_to(DOCS)) for path in pictures) | MORE
