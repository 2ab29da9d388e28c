"""Row of the merge: acknowledged reports become rows of all tables. The ceiling is PostgreSQL alone writing these rows.

The ceiling starts from staging tables that are loaded and analysed: no JSON, no comparison, no Python, one
`INSERT … SELECT … ON CONFLICT` per table in one commit. Merge and ceiling take turns, and each starts with empty tables
after a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, process_time

from django.db import connection, transaction

from agents import jobs
from agents.gateway.writer import COPY_TO_SPOOL, COPY_TYPES
from tests.bench import fixtures, messages
from tests.bench.figures import Row, median

DEVICES = 10
KEYS = {
    "device": "host_id, key",
    "deployable": "device_id, name",
    "attribute": "deployable_id, key",
    "attachhandle": "deployable_id, attach_info",
    "event": "",
    "intent": "kind, key",
}
"""Tables in the order of their foreign keys, with their unique columns; events have none."""


@dataclass(frozen=True)
class Size:
    """Number of hosts, and of turns that are counted."""

    hosts: int
    rounds: int


def rows(size: Size, progress: Callable[[str], None]) -> list[Row]:
    """Merge all reports and upsert the same rows, turn by turn; return the row."""
    progress(f"merging {size.hosts} new hosts of {DEVICES} devices against one upsert per table")
    ids = fixtures.enrol(size.hosts)
    merged, spent, staged, count = list[float](), list[float](), list[float](), 0
    for turn in range(size.rounds + 1):  # the first turn is a warm-up
        fixtures.empty_inventory()
        _spool_reports(ids)
        began, cpu = perf_counter(), process_time()
        jobs.merge()
        merged.append(perf_counter() - began)
        spent.append(process_time() - cpu)
        if not turn:
            count = _fill_staging_tables()
        fixtures.empty_inventory()
        began = perf_counter()
        _upsert_staged_rows()
        staged.append(perf_counter() - began)
    fixtures.empty_inventory()
    _drop_staging_tables()
    ratio = median([ceiling / ours for ours, ceiling in zip(merged[1:], staged[1:], strict=True)])
    devices = size.hosts * DEVICES
    note = f"{count} rows in all tables; every host, device and event new; CPU of the merging process alone"
    return [
        Row(
            "spool to rows of all tables",
            devices / median(merged[1:]),
            "devices/s",
            "one upsert per table, staged rows",
            0.30,
            devices / median(staged[1:]),
            ratio,
            median(spent[1:]) / devices * 1e6,
            note,
        )
    ]


def _spool_reports(ids: list[int]) -> None:
    with transaction.atomic(), connection.cursor() as cursor, cursor.copy(COPY_TO_SPOOL) as copy:
        copy.set_types(COPY_TYPES)
        for number, host in enumerate(ids):
            parts = messages.report_parts(messages.devices(DEVICES, messages.host_name(number)))
            copy.write_row((host, 1, number + 1, messages.report(parts, number + 1), False))
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE spool")


def _fill_staging_tables() -> int:
    """Copy what the merge wrote into staging tables; return the number of rows."""
    count = 0
    with connection.cursor() as cursor:
        for name in ("host", *KEYS):
            cursor.execute(f"CREATE TABLE stage_{name} AS SELECT * FROM accelerators_{name}")
            count += cursor.rowcount
            cursor.execute(f"ANALYZE stage_{name}")
    return count


def _drop_staging_tables() -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"DROP TABLE {', '.join(f'stage_{name}' for name in ('host', *KEYS))}")


def _upsert_staged_rows() -> None:
    with transaction.atomic(), connection.cursor() as cursor:
        for name, key in KEYS.items():
            cursor.execute(_build_upsert(name, key))
        cursor.execute(
            "UPDATE accelerators_host t SET applied_epoch = s.applied_epoch, applied_seq = s.applied_seq,"
            " applied_hash = s.applied_hash, drivers = s.drivers, reported_at = now(), updated_at = now()"
            " FROM stage_host s WHERE t.id = s.id"
        )


def _build_upsert(name: str, key: str) -> str:
    columns = _list_columns(f"stage_{name}")
    conflict = ""
    if key:
        fixed = {"id", "uuid", "created_at", *key.split(", ")}
        changed = ", ".join(f"{column} = excluded.{column}" for column in columns if column not in fixed)
        conflict = f" ON CONFLICT ({key}) DO UPDATE SET {changed}"
    listed = ", ".join(columns)
    return f"INSERT INTO accelerators_{name} ({listed}) SELECT {listed} FROM stage_{name}{conflict}"


_known: dict[str, list[str]] = {}


def _list_columns(table: str) -> list[str]:
    if table not in _known:
        with connection.cursor() as cursor:
            found = connection.introspection.get_table_description(cursor, table)
        _known[table] = [column.name for column in found]
    return _known[table]
