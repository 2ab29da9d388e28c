"""What is asked of many devices at once: a frozen set, a question, a job that is cancelled, killed, overtaken."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from threading import Barrier, Thread
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.db.models import QuerySet
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from accelerators import conductor
from accelerators.commands import placing
from accelerators.devices import lifecycle
from accelerators.devices.lifecycle import Seen
from accelerators.domain.actions import Action
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusedError
from accelerators.domain.states import Drain
from accelerators.models import Bulk, Command, Device, Event, Host
from accelerators.workflows import bulk_actions
from tests.console.conftest import Fill
from tests.support.reports import answer, apply, card

LIST = "admin:accelerators_device_changelist"
OLGA = Caller("olga", "1", frozenset(), "")


def choose(client: Client, action: str, devices: QuerySet[Device] | None = None, filters: str = "") -> Bulk:
    """By the list: some of its rows, else all that match its filters."""
    keys = [str(pk) for pk in (Device.objects.all() if devices is None else devices).values_list("pk", flat=True)]
    sent = {"action": action, "_selected_action": keys if devices is not None else keys[:1]}
    answered = client.post(reverse(LIST) + filters, sent | {"select_across": "1" if devices is None else "0"})
    bulk = Bulk.objects.latest("id")
    assert answered["location"] == page(bulk)
    return bulk


def page(bulk: Bulk) -> str:
    return reverse("admin:accelerators_bulk_change", args=[bulk.uuid])


def do(client: Client, bulk: Bulk, verb: str, **sent: Any) -> str:
    """Its page after that."""
    answered = client.post(page(bulk), {"do": verb, **sent}, follow=True)
    bulk.refresh_from_db()
    return str(answered.content.decode())


def work(most: int = 1000) -> None:
    """The job, until there is nothing left."""
    assert any(not bulk_actions.step() for _ in range(most)), "there is always more"


def free(client: Client) -> QuerySet[Device]:
    return Device.objects.filter(address__endswith="04:00.0")


@pytest.mark.django_db
def test_the_question_names_number_first_twenty_and_what_is_refused_by_whom(operator: Client, fill: Fill) -> None:
    fill(60)
    with conductor.writing():
        Device.objects.update(state="maintenance")
    bulk = choose(operator, "retire", filters="?type__exact=FPGA")
    with CaptureQueriesContext(connection) as captured:
        asked = operator.get(page(bulk))
    assert len(captured) <= 12
    text = asked.content.decode()
    coming = {one.text: one.number for _, one in asked.context["forecast"]}
    held = coming["is held: it cannot be retired"]
    assert coming == {"becomes retired": 60 - held, "is held: it cannot be retired": held} and 0 < held < 60
    assert len(asked.context["first"]) == 20 and len(asked.context["holders"]) == 20
    assert "Retire: 60 devices?" in text and f"Retire {60 - held} of 60" in text
    assert bulk.selection == "type__exact=FPGA" and "?type__exact=FPGA" in text
    assert not Device.objects.filter(state="retired").exists()


@pytest.mark.django_db(transaction=True)
def test_a_small_set_is_done_at_once_and_never_twice(operator: Client, fill: Fill) -> None:
    fill(10)
    chosen = Device.objects.filter(address="0000:02:00.0")
    bulk = choose(operator, "enable", chosen)
    text = do(operator, bulk, "confirm", reason="burnt in")
    assert (bulk.state, bulk.moved, Device.objects.get(pk=chosen.get().pk).state) == ("done", 1, "ready")
    assert "burnt in" in text and "1 done" in text
    do(operator, bulk, "confirm", reason="once more")
    assert bulk.reason == "burnt in"
    assert Event.objects.filter(action="device.ready", subject=chosen.get().uuid).count() == 1
    told = Event.objects.filter(subject=bulk.uuid).order_by("id").values_list("action", "actor", "reason")
    assert [*told] == [("bulk.confirmed", "olga", "burnt in"), ("bulk.done", "olga", "burnt in")]


@pytest.mark.django_db(transaction=True)
def test_what_changed_after_the_question_is_left_alone_and_said(operator: Client, fill: Fill) -> None:
    fill(10)
    with conductor.writing():
        Device.objects.update(state="inactive")
    bulk = choose(operator, "quarantine")
    other = Device.objects.get(address="0000:02:00.0")
    lifecycle.ask(Action.ENABLE, other.uuid, Caller("vera", "2", frozenset(), ""), "needed")
    gone = Device.objects.get(address="0000:05:00.0")
    lifecycle.ask(Action.QUARANTINE, gone.uuid, OLGA)
    assert "was inactive when it was chosen, is ready now" in operator.get(page(bulk)).content.decode()
    text = do(operator, bulk, "confirm", typed="10")
    other.refresh_from_db()
    assert other.state == "ready"
    assert (bulk.moved, bulk.unchanged, bulk.refused) == (8, 1, 1)
    assert "it is ready now, since" in text and "by vera: needed. Look at it again." in text
    assert "Choose the 1 refused device again" in text
    asked = operator.post(page(bulk), {"do": "again"}, follow=True)
    assert "Quarantine: 1 device?" in asked.content.decode()
    assert [stood for _, _, stood, _, _ in asked.context["first"]] == ["ready"]


@pytest.mark.django_db(transaction=True)
def test_held_devices_take_their_number_typed(operator: Client, fill: Fill) -> None:
    fill(10)
    bulk = choose(operator, "disable", Device.objects.filter(state="ready"))
    assert bulk.total == 1
    do(operator, bulk, "cancel")
    with conductor.writing():
        Device.objects.update(state="ready")
    bulk = choose(operator, "drain")
    assert "Some devices are held" in operator.get(page(bulk)).content.decode()
    for wrong in ("", "9"):
        assert "To confirm, type 10. Nothing was done." in do(operator, bulk, "confirm", typed=wrong)
    assert bulk.state == "draft" and not Device.objects.exclude(state="ready").exists()
    do(operator, bulk, "confirm", typed="10")
    assert (bulk.state, bulk.moved) == ("done", 10)
    assert Device.objects.filter(state="maintenance", drain_to="maintenance").exists()


@pytest.mark.django_db(transaction=True)
def test_what_is_bound_after_the_question_is_left_alone(operator: Client, fill: Fill) -> None:
    fill(10)
    with conductor.writing():
        Device.objects.update(state="ready")
    bulk = choose(operator, "drain")
    bulk_actions.confirm(bulk, "", held_too=False)
    bulk.refresh_from_db()
    assert bulk.refused > 0 and bulk.moved > 0
    assert {item.why for item in bulk.items.filter(outcome="refused")} == {"held"}
    assert not Device.objects.filter(drain_to__isnull=False).exists()


@pytest.mark.django_db(transaction=True)
def test_a_dry_run_asks_everybody_and_changes_nothing(operator: Client, fill: Fill) -> None:
    fill(10)
    with conductor.writing():
        Device.objects.update(state="maintenance")
    events = Event.objects.count()
    bulk = choose(operator, "retire")
    text = do(operator, bulk, "try")
    assert "What the dry run found" in text and "is held by request" in text
    assert (bulk.state, bulk.moved + bulk.refused) == ("draft", 10) and bulk.refused
    assert Event.objects.count() == events and not Device.objects.filter(state="retired").exists()
    do(operator, bulk, "confirm")
    assert Device.objects.filter(state="retired").count() == bulk.moved > 0


@pytest.mark.django_db(transaction=True)
def test_a_large_set_is_a_job_that_survives_being_killed_and_can_be_stopped(
    operator: Client, fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_actions, "SLICE", 10)
    fill(60)
    with conductor.writing():
        Device.objects.update(state="inactive")
    bulk = choose(operator, "quarantine")
    text = do(operator, bulk, "confirm", typed="60")
    assert "0 of 60" in text and "Stop before the next device" in text and reverse_now(bulk) in text
    real = lifecycle.store

    def killed(*said: Any) -> None:
        real(*said)
        raise Killed

    assert bulk_actions.step()
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(lifecycle, "store", killed)
        bulk_actions.step()
    assert Device.objects.filter(state="quarantined").count() == 10
    assert bulk_actions.step()
    bulk.refresh_from_db()
    assert bulk.worked == 20 and "20 of 60" in operator.get(reverse_now(bulk)).content.decode()
    assert "40 not done" in do(operator, bulk, "cancel")
    work()
    assert (bulk.state, Device.objects.filter(state="quarantined").count()) == ("cancelled", 20)
    moves = Event.objects.filter(action="device.quarantined").values_list("subject", flat=True)
    assert len(moves) == len(set(moves)) == 20
    assert 'data-live="/' not in operator.get(page(bulk)).content.decode()


class Killed(BaseException):
    """As kill -9 would end it: nobody catches this."""


def reverse_now(bulk: Bulk) -> str:
    return reverse("admin:accelerators_bulk_now", args=[bulk.pk])


@pytest.mark.django_db(transaction=True)
def test_of_two_operators_at_once_one_wins_and_the_other_is_told(fill: Fill) -> None:
    User.objects.create(username="olga")
    fill(3)
    device = Device.objects.get(address="0000:02:00.0")
    start, said = Barrier(2), list[str]()

    def ask(action: Action) -> None:
        start.wait(10)
        try:
            seen = Seen({device.uuid: "inactive"})
            said.append(lifecycle.ask(action, device.uuid, OLGA, f"to {action}", seen=seen).state)
        except RefusedError as refused:
            said.append(refused.text)
        finally:
            connection.close()

    threads = [Thread(target=ask, args=[action]) for action in (Action.ENABLE, Action.QUARANTINE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    device.refresh_from_db()
    assert device.state in said and len(said) == 2
    (told,) = [text for text in said if text != device.state]
    assert f"was inactive when this was decided; it is {device.state} now" in told and device.state_reason in told
    assert Event.objects.filter(subject=device.uuid, subject_type="device").exclude(action="device.found").count() == 1


@pytest.mark.django_db
def test_who_may_only_look_asks_for_nothing_and_nobody_confirms_anothers_set(operator: Client, fill: Fill) -> None:
    fill(10)
    bulk = choose(operator, "enable")
    vera, rudi = (User.objects.create(username=name, is_staff=True) for name in ("vera", "rudi"))
    vera.user_permissions.set(Permission.objects.filter(codename__startswith="view_"))
    rudi.user_permissions.set(Permission.objects.filter(codename__in=["view_device", "change_device"]))
    for user, sees in ((vera, 200), (rudi, 200)):
        client = Client()
        client.force_login(user)
        assert client.get(page(bulk)).status_code == sees
        assert client.post(page(bulk), {"do": "confirm"}).status_code == 403
        assert 'value="confirm"' not in client.get(page(bulk)).content.decode()
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(User.objects.get(username="olga"))
    assert strict.post(page(bulk), {"do": "confirm"}).status_code == 403
    bulk.refresh_from_db()
    assert bulk.state == "draft"


@pytest.mark.django_db
def test_bounds_and_what_is_kept(operator: Client, fill: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(10)
    monkeypatch.setattr(bulk_actions, "MOST", 9)
    every = Device.objects.all()
    with pytest.raises(RefusedError, match="More than 9 devices are chosen"):
        bulk_actions.choose(Action.ENABLE, Drain.MAINTENANCE, every, OLGA)
    with pytest.raises(RefusedError, match="No device is chosen"):
        bulk_actions.choose(Action.ENABLE, Drain.MAINTENANCE, every.none(), OLGA)
    bulk = bulk_actions.choose(Action.ENABLE, Drain.MAINTENANCE, every.filter(address__lte="0000:02:00.0"), OLGA)
    assert [item.stood for item in bulk.items.all()] == [item.device.stands for item in bulk.items.all()]
    assert "A reason is at most 500" in do(operator, bulk, "confirm", reason="x" * 501, typed="3")
    assert (
        not bulk_actions.forget()
        and bulk_actions.forget(datetime.now(UTC) + timedelta(days=2))
        and not Bulk.objects.exists()
    )
    assert operator.get(reverse("admin:accelerators_bulk_changelist")).status_code == 200
    assert operator.get(reverse("admin:accelerators_bulkitem_changelist")).status_code == 200
    assert re.search(
        "No bulk actions yet", operator.get(reverse("admin:accelerators_bulk_changelist")).content.decode()
    )


def heard(number: int, acts: str = "health reset") -> list[Device]:
    """Cards of a host whose agent takes commands."""
    host = Host.objects.order_by("id").first()
    assert host is not None
    apply(host, answer(*(card(n, acts=acts) for n in range(number)), driver="pci_driver"), seq=2)
    return list(Device.objects.filter(host=host).order_by("id"))


@pytest.mark.django_db(transaction=True)
def test_agents_are_asked_about_many_and_what_is_held_is_never_reset(operator: Client, fill: Fill) -> None:
    fill(10)
    devices = heard(10)
    held = {d.pk for d in devices if d.deployables.filter(attach_handles__request__isnull=False).exists()}
    assert 0 < len(held) < 10
    busy = next(device for device in devices if device.pk not in held)
    placing.ask("reset", busy.uuid, OLGA)
    bulk = choose(operator, "reset", Device.objects.filter(pk__in=[device.pk for device in devices]))
    asked = operator.get(page(bulk))
    coming = {one.text: one.number for _, one in asked.context["forecast"]}
    going = 10 - len(held) - 1
    assert coming == {
        "the command is sent to its agent": going,
        "is held: it cannot be reset": len(held),
        "is busy with a command": 1,
    }
    text = do(operator, bulk, "try")
    assert "What the dry run found" in text and Command.objects.count() == 1
    text = do(operator, bulk, "confirm", typed="10", reason="after the storm")
    assert (bulk.state, bulk.moved, bulk.refused) == ("done", going, 10 - going)
    assert "is held by request" in text and "is busy with reset" in text and f"{going} ordered" in text
    assert text.count(">command ") == going
    placed = Command.objects.filter(request_id=bulk.request_id, op="reset")
    assert {one.device_id for one in placed}.isdisjoint(held) and len(placed) == going
    assert {(one.actor, one.reason, one.exclusive) for one in placed} == {("olga", "after the storm", True)}
    listed = operator.get(re.findall(r'href="([^"]*together=[^"]*)"', text)[0].replace("&amp;", "&"))
    assert listed.context["cl"].result_count == going
    assert "ordered with request" in {chip["name"] for chip in listed.context["cl"].chips()}


@pytest.mark.django_db(transaction=True)
def test_health_is_asked_of_held_devices_too_and_each_refusal_has_its_reason(operator: Client, fill: Fill) -> None:
    fill(20)
    devices = heard(10)
    missing = devices[3]
    with conductor.writing():
        Device.objects.filter(pk=missing.pk).update(state="missing", returns_to="ready")
    bulk = choose(operator, "health")
    assert "Some devices are held" not in operator.get(page(bulk)).content.decode()
    do(operator, bulk, "confirm")
    assert (bulk.state, bulk.moved, bulk.refused) == ("done", 9, 11)
    why = dict(bulk.items.filter(outcome="refused").values_list("device_uuid", "text"))
    assert "is missing: health is possible when" in why[missing.uuid]
    other = Device.objects.exclude(host=missing.host).first()
    assert other and "cannot health it" in why[other.uuid]
    assert Command.objects.filter(op="health").count() == 9
    again = operator.post(page(bulk), {"do": "again"}, follow=True)
    assert "Check health: 11 devices?" in again.content.decode()
