"""Test bulk actions on devices: the frozen set, the question, the dry run, the job, and cancellation."""

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
from accelerators.commands import command_queue
from accelerators.devices import lifecycle
from accelerators.devices.lifecycle import SeenStates
from accelerators.domain.caller import Caller
from accelerators.domain.device_actions import Action
from accelerators.domain.errors import RefusedError
from accelerators.domain.states import DrainTarget
from accelerators.models import Bulk, Command, Device, Event, Host
from accelerators.workflows import bulk_actions
from tests.cyborgweb.console.conftest import Fill
from tests.support.reports import apply_report, make_card, make_driver_report

pytestmark = pytest.mark.usefixtures("agents_need_not_be_up")
LIST = "admin:accelerators_device_changelist"
OLGA = Caller("olga", "1", frozenset(), "")


def choose_devices(client: Client, action: str, devices: QuerySet[Device] | None = None, filters: str = "") -> Bulk:
    """Choose devices in the list and start an action on them: these devices, else all that match the filters."""
    keys = [str(pk) for pk in (Device.objects.all() if devices is None else devices).values_list("pk", flat=True)]
    sent = {"action": action, "_selected_action": keys if devices is not None else keys[:1]}
    answered = client.post(reverse(LIST) + filters, sent | {"select_across": "1" if devices is None else "0"})
    bulk = Bulk.objects.latest("id")
    assert answered["location"] == bulk_page(bulk)
    return bulk


def bulk_page(bulk: Bulk) -> str:
    return reverse("admin:accelerators_bulk_change", args=[bulk.uuid])


def press_button(client: Client, bulk: Bulk, verb: str, **fields: Any) -> str:
    """Press a button of the bulk action's page, and return the page after that."""
    answered = client.post(bulk_page(bulk), {"do": verb, **fields}, follow=True)
    bulk.refresh_from_db()
    return str(answered.content.decode())


def run_job(max_steps: int = 1000) -> None:
    """Run the job until it has nothing left to do; fail after `max_steps` steps."""
    assert any(not bulk_actions.process_next_slice() for _ in range(max_steps)), "there is always more"


@pytest.mark.django_db
def test_the_forecast_of_a_drain_says_what_happens_when_the_last_request_ends(operator: Client, fill: Fill) -> None:
    fill(60)
    ready = Device.objects.filter(state="ready", drain_to=None)
    held = ready.filter(deployables__attach_handles__request__isnull=False).first()
    free = ready.exclude(deployables__attach_handles__request__isnull=False).first()
    assert held and free

    def forecast(device: Device, then: DrainTarget) -> str:
        return bulk_actions.forecast_device(Action.DRAIN, then, device).text

    assert forecast(held, DrainTarget.MAINTENANCE) == "becomes maintenance, and drains until its last request ends"
    retired = "becomes maintenance, drains, and becomes retired when its last request ends"
    assert forecast(held, DrainTarget.RETIRED) == retired
    assert forecast(free, DrainTarget.MAINTENANCE) == "becomes maintenance"
    assert forecast(free, DrainTarget.RETIRED) == "becomes retired"


@pytest.mark.django_db
def test_the_question_shows_the_number_the_first_twenty_devices_and_their_holders(operator: Client, fill: Fill) -> None:
    fill(60)
    with conductor.writing():
        Device.objects.update(state="maintenance")
    bulk = choose_devices(operator, "retire", filters="?type__exact=FPGA")
    with CaptureQueriesContext(connection) as captured:
        asked = operator.get(bulk_page(bulk))
    assert len(captured) <= 12
    text = asked.content.decode()
    forecast = {one.text: one.number for _, one in asked.context["forecast"]}
    held = forecast["is held: it cannot be retired"]
    assert forecast == {"becomes retired": 60 - held, "is held: it cannot be retired": held} and 0 < held < 60
    assert len(asked.context["first"]) == 20 and len(asked.context["holders"]) == 20
    assert "Retire: 60 devices?" in text and f"Retire {60 - held} of 60" in text
    assert bulk.selection == "type__exact=FPGA" and "?type__exact=FPGA" in text
    assert not Device.objects.filter(state="retired").exists()


@pytest.mark.django_db(transaction=True)
def test_a_small_bulk_action_is_done_at_once_and_only_once(operator: Client, fill: Fill) -> None:
    fill(10)
    chosen = Device.objects.filter(address="0000:02:00.0")
    bulk = choose_devices(operator, "enable", chosen)
    text = press_button(operator, bulk, "confirm", reason="burnt in")
    assert (bulk.state, bulk.moved, Device.objects.get(pk=chosen.get().pk).state) == ("done", 1, "ready")
    assert "burnt in" in text and "1 done" in text
    press_button(operator, bulk, "confirm", reason="once more")
    assert bulk.reason == "burnt in"
    assert Event.objects.filter(action="device.ready", subject=chosen.get().uuid).count() == 1
    bulk_events = Event.objects.filter(subject=bulk.uuid).order_by("id").values_list("action", "actor", "reason")
    assert [*bulk_events] == [("bulk.confirmed", "olga", "burnt in"), ("bulk.done", "olga", "burnt in")]


@pytest.mark.django_db(transaction=True)
@pytest.mark.slow
def test_devices_that_changed_after_the_question_are_refused_with_the_reason(operator: Client, fill: Fill) -> None:
    fill(10)
    with conductor.writing():
        Device.objects.update(state="inactive")
    bulk = choose_devices(operator, "quarantine")
    other = Device.objects.get(address="0000:02:00.0")
    lifecycle.apply_action_to_device(Action.ENABLE, other.uuid, Caller("vera", "2", frozenset(), ""), "needed")
    gone = Device.objects.get(address="0000:05:00.0")
    lifecycle.apply_action_to_device(Action.QUARANTINE, gone.uuid, OLGA)
    assert "was inactive when it was chosen, is ready now" in operator.get(bulk_page(bulk)).content.decode()
    text = press_button(operator, bulk, "confirm", typed="10")
    other.refresh_from_db()
    assert other.state == "ready"
    assert (bulk.moved, bulk.unchanged, bulk.refused) == (8, 1, 1)
    assert "it is ready now, since" in text and "by vera: needed. Look at it again." in text
    assert "Retry the 1 failed device" in text
    asked = operator.post(bulk_page(bulk), {"do": "again"}, follow=True)
    assert "Quarantine: 1 device?" in asked.content.decode()
    assert [stood for _, _, stood, _, _ in asked.context["first"]] == ["ready"]


@pytest.mark.django_db(transaction=True)
@pytest.mark.slow
def test_a_bulk_action_on_held_devices_needs_their_number_typed(operator: Client, fill: Fill) -> None:
    fill(10)
    bulk = choose_devices(operator, "disable", Device.objects.filter(state="ready"))
    assert bulk.total == 1
    press_button(operator, bulk, "cancel")
    with conductor.writing():
        Device.objects.update(state="ready")
    bulk = choose_devices(operator, "drain")
    assert "Some devices are held" in operator.get(bulk_page(bulk)).content.decode()
    for wrong in ("", "9"):
        assert "To confirm, type 10. Nothing was done." in press_button(operator, bulk, "confirm", typed=wrong)
    assert bulk.state == "draft" and not Device.objects.exclude(state="ready").exists()
    press_button(operator, bulk, "confirm", typed="10")
    assert (bulk.state, bulk.moved) == ("done", 10)
    assert Device.objects.filter(state="maintenance", drain_to="maintenance").exists()


@pytest.mark.django_db(transaction=True)
def test_devices_bound_after_the_question_are_refused(operator: Client, fill: Fill) -> None:
    fill(10)
    with conductor.writing():
        Device.objects.update(state="ready")
    bulk = choose_devices(operator, "drain")
    bulk_actions.confirm_draft(bulk, "", held_too=False)
    bulk.refresh_from_db()
    assert bulk.refused > 0 and bulk.moved > 0
    assert {item.why for item in bulk.items.filter(outcome="refused")} == {"in_use"}
    assert not Device.objects.filter(drain_to__isnull=False).exists()


@pytest.mark.django_db(transaction=True)
@pytest.mark.slow
def test_a_dry_run_checks_every_device_and_changes_nothing(operator: Client, fill: Fill) -> None:
    fill(10)
    with conductor.writing():
        Device.objects.update(state="maintenance")
    events = Event.objects.count()
    bulk = choose_devices(operator, "retire")
    text = press_button(operator, bulk, "try")
    assert "What the dry run found" in text and "is held by request" in text
    assert (bulk.state, bulk.moved + bulk.refused) == ("draft", 10) and bulk.refused
    assert Event.objects.count() == events and not Device.objects.filter(state="retired").exists()
    press_button(operator, bulk, "confirm")
    assert Device.objects.filter(state="retired").count() == bulk.moved > 0


@pytest.mark.django_db(transaction=True)
@pytest.mark.slow
def test_a_large_bulk_action_continues_after_being_killed_and_can_be_stopped(
    operator: Client, fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_actions, "BULK_SLICE_SIZE", 10)
    fill(60)
    with conductor.writing():
        Device.objects.update(state="inactive")
    bulk = choose_devices(operator, "quarantine")
    text = press_button(operator, bulk, "confirm", typed="60")
    assert "0 of 60" in text and "Stop before the next device" in text and live_fragment_url(bulk) in text
    real = lifecycle.store_state_changes

    def killed(*said: Any) -> None:
        real(*said)
        raise KilledError

    assert bulk_actions.process_next_slice()
    with monkeypatch.context() as patched, pytest.raises(KilledError):
        patched.setattr(lifecycle, "store_state_changes", killed)
        bulk_actions.process_next_slice()
    assert Device.objects.filter(state="quarantined").count() == 10
    assert bulk_actions.process_next_slice()
    bulk.refresh_from_db()
    assert bulk.finished_count == 20 and "20 of 60" in operator.get(live_fragment_url(bulk)).content.decode()
    assert "40 not done" in press_button(operator, bulk, "cancel")
    run_job()
    assert (bulk.state, Device.objects.filter(state="quarantined").count()) == ("cancelled", 20)
    moves = Event.objects.filter(action="device.quarantined").values_list("subject", flat=True)
    assert len(moves) == len(set(moves)) == 20
    assert 'data-live="/' not in operator.get(bulk_page(bulk)).content.decode()


class KilledError(BaseException):
    """Simulates kill -9: no handler catches it."""


def live_fragment_url(bulk: Bulk) -> str:
    return reverse("admin:accelerators_bulk_now", args=[bulk.pk])


@pytest.mark.django_db(transaction=True)
def test_of_two_concurrent_actions_on_a_device_one_wins_and_the_other_is_refused(fill: Fill) -> None:
    User.objects.create(username="olga")
    fill(3)
    device = Device.objects.get(address="0000:02:00.0")
    start, outcomes = Barrier(2), list[str]()

    def ask(action: Action) -> None:
        start.wait(10)
        try:
            seen = SeenStates({device.uuid: "inactive"}, held_too=False)
            outcomes.append(
                lifecycle.apply_action_to_device(action, device.uuid, OLGA, f"to {action}", seen=seen).state
            )
        except RefusedError as refused:
            outcomes.append(refused.text)
        finally:
            connection.close()

    threads = [Thread(target=ask, args=[action]) for action in (Action.ENABLE, Action.QUARANTINE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    device.refresh_from_db()
    assert device.state in outcomes and len(outcomes) == 2
    (refusal,) = [text for text in outcomes if text != device.state]
    assert f"was inactive when this was decided; it is {device.state} now" in refusal and device.state_reason in refusal
    assert Event.objects.filter(subject=device.uuid, subject_type="device").exclude(action="device.found").count() == 1


@pytest.mark.django_db
@pytest.mark.slow
def test_only_the_operator_who_chose_a_set_and_may_change_devices_can_confirm_it(operator: Client, fill: Fill) -> None:
    fill(10)
    bulk = choose_devices(operator, "enable")
    vera, rudi, nina = (User.objects.create(username=name, is_staff=True) for name in ("vera", "rudi", "nina"))
    vera.user_permissions.set(Permission.objects.filter(codename__startswith="view_"))
    rudi.user_permissions.set(Permission.objects.filter(codename__in=["view_device", "change_device"]))
    nina.user_permissions.set(Permission.objects.filter(codename="view_device"))
    for user, status in ((vera, 200), (rudi, 200), (nina, 403)):
        client = Client()
        client.force_login(user)
        assert client.get(bulk_page(bulk)).status_code == status
        assert client.post(bulk_page(bulk), {"do": "confirm"}).status_code == 403
        assert 'value="confirm"' not in client.get(bulk_page(bulk)).content.decode()
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(User.objects.get(username="olga"))
    assert strict.post(bulk_page(bulk), {"do": "confirm"}).status_code == 403
    bulk.refresh_from_db()
    assert bulk.state == "draft"


@pytest.mark.django_db
@pytest.mark.slow
def test_too_large_or_empty_sets_are_refused_and_old_bulk_actions_are_deleted(
    operator: Client, fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(10)
    monkeypatch.setattr(bulk_actions, "MAX_BULK_OBJECTS", 9)
    every = Device.objects.all()
    with pytest.raises(RefusedError, match="More than 9 devices are chosen"):
        bulk_actions.create_draft(Action.ENABLE, DrainTarget.MAINTENANCE, every, OLGA)
    with pytest.raises(RefusedError, match="No device is chosen"):
        bulk_actions.create_draft(Action.ENABLE, DrainTarget.MAINTENANCE, every.none(), OLGA)
    bulk = bulk_actions.create_draft(
        Action.ENABLE,
        DrainTarget.MAINTENANCE,
        every.filter(address__lte="0000:02:00.0"),
        Caller("olga", str(User.objects.get(username="olga").pk), frozenset(), ""),
    )
    stranger = Caller("olga", "a user of Keystone with the same name", frozenset(), "")
    assert not bulk_actions.may_confirm(bulk, stranger)
    few = every.filter(address__lte="0000:02:00.0")
    of_stranger = bulk_actions.create_draft(Action.ENABLE, DrainTarget.MAINTENANCE, few, stranger)
    later = [bulk_actions.create_draft(Action.ENABLE, DrainTarget.MAINTENANCE, few, stranger) for _ in range(5)]
    assert set(Bulk.objects.all()) == {bulk, *later}, "a caller has at most five drafts; the oldest goes first"
    assert not of_stranger.items.exists()
    with conductor.writing():
        Bulk.objects.filter(pk__in=[draft.pk for draft in later]).delete()
        conductor.record_purge("bulk", len(later), timedelta(days=1))
    assert [item.stood for item in bulk.items.all()] == [item.device.lifecycle_text for item in bulk.items.all()]
    assert "A reason is at most 500" in press_button(operator, bulk, "confirm", reason="x" * 501, typed="3")
    assert (
        not bulk_actions.delete_oldest_expired_bulk()
        and bulk_actions.delete_oldest_expired_bulk(datetime.now(UTC) + timedelta(days=2))
        and not Bulk.objects.exists()
    )
    assert list(Event.objects.filter(action="bulk.forgotten").order_by("id").values_list("reason", flat=True)) == [
        "olga has made 5 newer drafts",
        "they ended more than 1 day ago",
        "they were created as drafts more than 1 day ago",
    ]
    assert operator.get(reverse("admin:accelerators_bulk_changelist")).status_code == 200
    assert operator.get(reverse("admin:accelerators_bulkitem_changelist")).status_code == 200
    assert re.search(
        "No bulk actions yet", operator.get(reverse("admin:accelerators_bulk_changelist")).content.decode()
    )


def report_cards(number: int, acts: str = "health reset") -> list[Device]:
    """Report cards of a host whose agent accepts commands, and return its devices."""
    host = Host.objects.order_by("id").first()
    assert host is not None
    apply_report(
        host, make_driver_report(*(make_card(n, acts=acts) for n in range(number)), driver="pci_driver"), seq=2
    )
    return list(Device.objects.filter(host=host).order_by("id"))


@pytest.mark.django_db(transaction=True)
@pytest.mark.slow
def test_a_bulk_reset_orders_commands_for_free_devices_and_refuses_held_ones(operator: Client, fill: Fill) -> None:
    fill(10)
    devices = report_cards(10)
    held = {d.pk for d in devices if d.deployables.filter(attach_handles__request__isnull=False).exists()}
    assert 0 < len(held) < 10
    busy = next(device for device in devices if device.pk not in held)
    command_queue.order_device_command("reset", busy.uuid, OLGA)
    bulk = choose_devices(operator, "reset", Device.objects.filter(pk__in=[device.pk for device in devices]))
    asked = operator.get(bulk_page(bulk))
    forecast = {one.text: one.number for _, one in asked.context["forecast"]}
    orderable = 10 - len(held) - 1
    assert forecast == {
        "the command is sent to its agent": orderable,
        "is held: it cannot be reset": len(held),
        "is busy with a command": 1,
    }
    text = press_button(operator, bulk, "try")
    assert "What the dry run found" in text and Command.objects.count() == 1
    text = press_button(operator, bulk, "confirm", typed="10", reason="after the storm")
    assert (bulk.state, bulk.moved, bulk.refused) == ("done", orderable, 10 - orderable)
    assert "is held by request" in text and "is busy with reset" in text and f"{orderable} ordered" in text
    assert text.count(">command ") == orderable
    placed = Command.objects.filter(request_id=bulk.request_id, op="reset")
    assert {one.device_id for one in placed}.isdisjoint(held) and len(placed) == orderable
    assert {(one.actor, one.reason, one.exclusive) for one in placed} == {("olga", "after the storm", True)}
    listed = operator.get(re.findall(r'href="([^"]*together=[^"]*)"', text)[0].replace("&amp;", "&"))
    assert listed.context["cl"].result_count == orderable
    assert "ordered with request" in {chip["name"] for chip in listed.context["cl"].applied_filters()}


@pytest.mark.django_db
@pytest.mark.parametrize("scope", ["host", "bus"])
@pytest.mark.slow
def test_a_bulk_reset_lists_the_devices_outside_of_it_that_it_affects_before_it_is_confirmed(
    operator: Client, fill: Fill, scope: str
) -> None:
    fill(2)
    first, *others = report_cards(3)
    bulk = choose_devices(operator, "reset", Device.objects.filter(pk=first.pk))
    assert b"Also affected" not in operator.get(bulk_page(bulk)).content
    with conductor.writing():
        host = Host.objects.get(pk=first.host_id)
        host.drivers[first.driver]["declares"] = {"affects": {"reset": scope}}
        host.save(update_fields=["drivers"])
    page = operator.get(bulk_page(bulk))
    listed = {str(device) for device, _, _ in page.context["affected"]}
    affected = others if scope == "host" else []  # each card is on a bus of its own
    assert page.context["affected_number"] == len(affected) == len(listed)
    assert all(any(str(device.pk) in link or str(device) in link for link in listed) for device in affected)
    assert (b"Also affected" in page.content) is bool(affected)
    checked = choose_devices(operator, "health", Device.objects.filter(pk=first.pk))
    assert b"Also affected" not in operator.get(bulk_page(checked)).content


@pytest.mark.django_db(transaction=True)
@pytest.mark.slow
def test_a_bulk_health_check_includes_held_devices_and_each_refusal_has_a_reason(operator: Client, fill: Fill) -> None:
    fill(20)
    devices = report_cards(10)
    missing = devices[3]
    with conductor.writing():
        Device.objects.filter(pk=missing.pk).update(state="missing", returns_to="ready")
    bulk = choose_devices(operator, "health")
    assert "Some devices are held" not in operator.get(bulk_page(bulk)).content.decode()
    assert "The devices are on 2 hosts. To confirm, type 20. Nothing was done." in press_button(
        operator, bulk, "confirm"
    )
    press_button(operator, bulk, "confirm", typed="20")
    assert (bulk.state, bulk.moved, bulk.refused) == ("done", 9, 11)
    why = dict(bulk.items.filter(outcome="refused").values_list("target_uuid", "text"))
    assert "is missing: health is possible when" in why[missing.uuid]
    other = Device.objects.exclude(host=missing.host).first()
    assert other and "cannot health it" in why[other.uuid]
    assert Command.objects.filter(op="health").count() == 9
    again = operator.post(bulk_page(bulk), {"do": "again"}, follow=True)
    assert "Check health: 11 devices?" in again.content.decode()
