"""Pagination by cursor: the last page is as fast as the first, and rows that are added or deleted meanwhile shift
nothing.

A cursor marks a position between two rows and names the order it belongs to. DRF's own cursor pagination counts rows
with equal values by an offset and stops at a thousand of them.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, cast

import msgspec
from django.core.exceptions import FieldDoesNotExist, ValidationError
from django.db.models import F, Model, QuerySet
from django.db.models.fields.tuple_lookups import TupleGreaterThan, TupleLessThan
from rest_framework.exceptions import NotFound, ParseError
from rest_framework.pagination import CursorPagination
from rest_framework.request import Request
from rest_framework.utils.urls import replace_query_param

MAX_CURSOR_CHARS = 1024


class PageCursor(msgspec.Struct, frozen=True, array_like=True):
    """A position after the row with this `value` of the sort field and this `id`; if `backwards`, before that row."""

    order: str
    backwards: bool
    value: str
    id: int

    def encode(self) -> str:
        """Return the cursor encoded for a URL."""
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode().rstrip("=")

    @classmethod
    def decode(cls, text: str, order: str) -> PageCursor:
        """Decode a cursor; raise NotFound (404) if it is invalid or belongs to another order."""
        try:
            if len(text) > MAX_CURSOR_CHARS or "\0" in text:
                raise ValueError
            cursor = msgspec.json.decode(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)), type=cls)
        except (ValueError, msgspec.MsgspecError) as error:
            raise _invalid_cursor_error() from error
        if cursor.order != order or "\0" in cursor.value or not 0 <= cursor.id < 2**63:
            raise _invalid_cursor_error()
        return cursor


def _invalid_cursor_error() -> NotFound:
    """Return the error 404 for a cursor that cannot be read or does not belong to this list in this order."""
    return NotFound("cursor: it does not belong to this list in this order; leave it out to start at the first page.")


class RowPagination(CursorPagination):
    """Pages of `limit` rows, 1 to 500. `next` and `previous` are complete addresses."""

    page_size = 50
    max_page_size = 500
    page_size_query_param = "limit"
    page_size_query_description = "Number of rows on a page, 1 to 500."
    cursor_query_description = "Where the page begins; copy it from `next` or `previous` of another page."
    base_url: str

    def get_page_size(self, request: Request) -> int:
        """Return the page size, 50 without `limit`; raise ParseError (400) if `limit` is not a number from 1 to 500."""
        text = request.query_params.get(self.page_size_query_param)
        if text is None:
            return self.page_size
        if text.isascii() and text.isdecimal() and len(text) <= 4 and 1 <= int(text) <= self.max_page_size:
            return int(text)
        raise ParseError(f"limit: say a number from 1 to {self.max_page_size}.")

    def get_schema_operation_parameters(self, view: Any) -> list[dict[str, Any]]:
        """Return the parameters for the OpenAPI document, with the bounds of `limit`."""
        parameters: list[dict[str, Any]] = super().get_schema_operation_parameters(view)
        bounds = {"minimum": 1, "maximum": self.max_page_size, "default": self.page_size}
        for parameter in parameters:
            if parameter["name"] == self.page_size_query_param:
                parameter["schema"] |= bounds
        return parameters

    def parse_request(self, request: Request, view: Any) -> None:
        """Read page size, order and cursor from the request, and keep them for `paginate_queryset`.

        Raises ParseError (400) or NotFound (404) for invalid values.
        """
        self.base_url, self.size = request.build_absolute_uri(), self.get_page_size(request)
        self.order: str = view.get_requested_ordering(request)
        self.sort_field = view.sort_fields[self.order.removeprefix("-")]
        text = request.query_params.get(self.cursor_query_param, "")
        self.page_cursor = PageCursor.decode(text, self.order) if text else None

    def paginate_queryset(
        self, queryset: QuerySet[Any] | Sequence[Any], request: Request, view: Any = None
    ) -> list[Any]:
        """Return the rows of the requested page. Call `parse_request` first. Takes the statements of
        `load_first_rows`.

        Raises NotFound (404) if the cursor's value does not fit the sort field.
        """
        queryset = cast("QuerySet[Any]", queryset)  # DRF allows sequences as well; our views have none.
        cursor, size = self.page_cursor, self.size
        backwards = cursor is not None and cursor.backwards
        descending = self.order.startswith("-") != backwards
        if cursor:
            queryset = self._filter_beyond_cursor(queryset, cursor, descending)
        sign = "-" if descending else ""
        rows = self.load_first_rows(queryset.order_by(f"{sign}{self.sort_field}", f"{sign}id"), size + 1)
        has_more, rows = len(rows) > size, rows[:size]
        if backwards:
            rows.reverse()
        self.rows, self.has_next, self.has_previous = (
            rows,
            backwards or has_more,
            has_more if backwards else cursor is not None,
        )
        return rows

    def load_first_rows(self, queryset: QuerySet[Any], count: int) -> list[Any]:
        """Return the first `count` rows of the ordered query, which begins at the cursor. Costs one statement."""
        return list(queryset[:count])

    def _filter_beyond_cursor(self, queryset: QuerySet[Any], cursor: PageCursor, descending: bool) -> QuerySet[Any]:
        """Keep the rows with a smaller sort value and id than the cursor's if `descending`, otherwise those with
        greater ones.

        Raises NotFound (404) if the cursor's value does not fit the sort field.
        """
        try:
            value = _resolve_model_field(queryset.model, self.sort_field).to_python(cursor.value)
            value = value.astimezone(UTC) if isinstance(value, datetime) else value
        except (ValidationError, OverflowError) as error:
            raise _invalid_cursor_error() from error
        lookup = TupleLessThan if descending else TupleGreaterThan
        return queryset.filter(lookup((F(self.sort_field), F("id")), (value, cursor.id)))

    def get_next_link(self) -> str | None:
        """Return the address of the next page, None if this is the last one."""
        return self._build_page_url(self.rows[-1], False) if self.has_next and self.rows else None

    def get_previous_link(self) -> str | None:
        """Return the address of the previous page, None if this is the first one."""
        return self._build_page_url(self.rows[0], True) if self.has_previous and self.rows else None

    def _build_page_url(self, row: Model, backwards: bool) -> str:
        """Return the address of the page that begins after `row` or, if `backwards`, ends before it."""
        value: Any = row
        for name in self.sort_field.split("__"):
            value = getattr(value, name)
        cursor = PageCursor(
            self.order, backwards, value.isoformat() if hasattr(value, "isoformat") else str(value), row.pk
        )
        return str(replace_query_param(self.base_url, self.cursor_query_param, cursor.encode()))


def _resolve_model_field(model: type[Model], path: str) -> Any:
    """Return the model field at the end of `path`, which may lead through relations; raise FieldDoesNotExist
    otherwise."""
    *relations, last = path.split("__")
    for name in relations:
        related = model._meta.get_field(name).related_model
        if not isinstance(related, type):
            raise FieldDoesNotExist(path)
        model = related
    return model._meta.get_field(last)


def get_list_parameters() -> Sequence[str]:
    """Return the query parameters that every list accepts in addition to its filters."""
    return (RowPagination.cursor_query_param, "limit", "ordering", "fields")
