"""A list as a file: the rows that its filters leave, the columns it shows, each row's uuid. Called by `admin.listing`.

Rows come from a cursor of the database and leave in slices, so memory stays the same whatever their number; all are of
one moment. Who exported what, and how many rows left, is an event.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain, islice
from threading import BoundedSemaphore
from typing import Any

import orjson
import yaml
from django.core.exceptions import FieldDoesNotExist, PermissionDenied
from django.db import connection, transaction
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, StreamingHttpResponse
from django.utils.text import slugify

from accelerators import conductor
from accelerators.domain.states import Source

Rows = Iterator[Sequence[Any]]

SLICE = 500
"""Rows in one piece of the answer."""
AT_ONCE = 2
"""Exports in one process; each holds a request thread and a transaction as long as its reader takes."""
STALLED = "60s"
"""A reader that takes nothing for so long loses the rest: its transaction would keep the database from tidying up."""
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""Spreadsheets compute a cell that begins so; what agents and tenants wrote must stay text."""

_free = BoundedSemaphore(AT_ONCE)


class Export(StreamingHttpResponse):
    """Frees its place when it is closed, also if nobody read it."""

    def close(self) -> None:
        super().close()
        if not getattr(self, "_freed", False):
            self._freed = True
            _free.release()


def respond(admin: Any, request: HttpRequest, form: str) -> HttpResponse | StreamingHttpResponse:
    """The list as `form`: csv, json, jsonl or yaml (else 404); 503 while `AT_ONCE` others are under way."""
    if form not in FORMS:
        raise Http404(f"There is no export as {form!r}: ask for {', '.join(FORMS)}.")
    if not admin.has_view_permission(request):
        raise PermissionDenied
    rows: QuerySet[Any] = admin.get_changelist_instance(request).queryset
    paths = columns(admin, request)
    if not _free.acquire(blocking=False):
        text = f"{AT_ONCE} exports are under way in this process. Ask again in a moment.\n"
        return HttpResponse(text, status=503, content_type="text/plain", headers={"Retry-After": "10"})
    kind, write = FORMS[form]
    name = f"{slugify(admin.opts.verbose_name_plural)}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.{form}"
    response = Export(_told(admin, request, form, rows, paths, write), content_type=kind)
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    return response


def columns(admin: Any, request: HttpRequest) -> list[str]:
    """Fields of the columns shown, in their order, the uuid first: a column's own field, what it is sorted by, or
    what the admin's `exports` say."""
    paths = list(chain.from_iterable(_paths(admin, name) for name in admin.get_list_display(request)))
    named = ["uuid", *paths] if hasattr(admin.model, "uuid") else paths
    return list(dict.fromkeys(named))


def _paths(admin: Any, column: str) -> Iterable[str]:
    if column in admin.exports:
        return tuple(admin.exports[column])
    try:
        return (admin.opts.get_field(column).name,)
    except FieldDoesNotExist:
        sorted_by = getattr(getattr(admin, column), "admin_order_field", None)
        return (sorted_by.lstrip("-"),) if sorted_by else ()


def _told(
    admin: Any, request: HttpRequest, form: str, rows: QuerySet[Any], paths: list[str], write: Callable[..., Any]
) -> Iterator[bytes]:
    """The pieces; whatever ends it, the event says how many rows were taken."""
    counted = [0]
    try:
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("SELECT set_config('idle_in_transaction_session_timeout', %s, true)", [STALLED])
            found = rows.prefetch_related(None).values_list(*paths).iterator(chunk_size=SLICE)
            names = [path.replace("__", "_") for path in paths]
            for text in write(names, _sliced(found, counted)):
                yield text.encode() if isinstance(text, str) else text
    finally:
        if not connection.in_atomic_block:
            connection.close_if_unusable_or_obsolete()
        asked = request.GET.urlencode()[:1000]
        changes = {"rows": [None, counted[0]], "as": [None, form]} | ({"only": [None, asked]} if asked else {})
        subject = (None, str(admin.opts.verbose_name_plural))
        conductor.record("list.exported", Source.PERSON, request.user.get_username(), subject=subject, changes=changes)


def _sliced(rows: Iterator[Sequence[Any]], counted: list[int]) -> Iterator[list[Sequence[Any]]]:
    while part := list(islice(rows, SLICE)):
        counted[0] += len(part)
        yield part


def _csv(names: list[str], parts: Iterator[list[Sequence[Any]]]) -> Iterator[str]:
    for part in chain([[names]], parts):
        text = io.StringIO()
        csv.writer(text).writerows([_cell(value) for value in row] for row in part)
        yield text.getvalue()


def _cell(value: Any) -> Any:
    """As text that a spreadsheet shows and never computes; numbers stay numbers."""
    if value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else str(value)
    return f"'{text}" if text.startswith(FORMULA) else text


def _plain(names: list[str], row: Sequence[Any]) -> dict[str, Any]:
    """A row as JSON has it."""
    return orjson.loads(_json_of(names, row))


def _json_of(names: list[str], row: Sequence[Any]) -> bytes:
    return orjson.dumps(dict(zip(names, row, strict=True)), default=str, option=orjson.OPT_NON_STR_KEYS)


def _json(names: list[str], parts: Iterator[list[Sequence[Any]]]) -> Iterator[bytes]:
    before = b"[\n"
    for part in parts:
        yield before + b",\n".join(_json_of(names, row) for row in part)
        before = b",\n"
    yield b"[]\n" if before == b"[\n" else b"\n]\n"


def _jsonl(names: list[str], parts: Iterator[list[Sequence[Any]]]) -> Iterator[bytes]:
    for part in parts:
        yield b"".join(_json_of(names, row) + b"\n" for row in part)


def _yaml(names: list[str], parts: Iterator[list[Sequence[Any]]]) -> Iterator[str]:
    written = False
    for part in parts:
        written = True
        plain = [_plain(names, row) for row in part]
        yield yaml.dump(plain, Dumper=DUMPER, sort_keys=False, allow_unicode=True)
    if not written:
        yield "[]\n"


DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml's where it is there: ten times as fast."""
FORMS: dict[str, tuple[str, Callable[..., Any]]] = {
    "csv": ("text/csv; charset=utf-8", _csv),
    "json": ("application/json", _json),
    "jsonl": ("application/x-ndjson", _jsonl),
    "yaml": ("application/yaml", _yaml),
}
