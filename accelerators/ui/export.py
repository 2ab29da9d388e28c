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
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, islice
from threading import BoundedSemaphore
from typing import Any

import orjson
import yaml
from django.core.exceptions import FieldDoesNotExist, PermissionDenied
from django.db import connection, transaction
from django.db.models import QuerySet, Subquery
from django.http import Http404, HttpRequest, HttpResponse, StreamingHttpResponse
from django.utils.text import slugify

from accelerators import conductor
from accelerators.domain.states import EventSource
from drivers.csv_text import disarm_formulas

RowIterator = Iterator[Sequence[Any]]

ROWS_PER_CHUNK = 500
"""Number of rows in one chunk of the response."""
MAX_CONCURRENT_EXPORTS = 2
"""Maximum number of concurrent exports in one process. Each holds a request thread and a transaction until the client
has read everything."""
STALL_TIMEOUT = "60s"
"""Time after which PostgreSQL ends the transaction of a client that reads nothing; the client loses the remaining rows.
An open transaction would keep the database from vacuuming."""

_export_slots = BoundedSemaphore(MAX_CONCURRENT_EXPORTS)


@dataclass(frozen=True)
class ExportedValue:
    """A column of an export whose values are computed: `compute` is called with the row's values of `fields`, which are
    lookup paths and expressions."""

    name: str
    fields: tuple[str | Subquery, ...]
    compute: Callable[..., Any]


class ExportResponse(StreamingHttpResponse):
    """Streaming response that frees its place among `MAX_CONCURRENT_EXPORTS` exports when it is closed, even if nobody
    read it.
    """

    def close(self) -> None:
        """Close the response and free its place among the exports; a second call does not free another one."""
        super().close()
        if not getattr(self, "_freed", False):
            self._freed = True
            _export_slots.release()


def build_export_response(admin: Any, request: HttpRequest, file_format: str) -> HttpResponse | StreamingHttpResponse:
    """Answer with the list as a file in the format `file_format`: csv, json, jsonl or yaml.

    Raises Http404 for another format, PermissionDenied for a user who may not view the list, and BadRequest if the URL
    has an invalid filter or column. Answers 503 with Retry-After while `MAX_CONCURRENT_EXPORTS` other exports run in
    this process. The rows are read while the response is sent.
    """
    if file_format not in FILE_FORMATS:
        raise Http404(f"There is no export format {file_format!r}. The formats are {', '.join(FILE_FORMATS)}.")
    if denial := admin.explain_refusal(request, "view"):
        raise PermissionDenied(denial)
    rows: QuerySet[Any] = admin.get_changelist_instance(request).queryset
    columns = list_export_columns(admin, request)
    if not _export_slots.acquire(blocking=False):
        text = f"{MAX_CONCURRENT_EXPORTS} exports are running in this process. Try again in a moment.\n"
        return HttpResponse(text, status=503, content_type="text/plain", headers={"Retry-After": "10"})
    content_type, write_file = FILE_FORMATS[file_format]
    file_name = f"{slugify(admin.opts.verbose_name_plural)}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.{file_format}"
    response = ExportResponse(
        _stream_and_record(admin, request, file_format, rows, columns, write_file), content_type=content_type
    )
    response["Content-Disposition"] = f'attachment; filename="{file_name}"'
    return response


def list_export_columns(admin: Any, request: HttpRequest) -> list[str | ExportedValue]:
    """Return what to export: the uuid if the model has one, then the fields of the shown columns, in their order.

    The fields of a column are those in the admin's `exports`, else its own model field, else the field that it is
    sorted by.
    """
    columns = list(chain.from_iterable(_list_fields_of_column(admin, name) for name in admin.get_list_display(request)))
    all_columns = ["uuid", *columns] if hasattr(admin.model, "uuid") else columns
    return list(dict.fromkeys(all_columns))


def _list_fields_of_column(admin: Any, column: str) -> Iterable[str | ExportedValue]:
    """Return what is exported for a column; () if it has no fields."""
    if column in admin.exports:
        return tuple(admin.exports[column])
    try:
        return (admin.opts.get_field(column).name,)
    except FieldDoesNotExist:
        sorted_by = getattr(getattr(admin, column), "admin_order_field", None)
        return (sorted_by.lstrip("-"),) if sorted_by else ()


def _compute_values(
    columns: Sequence[str | ExportedValue], field_paths: Sequence[str | Subquery], rows: RowIterator
) -> RowIterator:
    """Yield the values of `columns` for each row, which has the values of `field_paths`."""
    places = {path: place for place, path in enumerate(field_paths)}
    for row in rows:
        yield [
            row[places[one]] if isinstance(one, str) else one.compute(*(row[places[path]] for path in one.fields))
            for one in columns
        ]


def _stream_and_record(
    admin: Any,
    request: HttpRequest,
    file_format: str,
    rows: QuerySet[Any],
    columns: list[str | ExportedValue],
    write_file: Callable[..., Any],
) -> Iterator[bytes]:
    """Yield the file in chunks and then record the event `list.exported` with the number of rows that were read.

    All rows are read in one transaction, which PostgreSQL ends after STALL_TIMEOUT if the client reads nothing. The
    event is recorded also if the client disconnects or the query fails, but not if the iteration never begins.
    """
    row_counter = [0]
    try:
        with transaction.atomic():
            with connection.cursor() as cursor:  # the ORM has no statement for a setting of the transaction
                cursor.execute("SELECT set_config('idle_in_transaction_session_timeout', %s, true)", [STALL_TIMEOUT])
            sources = ((one,) if isinstance(one, str) else one.fields for one in columns)
            field_paths = list(dict.fromkeys(chain.from_iterable(sources)))
            stored_rows = rows.prefetch_related(None).values_list(*field_paths).iterator(chunk_size=ROWS_PER_CHUNK)
            row_values = _compute_values(columns, field_paths, stored_rows)
            names = [one.replace("__", "_") if isinstance(one, str) else one.name for one in columns]
            for text in write_file(names, _read_chunks(row_values, row_counter)):
                yield text.encode() if isinstance(text, str) else text
    finally:
        if not connection.in_atomic_block:
            connection.close_if_unusable_or_obsolete()
        list_query = request.GET.urlencode()[:1000]
        changes = {"rows": [None, row_counter[0]], "as": [None, file_format]} | (
            {"only": [None, list_query]} if list_query else {}
        )
        subject: Any = (None, str(admin.opts.verbose_name_plural))  # `EventSubject` knows no subject without uuid
        conductor.record_event(
            "list.exported", EventSource.PERSON, request.user.get_username(), subject=subject, changes=changes
        )


def _read_chunks(rows: Iterator[Sequence[Any]], row_counter: list[int]) -> Iterator[list[Sequence[Any]]]:
    """Yield the rows in lists of at most ROWS_PER_CHUNK; before each, add its length to `row_counter[0]`."""
    while chunk := list(islice(rows, ROWS_PER_CHUNK)):
        row_counter[0] += len(chunk)
        yield chunk


def _write_csv(names: list[str], chunks: Iterator[list[Sequence[Any]]]) -> Iterator[str]:
    """Yield the rows as CSV with `names` as the heading, every cell quoted, one text per chunk."""
    all_chunks: Iterator[list[Sequence[Any]]] = chain([[names]], chunks)
    for chunk in all_chunks:
        text = io.StringIO()
        csv.writer(text, quoting=csv.QUOTE_ALL).writerows([_to_csv_cell(value) for value in row] for row in chunk)
        yield text.getvalue()


def _to_csv_cell(value: Any) -> Any:
    """Return a value as text that a spreadsheet shows but does not evaluate; numbers and None are left as they are.

    Text from agents and tenants must stay text (`disarm_formulas`). Times are in UTC; lists and dicts become JSON.
    """
    if value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    return disarm_formulas(json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else str(value))


def _to_plain_dict(names: list[str], row: Sequence[Any]) -> dict[str, Any]:
    """Return a row as a dict that contains JSON types only."""
    plain: dict[str, Any] = orjson.loads(_dump_row(names, row))
    return plain


def _dump_row(names: list[str], row: Sequence[Any]) -> bytes:
    """Return a row as a JSON object; values that JSON does not know become text."""
    return orjson.dumps(dict(zip(names, row, strict=True)), default=str, option=orjson.OPT_NON_STR_KEYS)


def _write_json(names: list[str], chunks: Iterator[list[Sequence[Any]]]) -> Iterator[bytes]:
    """Yield the rows as one JSON list of objects; `[]` if there are none."""
    separator = b"[\n"
    for chunk in chunks:
        yield separator + b",\n".join(_dump_row(names, row) for row in chunk)
        separator = b",\n"
    yield b"[]\n" if separator == b"[\n" else b"\n]\n"


def _write_jsonl(names: list[str], chunks: Iterator[list[Sequence[Any]]]) -> Iterator[bytes]:
    """Yield the rows as JSON objects, one per line."""
    for chunk in chunks:
        yield b"".join(_dump_row(names, row) + b"\n" for row in chunk)


def _write_yaml(names: list[str], chunks: Iterator[list[Sequence[Any]]]) -> Iterator[str]:
    """Yield the rows as one YAML list of mappings; `[]` if there are none."""
    written = False
    for chunk in chunks:
        written = True
        plain_rows = [_to_plain_dict(names, row) for row in chunk]
        yield yaml.dump(plain_rows, Dumper=YAML_DUMPER, sort_keys=False, allow_unicode=True)
    if not written:
        yield "[]\n"


YAML_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""The dumper of libyaml if it is installed, because it is ten times as fast; else the one in Python."""
FILE_FORMATS: dict[str, tuple[str, Callable[..., Any]]] = {
    "csv": ("text/csv; charset=utf-8", _write_csv),
    "json": ("application/json", _write_json),
    "jsonl": ("application/x-ndjson", _write_jsonl),
    "yaml": ("application/yaml", _write_yaml),
}
