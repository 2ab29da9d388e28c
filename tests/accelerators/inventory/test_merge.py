"""Test how reports are merged into the tables: found, changed, missing, returned and unchanged devices.

The number of statements is constant.
"""

from __future__ import annotations

import psycopg
import pytest
from django.db.utils import IntegrityError

from accelerators import conductor
from accelerators.inventory import merge
from accelerators.models import AttachHandle, Attribute, Deployable, Device, Event, Host, Intent
from tests.support.reports import (
    apply_report,
    get_or_create_host,
    make_card,
    make_driver_report,
    make_report,
    name_providers,
)
from tests.support.writeguard import ForbiddenWriteError, expect_violation

pytestmark = pytest.mark.django_db


def test_new_devices_are_stored_inactive_with_one_event_each() -> None:
    host = get_or_create_host()
    apply_report(host, make_driver_report(make_card(1, handles=2), make_card(2)))
    assert list(Device.objects.values_list("address", "state")) == [
        ("0000:01:00.0", "inactive"),
        ("0000:02:00.0", "inactive"),
    ]
    assert AttachHandle.objects.count() == 3
    assert Attribute.objects.filter(key="rc", value="FPGA").count() == 2
    assert list(Event.objects.filter(subject_type="device").values_list("action", flat=True)) == ["device.found"] * 2
    assert Intent.objects.get().kind == "provider"


def test_an_unchanged_report_changes_no_device_and_makes_no_event() -> None:
    host = get_or_create_host()
    apply_report(host, make_driver_report(make_card(1)))
    events = Event.objects.count()
    apply_report(host, make_driver_report(make_card(1)), seq=2)
    assert Event.objects.count() == events
    assert Device.objects.get().updated_at is None


def test_a_changed_device_makes_one_event_with_old_and_new_values() -> None:
    host = get_or_create_host()
    apply_report(host, make_driver_report(make_card(1)))
    apply_report(host, make_driver_report(make_card(1, status="degraded", status_reason="link at x8 of x16")), seq=2)
    event = Event.objects.get(action="device.changed")
    assert event.changes["status"] == ["ok", "degraded"]
    assert Device.objects.get().status_reason == "link at x8 of x16"


def test_an_absent_device_becomes_missing_and_gets_its_state_back_when_it_returns() -> None:
    host = get_or_create_host()
    apply_report(host, make_driver_report(make_card(1), make_card(2)))
    with conductor.writing():
        Device.objects.filter(address="0000:01:00.0").update(state="ready")
    apply_report(host, make_driver_report(make_card(2)), seq=2)
    gone = Device.objects.get(address="0000:01:00.0")
    assert (gone.state, gone.returns_to) == ("missing", "ready")
    changes = Event.objects.get(action="device.missing").changes
    assert (changes["state"], changes["returns_to"]) == (["ready", "missing"], [None, "ready"])
    assert [moment[:16] for moment in changes["state_since"]] == [gone.state_since.isoformat()[:16]] * 2
    apply_report(host, make_driver_report(make_card(1), make_card(2)), seq=3)
    back = Device.objects.get(address="0000:01:00.0")
    assert (back.state, back.returns_to, back.pk) == ("ready", None, gone.pk)
    assert back.state_reason == "seen again by its driver"
    assert [e.action for e in Event.objects.filter(subject=gone.uuid).order_by("id")] == [
        "device.found",
        "device.missing",
        "device.back",
    ]


def test_an_empty_answer_marks_devices_missing_and_removes_none() -> None:
    host = get_or_create_host()
    apply_report(host, make_driver_report(*(make_card(n) for n in range(8))))
    apply_report(host, make_driver_report(), seq=2)
    assert Device.objects.filter(state="missing").count() == 8
    assert Deployable.objects.count() == 8


def test_L6_a_failing_driver_does_not_affect_devices_of_other_drivers() -> None:
    host = get_or_create_host()
    good, bad = make_driver_report(make_card(1), driver="good"), make_driver_report(make_card(2), driver="bad")
    apply_report(host, good, bad)
    apply_report(
        host,
        make_driver_report(make_card(1), make_card(3), driver="good"),
        make_driver_report(driver="bad", error="it hung for 20 s"),
        seq=2,
    )
    assert set(Device.objects.values_list("address", "state")) == {(f"0000:0{n}:00.0", "inactive") for n in (1, 2, 3)}
    host.refresh_from_db()
    assert host.drivers["bad"]["error"] == "it hung for 20 s"
    assert Event.objects.get(action="driver.failed").reason == "it hung for 20 s"
    apply_report(host, good, bad, seq=3)
    assert Event.objects.filter(action="driver.recovered").count() == 1


def test_an_answer_followed_by_a_failure_in_one_batch_is_applied_too() -> None:
    host = get_or_create_host()
    first = make_report(make_driver_report(make_card(1), driver="flaky"), seq=1)
    second = make_report(make_driver_report(driver="flaky", error="crashed"), seq=2)
    merge.merge_reports({host.id: [second, first]})
    assert Device.objects.get().address == "0000:01:00.0"
    assert Host.objects.get().drivers["flaky"]["error"] == "crashed"


def test_older_reports_are_dropped() -> None:
    host = get_or_create_host()
    apply_report(host, make_driver_report(make_card(1), make_card(2)), seq=5)
    assert apply_report(host, make_driver_report(), seq=4) == apply_report(host, make_driver_report(), seq=5) == 0
    assert not Device.objects.filter(state="missing").exists()


def test_vanished_handles_are_marked_missing_and_the_others_stay() -> None:
    host = get_or_create_host()
    apply_report(host, make_driver_report(make_card(1, handles=4)))
    keep = make_card(1, handles=4).deployables[0].handles[1:]
    less = make_card(1, handles=4)
    from msgspec.structs import replace

    apply_report(
        host,
        make_driver_report(
            replace(less, deployables=(replace(less.deployables[0], handles=keep, num_accelerators=3),))
        ),
        seq=2,
    )
    gone = AttachHandle.objects.filter(missing_since__isnull=False)
    assert ['"function": "0"' in h.attach_info for h in gone] == [True]
    vanished = gone.get().attach_info
    assert Event.objects.filter(action="device.changed").latest("id").changes[f"handle {vanished}"] == [
        "PCI",
        "missing",
    ]
    apply_report(host, make_driver_report(make_card(1, handles=4)), seq=3)
    assert Event.objects.filter(action="device.changed").latest("id").changes[f"handle {vanished}"] == [
        "missing",
        "PCI",
    ]


def test_an_operators_attribute_survives_reports() -> None:
    host = get_or_create_host()
    apply_report(host, make_driver_report(make_card(1)))
    with conductor.writing():
        Attribute.objects.create(deployable=Deployable.objects.get(), key="rack", value="A7", origin="operator")
        Attribute.objects.filter(key="trait0").update(origin="operator", value="CUSTOM_MINE")
    apply_report(host, make_driver_report(make_card(1)), seq=2)
    assert set(Attribute.objects.values_list("key", "value")) == {
        ("rc", "FPGA"),
        ("rack", "A7"),
        ("trait0", "CUSTOM_MINE"),
    }


@pytest.mark.parametrize("hosts", [1, 20])
def test_a_merge_sends_nine_statements_however_many_hosts_report(hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [get_or_create_host(f"cmp{n}") for n in range(hosts)]
    found = make_driver_report(*(make_card(n) for n in range(20)))
    batch = {host.id: [make_report(*name_providers(host, found))] for host in made}
    sent: list[str] = []
    execute = psycopg.Cursor.execute
    monkeypatch.setattr(
        psycopg.Cursor, "execute", lambda self, query, *a, **k: sent.append(query) or execute(self, query, *a, **k)
    )
    merge.merge_reports(batch)
    monkeypatch.undo()
    assert Device.objects.count() == 20 * hosts
    assert len([query for query in sent if "SAVEPOINT" not in query]) == 9  # lock, load, five tables, intents, hosts


def test_changing_an_event_is_refused_by_the_database() -> None:
    get_or_create_host()
    with pytest.raises(IntegrityError, match="append-only"), conductor.writing():
        Event.objects.update(reason="never happened")


def test_writing_inventory_outside_the_conductor_is_a_violation() -> None:
    with expect_violation(ForbiddenWriteError):
        Host.objects.create(name="x", node="x")
