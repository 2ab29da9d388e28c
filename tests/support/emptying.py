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
RESET_SESSION = "UNLISTEN *; SELECT pg_advisory_unlock_all(); RESET ALL"
"""Ends what a test may have left in its database session: LISTEN, advisory locks and changed settings."""


def allow_emptying() -> None:
    """Disable the triggers that keep tables from being emptied, in the current database, permanently."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT tgrelid::regclass::text FROM pg_trigger WHERE tgname = 'accelerators_kept'")
        for (table,) in cursor.fetchall():
            cursor.execute(f"ALTER TABLE ONLY {table} DISABLE TRIGGER accelerators_kept")


def empty_by_deleting() -> None:
    """Make TransactionTestCase delete all rows; truncating the tables takes thirty times as long (measured).

    It also keeps the connection of the test's thread for the next test, as TestCase does: a new connection costs
    PostgreSQL a new process, which reads the catalogs again.
    """
    TransactionTestCase._fixture_teardown = _end_transactional_test  # type: ignore[attr-defined]
    TransactionTestCase._should_reload_connections = lambda _case: False  # type: ignore[attr-defined]


def _end_transactional_test(_case: TransactionTestCase) -> None:
    """Delete all rows. Close the test's connection only if it is broken or in a transaction."""
    _empty_tables()
    if connection.connection is None:
        return
    if connection.in_atomic_block or not connection.get_autocommit():
        connection.close()
        return
    try:
        connection.connection.execute(RESET_SESSION, prepare=False)
        connection.init_connection_state()  # sets the time zone again, if it is not the server's default
    except psycopg.Error:
        connection.close()


def _empty_tables() -> None:
    """Delete all rows, on a separate connection that stays open.

    Django's own connection may be broken, or in a transaction that the test has left open.
    """
    try:
        _delete_rows(_connection())
    except psycopg.OperationalError:  # a test of an outage has ended all database sessions
        _connection.cache_clear()
        _delete_rows(_connection())


def _delete_rows(raw: psycopg.Connection[Any]) -> None:
    """Delete all rows except those of KEPT_TABLES. Waits up to PATIENCE_S for open transactions, as TRUNCATE does."""
    deleted = raw.execute("SELECT pg_temp.delete_rows()").fetchone()
    assert deleted is not None
    if many := [table for table, count in zip(_tables(), deleted[0], strict=True) if count > VACUUM_ABOVE_ROWS]:
        raw.execute(f"VACUUM {', '.join(many)}")


@cache
def _connection() -> psycopg.Connection[Any]:
    """Return a connection with the function `pg_temp.delete_rows`, which returns the number of rows for each table.

    PostgreSQL keeps the plans of a function's statements; planning takes most of the time of deleting from an empty
    table.
    """
    parameters = connection.get_connection_params()
    kept = {name: parameters[name] for name in ("host", "port", "user", "password", "dbname") if name in parameters}
    raw = psycopg.connect(**kept, autocommit=True)
    steps = [f"DELETE FROM {table}; GET DIAGNOSTICS n = ROW_COUNT; counts := counts || n;" for table in _tables()]
    raw.execute(f"""
        CREATE FUNCTION pg_temp.delete_rows() RETURNS bigint[] LANGUAGE plpgsql
        SET session_replication_role = replica  -- neither foreign keys nor triggers are checked
        SET lock_timeout = '{PATIENCE_S}s'
        SET plan_cache_mode = force_generic_plan
        AS $$
        DECLARE n bigint; counts bigint[] := '{{}}';
        BEGIN
            LOCK TABLE {", ".join(_tables())} IN SHARE ROW EXCLUSIVE MODE;
            {" ".join(steps)}
            RETURN counts;
        END $$
    """)
    return raw


@cache
def _tables() -> tuple[str, ...]:
    found = connection.introspection.django_table_names(only_existing=True, include_views=False)
    return tuple(sorted(set(found) - KEPT_TABLES))
