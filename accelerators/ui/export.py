"""Export a console list as a file: the rows that match its filters, with the columns it shows and each row's uuid.

Rows are read from a database cursor and sent in slices, so memory use does not depend on their number; one query reads
all rows, so they are of one moment. Each export is recorded as an event with its user, its format, the list's query
string and the number of rows.
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
"""Number of rows in one chunk of the response."""
AT_ONCE = 2
"""Maximum number of concurrent exports in one process. Each holds a request thread and a transaction until the client
has read everything."""
STALLED = "60s"
"""Time after which PostgreSQL ends the transaction of a client that reads nothing; the client loses the remaining rows.
An open transaction would keep the database from vacuuming."""
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""First characters of a cell that a spreadsheet would evaluate. Text from agents and tenants must stay text."""

_free = BoundedSemaphore(AT_ONCE)


class Export(StreamingHttpResponse):
    """Streaming response that frees its place among `AT_ONCE` exports when it is closed, even if nobody read it."""

    def close(self) -> None:
        super().close()
        if not getattr(self, "_freed", False):
            self._freed = True
            _free.release()


def respond(admin: Any, request: HttpRequest, form: str) -> HttpResponse | StreamingHttpResponse:
    """Answer with the list as a file in the format `form`: csv, json, jsonl or yaml.

    Raises Http404 for another format and PermissionDenied for a user who may not view the list. Answers 503 with
    Retry-After while `AT_ONCE` other exports run in this process.
    """
    if form not in FORMS:
        raise Http404(f"There is no export format {form!r}. The formats are {', '.join(FORMS)}.")
    if not admin.has_view_permission(request):
        raise PermissionDenied
    rows: QuerySet[Any] = admin.get_changelist_instance(request).queryset
    paths = columns(admin, request)
    if not _free.acquire(blocking=False):
        text = f"{AT_ONCE} exports are running in this process. Try again in a moment.\n"
        return HttpResponse(text, status=503, content_type="text/plain", headers={"Retry-After": "10"})
    kind, write = FORMS[form]
    name = f"{slugify(admin.opts.verbose_name_plural)}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.{form}"
    response = Export(_told(admin, request, form, rows, paths, write), content_type=kind)
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    return response


def columns(admin: Any, request: HttpRequest) -> list[str]:
    """Return the fields to export: the uuid if the model has one, then those of the shown columns, in their order.

    The fields of a column are those in the admin's `exports`, else its own model field, else the field that it is
    sorted by.
    """
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
    """Yield the file in chunks and then record the event `list.exported` with the number of rows that were read.

    The event is recorded also if the client disconnects or the query fails.
    """
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
    """Return a value as text that a spreadsheet shows but does not evaluate; numbers and None are left as they are."""
    if value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else str(value)
    return f"'{text}" if text.startswith(FORMULA) else text


def _plain(names: list[str], row: Sequence[Any]) -> dict[str, Any]:
    """Return a row as a dict that contains JSON types only."""
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
"""The dumper of libyaml if it is installed, because it is ten times as fast; else the one in Python."""
FORMS: dict[str, tuple[str, Callable[..., Any]]] = {
    "csv": ("text/csv; charset=utf-8", _csv),
    "json": ("application/json", _json),
    "jsonl": ("application/x-ndjson", _jsonl),
    "yaml": ("application/yaml", _yaml),
}
