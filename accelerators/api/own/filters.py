"""Filters that several resources of our own API have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

import django_filters as filters
from django.db.models import QuerySet
from rest_framework.exceptions import ParseError

from accelerators.domain.choices import list_choices
from accelerators.domain.uuids import MIN_HEX_DIGITS, uuid_bounds
from accelerators.models import BulkItem
from accelerators.ui.extensions import SAVED_VIEW


class UuidPrefixFilter(filters.CharFilter):
    """A filter by the beginning of a uuid. It becomes a range of uuids, so that the index of the uuids finds them."""

    def __init__(self, field_name: str = "uuid") -> None:
        super().__init__(field_name, help_text=f"The beginning of its uuid, at least {MIN_HEX_DIGITS} digits.")

    def filter(self, qs: QuerySet[Any], value: str) -> QuerySet[Any]:
        """Keep the rows whose uuid begins with `value`; raise ParseError (400) if it is not the beginning of a uuid."""
        if not value:
            return qs
        if (bounds := uuid_bounds(value)) is None:
            raise ParseError(f"uuid_prefix: say the beginning of a uuid, at least {MIN_HEX_DIGITS} hexadecimal digits.")
        return qs.filter(**{f"{self.field_name}__range": bounds})


class BulkActionFilter(filters.UUIDFilter):
    """A filter by the bulk action whose objects the rows are."""

    def __init__(self) -> None:
        super().__init__(help_text="Only the objects of this bulk action.")

    def filter(self, qs: QuerySet[Any], value: UUID | None) -> QuerySet[Any]:
        """Keep the rows that are objects of the bulk action with this uuid."""
        if not value:
            return qs
        return qs.filter(uuid__in=BulkItem.objects.filter(bulk__uuid=value).values("target_uuid"))


class RowFilter(filters.FilterSet):
    """Filter by the beginning of a row's uuid. Collections whose rows people name by their uuid inherit it."""

    uuid_prefix = UuidPrefixFilter()


class SavedViewFilter(filters.FilterSet):
    """Filter by a saved view of the console. All collections that the console shows as lists inherit it."""

    saved_view = filters.CharFilter(
        method="filter_by_saved_view",
        help_text="The name of a view that was saved in the console: its search and its filters apply.",
    )

    def filter_by_saved_view(self, rows: QuerySet[Any], name: str, value: str) -> QuerySet[Any]:
        """Keep the rows that the saved view shows. Its order and its columns are ignored.

        Raises RefusedError INVALID (400) if the caller has no view of this name.
        """
        shown = SAVED_VIEW.only()(self.request.user, rows.model._meta.label_lower, value)
        return rows.filter(pk__in=shown.order_by().values("pk"))


class ListFilter(SavedViewFilter, RowFilter):
    """Filter by the beginning of a row's uuid, and by a saved view of the console."""


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
