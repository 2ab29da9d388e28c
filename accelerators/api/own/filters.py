"""Filters that several resources of our own API have."""

from __future__ import annotations

from collections.abc import Iterable

import django_filters as filters

from accelerators.domain.choices import list_choices


def host_filter(field_name: str | None = None) -> filters.CharFilter:
    """Build a filter by the exact name of a host.

    `field_name` is the lookup path to the name; by default it is the name of the filter.
    """
    return filters.CharFilter(field_name=field_name, help_text="Exactly this host name.")


def choice_filter(words: Iterable[str], field_name: str | None = None, **options: str) -> filters.MultipleChoiceFilter:
    """Build a filter by one or several of `words`, which are an enumeration or plain text; any other word gives 400."""
    return filters.MultipleChoiceFilter(field_name, choices=list_choices(words), distinct=False, **options)


def single_choice_filter(words: Iterable[str], **options: str) -> filters.ChoiceFilter:
    """Build a filter by one of `words`, which are an enumeration or plain text; any other word gives 400."""
    return filters.ChoiceFilter(choices=list_choices(words), **options)


def presence_filter(field_name: str, help_text: str = "") -> filters.BooleanFilter:
    """Build a filter by whether a column has a value: `true` keeps the rows in which it is not NULL, `false` the
    others."""
    return filters.BooleanFilter(field_name, "isnull", exclude=True, help_text=help_text)
