"""Registries of the console: what other packages add to its pages and lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.db.models import Q, QuerySet
from django.http import HttpRequest

from accelerators.runtime.registry import Registry

DENIAL_REASON: Registry[Callable[[HttpRequest, str, str], str]] = Registry("denial reason", single=True)
"""Function that returns why the user of a request may not do what a policy rule covers, unless they have a Django
permission; '' if they may. `accelerators.ui.permissions` calls it."""
USER_PROJECT: Registry[Callable[[Any], str]] = Registry("user's project", single=True)
"""Function that returns the only project whose rows a user sees in lists; '' means all projects."""
LIST_MEMORY: Registry[Callable[[Any, str], Any]] = Registry("list memory", single=True)
"""Function that returns the columns that a user has chosen for the list of a model, and the saved views."""
SAVED_VIEW: Registry[Callable[[Any, str, str], QuerySet[Any]]] = Registry("saved view", single=True)
"""Function that returns the rows that a saved view of a list shows, given the caller, the model (`app.model`) and the
view's name. It raises RefusedError INVALID if the caller has no such view."""
FIELD_SENTENCE: Registry[Callable[[str, str, str], str]] = Registry("field sentence", single=True)
"""Function that returns the description of a model's field, given the model's name, the field's name and the model's
help text."""
PAGE_SECTIONS: Registry[Callable[[Any], Any]] = Registry("page section")
"""Functions that return the content of a section for a row. The name of an entry is that of the page and that of the
template's variable: `host.load`. The pages of hosts, devices and requests call `build_sections`."""


def build_sections(page: str, row: Any) -> dict[str, Any]:
    """Return the template variables of all sections that are registered for this page, by their names.

    The name of a variable is that of the section without the page: `load` for `host.load`. Its value is what the
    registered function returns for `row`.
    """
    return {
        name.removeprefix(f"{page}."): build(row)
        for name, build in PAGE_SECTIONS.items()
        if name.startswith(f"{page}.")
    }


@dataclass(frozen=True)
class SearchProvider:
    """Rows that the search page finds; their model has a list in the console.

    `fields` are searched by prefix (`accelerators.ui.search`). `result_text` and `side_text` are database expressions
    for the result's text and the text next to it; `describe` turns the value of `result_text` into the text that is
    shown. `find_by_name` returns the condition for rows that people call by a term that no field contains, None if
    there are none; it may run one statement.
    """

    model: type[Any]
    fields: tuple[str, ...]
    result_text: Any
    side_text: Any
    describe: Callable[[str], str] = str
    find_by_name: Callable[[str], Q | None] = lambda term: None


SEARCH_PROVIDERS: Registry[SearchProvider] = Registry("search provider")
"""Search providers, in the order in which `cyborgweb.pages.search` lists their results. The name of an entry is
`app.model`."""
