"""The database between two tests: the connection is kept, and nothing that a test left in its session."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from accelerators import conductor
from tests.support import emptying

pytestmark = pytest.mark.django_db(transaction=True)


def ask(statement: str) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchone()[0]


def test_rows_locks_channels_and_settings_of_a_test_are_gone_but_its_session_is_kept() -> None:
    User.objects.create(username="ann")
    session, zone = ask("SELECT pg_backend_pid()"), ask("SHOW timezone")
    with connection.cursor() as cursor:
        cursor.execute("LISTEN news; SELECT pg_advisory_lock(1); SET lock_timeout = '7s'; SET timezone = 'Asia/Tokyo'")
    emptying._end_transactional_test(None)
    assert not User.objects.exists()
    assert ask("SELECT pg_backend_pid()") == session
    assert ask("SELECT count(*) FROM pg_listening_channels()") == 0
    assert ask("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()") == 0
    assert (ask("SHOW lock_timeout"), ask("SHOW timezone")) == ("0", zone)


def test_a_session_that_was_ended_or_is_in_a_transaction_is_not_kept() -> None:
    ended = ask("SELECT pg_backend_pid()")
    assert emptying._connection().execute("SELECT pg_terminate_backend(%s, 5000)", [ended]).fetchone() == (True,)
    emptying._end_transactional_test(None)
    assert connection.connection is None
    transaction.set_autocommit(False)
    ask("SELECT pg_backend_pid()")
    emptying._end_transactional_test(None)
    assert connection.connection is None


def test_captured_statements_have_a_text_also_when_they_are_prepared() -> None:
    with CaptureQueriesContext(connection) as captured:
        for _ in range(10):
            with conductor.open_cursor() as cursor:
                cursor.execute("SELECT %s::text", ["ann"])
    assert ["::text" in (one["sql"] or "") for one in captured] == [True] * 10
