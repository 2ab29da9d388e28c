"""Test that the failure of a call after a commit stops neither the other calls nor the caller."""

from __future__ import annotations

import pytest
from django.db import OperationalError, transaction

from accelerators.runtime.after_commit import call_after_commit

pytestmark = pytest.mark.django_db(transaction=True)


def fail(text: str) -> None:
    raise OperationalError(text)


def test_a_call_after_a_commit_that_fails_is_logged_and_the_others_are_made(caplog: pytest.LogCaptureFixture) -> None:
    made: list[str] = []
    with transaction.atomic():
        call_after_commit(made.append, "one")
        call_after_commit(fail, "PostgreSQL is being restarted")
        call_after_commit(made.append, "two")
        assert made == []
    assert made == ["one", "two"] and "PostgreSQL is being restarted" in caplog.text


def test_without_a_transaction_the_call_is_made_at_once() -> None:
    made: list[str] = []
    call_after_commit(made.append, "one")
    call_after_commit(fail, "PostgreSQL is being restarted")
    assert made == ["one"]


def test_nothing_is_called_after_a_rollback() -> None:
    made: list[str] = []
    with pytest.raises(OperationalError), transaction.atomic():
        call_after_commit(made.append, "one")
        fail("no")
    assert made == []
