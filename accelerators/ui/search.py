"""Conditions that find rows by the beginning of a field, so that an index finds them in a table of any size."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from django.db.models import Q

from accelerators.domain.uuids import uuid_bounds

PCI_ADDRESS = re.compile(r"(?:([0-9a-f]{4}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7])?)?", re.IGNORECASE)

BEGINNING_MARK = "*"
"""The last character of a search word that is always taken for a beginning, also if a row has exactly this word."""


class WordConditions(NamedTuple):
    """Conditions for a search word: that a field is exactly the word, and that a field begins with it."""

    exact: list[Q]
    beginnings: list[Q]


def build_word_conditions(paths: Iterable[str], word: str) -> WordConditions:
    """Build the conditions that the field at the end of one of the lookup paths is exactly `word`, and those that it
    begins with it. Fields of which no value can do so have none. For a word with the mark of a beginning, which is not
    part of the text, there are no exact ones.
    """
    text = word.removesuffix(BEGINNING_MARK)
    return WordConditions(
        [built for path in paths if text == word and (built := build_exact_condition(path, text))],
        [built for path in paths if (built := build_prefix_condition(path, text))],
    )


def build_prefix_condition(path: str, term: str) -> Q | None:
    """Build the condition that the field at the end of the lookup path `path` begins with `term`.

    Returns None if no value of this field can begin with the term. A field whose name ends in `uuid` is a uuid; the
    other fields are those of `list_search_prefixes`.
    """
    if path.endswith("uuid"):
        bounds = uuid_bounds(term)
        return Q(**{f"{path}__range": bounds}) if bounds else None
    condition = Q()
    for prefix in list_search_prefixes(path.rpartition("__")[2], term):
        condition |= Q(**{f"{path}__startswith": prefix})
    return condition or None


def build_exact_condition(path: str, term: str) -> Q | None:
    """Build the condition that the field at the end of the lookup path `path` is exactly `term`, in the form in which
    the field stores it. Returns None if no value of this field can be the term."""
    if path.endswith("uuid"):
        bounds = uuid_bounds(term)
        return Q(**{path: bounds[0]}) if bounds and bounds[0] == bounds[1] else None
    values = list_search_prefixes(path.rpartition("__")[2], term)
    return Q(**{f"{path}__in": values}) if values else None


def list_search_prefixes(field: str, term: str) -> list[str]:
    """Return the prefixes to search for in this field, in the form in which the field stores them; an empty list if the
    term cannot match. `address` and `attach_info` hold PCI addresses, `key` also serial numbers.
    """
    address = PCI_ADDRESS.fullmatch(term)
    if field == "address":
        return [_format_pci_address(address)] if address else []
    if field == "attach_info":
        domain, bus, device, function = address.groups() if address else (None,) * 4
        names = {"bus": bus, "device": device, "domain": domain or "0000", "function": function}
        text = ", ".join(f'"{name}": "{str(value).lower()}"' for name, value in names.items())
        return ["{" + text + "}"] if function else []
    if field == "key":
        return [] if address else [term, f"serial:{term}"]
    return [term]


def _format_pci_address(match: re.Match[str]) -> str:
    """Return the address in lower case, with the domain `0000` if it has none, and with the function only if it has
    one.
    """
    domain, bus, device, function = match.groups()
    end = f".{function}" if function else ""
    return f"{domain or '0000'}:{bus}:{device}{end}".lower()
