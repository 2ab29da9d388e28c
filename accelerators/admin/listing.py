"""The one shape of every list: 50 rows, server side all of it, applied filters as chips, read only.

Called by the admins of all rooms. Statements are constant whatever the table's size (promise P3).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

from django.contrib.admin import ShowFacets
from django.core.paginator import Paginator
from django.db import connection
from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.utils.functional import cached_property
from unfold.admin import ModelAdmin
from unfold.views import ChangeList


class ChipList(ChangeList):
    """A list that names its applied filters."""

    def get_results(self, request: HttpRequest) -> None:
        """Nothing is filtered: what is found is all there is, and the heading need not offer to show all."""
        super().get_results(request)
        if not self.query and not self.has_active_filters:
            self.full_result_count = self.result_count

    def chips(self) -> Iterator[dict[str, str]]:
        """Each applied filter: what it is about, what it asks for, and the address without it."""
        for spec in self.filter_specs:
            choices = list(spec.choices(self))
            for choice in choices[1:]:
                if choice["selected"]:
                    yield {"name": spec.title, "value": choice["display"], "without": choices[0]["query_string"]}


class Listing(ModelAdmin):
    """What every list shares. `empty` is the sentence an empty list teaches with."""

    list_per_page = 50
    list_max_show_all = 50
    show_full_result_count = False
    show_facets = ShowFacets.NEVER
    list_filter_sheet = False
    list_fullwidth = True
    list_before_template = "console/chips.html"
    actions = None
    empty = "None has been made."

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChipList]:
        return ChipList


class ReadOnly(Listing):
    """Shown to whoever may view it, written by nobody here: inventory has one writer, the conductor."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Model | None:
        """By id or by uuid, so that an event's subject is a link without looking it up."""
        uuid = as_uuid(object_id)
        if uuid is None:
            return super().get_object(request, object_id, from_field)
        return self.get_queryset(request).filter(uuid=uuid).first()


class BoundedPaginator(Paginator):
    """Counts exactly up to `EXACT`; beyond it takes the database's estimate of the whole table, or stops there
    when filters are set. So a list of millions opens as fast as a short one."""

    EXACT = 10_000
    template_name = "console/pagination.html"
    estimated = False

    @cached_property
    def count(self) -> int:
        rows: QuerySet[Any] = self.object_list
        exact = rows.order_by()[: self.EXACT + 1].count()
        if exact <= self.EXACT:
            return exact
        self.estimated = True
        return self.EXACT if rows.query.where else max(self.EXACT, estimate(rows.model._meta.db_table))


def estimate(table: str) -> int:
    """Rows of a partitioned table, as its partitions' statistics have it."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT coalesce(sum(greatest(c.reltuples, 0)), 0)::bigint FROM pg_inherits i"
            " JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = %s::regclass",
            [table],
        )
        return int(cursor.fetchone()[0])


def as_uuid(text: str) -> UUID | None:
    """A uuid as people paste it, else None."""
    try:
        return UUID(text.strip())
    except ValueError:
        return None
