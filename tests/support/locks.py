"""Wait until another connection waits for a lock."""

from __future__ import annotations

import time

import pytest
from django.db import connection


def wait_for_a_waiting_lock(connections: int = 1) -> None:
    """Return when this number of other connections to this database wait for locks; fail the test after 10 seconds."""
    end = time.monotonic() + 10
    with connection.cursor() as cursor:
        while time.monotonic() < end:
            cursor.execute("SELECT pg_stat_clear_snapshot()")  # a transaction keeps the list that it has read first
            cursor.execute(
                "SELECT count(*) FROM pg_locks l JOIN pg_stat_get_activity(NULL) a ON a.pid = l.pid"
                " WHERE NOT l.granted AND a.datid = (SELECT oid FROM pg_database WHERE datname = current_database())"
            )
            if cursor.fetchone()[0] >= connections:
                return
            time.sleep(0.02)
    pytest.fail("nothing waits for a lock")
