"""How tables become empty again. Events and seals cannot be emptied in the product; in the database of a test or a
measurement they can.

Called by the tests' `conftest` and by `tests.bench.fixtures`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import psycopg
from django.db import connection
from django.test import TransactionTestCase

KEPT = {"django_content_type", "auth_permission"}
"""What migrations make of the models alone: to make them anew each time costs more than most tests."""
PATIENCE_S = 30
"""A test that leaves a transaction open fails by itself, and not the run."""
MANY = 1000
"""So many dead rows would be read again and again, for nothing cleans up behind tests."""


def allow() -> None:
    """Let TRUNCATE through from now on."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT tgrelid::regclass::text FROM pg_trigger WHERE tgname = 'accelerators_kept'")
        for (table,) in cursor.fetchall():
            cursor.execute(f"ALTER TABLE ONLY {table} DISABLE TRIGGER accelerators_kept")


def by_deleting() -> None:
    """Have tests that commit delete what they wrote: to truncate all tables takes thirty times as long (measured)."""
    TransactionTestCase._fixture_teardown = _empty  # type: ignore[attr-defined]


def _empty(_case: TransactionTestCase) -> None:
    """Delete all rows on a connection of its own, which stays warm: Django's closes between tests, and a new one
    reads PostgreSQL's catalogs anew."""
    try:
        _delete_rows(_connection())
    except psycopg.OperationalError:  # a test of an outage ended all sessions
        _connection.cache_clear()
        _delete_rows(_connection())


def _delete_rows(raw: psycopg.Connection[Any]) -> None:
    """Delete all rows but those that are KEPT. Who still writes is waited for, as TRUNCATE waits."""
    prepare = (
        "SET LOCAL session_replication_role = replica",  # neither foreign keys nor triggers are asked
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
    if many := [table for table, count in counts if count > MANY]:
        raw.execute(f"VACUUM {', '.join(many)}")


@cache
def _connection() -> psycopg.Connection[Any]:
    parameters = connection.get_connection_params()
    kept = {name: parameters[name] for name in ("host", "port", "user", "password", "dbname") if name in parameters}
    return psycopg.connect(**kept, autocommit=True)


@cache
def _tables() -> tuple[str, ...]:
    found = connection.introspection.django_table_names(only_existing=True, include_views=False)
    return tuple(sorted(set(found) - KEPT))
