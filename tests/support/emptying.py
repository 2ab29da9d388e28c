"""Empty the tables between tests, including events and seals.

The product's triggers prevent that events and seals are deleted; this module disables these triggers in the databases
of tests and benchmarks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import psycopg
from django.db import connection
from django.test import TransactionTestCase

KEPT_TABLES = {"django_content_type", "auth_permission"}
"""Tables that are kept, because migrations derive their rows from the models and refilling them is slow."""
PATIENCE_S = 30
"""Seconds to wait for table locks, so that a test that leaves a transaction open fails instead of blocking the run."""
VACUUM_ABOVE_ROWS = 1000
"""A table with more deleted rows than this is vacuumed; otherwise every later test would read its dead rows."""


def allow_emptying() -> None:
    """Disable the triggers that keep tables from being emptied, in the current database, permanently."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT tgrelid::regclass::text FROM pg_trigger WHERE tgname = 'accelerators_kept'")
        for (table,) in cursor.fetchall():
            cursor.execute(f"ALTER TABLE ONLY {table} DISABLE TRIGGER accelerators_kept")


def empty_by_deleting() -> None:
    """Make TransactionTestCase delete all rows; truncating the tables takes thirty times as long (measured)."""
    TransactionTestCase._fixture_teardown = _empty_tables  # type: ignore[attr-defined]


def _empty_tables(_case: TransactionTestCase) -> None:
    """Delete all rows, on a separate connection that stays open.

    Django closes its connection between tests, and a new connection would read PostgreSQL's catalogs again.
    """
    try:
        _delete_rows(_connection())
    except psycopg.OperationalError:  # a test of an outage has ended all database sessions
        _connection.cache_clear()
        _delete_rows(_connection())


def _delete_rows(raw: psycopg.Connection[Any]) -> None:
    """Delete all rows except those of KEPT_TABLES. Waits up to PATIENCE_S for open transactions, as TRUNCATE does."""
    prepare = (
        "SET LOCAL session_replication_role = replica",  # neither foreign keys nor triggers are checked
        f"SET LOCAL lock_timeout = '{PATIENCE_S}s'",
        f"LOCK TABLE {', '.join(_tables())} IN SHARE ROW EXCLUSIVE MODE",
    )
    deleted = []
    with raw.transaction():
        done = raw.execute("; ".join([*prepare, *(f"DELETE FROM {table}" for table in _tables())]))
        for _ in range(len(prepare) + len(_tables())):
            deleted.append(done.rowcount)
            done.nextset()
    counts = zip(_tables(), deleted[len(prepare) :], strict=True)
    if many := [table for table, count in counts if count > VACUUM_ABOVE_ROWS]:
        raw.execute(f"VACUUM {', '.join(many)}")


@cache
def _connection() -> psycopg.Connection[Any]:
    parameters = connection.get_connection_params()
    kept = {name: parameters[name] for name in ("host", "port", "user", "password", "dbname") if name in parameters}
    return psycopg.connect(**kept, autocommit=True)


@cache
def _tables() -> tuple[str, ...]:
    found = connection.introspection.django_table_names(only_existing=True, include_views=False)
    return tuple(sorted(set(found) - KEPT_TABLES))
