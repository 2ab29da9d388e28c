"""Test that every event becomes exactly one delivery for each matching subscription, even if a transaction commits late
or the process is killed."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from accelerators import conductor
from accelerators.devices import lifecycle
from accelerators.domain.caller import Caller
from accelerators.domain.states import EventSource
from accelerators.models import AcceleratorRequest, Device, DeviceProfile, Event
from accelerators.requests import binding
from accelerators.requests.binding import BindSpec
from cyborgweb.models.notify import Delivery, Reader, Subscription
from cyborgweb.notify import fanout
from tests.cyborgweb.notify.conftest import OLGA, PAST_TIME, Subscribe
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = pytest.mark.django_db(transaction=True)
NOVA = Caller("nova", "n", frozenset({"member"}), "p1", service=True)
OTHER_PROJECT_NOVA = Caller("nova", "n", frozenset({"member"}), "p2", service=True)


@pytest.fixture(autouse=True)
def _reader() -> None:
    """Let the fan-out begin with the events of the test; earlier events are skipped."""
    Reader.objects.all().delete()
    fanout.run()


def create_bound_request(device: Device, caller: Caller, label: str = "") -> str:
    """Create a request of `caller`, bind it to this device, and return its uuid."""
    DeviceProfile.objects.filter(name="one").exists() or _create_profile()
    (request,) = binding.create_requests("one", caller)
    provider = str(device.deployables.get().rp_uuid)
    binding.bind_requests([BindSpec(request, device.host.name, provider, str(uuid.uuid4()))], caller)
    with conductor.writing():
        AcceleratorRequest.objects.filter(uuid=request).update(label=label)
    return request


def _create_profile() -> None:
    with conductor.writing():
        DeviceProfile.objects.create(name="one", groups=[{"resources:FPGA": "1"}])


def create_ready_device(host: str = "cmp1", handles: int = 2) -> Device:
    """Report a device, make it ready, and return it."""
    apply_report(get_or_create_host(host), make_driver_report(make_card(0, handles=handles)))
    device = Device.objects.select_related("host").get(host__name=host)
    lifecycle.enable_device(device.uuid, OLGA)
    return Device.objects.select_related("host").get(pk=device.pk)


def list_kinds(subscription: Subscription) -> list[str]:
    """Return the kinds of the subscription's messages, in the order of their events."""
    return list(Delivery.objects.filter(subscription=subscription).order_by("event").values_list("kind", flat=True))


def test_an_unconfirmed_address_gets_no_messages(subscribe: Subscribe) -> None:
    waiting = subscribe("email", target="a@example.org")
    confirmed = subscribe("email", target="b@example.org")
    Subscription.objects.filter(pk=waiting.pk).update(confirmed_at=None)
    create_ready_device()
    fanout.run()
    assert list_kinds(confirmed) == ["device.ready"] and list_kinds(waiting) == []


def test_of_what_the_former_release_inserts_during_the_upgrade_only_mail_waits_for_confirmation(
    subscribe: Subscribe,
) -> None:
    known = {"id", "uuid", "confirmed_at"}
    columns = ", ".join(field.column for field in Subscription._meta.fields if field.column not in known)
    subscribe("email", target="a@example.org")
    subscribe("webhook", target="https://example.org/")
    subscribe()
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO cyborgweb_subscription (uuid, {columns})"
            f" SELECT gen_random_uuid(), {columns} FROM cyborgweb_subscription ORDER BY id"
        )
    mails, hook, inbox = Subscription.objects.order_by("id")[3:]
    create_ready_device()
    fanout.run()
    assert mails.is_unconfirmed
    assert (list_kinds(mails), list_kinds(hook), list_kinds(inbox)) == ([], ["device.ready"], ["device.ready"])


def test_events_are_delivered_to_matching_subscriptions_only(subscribe: Subscribe) -> None:
    cloud = subscribe(name="all")
    here = subscribe(name="here", host="cmp?")
    elsewhere = subscribe(name="elsewhere", host="gpu*")
    gpus = subscribe(name="gpus", type="GPU")
    ours = subscribe(name="ours", scope="project", caller=NOVA)
    theirs = subscribe(name="theirs", scope="project", caller=OTHER_PROJECT_NOVA)
    labelled = subscribe(name="labelled", label="training")
    device = create_ready_device()
    request = create_bound_request(device, NOVA, "training")
    apply_report(
        get_or_create_host(),
        make_driver_report(make_card(0, handles=2, status="failed", status_reason="it is hot at /sys/inner")),
        seq=2,
    )
    apply_report(get_or_create_host(), make_driver_report(), seq=3)
    binding.delete_requests([request], NOVA)
    fanout.run()
    everything = ["device.ready", "request.bound", "device.health", "device.missing", "request.unbound"]
    assert list_kinds(cloud) == list_kinds(here) == everything
    assert list_kinds(elsewhere) == list_kinds(gpus) == list_kinds(theirs) == []
    assert list_kinds(ours) == ["request.bound", "request.unbound"], "by then nobody held the device"
    assert list_kinds(labelled) == []
    assert {row["project"] for row in Delivery.objects.filter(subscription=ours).values_list("data", flat=True)} == {
        "p1"
    }


def test_x4_a_project_gets_events_of_devices_it_holds_without_their_reasons_and_hosts(subscribe: Subscribe) -> None:
    ours, theirs = (subscribe(name="x", scope="project", caller=who) for who in (NOVA, OTHER_PROJECT_NOVA))
    cloud, labelled = subscribe(name="all", kinds=["device.health"]), subscribe(name="l", label="training")
    device = create_ready_device()
    request = create_bound_request(device, NOVA, "training")
    apply_report(
        get_or_create_host(),
        make_driver_report(make_card(0, handles=2, status="failed", status_reason="hot at /sys/inner")),
        seq=2,
    )
    fanout.run()
    assert list_kinds(ours) == ["request.bound", "device.health"]
    assert list_kinds(labelled) == ["request.bound", "device.health"]
    assert list_kinds(theirs) == []
    health = Delivery.objects.get(subscription=ours, kind="device.health").data
    assert health == {
        "device": str(device.uuid),
        "type": "FPGA",
        "vendor": "1af4",
        "model": "1044",
        "subsystem": "",
        "state": "ready",
        "health": "failed",
        "requests": [request],
    }
    seen = Delivery.objects.get(subscription=cloud).data
    assert (seen["host"], seen["reason"]) == ("cmp1", "hot at /sys/inner")


def test_a_failed_request_is_delivered_with_its_reason(subscribe: Subscribe) -> None:
    ours = subscribe(scope="project", caller=NOVA)
    device = create_ready_device(handles=1)
    create_bound_request(device, NOVA)
    with pytest.raises(Exception, match="all are held"):
        create_bound_request(device, NOVA)
    fanout.run()
    assert list_kinds(ours) == ["request.bound", "request.failed"]
    data = Delivery.objects.get(kind="request.failed").data
    assert data["reason"] and data["state"] == "BindFailed" and data["host"] == "cmp1"


def test_an_event_committed_late_is_delivered_exactly_once(subscribe: Subscribe) -> None:
    mine = subscribe()
    late, early = uuid.uuid4(), uuid.uuid4()
    with psycopg.connect(**_get_connection_parameters()) as slow:
        slow.execute(INSERT_EVENT_SQL, [late])
        _record_event(early)
        fanout.run()
        assert list_kinds(mine) == [], "what began before it is still under way"
        slow.commit()
    fanout.run()
    numbers = dict(Event.objects.filter(subject__in=[late, early]).values_list("subject", "id"))
    assert numbers[late] < numbers[early]
    assert Counter(Delivery.objects.values_list("event", flat=True)) == Counter(numbers.values())
    fanout.run()
    assert Delivery.objects.count() == 2


INSERT_EVENT_SQL = """
INSERT INTO accelerators_event (source, actor, request_id, action, subject_type, subject, subject_name, host, changes,
  reason) VALUES ('system', 'a', '', 'request.bound', 'request', %s, '', '', '{"project_id": [null, "p1"]}', '')
"""


def _get_connection_parameters() -> dict[str, Any]:
    known = connection.get_connection_params()
    return {name: known[name] for name in ("dbname", "user", "host", "port") if known.get(name)}


def _record_event(subject: uuid.UUID) -> None:
    changes = {"project_id": [None, "p1"]}
    conductor.record_event("request.bound", EventSource.SYSTEM, "a", subject=(subject, ""), changes=changes)


class KilledError(BaseException):
    """Simulates kill -9: no handler of Exception catches it, and it rolls the open transaction back."""


def kill_after_statement(number: int) -> Callable[..., Any]:
    """Return a wrapper for `execute_wrapper` that raises KilledError after this number of statements."""
    count = 0

    def execute(run: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal count
        count += 1
        if count > number:
            raise KilledError
        done = run(sql, params, many, context)
        if count == number:
            raise KilledError
        return done

    return execute


def test_every_event_is_delivered_once_even_if_the_fan_out_is_killed_at_any_statement(
    subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fanout, "MAX_EVENTS", 2)
    mine, others = subscribe(), subscribe(name="ours", scope="project", caller=NOVA)
    number, reached, events = 0, True, 0
    while reached:
        number += 1
        for _ in range(3):
            _record_event(uuid.uuid4())
            events += 1
        try:
            with connection.execute_wrapper(kill_after_statement(number)):
                fanout.run()
            reached = False
        except KilledError:
            pass
        fanout.run()
        for subscription in (mine, others):
            rows = Counter(Delivery.objects.filter(subscription=subscription).values_list("event", flat=True))
            assert len(rows) == events and set(rows.values()) == {1}, f"killed at statement {number}"
    assert number > 6


def test_after_a_restore_with_lower_transaction_numbers_every_event_is_delivered_once(subscribe: Subscribe) -> None:
    mine = subscribe()
    _record_event(uuid.uuid4())
    fanout.run()
    Reader.objects.update(transaction=2**40)
    _record_event(uuid.uuid4())
    fanout.run()
    assert len(list_kinds(mine)) == 2


def test_inactive_users_switched_off_and_later_subscriptions_get_no_deliveries(
    subscribe: Subscribe, django_user_model: Any
) -> None:
    user = django_user_model.objects.create(username="olga")
    mine = subscribe(caller=Caller("olga", str(user.pk), frozenset(), "p1"))
    off = subscribe(standing="off")
    new = subscribe(name="new")
    Subscription.objects.filter(pk=new.pk).update(created_at="2100-01-01T00:00:00Z")
    user.is_active = False
    user.save()
    _record_event(uuid.uuid4())
    fanout.run()
    assert [list_kinds(one) for one in (mine, off, new)] == [[], [], []]
    user.delete()
    mine.refresh_from_db()
    assert (mine.standing, mine.user) == ("ended", None)


@pytest.mark.exhaustive
def test_fan_out_to_a_hundred_subscriptions_takes_a_constant_number_of_statements_a_batch(subscribe: Subscribe) -> None:
    first = subscribe(kinds=["request.failed"])
    Subscription.objects.bulk_create(
        Subscription(
            name=f"s{n}",
            project_id=f"p{n}",
            kinds=["request.bound"],
            scope="project",
            way="webhook",
            target="https://example.org/",
        )
        for n in range(99)
    )
    Subscription.objects.update(created_at=PAST_TIME)
    with connection.cursor() as cursor, conductor.writing():
        cursor.execute(INSERT_MANY_EVENTS_SQL)
    with CaptureQueriesContext(connection) as captured:
        fanout.run()
    spread = [one for one in captured if "cyborgweb_delivery" in one["sql"]]
    assert len(spread) == 10 + 1
    assert len(captured) < 11 * 8
    assert not list_kinds(first)
    assert Delivery.objects.count() == 9900
    assert set(Counter(Delivery.objects.values_list("subscription", flat=True)).values()) == {100}


INSERT_MANY_EVENTS_SQL = """
INSERT INTO accelerators_event (source, actor, request_id, action, subject_type, subject, subject_name, host, changes,
  reason) SELECT 'system', 'a', '', 'request.bound', 'request', gen_random_uuid(), '', '',
  jsonb_build_object('project_id', jsonb_build_array(NULL, 'p' || n % 100)), '' FROM generate_series(1, 10000) n
"""
