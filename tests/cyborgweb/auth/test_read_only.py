"""Test that read-only mode is switched once, whoever else switches or reads it at the same time."""

from __future__ import annotations

import threading

import psycopg
import pytest
from django.contrib.auth.models import User
from django.db import IntegrityError, connection
from django.test import Client

from accelerators import conductor
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import EventSource
from accelerators.models import Device, Event
from cyborgweb.auth import read_only
from cyborgweb.models import Maintenance
from tests.support.locks import wait_for_a_waiting_lock
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report


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


def enable_device(device: Device, results: list[object]) -> None:
    """Enable the device through the API as an administrator of the console, and note the status of the answer."""
    client = Client()
    client.force_login(User.objects.get(username="rita"))
    try:
        results.append(client.post(f"/api/devices/{device.uuid}/enable/", {}, "application/json").status_code)
    finally:
        connection.close()


def switch_and_disconnect(results: list[object]) -> None:
    """Switch read-only mode on, on a connection of its own, and note that it is on."""
    try:
        results.append(switch(True, "ada") is not None)
    finally:
        connection.close()


@pytest.fixture
def device() -> Device:
    """Return an inactive device; the administrator rita exists."""
    User.objects.create_superuser("rita", password="secret")
    apply_report(get_or_create_host(), make_driver_report(make_card(1)))
    return Device.objects.get()


@pytest.mark.django_db(transaction=True)
def test_the_switch_waits_for_a_write_that_began_before_it(device: Device) -> None:
    results: list[object] = []
    threads = [
        threading.Thread(target=enable_device, args=(device, results), daemon=True),
        threading.Thread(target=switch_and_disconnect, args=(results,), daemon=True),
    ]
    with conductor.writing():
        conductor.lock_devices(Device.objects.all())
        for number, thread in enumerate(threads, 1):
            thread.start()
            wait_for_a_waiting_lock(number)
        assert not Maintenance.objects.exists(), "a write is under way"
    for thread in threads:
        thread.join(10)
    actions = Event.objects.filter(action__in=["device.ready", "maintenance.begun"]).order_by("id")
    assert {*results} == {200, True}, "both have succeeded; which thread notes its result first says nothing"
    assert [*actions.values_list("action", flat=True)] == ["device.ready", "maintenance.begun"]


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_a_switch_gives_up_behind_a_long_write_and_does_not_stop_other_writes(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_only, "SWITCH_TIMEOUT_S", 1.0)
    results: list[object] = []
    thread = threading.Timer(0.3, enable_device, args=(device, results))  # while the switch waits
    with psycopg.connect(**connection.get_connection_params()) as outside:
        outside.execute("SELECT pg_advisory_xact_lock_shared(%s)", [read_only._SWITCH_LOCK_ID])
        thread.start()
        with pytest.raises(RefusedError, match="running for long: try again") as refused:
            switch(True, "ada")
        thread.join(10)
    assert (refused.value.reason, results) == (RefusalReason.UNAVAILABLE, [200])


@pytest.mark.django_db(transaction=True)
def test_a_write_that_waits_long_for_a_switch_is_answered_503(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_only, "WRITE_TIMEOUT_S", 0.2)
    results: list[object] = []
    with psycopg.connect(**connection.get_connection_params()) as outside:
        outside.execute("SELECT pg_advisory_xact_lock(%s)", [read_only._SWITCH_LOCK_ID])
        thread = threading.Thread(target=enable_device, args=(device, results), daemon=True)
        thread.start()
        thread.join(10)
        assert results == [503]
    enable_device(device, results)
    assert results == [503, 200]


@pytest.mark.django_db(transaction=True)
def test_the_limit_for_the_switch_does_not_last_for_the_rest_of_the_transaction() -> None:
    check = conductor.checking_writes(read_only.refuse_in_transaction)
    with check, conductor.writing(), connection.cursor() as cursor:
        cursor.execute("SHOW lock_timeout")
        assert cursor.fetchone() == ("0",)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("way", ["api", "console"])
def test_a_write_that_was_let_through_before_the_switch_is_refused_in_its_transaction(
    device: Device, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch(True, "ada")
    monkeypatch.setattr(read_only, "_cached", (float("inf"), None))  # as the request has read it before
    results: list[object] = []
    if way == "api":
        enable_device(device, results)
    else:
        client = Client()
        client.force_login(User.objects.get(username="rita"))
        answer = client.post(f"/admin/accelerators/device/{device.pk}/decide/", {"choice": "enable"})
        assert b"because of ada" in answer.content
        results.append(answer.status_code)
    assert results == [503]
    assert Device.objects.get().state == "inactive"
