"""What the manual has, in which order: `docs/contents.toml`. Read by everything of this package, and by tests."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
MORE = {"openapi.yaml", "policy.yaml.sample", "monitoring/alerts.yaml", "monitoring/grafana-dashboard.json"}
"""What is no page and no picture, and yet linked to."""
FIRST = "index"
FIELDS = "fields"
"""The page that is made of the code and stands in no file."""


@dataclass(frozen=True)
class Entry:
    """A page in the list of contents; `name` is its path below docs/ without its ending."""

    part: str
    name: str
    title: str


@cache
def entries() -> tuple[Entry, ...]:
    """Every page, in the order in which one would read them."""
    table = tomllib.loads((DOCS / "contents.toml").read_text())
    return tuple(Entry(part["title"], name, title) for part in table["part"] for name, title in part["pages"].items())


@cache
def files() -> frozenset[str]:
    """What pages may show or lead to beside pages, as paths below docs/."""
    pictures = (path for path in (DOCS / "images").iterdir() if path.suffix in (".png", ".svg"))
    return frozenset(str(path.relative_to(DOCS)) for path in pictures) | MORE
