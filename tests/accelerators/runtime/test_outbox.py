"""Test the outbox: when an intent is due again, and intents that are raised again while they are processed."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from accelerators import conductor, outbox
from accelerators.models import Intent
from accelerators.outbox import DueIntent

pytestmark = pytest.mark.django_db


def raise_and_load(**payload: str) -> DueIntent:
    """Raise the only intent (again), and return it as loaded for processing."""
    conductor.raise_intents("test", {"a": payload})
    (intent,) = outbox.load_due_intents("test", 10)
    return intent


def get_pause() -> float:
    """Return the seconds until the intent is due."""
    return (Intent.objects.get().next_at - datetime.now(UTC)).total_seconds()


def test_the_pause_after_a_failure_doubles_up_to_a_minute() -> None:
    intent = raise_and_load()
    for expected in (1, 2, 4, 8, 16, 32, 60, 60):
        outbox.record_failures([intent], "it was away")
        assert expected - 1 < get_pause() <= expected
    assert (Intent.objects.get().attempts, Intent.objects.get().last_error) == (8, "it was away")
    assert outbox.load_due_intents("test", 10) == []
    outbox.record_failures([intent], "it was away", 0.0)
    assert get_pause() <= 0, "the pause that was given"


def test_a_postponed_intent_keeps_its_progress_until_it_is_raised_again() -> None:
    outbox.postpone_intent(raise_and_load(host="cmp1"), "the agent writes", 30.0, command=7)
    row = Intent.objects.get()
    assert (row.payload, row.attempts, row.last_error) == ({"host": "cmp1", "command": 7}, 0, "the agent writes")
    assert 29 < get_pause() <= 30
    outbox.make_intents_due("test", ["a"])
    (intent,) = outbox.load_due_intents("test", 10)
    assert intent.payload == {"host": "cmp1", "command": 7}
    assert raise_and_load(host="cmp1").payload == {"host": "cmp1"}


@pytest.mark.django_db(transaction=True)
def test_an_intent_that_was_raised_again_is_neither_postponed_nor_deleted_as_done() -> None:
    loaded = raise_and_load(host="cmp1")
    again = raise_and_load(host="cmp2")
    outbox.postpone_intent(loaded, "late", 30.0, command=7)
    outbox.delete_done_intents([loaded])
    assert outbox.load_due_intents("test", 10) == [again]
    outbox.delete_done_intents([again])
    assert not Intent.objects.exists()
