"""What the console's search page finds: each package registers the rows of its own models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accelerators.runtime.registry import Registry


@dataclass(frozen=True)
class SearchProvider:
    """Rows of a model that has a list in the console.

    `uuid_fields` and `name_fields` are fields that are searched by prefix. `result_text` and `side_text` are database
    expressions for the result's text and the text next to it; `describe` makes the shown text of the former.
    """

    model: type[Any]
    uuid_fields: tuple[str, ...]
    name_fields: tuple[str, ...]
    result_text: Any
    side_text: Any
    describe: Callable[[str], str] = str


SEARCH_PROVIDERS: Registry[SearchProvider] = Registry("search provider")
"""The kinds of rows that `cyborgweb.pages.search` finds, in the order in which it lists them. The name of an entry is
that of its model, `app.model`."""
