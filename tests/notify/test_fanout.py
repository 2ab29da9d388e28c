"""Every event becomes one delivery for each subscription that fits: whatever is committed late, whoever is killed."""

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
from tests.notify.conftest import LONG_AGO, OLGA, Subscribe
from tests.support.reports import a_host, answer, apply, card

pytestmark = pytest.mark.django_db(transaction=True)
NOVA = Caller("nova", "n", frozenset({"member"}), "p1", service=True)
ELSE = Caller("nova", "n", frozenset({"member"}), "p2", service=True)


@pytest.fixture(autouse=True)
def _reader() -> None:
    """What was before is not told."""
    Reader.objects.all().delete()
    fanout.run()


def bound(device: Device, who: Caller, label: str = "") -> str:
    """A request of `who` on this device; its uuid."""
    DeviceProfile.objects.filter(name="one").exists() or _profile()
    (request,) = binding.create_requests("one", who)
    provider = str(device.deployables.get().rp_uuid)
    binding.bind_requests([BindSpec(request, device.host.name, provider, str(uuid.uuid4()))], who)
    with conductor.writing():
        AcceleratorRequest.objects.filter(uuid=request).update(label=label)
    return request


def _profile() -> None:
    with conductor.writing():
        DeviceProfile.objects.create(name="one", groups=[{"resources:FPGA": "1"}])


def ready(host: str = "cmp1", handles: int = 2) -> Device:
    """A device that is offered."""
    apply(a_host(host), answer(card(0, handles=handles)))
    device = Device.objects.select_related("host").get(host__name=host)
    lifecycle.enable_device(device.uuid, OLGA)
    return Device.objects.select_related("host").get(pk=device.pk)


def told(subscription: Subscription) -> list[str]:
    """The kinds of its messages, in order."""
    return list(Delivery.objects.filter(subscription=subscription).order_by("event").values_list("kind", flat=True))


def test_what_happens_is_told_to_whom_it_concerns_and_nobody_else(subscribe: Subscribe) -> None:
    cloud = subscribe(name="all")
    here = subscribe(name="here", host="cmp?")
    elsewhere = subscribe(name="elsewhere", host="gpu*")
    gpus = subscribe(name="gpus", type="GPU")
    ours = subscribe(name="ours", scope="project", caller=NOVA)
    theirs = subscribe(name="theirs", scope="project", caller=ELSE)
    labelled = subscribe(name="labelled", label="training")
    device = ready()
    request = bound(device, NOVA, "training")
    apply(a_host(), answer(card(0, handles=2, status="failed", status_reason="it is hot at /sys/inner")), seq=2)
    apply(a_host(), answer(), seq=3)
    binding.delete_requests([request], NOVA)
    fanout.run()
    everything = ["device.ready", "request.bound", "device.health", "device.missing", "request.unbound"]
    assert told(cloud) == told(here) == everything
    assert told(elsewhere) == told(gpus) == told(theirs) == []
    assert told(ours) == ["request.bound", "request.unbound"], "by then nobody held the device"
    assert told(labelled) == []
    assert {row["project"] for row in Delivery.objects.filter(subscription=ours).values_list("data", flat=True)} == {
        "p1"
    }


def test_x4_a_project_hears_of_the_devices_it_holds_without_their_inner_life(subscribe: Subscribe) -> None:
    ours, theirs = (subscribe(name="x", scope="project", caller=who) for who in (NOVA, ELSE))
    cloud, labelled = subscribe(name="all", kinds=["device.health"]), subscribe(name="l", label="training")
    device = ready()
    request = bound(device, NOVA, "training")
    apply(a_host(), answer(card(0, handles=2, status="failed", status_reason="hot at /sys/inner")), seq=2)
    fanout.run()
    assert told(ours) == ["request.bound", "device.health"]
    assert told(labelled) == ["request.bound", "device.health"]
    assert told(theirs) == []
    health = Delivery.objects.get(subscription=ours, kind="device.health").data
    assert health == {
        "device": str(device.uuid),
        "type": "FPGA",
        "model": "1044",
        "state": "ready",
        "health": "failed",
        "requests": [request],
    }
    seen = Delivery.objects.get(subscription=cloud).data
    assert (seen["host"], seen["reason"]) == ("cmp1", "hot at /sys/inner")


def test_a_request_that_fails_says_why(subscribe: Subscribe) -> None:
    ours = subscribe(scope="project", caller=NOVA)
    device = ready(handles=1)
    bound(device, NOVA)
    with pytest.raises(Exception, match="all are held"):
        bound(device, NOVA)
    fanout.run()
    assert told(ours) == ["request.bound", "request.failed"]
    data = Delivery.objects.get(kind="request.failed").data
    assert data["reason"] and data["state"] == "BindFailed" and data["host"] == "cmp1"


def test_an_event_that_is_committed_late_is_neither_skipped_nor_doubled(subscribe: Subscribe) -> None:
    mine = subscribe()
    late, early = uuid.uuid4(), uuid.uuid4()
    with psycopg.connect(**_parameters()) as slow:
        slow.execute(INSERT, [late])
        _event(early)
        fanout.run()
        assert told(mine) == [], "what began before it is still under way"
        slow.commit()
    fanout.run()
    numbers = dict(Event.objects.filter(subject__in=[late, early]).values_list("subject", "id"))
    assert numbers[late] < numbers[early]
    assert Counter(Delivery.objects.values_list("event", flat=True)) == Counter(numbers.values())
    fanout.run()
    assert Delivery.objects.count() == 2


INSERT = """
INSERT INTO accelerators_event (source, actor, request_id, action, subject_type, subject, subject_name, host, changes,
  reason) VALUES ('system', 'a', '', 'request.bound', 'request', %s, '', '', '{"project_id": [null, "p1"]}', '')
"""


def _parameters() -> dict[str, Any]:
    known = connection.get_connection_params()
    return {name: known[name] for name in ("dbname", "user", "host", "port") if known.get(name)}


def _event(subject: uuid.UUID) -> None:
    changes = {"project_id": [None, "p1"]}
    conductor.record_event("request.bound", EventSource.SYSTEM, "a", subject=(subject, ""), changes=changes)


class Killed(BaseException):
    """kill -9: no handler may stop it, and the transaction under way is gone with the process."""


def killed_at(number: int) -> Callable[..., Any]:
    """For `execute_wrapper`: the process dies after the statement of this number."""
    count = 0

    def execute(run: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal count
        count += 1
        if count > number:
            raise Killed
        done = run(sql, params, many, context)
        if count == number:
            raise Killed
        return done

    return execute


def test_killed_at_any_statement_none_is_lost_and_none_doubled(
    subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fanout, "MAX_EVENTS", 2)
    mine, others = subscribe(), subscribe(name="ours", scope="project", caller=NOVA)
    number, reached, events = 0, True, 0
    while reached:
        number += 1
        for _ in range(3):
            _event(uuid.uuid4())
            events += 1
        try:
            with connection.execute_wrapper(killed_at(number)):
                fanout.run()
            reached = False
        except Killed:
            pass
        fanout.run()
        for subscription in (mine, others):
            rows = Counter(Delivery.objects.filter(subscription=subscription).values_list("event", flat=True))
            assert len(rows) == events and set(rows.values()) == {1}, f"killed at statement {number}"
    assert number > 6


def test_a_database_that_was_restored_elsewhere_loses_and_doubles_nothing(subscribe: Subscribe) -> None:
    mine = subscribe()
    _event(uuid.uuid4())
    fanout.run()
    Reader.objects.update(transaction=2**40)
    _event(uuid.uuid4())
    fanout.run()
    assert len(told(mine)) == 2


def test_who_is_no_user_any_more_and_what_is_off_gets_nothing(subscribe: Subscribe, django_user_model: Any) -> None:
    user = django_user_model.objects.create(username="olga")
    mine = subscribe(caller=Caller("olga", str(user.pk), frozenset(), "p1"))
    off = subscribe(standing="off")
    new = subscribe(name="new")
    Subscription.objects.filter(pk=new.pk).update(created_at="2100-01-01T00:00:00Z")
    user.is_active = False
    user.save()
    _event(uuid.uuid4())
    fanout.run()
    assert [told(one) for one in (mine, off, new)] == [[], [], []]
    user.delete()
    assert not Subscription.objects.filter(pk=mine.pk).exists()


@pytest.mark.exhaustive
def test_ten_thousand_events_and_a_hundred_subscriptions_take_two_statements_a_batch(subscribe: Subscribe) -> None:
    first = subscribe(kinds=["request.failed"])
    made = Subscription.objects.bulk_create(
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
    Subscription.objects.update(created_at=LONG_AGO)
    with connection.cursor() as cursor, conductor.writing():
        cursor.execute(MANY)
    with CaptureQueriesContext(connection) as captured:
        fanout.run()
    spread = [one for one in captured if "cyborgweb_delivery" in one["sql"]]
    assert len(spread) == 10 + 1
    assert len(captured) < 11 * 8
    assert not told(first)
    assert Delivery.objects.count() == 9900
    assert set(Counter(Delivery.objects.values_list("subscription", flat=True)).values()) == {100}
    assert len(made) == 99


MANY = """
INSERT INTO accelerators_event (source, actor, request_id, action, subject_type, subject, subject_name, host, changes,
  reason) SELECT 'system', 'a', '', 'request.bound', 'request', gen_random_uuid(), '', '',
  jsonb_build_object('project_id', jsonb_build_array(NULL, 'p' || n % 100)), '' FROM generate_series(1, 10000) n
"""
