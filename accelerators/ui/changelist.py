"""The one shape of every list: 50 rows, server side all of it, applied filters as chips, read only.

Called by the admins of all rooms. Statements are constant whatever the table's size (promise P3). The address says all
that is shown: filters, search, order, page, columns; what it says wrongly is answered 400.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, NoReturn
from urllib.parse import urlencode
from uuid import UUID

from django.conf import settings
from django.contrib.admin import ShowFacets
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.options import IncorrectLookupParameters
from django.core.exceptions import BadRequest, ValidationError
from django.core.paginator import Paginator
from django.db import DataError, connection
from django.db.models import Model, Q, QuerySet
from django.http import Http404, HttpRequest
from django.http.response import HttpResponseBase
from django.urls import path
from django.utils.functional import cached_property
from django.utils.html import format_html
from django.utils.module_loading import import_string
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from unfold.admin import ModelAdmin, checkbox
from unfold.decorators import display
from unfold.views import ChangeList

from accelerators.ui import export

COLUMNS = "columns"
"""The parameter that names the columns shown, in their order, between commas."""
CHECKBOX = "action_checkbox"


class ChipList(ChangeList):
    """A list that names its applied filters, its columns and the files it can be had as."""

    def get_filters_params(self, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """Columns filter nothing."""
        found: dict[str, Any] = super().get_filters_params(params)
        found.pop(COLUMNS, None)
        return found

    def get_results(self, request: HttpRequest) -> None:
        """Nothing is filtered: what is found is all there is, and the heading need not offer to show all. What was
        counted to be nothing is not looked for again."""
        super().get_results(request)
        if not self.result_count:
            self.result_list = self.queryset.none()
        if not self.query and not self.has_active_filters:
            self.full_result_count = self.result_count

    def get_query_string(self, new_params: Any = None, remove: Any = None) -> str:
        """Asked for again and again by every row's headings: each answer is made once."""
        key = (repr(new_params), repr(remove))
        if key not in (made := self.__dict__.setdefault("_made", {})):
            made[key] = super().get_query_string(new_params, remove)
        return str(made[key])

    def exports(self) -> list[tuple[str, str]]:
        """Each form with the address of this list in it."""
        asked = {name: value for name, value in self.params.items() if name != "all"}
        return [(form.upper(), f"export.{form}?{urlencode(asked)}") for form in export.FORMS]

    def choices(self) -> list[tuple[str, str, bool]]:
        """Every column: its name in addresses, its heading, whether it is shown. Those shown first, in their order."""
        admin, shown = self.model_admin, [name for name in self.list_display if name != CHECKBOX]
        rest = [name for name in admin.list_display if name not in shown]
        return [(public(name), admin.heading(name), name in shown) for name in (*shown, *rest)]

    def views(self) -> Any:
        """What this person saved of this list, and what others share."""
        return self.model_admin.remembered(self.request).views

    def as_saved(self) -> str:
        """This list as an address that shows anybody the same: with its columns, whoever chose them."""
        asked = {name: value for name, value in self.params.items() if name != "all"}
        if [name for name in self.list_display if name != CHECKBOX] != list(self.model_admin.list_display):
            asked[COLUMNS] = ",".join(public(name) for name in self.list_display if name != CHECKBOX)
        return urlencode(asked)

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
    exports: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Of columns that are none or several fields: the fields that stand for them in an export."""
    of_project: ClassVar[str] = ""
    """The field that says whose a row is, where that matters."""

    def _get_obj_does_not_exist_redirect(self, request: HttpRequest, opts: Any, object_id: str) -> NoReturn:
        """Django's would say so on the first page, as if that had been asked for."""
        raise Http404(f"There is no {opts.verbose_name} {object_id[:64]!r}; perhaps it was removed.")

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChipList]:
        return ChipList

    def get_paginator(self, request: HttpRequest, queryset: Any, per_page: int, *args: Any, **kwargs: Any) -> Paginator:
        return BoundedPaginator(queryset, per_page, *args, **kwargs)

    def get_changelist_instance(self, request: HttpRequest) -> ChipList:
        """Raises BadRequest for a page, a filter's value or a column that is none."""
        try:
            found: ChipList = super().get_changelist_instance(request)
        except (IncorrectLookupParameters, ValidationError, ValueError, DataError) as error:
            raise BadRequest("This list has no such page, or a filter in the address has no such value.") from error
        found.request = request
        return found

    def get_list_display(self, request: HttpRequest) -> Sequence[str]:
        """The columns that the address names, else those this person chose, else all."""
        every = {public(str(name)): str(name) for name in super().get_list_display(request)}
        if COLUMNS not in request.GET:
            chosen = [name for name in self.remembered(request).columns if name in every]
            return [every[name] for name in chosen or every]
        names = request.GET[COLUMNS].split(",")
        if unknown := [name for name in names if name not in every]:
            raise BadRequest(f"This list has no column {unknown[0][:64]!r}, but {', '.join(every)}.")
        return [every[name] for name in dict.fromkeys(names)]

    def get_list_display_links(self, request: HttpRequest, list_display: Sequence[str]) -> Sequence[str]:
        links = super().get_list_display_links(request, list_display) or ()
        return [name for name in links if name in list_display] or list(list_display)[:1]

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """A term that is a whole uuid is looked up by index in all `…uuid` fields; others are Django's."""
        fields = [name.removesuffix("__startswith") for name in self.get_search_fields(request)]
        uuid = as_uuid(search_term)
        if uuid is None or not (named := [name for name in fields if name.endswith("uuid")]):
            return super().get_search_results(request, queryset, search_term)
        wanted = Q()
        for name in named:
            wanted |= Q(**{name: uuid})
        return queryset.filter(wanted), False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Of one project for who sees one (promise X4): lists, pages, exports and the live feed all begin here."""
        rows: QuerySet[Any] = super().get_queryset(request)
        project = import_string(settings.CONSOLE_PROJECT)(request.user) if self.of_project else ""
        return rows.filter(**{self.of_project: project}) if project else rows

    def get_urls(self) -> list[Any]:
        name = f"{self.opts.app_label}_{self.opts.model_name}_export"
        return [path("export.<str:form>", self.admin_site.admin_view(self.export_view), name=name), *super().get_urls()]

    def export_view(self, request: HttpRequest, form: str) -> HttpResponseBase:
        """The list as a file."""
        return export.respond(self, request, form)

    @display(description=ModelAdmin.action_checkbox.short_description)
    def action_checkbox(self, obj: Model) -> SafeString:
        """A row's, from a template that is rendered once."""
        return format_html(_checkbox(), obj.pk)

    def formfield_for_dbfield(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        """With the manual's sentence (`FIELD_SENTENCE`) where the model has none of its own."""
        made = super().formfield_for_dbfield(db_field, request, **kwargs)
        if made and not made.help_text:
            made.help_text = import_string(settings.FIELD_SENTENCE)(self.opts.model_name, db_field.name)
        return made

    def heading(self, column: str) -> str:
        """What stands above a column."""
        shown = getattr(self, column, None)
        said = getattr(shown, "short_description", None) or self.opts.get_field(column).verbose_name
        return capfirst(str(said))

    def remembered(self, request: HttpRequest) -> Any:
        """This person's columns and saved views of this list, asked for once a request (`LIST_MEMORY`)."""
        if not hasattr(request, "list_memory"):
            request.list_memory = import_string(settings.LIST_MEMORY)(request.user, self.opts.label_lower)
        return request.list_memory


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
        uuid = as_uuid(object_id) if hasattr(self.model, "uuid") else None
        if uuid is None:
            return super().get_object(request, object_id, from_field)
        return self.get_queryset(request).filter(uuid=uuid).first()


class BoundedPaginator(Paginator):
    """Counts exactly up to `EXACT`; beyond it takes the database's estimate of the whole table, or stops there when
    filters are set. Pages end there too. So a list of millions opens as fast as a short one, on any page it has."""

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

    @cached_property
    def num_pages(self) -> int:
        return min(super().num_pages, -(-self.EXACT // self.per_page))


def estimate(table: str) -> int:
    """Rows of a table with its partitions, as their statistics have it."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT coalesce(sum(greatest(c.reltuples, 0)), 0)::bigint FROM pg_class c"
            " WHERE c.oid = %s::regclass AND c.relkind = 'r'"
            " OR c.oid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = %s::regclass)",
            [table, table],
        )
        return int(cursor.fetchone()[0])


@lru_cache(maxsize=1)
def _checkbox() -> str:
    stock = checkbox.render(ACTION_CHECKBOX_NAME, "VALUE")
    return str(stock).replace("{", "{{").replace("}", "}}").replace("VALUE", "{}")


def public(column: str) -> str:
    """A column's name in addresses."""
    return re.sub(r"^(shown|all)_", "", column)


def as_uuid(text: str) -> UUID | None:
    """A uuid as people paste it, else None."""
    try:
        return UUID(text.strip())
    except ValueError:
        return None
