"""Slow neighbours are counted in memory, recorded as few events, and shown as alerts on the overview."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from django.test import Client

from accelerators import slow_neighbours
from accelerators.models import Event
from cyborgweb.http.slow_clients import SLOW_REQUESTS, note_slow_client
from cyborgweb.monitoring import backlog

pytestmark = pytest.mark.django_db
SENTENCE = "answers slowly: {count} calls, the slowest {worst_s:.1f} s."


@pytest.fixture(autouse=True)
def no_counts() -> Iterator[None]:
    """Begin and end without counts of other tests."""
    slow_neighbours.forget()
    yield
    slow_neighbours.forget()


def list_events() -> list[tuple[str, str]]:
    """Return name and reason of all recorded slow neighbours, the oldest first."""
    events = Event.objects.filter(action=slow_neighbours.ACTION).order_by("id")
    return list(events.values_list("subject_name", "reason"))


def pretend_time_passed(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the module's clock show a time that is `seconds` later."""
    later = time.monotonic() + seconds
    monkeypatch.setattr("accelerators.slow_neighbours.time.monotonic", lambda: later)


def test_a_neighbour_is_recorded_when_it_was_slow_often_enough_and_then_not_for_some_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seconds in (1.5, 2.0):
        slow_neighbours.note("Placement", SENTENCE, seconds, needed=3)
    slow_neighbours.record()
    assert not list_events()
    slow_neighbours.note("Placement", SENTENCE, 1.1, needed=3)
    slow_neighbours.record()
    expected = [("Placement", "answers slowly: 3 calls, the slowest 2.0 s.")]
    assert list_events() == expected
    for _ in range(3):
        slow_neighbours.note("Placement", SENTENCE, 1.0, needed=3)
    slow_neighbours.record()
    assert list_events() == expected
    pretend_time_passed(monkeypatch, slow_neighbours.EVENT_INTERVAL_S)
    slow_neighbours.record()
    assert [name for name, _ in list_events()] == ["Placement"] * 2


def test_a_neighbour_that_is_slow_now_and_then_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        slow_neighbours.note("Nova", SENTENCE, 2.0, needed=3)
    pretend_time_passed(monkeypatch, slow_neighbours.WINDOW_S + 1)
    for _ in range(2):
        slow_neighbours.note("Nova", SENTENCE, 2.0, needed=3)
    slow_neighbours.record()
    assert not list_events()


def test_X5_many_slow_clients_use_bounded_memory_and_do_not_hide_a_slow_service() -> None:
    for number in range(10 * slow_neighbours.MAX_CLIENTS):
        for _ in range(SLOW_REQUESTS):
            note_slow_client((f"192.0.2.{number}", 1))
    slow_neighbours.note("Placement", SENTENCE, 2.0)
    slow_neighbours.record()
    names = [name for name, _ in list_events()]
    assert len(names) == slow_neighbours.MAX_CLIENTS + 1 and "Placement" in names and "The client 192.0.2.0" in names


def test_slow_neighbours_are_alerts_on_the_overview(admin_client: Client) -> None:
    slow_neighbours.note("Placement", SENTENCE, 2.0)
    slow_neighbours.record()
    assert backlog.read_backlog().slow_neighbours == [("Placement", "answers slowly: 1 calls, the slowest 2.0 s.")]
    page = admin_client.get("/admin/").content.decode()
    assert "Placement</a> answers slowly: 1 calls, the slowest 2.0 s." in page
    assert admin_client.get("/admin/accelerators/event/?q=action:neighbour.slow").content.decode().count("slowest") == 1
