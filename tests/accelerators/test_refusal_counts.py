"""Refusals are counted in memory, and recorded as few events, however many there are."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from django.db import OperationalError

from accelerators import conductor, refusal_counts
from accelerators.domain.states import EventSource
from accelerators.models import Event
from accelerators.refusal_counts import RefusalKind, Refusals, note_refusal

pytestmark = pytest.mark.django_db


def build_events(refusals: Mapping[str, Refusals]) -> list[dict[str, Any]]:
    """Return one event with the number of refusals by key, and the newest details."""
    changes = {key: [one.details.get("text"), one.number] for key, one in refusals.items()}
    return [conductor.build_event("test.refused", EventSource.SYSTEM, "test", changes=changes)]


KIND = RefusalKind(build_events)


@pytest.fixture(autouse=True)
def no_counts() -> Iterator[None]:
    """Begin and end without counts of other tests."""
    refusal_counts.forget()
    yield
    refusal_counts.forget()


def list_changes() -> list[dict[str, Any]]:
    """Return what the recorded events have counted, the oldest first."""
    return list(Event.objects.filter(action="test.refused").order_by("id").values_list("changes", flat=True))


def pretend_time_passed(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the module's clock show a time that is `seconds` later."""
    later = time.monotonic() + seconds
    monkeypatch.setattr("accelerators.refusal_counts.time.monotonic", lambda: later)


def test_the_first_refusals_are_recorded_at_once_and_later_ones_together_after_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    note_refusal(KIND, "a", details={"text": "first"})
    refusal_counts.record()
    assert list_changes() == [{"a": ["first", 1]}]
    for number in range(1000):
        note_refusal(KIND, "ab"[number % 2], details={"text": str(number)})
    refusal_counts.record()
    assert len(list_changes()) == 1
    pretend_time_passed(monkeypatch, refusal_counts.INTERVAL_S)
    refusal_counts.record()
    refusal_counts.record()
    assert list_changes()[1:] == [{"a": ["998", 500], "b": ["999", 500]}]


def test_counts_are_kept_while_the_database_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    note_refusal(KIND, "a", 2, {"text": "old"})
    note_refusal(KIND, "b")

    def fail(events: list[dict[str, Any]]) -> None:
        note_refusal(KIND, "a", details={"text": "new"})  # refused meanwhile, by another thread
        raise OperationalError("the database is down")

    with monkeypatch.context() as patch, pytest.raises(OperationalError):
        patch.setattr(conductor, "record_events", fail)
        refusal_counts.record()
    pretend_time_passed(monkeypatch, refusal_counts.INTERVAL_S)
    refusal_counts.record()
    assert list_changes() == [{"a": ["new", 3], "b": [None, 1]}]


def test_X5_many_keys_use_bounded_memory() -> None:
    for number in range(2 * refusal_counts.MAX_KEYS):
        note_refusal(KIND, str(number))
    refusal_counts.record()
    assert len(list_changes()[0]) == refusal_counts.MAX_KEYS
