"""Test that read-only mode is switched once, whoever else switches or reads it at the same time."""

from __future__ import annotations

import threading

import pytest
from django.db import IntegrityError, connection

from accelerators import conductor
from accelerators.domain.caller import Caller
from accelerators.domain.states import EventSource
from accelerators.models import Event
from cyborgweb.auth import read_only
from cyborgweb.models import Maintenance
from tests.support.locks import wait_for_a_waiting_lock


def switch(on: bool, name: str) -> Maintenance | None:
    """Switch read-only mode as the person with this name."""
    return read_only.switch_read_only(on, Caller(name, "1", frozenset(), ""), f"because of {name}", EventSource.PERSON)


@pytest.mark.django_db(transaction=True)
def test_of_two_people_who_switch_at_the_same_time_the_second_finds_what_the_first_has_done() -> None:
    results: list[object] = []

    def switch_too() -> None:
        try:
            results.append(switch(True, "bob"))
        except IntegrityError as error:
            results.append(error)
        finally:
            connection.close()

    thread = threading.Thread(target=switch_too, daemon=True)
    with conductor.writing():
        switch(True, "ada")
        thread.start()
        wait_for_a_waiting_lock()
    thread.join(10)
    (found,) = results
    assert isinstance(found, Maintenance), found
    assert (found.by, Maintenance.objects.get().by) == ("ada", "ada")
    assert [*Event.objects.values_list("action", "actor")] == [("maintenance.begun", "ada")]


@pytest.mark.django_db
def test_a_switch_while_a_write_reads_the_mode_is_not_hidden_by_the_older_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_only._drop_cached(None)
    first = Maintenance.objects.first

    def read_before_the_switch() -> Maintenance | None:
        answer = first()
        monkeypatch.undo()
        switch(True, "ada")
        read_only._drop_cached(None)  # the notification after the commit
        return answer

    monkeypatch.setattr(Maintenance.objects, "first", read_before_the_switch)
    assert read_only.get_maintenance() is None
    assert read_only.get_maintenance() is not None
    read_only._drop_cached(None)
