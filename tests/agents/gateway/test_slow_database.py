"""Test that the gateway's writer notices a slow database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accelerators import slow_neighbours
from accelerators.models import Event
from agents.gateway import writer
from agents.gateway.asgi_app import AgentGateway
from tests.support.webserver import until
from tests.support.wireagent import WireAgent

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def no_counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin and end without counts of other tests; the writer measures often."""
    monkeypatch.setattr(writer, "CHANGES_POLL_S", 0.02)
    slow_neighbours.forget()
    yield
    slow_neighbours.forget()


def list_slow() -> list[str]:
    """Return the names of all recorded slow neighbours."""
    return list(Event.objects.filter(action=slow_neighbours.ACTION).values_list("subject_name", flat=True))


def test_a_database_is_named_when_even_its_fastest_statements_are_slow(
    agent: WireAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "SLOW_STATEMENT_S", 0.0)
    with agent.connect():
        until(lambda: slow_neighbours.record() or list_slow() == ["The database"])


def test_one_fast_statement_shows_that_the_database_is_not_far_away(gateway: AgentGateway) -> None:
    slow, fast = 2 * writer.SLOW_STATEMENT_S, writer.SLOW_STATEMENT_S / 10
    for seconds in (slow, slow, fast, slow, slow, slow):
        gateway._writer._note_statement_time(seconds)
    slow_neighbours.record()
    assert not list_slow()
    gateway._writer._note_statement_time(slow)
    slow_neighbours.record()
    assert list_slow() == ["The database"]
