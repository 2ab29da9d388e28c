"""How tables become empty again. Events and seals cannot be emptied in the product; in the database of a test or a
measurement they can.

Called by the tests' `conftest` and by `tests.bench.fixtures`.
"""

from __future__ import annotations

from functools import cache

from django.db import connection
from django.test import TransactionTestCase

KEPT = {"django_content_type", "auth_permission"}
"""What migrations make of the models alone: to make them anew each time costs more than most tests."""
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
    """Past Django, whose guards ask who may write. Who still writes is waited for, as TRUNCATE waits."""
    connection.ensure_connection()
    raw, dead = connection.connection, []
    with raw.transaction():
        raw.execute("SET LOCAL session_replication_role = replica")  # neither foreign keys nor triggers are asked
        raw.execute(f"LOCK TABLE {', '.join(_tables())} IN SHARE ROW EXCLUSIVE MODE")
        for table in _tables():
            if raw.execute(f"DELETE FROM {table}").rowcount > MANY:
                dead.append(table)
    if dead:
        raw.execute(f"VACUUM {', '.join(dead)}")


@cache
def _tables() -> tuple[str, ...]:
    found = connection.introspection.django_table_names(only_existing=True, include_views=False)
    return tuple(sorted(set(found) - KEPT))
