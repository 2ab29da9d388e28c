"""Sections that other packages add to the console's pages of hosts, devices and requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.db.models import Model

from accelerators.runtime.registry import Registry


@dataclass(frozen=True)
class PageSection:
    """A section of the page of each row of `model`.

    `build` returns the content for a row, and the page's template gets it as the variable `variable`.
    """

    model: type[Model]
    variable: str
    build: Callable[[Any], Any]


PAGE_SECTIONS: Registry[PageSection] = Registry("page section")
"""Sections of pages; an entry's name begins with that of the page. The pages' views call `build_sections`."""


def build_sections(row: Model) -> dict[str, Any]:
    """Return the template variables of all sections of the page that shows this row."""
    sections = [section for section in PAGE_SECTIONS.values() if isinstance(row, section.model)]
    return {section.variable: section.build(row) for section in sections}
