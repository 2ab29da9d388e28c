"""Base classes of all lists in the console: 50 rows a page, rendered on the server, with applied filters as chips.

The number of statements does not depend on the size of the table (promise P3). The URL determines all that is shown:
filters, search, order, page, columns. A URL with an invalid value is answered with 400.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast
from urllib.parse import urlencode
from uuid import UUID

from django.contrib.admin import ShowFacets
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import PAGE_VAR, SEARCH_VAR
from django.core.exceptions import BadRequest, ValidationError
from django.core.paginator import Paginator
from django.db import DataError, connection
from django.db.models import CharField, Field, Model, Q, QuerySet, Value
from django.http import Http404, HttpRequest
from django.http.response import HttpResponseBase
from django.urls import path
from django.utils.functional import cached_property
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import capfirst, smart_split, unescape_string_literal
from unfold.admin import ModelAdmin, checkbox
from unfold.decorators import display
from unfold.views import ChangeList

from accelerators.ui import badges, empty_lists, export, keyset
from accelerators.ui.explained_admin import ExplainedModelAdmin, Rights
from accelerators.ui.extensions import FIELD_SENTENCE, LIST_MEMORY, USER_PROJECT
from accelerators.ui.search import BEGINNING_MARK, build_word_conditions

AFTER_PARAM = "after"
"""Name of the URL parameter with the primary key of the row behind which the list begins."""
COLUMNS_PARAM = "columns"
"""Name of the URL parameter that lists the columns to show, in their order, separated by commas."""
CHECKBOX_COLUMN = "action_checkbox"
EXACT_WORDS = "exact_search_words"
"""Name of the attribute of a request with the words that `note_exact_word` noted."""
WITHOUT_RESULTS = "list_without_results"
"""Name of the attribute that requests of `select_listed_rows` have."""
MAX_SELECTABLE_ROWS = 1_000_000
"""Rows that are counted exactly in a list with actions."""
MAX_SEARCH_WORDS = 8
"""Words of a search term that are used; further ones are ignored."""
MAX_LISTED_KEYS = 1000
"""If at most this number of rows matches a word of a search, the query lists their keys."""

Column = str | Callable[[Any], str | bool]
Columns = list[Column] | tuple[Column, ...] | tuple[()]
"""The types by which Django's admin knows columns. All columns of this console are names."""

if TYPE_CHECKING:
    AnyPaginator = Paginator[Any]
else:  # at run time Django's class takes no type parameter
    AnyPaginator = Paginator


class ConsoleChangeList(ChangeList):
    """Django's change list, extended by applied filters, columns, saved views and export links for the template."""

    model_admin: ConsoleModelAdmin
    request: HttpRequest

    def get_filters_params(self, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the filter parameters of the URL without `columns` and `after`, which are no filters of a field."""
        filter_params: dict[str, Any] = super().get_filters_params(params)
        filter_params.pop(COLUMNS_PARAM, None)
        filter_params.pop(AFTER_PARAM, None)
        return filter_params

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        """Return the filtered rows in their order; those behind a row if the URL names one in `after`.

        Raises IncorrectLookupParameters if there is no such row.
        """
        rows: QuerySet[Any] = super().get_queryset(request, exclude_parameters)
        if not self.is_continued:
            return rows
        key = request.GET[AFTER_PARAM]
        try:
            if not (key.isascii() and key.isdecimal() and len(key) < 19):
                raise LookupError(f"{key[:64]!r} is no key of a row")
            ordering = self.get_ordering(request, self.root_queryset)
            return keyset.select_rows_behind(rows, ordering, self.root_queryset, int(key))
        except LookupError as error:
            raise IncorrectLookupParameters(str(error)) from error

    @property
    def is_continued(self) -> bool:
        """Whether the list begins behind a row that the URL names."""
        return AFTER_PARAM in self.params

    def continuation_query(self) -> str:
        """Return the query string of the list behind the last row of this page; '' unless this is the last page and
        rows follow it."""
        rows, pages = list(self.result_list), self.paginator.num_pages
        has_more = self.paginator.estimated or self.result_count > pages * self.list_per_page
        return (
            f"?{urlencode(self.params | {AFTER_PARAM: rows[-1].pk})}"
            if rows and has_more and self.page_num == pages
            else ""
        )

    def first_page_query(self) -> str:
        """Return the query string of the first page of the whole list."""
        return self.get_query_string(remove=[AFTER_PARAM])

    def get_results(self, request: HttpRequest) -> None:
        """Load the rows of the page; skip the query for rows if their count is 0.

        Without search and filters the count of the result is also the full count, so that the heading does not offer
        to show all. Nothing is loaded for `select_listed_rows`.
        """
        if getattr(request, WITHOUT_RESULTS, False):
            self.result_count, self.result_list = 0, self.queryset.none()
            return
        super().get_results(request)
        if not self.result_count:
            self.result_list = self.queryset.none()
        if not self.query and not self.has_active_filters:
            self.full_result_count = self.result_count

    def get_query_string(self, new_params: Any = None, remove: Any = None) -> str:
        """Build the query string with changed parameters; cached, because headings ask for the same ones repeatedly."""
        if set(new_params or {}) != {PAGE_VAR}:  # another filter or order has other rows behind a row
            remove = [*(remove or ()), AFTER_PARAM]
        key = (repr(new_params), repr(remove))
        if key not in (query_strings := self.__dict__.setdefault("_made", {})):
            query_strings[key] = super().get_query_string(new_params, remove)
        return str(query_strings[key])

    def export_links(self) -> list[tuple[str, str]]:
        """Return the export formats, each with the URL that exports this list with its present filters and columns."""
        query_params = {name: value for name, value in self.params.items() if name not in ("all", AFTER_PARAM)}
        return [
            (file_format.upper(), f"export.{file_format}?{urlencode(query_params)}")
            for file_format in export.FILE_FORMATS
        ]

    def column_choices(self) -> list[tuple[str, str, bool]]:
        """Return all columns as (name in URLs, heading, is shown); the shown ones come first, in their order."""
        admin, shown_columns = self.model_admin, self._list_shown_columns()
        hidden_columns = [name for name in map(str, admin.list_display) if name not in shown_columns]
        return [
            (column_url_name(name), admin.column_heading(name), name in shown_columns)
            for name in (*shown_columns, *hidden_columns)
        ]

    def saved_views(self) -> Any:
        """Return the saved views of this list that this user may see, as the function in LIST_MEMORY finds them.

        These are the user's own and, unless the user is limited to one project, those that others share.
        """
        return self.model_admin.load_list_memory(self.request).views

    def shareable_query(self) -> str:
        """Return the query string that shows this list to any user as it is now.

        It names the columns unless they are the default ones, also if they come from this user's own choice.
        """
        query_params = {name: value for name, value in self.params.items() if name not in ("all", AFTER_PARAM)}
        shown_columns = self._list_shown_columns()
        if shown_columns != list(self.model_admin.list_display):
            query_params[COLUMNS_PARAM] = ",".join(map(column_url_name, shown_columns))
        return urlencode(query_params)

    def _list_shown_columns(self) -> list[str]:
        """Return the names of the columns that the list shows, in their order, without the checkbox."""
        return [str(name) for name in self.list_display if name != CHECKBOX_COLUMN]

    def empty_list_hint(self) -> empty_lists.EmptyListHint:
        """Return what an empty list shows to this user: how rows come into being, and the pages where this is done."""
        return empty_lists.build_hint(self.model_admin, self.request)

    def exact_words(self) -> list[str]:
        """Return the words of the search for which the list has only the rows that have exactly this word, although
        other rows begin with it."""
        return list(getattr(self.request, EXACT_WORDS, ()))

    def beginnings_query(self) -> str:
        """Return the query string of the list in which `exact_words` are searched as beginnings, too."""
        words = [f"{word}{BEGINNING_MARK}" if word in self.exact_words() else word for word in self.query.split()]
        return self.get_query_string({SEARCH_VAR: " ".join(words)}, [PAGE_VAR])

    def refused_actions(self) -> list[tuple[str, str]]:
        """Return what this user may not do on this page of the console, each with the reason."""
        return self.model_admin.list_refused_actions(self.request)

    def applied_filters(self) -> Iterator[dict[str, object]]:
        """Yield a dict per applied filter: its title (`name`), its value (`value`), and the list's query string without
        it (`without`). Filters that only the URL has come last; links of other pages use these.
        """
        for list_filter in self.filter_specs:
            choices = list(list_filter.choices(self))
            for choice in choices[1:]:
                if choice["selected"]:
                    yield {"name": list_filter.title, "value": choice["display"], "without": choices[0]["query_string"]}
        expected = {name for list_filter in self.filter_specs for name in list_filter.expected_parameters() or ()}
        for lookup, value in self.params.items():
            if lookup in self.get_filters_params() and lookup not in expected:
                words = [word for word in lookup.split("__") if word not in ("exact", "id", "name")]
                yield {
                    "name": (words or [lookup])[-1],
                    "value": value,
                    "without": self.get_query_string(remove=[lookup]),
                }


class ConsoleModelAdmin(ExplainedModelAdmin):
    """Base class of all lists.

    `empty` is the sentence that an empty list shows; it says how rows come into being. `empty_command` is the command
    that makes a row, and `sources` are the pages on which rows come into being.
    """

    list_per_page = 50
    list_max_show_all = 50
    show_full_result_count = False
    show_facets = ShowFacets.NEVER
    list_filter_sheet = False
    list_fullwidth = True
    list_before_template = "console/filter_chips.html"
    actions: Sequence[Callable[..., Any] | str] | None = None
    empty_value_display = badges.DASH
    empty = "There are none yet."
    indexed_search_fields: ClassVar[Sequence[str]] = ()
    """Lookup paths of fields that have an index for their beginnings; a search looks there first."""
    empty_command: ClassVar[str] = ""
    sources: ClassVar[Sequence[empty_lists.Source]] = ()
    change_form_before_template = "console/read_only_reason.html"
    exports: ClassVar[Mapping[str, Sequence[str | export.ExportedValue]]] = {}
    """The values to export for a column that is not a field of the model, or that shows several fields."""
    project_field: ClassVar[str] = ""
    """Field with the project that owns a row; '' if rows do not belong to projects."""

    def _get_obj_does_not_exist_redirect(self, request: HttpRequest, opts: Any, object_id: str) -> NoReturn:
        """Raise Http404. Django would redirect to the index page with a message instead."""
        raise Http404(f"There is no {opts.verbose_name} {object_id[:64]!r}; perhaps it was removed.")

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ConsoleChangeList]:
        """Return `ConsoleChangeList`."""
        return ConsoleChangeList

    def get_paginator(
        self, request: HttpRequest, queryset: Any, per_page: int, *args: Any, **kwargs: Any
    ) -> AnyPaginator:
        """Return a `BoundedPaginator`, which counts exactly only up to a limit.

        The limit is higher for a list with actions, because these can apply to all rows, and the page says how many
        rows these are.
        """
        paginator = BoundedPaginator(queryset, per_page, *args, **kwargs)
        if self.get_actions(request):
            paginator.max_exact_count = MAX_SELECTABLE_ROWS
        return paginator

    def get_changelist_instance(self, request: HttpRequest) -> ConsoleChangeList:
        """Build the list. Raises BadRequest if the page, a filter's value or a column in the URL does not exist."""
        try:
            change_list = cast("ConsoleChangeList", super().get_changelist_instance(request))  # see get_changelist
        except (IncorrectLookupParameters, ValidationError, ValueError, DataError) as error:
            raise BadRequest("This list has no such page, or a filter in the address has no such value.") from error
        change_list.request = request
        return change_list

    def select_listed_rows(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the query for all rows that the list of this request shows. No rows are counted or loaded.

        Costs only the statements of the search. Raises BadRequest as `get_changelist_instance` does, and for a NUL
        character, which only the database would refuse.
        """
        if any("\0" in value for values in request.GET.lists() for value in values[1]):
            raise BadRequest("The address of this list contains a NUL character.")
        setattr(request, WITHOUT_RESULTS, True)
        rows: QuerySet[Any] = self.get_changelist_instance(request).queryset
        return rows

    def get_list_display(self, request: HttpRequest) -> Columns:
        """Return the columns that the URL names, else those that this user chose, else all.

        Raises BadRequest if the URL names a column that does not exist. Columns of a user's choice that do not exist
        any more are left out.
        """
        columns_by_url_name = {column_url_name(str(name)): str(name) for name in super().get_list_display(request)}
        if COLUMNS_PARAM not in request.GET:
            known_columns = [] if getattr(request, WITHOUT_RESULTS, False) else self.load_list_memory(request).columns
            chosen_names = [name for name in known_columns if name in columns_by_url_name]
            return [columns_by_url_name[name] for name in chosen_names or columns_by_url_name]
        names = request.GET[COLUMNS_PARAM].split(",")
        if unknown := [name for name in names if name not in columns_by_url_name]:
            raise BadRequest(f"This list has no column {unknown[0][:64]!r}. It has {', '.join(columns_by_url_name)}.")
        return [columns_by_url_name[name] for name in dict.fromkeys(names)]

    def get_list_display_links(self, request: HttpRequest, list_display: Columns) -> Columns | None:  # type: ignore[override]  # Django returns None, too; the stubs lack it
        """Return the shown columns that link to a row's page; if none of the usual ones is shown, the first column.

        Returns None for a list whose rows have no page.
        """
        links = super().get_list_display_links(request, list_display)
        if links is None:
            return None
        return [name for name in links if name in list_display] or list(list_display)[:1]

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Keep the rows that match every word of the term.

        A word is first searched by indexes (`search_indexes`). Words that are found in no index are searched by
        `search_other_words`, which may read the whole table. Costs one statement, and those of `search_other_words`.
        The second value, whether rows may occur twice, is False.
        """
        if not self._list_indexed_search_fields(request):
            return super().get_search_results(request, queryset, search_term)
        word_by_text = {  # a phrase in quotation marks is one word
            unescape_string_literal(word) if word[0] in "\"'" and word[-1:] == word[0] else word: word
            for word in list(smart_split(search_term))[:MAX_SEARCH_WORDS]
        }
        other_words = []
        for text, condition in self.search_indexes(request, list(word_by_text)).items():
            if condition is None:
                other_words.append(word_by_text[text].removesuffix(BEGINNING_MARK))
            else:
                queryset = queryset.filter(condition)
        return (self.search_other_words(request, queryset, " ".join(other_words)) if other_words else queryset), False

    def search_indexes(self, request: HttpRequest, words: Sequence[str]) -> dict[str, Q | None]:
        """Build for each word the condition that one of `indexed_search_fields`, or of the search fields that are
        uuids, is exactly the word; if this holds for no row that this user may see, the condition that one of them
        begins with the word; None if neither holds for a row that this user may see.

        A word that ends in `*` is always a beginning. If rows that begin with an exact word are left out,
        `note_exact_word` notes the word. If few rows match, the condition lists their keys: PostgreSQL then joins only
        these rows with other tables. Costs one statement for all words.
        """
        paths = self._list_indexed_search_fields(request)
        visible = self.get_queryset(request).order_by()
        matches: dict[tuple[str, bool], Q] = {}
        queries = []
        for word in dict.fromkeys(words):
            exact, beginnings = build_word_conditions(paths, word)
            for is_exact, conditions in ((True, exact), (False, beginnings)):
                if conditions:
                    matches[word, is_exact] = self._join_conditions(conditions)
                    rows = visible.filter(matches[word, is_exact])
                    if not is_exact and exact:
                        rows = rows.exclude(matches[word, True])
                    labels = Value(word, CharField()), Value(is_exact)
                    queries.append(rows.values_list(*labels, "pk")[: MAX_LISTED_KEYS + 1])
        keys: dict[tuple[str, bool], list[Any]] = {}
        if queries:
            for word, is_exact, key in queries[0].union(*queries[1:], all=True):
                keys.setdefault((word, is_exact), []).append(key)
        built_conditions: dict[str, Q | None] = dict.fromkeys(words)
        for (word, is_exact), found in keys.items():
            if is_exact and (word, False) in keys:
                note_exact_word(request, word)
            if is_exact or (word, True) not in keys:
                built_conditions[word] = Q(pk__in=found) if len(found) <= MAX_LISTED_KEYS else matches[word, is_exact]
        return built_conditions

    def search_other_words(self, request: HttpRequest, queryset: QuerySet[Any], words: str) -> QuerySet[Any]:
        """Keep the rows that contain each of these words, which no index has, in one of `search_fields`."""
        found: QuerySet[Any] = super().get_search_results(request, queryset, words)[0]
        return found

    def _join_conditions(self, conditions: Sequence[Q]) -> Q:
        """Build the condition that any of `conditions` holds. Each is a subquery of its own, so that each uses its
        index."""
        subqueries = [self.model._base_manager.filter(one).order_by().values("pk") for one in conditions]
        return Q(pk__in=subqueries[0].union(*subqueries[1:], all=True) if subqueries[1:] else subqueries[0])

    def _list_indexed_search_fields(self, request: HttpRequest) -> list[str]:
        """Return the lookup paths of `indexed_search_fields` and of those search fields that are uuids."""
        names = [name.removesuffix("__startswith") for name in self.get_search_fields(request)]
        return list(dict.fromkeys([*(name for name in names if name.endswith("uuid")), *self.indexed_search_fields]))

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the rows that this user may see: those of one project if the user is limited to it (promise X4).

        A model without `project_field` is not limited. Lists, pages, exports and the live feed all start from this
        query.
        """
        rows: QuerySet[Any] = super().get_queryset(request)
        project = USER_PROJECT.only()(request.user) if self.project_field else ""
        return rows.filter(**{self.project_field: project}) if project else rows

    def get_urls(self) -> list[Any]:
        """Add the URL of `export_view`, such as `export.csv`."""
        name = f"{self.opts.app_label}_{self.opts.model_name}_export"
        return [
            path("export.<str:file_format>", self.admin_site.admin_view(self.export_view), name=name),
            *super().get_urls(),
        ]

    def export_view(self, request: HttpRequest, file_format: str) -> HttpResponseBase:
        """Answer with the list as a file in the format `file_format`: csv, json, jsonl or yaml.

        Raises and answers as `export.build_export_response` does.
        """
        return export.build_export_response(self, request, file_format)

    @display(description=vars(ModelAdmin.action_checkbox)["short_description"])
    def action_checkbox(self, obj: Model) -> SafeString:
        """Render the checkbox of a row from an HTML template that is rendered once per process."""
        return format_html(_checkbox_template(), obj.pk)

    def formfield_for_dbfield(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        """Build the form field, with the help text that FIELD_SENTENCE has for it."""
        form_field = super().formfield_for_dbfield(db_field, request, **kwargs)
        if form_field:
            help_text = FIELD_SENTENCE.only()(self.opts.model_name or "", db_field.name, str(form_field.help_text))
            form_field.help_text = help_text
        return form_field

    def column_heading(self, column: str) -> str:
        """Return the heading of a column: the description of its display method, else its model field's verbose name.

        Raises FieldDoesNotExist if it is neither.
        """
        display_method = getattr(self, column, None)
        heading_text = getattr(display_method, "short_description", None)
        if not heading_text:  # then the column is a field of the model itself, not a reverse relation
            heading_text = cast("Field[Any, Any]", self.opts.get_field(column)).verbose_name
        return capfirst(str(heading_text))

    def load_list_memory(self, request: HttpRequest) -> Any:
        """Return what the function in LIST_MEMORY knows about this list: the user's `columns` and the saved `views`.

        Loaded once per request.
        """
        cache: Any = request
        if not hasattr(cache, "list_memory"):
            cache.list_memory = LIST_MEMORY.only()(request.user, self.opts.label_lower)
        return cache.list_memory


class ReadOnlyModelAdmin(ConsoleModelAdmin):
    """List that nobody can edit in the console, because the conductor is the only writer of the inventory.

    Everybody with the view permission can read it.
    """

    rights: ClassVar[Rights] = {"add": None, "change": None, "delete": None}

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any | None:
        """Return the object with this id or uuid that the user may see, else None.

        Events link to their subjects by uuid, so that no query has to look for the id.
        """
        uuid = parse_uuid(object_id) if hasattr(self.model, "uuid") else None
        if uuid is None:
            return super().get_object(request, object_id, from_field)
        return self.get_queryset(request).filter(uuid=uuid).first()


class BoundedPaginator(AnyPaginator):
    """Paginator that counts exactly only up to a limit, so that a list of millions opens as fast as a short one.

    Above the limit `max_exact_count` the count is the database's estimate for the whole table, or the limit if filters
    are set. Rows beyond `EXACT` have no page, so every page is fast; the last page links to the rows behind it.
    """

    EXACT = 10_000
    max_exact_count = 0
    template_name = "console/pagination.html"
    estimated = False

    @cached_property
    def count(self) -> int:
        """Return the number of rows, exact up to the limit; sets `estimated` if there are more.

        If there are more, the result is the limit if the query has a condition, else the database's estimate for the
        whole table, at least the limit. One or two statements, once per paginator.
        """
        rows = cast("QuerySet[Any]", self.object_list)  # no list of this console paginates anything else
        limit = max(self.EXACT, self.max_exact_count)
        exact = rows.order_by()[: limit + 1].count()
        if exact <= limit:
            return exact
        self.estimated = True
        return limit if rows.query.where else max(limit, estimate_row_count(rows.model._meta.db_table))

    @cached_property
    def num_pages(self) -> int:
        """Return the number of pages; rows beyond `EXACT` have no page."""
        return min(super().num_pages, -(-self.EXACT // self.per_page))


def estimate_row_count(table: str) -> int:
    """Return the number of rows of a table and its partitions, as estimated by PostgreSQL's statistics.

    It is raw SQL because PostgreSQL's catalogue has no models.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT coalesce(sum(greatest(c.reltuples, 0)), 0)::bigint FROM pg_class c"
            " WHERE c.oid = %s::regclass AND c.relkind = 'r'"
            " OR c.oid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = %s::regclass)",
            [table, table],
        )
        return int(cursor.fetchone()[0])


@lru_cache(maxsize=1)
def _checkbox_template() -> str:
    """Return the HTML of a row's checkbox as a format string with one `{}`, for the row's key.

    It is rendered once per process.
    """
    rendered_checkbox = checkbox.render(ACTION_CHECKBOX_NAME, "VALUE")
    return str(rendered_checkbox).replace("{", "{{").replace("}", "}}").replace("VALUE", "{}")


def note_exact_word(request: HttpRequest, word: str) -> None:
    """Note in the request that a search lists only rows that have exactly this word, although others begin with it."""
    setattr(request, EXACT_WORDS, [*getattr(request, EXACT_WORDS, ()), word])


def column_url_name(column: str) -> str:
    """Return a column's name in URLs: without the prefix `shown_` or `all_`."""
    return re.sub(r"^(shown|all)_", "", column)


def parse_uuid(text: str) -> UUID | None:
    """Parse a uuid, with or without spaces around it; return None if the text is not a uuid."""
    try:
        return UUID(text.strip())
    except ValueError:
        return None
