"""Test what the sweep removes and what it keeps."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from django.db import connection

from accelerators import conductor, safety
from accelerators.models import AcceleratorRequest, AttachHandle, Deployable, Device, DeviceProfile, Event, Host, Intent
from accelerators.safety import HolderCheckResult
from accelerators.workflows import retention_sweep
from accelerators.workflows.retention_sweep import remove_missing_devices
from tests.support import emptying
from tests.support.holders import answer_each
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = pytest.mark.django_db
LATER = datetime.now(UTC) + timedelta(days=2)


@pytest.fixture
def host() -> Host:
    """Return a host with a missing card and a present one; its driver works and its agent is up."""
    host = get_or_create_host()
    apply_report(host, make_driver_report(make_card(1), make_card(2)))
    apply_report(host, make_driver_report(make_card(2)), seq=2)
    return host


def count_missing() -> int:
    return Device.objects.filter(state="missing").count()


def test_a_free_missing_device_is_removed_after_its_retention_with_an_event(host: Host) -> None:
    remove_missing_devices()
    assert count_missing() == 1
    with conductor.writing():
        Intent.objects.all().delete()
    remove_missing_devices(LATER)
    assert count_missing() == 0 and Device.objects.count() == 1
    assert Intent.objects.filter(kind="provider", key=str(host.uuid)).exists(), "its provider goes as well"
    assert Event.objects.filter(action="device.removed").count() == 1


def create_request(state: str, **values: object) -> None:
    """Create a request of a new profile."""
    with conductor.writing():
        profile = DeviceProfile.objects.create(name="p", groups=[{"resources:FPGA": "1"}])
        AcceleratorRequest.objects.create(project_id="p", profile=profile, group={}, state=state, **values)


def test_S1_a_held_missing_device_is_not_removed(host: Host) -> None:
    create_request("Bound", attach_handle=AttachHandle.objects.get(deployable__device__state="missing"))
    remove_missing_devices(LATER)
    assert count_missing() == 1


def test_a_missing_device_that_a_request_names_without_holding_it_is_left_out_and_not_in_the_way(host: Host) -> None:
    create_request("BindFailed", deployable=Deployable.objects.get(device__state="missing"))
    apply_report(host, make_driver_report(), seq=3)
    assert count_missing() == 2
    remove_missing_devices(LATER)
    assert Device.objects.get().address == "0000:01:00.0"


def test_a_missing_device_is_not_removed_while_its_agent_is_silent(host: Host) -> None:
    conductor.set_hosts_stale_since([host.id], datetime.now(UTC))
    remove_missing_devices(LATER)
    assert count_missing() == 1


def test_a_missing_device_is_not_removed_while_its_driver_fails(host: Host) -> None:
    apply_report(host, make_driver_report(error="crashed"), seq=3)
    remove_missing_devices(LATER)
    assert count_missing() == 1


@pytest.mark.parametrize(
    "said", [HolderCheckResult(holders=("allocation a",)), HolderCheckResult(unknown="it does not answer")]
)
def test_S1_a_missing_device_is_not_removed_unless_every_holder_check_says_it_is_free(
    host: Host, said: HolderCheckResult
) -> None:
    with safety.HOLDER_CHECKS.replaced("stranger", answer_each(lambda device: said)):
        assert remove_missing_devices(LATER) is False
        assert count_missing() == 1
    with safety.HOLDER_CHECKS.replaced("stranger", answer_each(lambda device: HolderCheckResult())):
        remove_missing_devices(LATER)
    assert count_missing() == 0


@pytest.mark.slow
def test_holder_checks_of_many_missing_devices_end_in_time_and_the_others_are_removed_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = get_or_create_host()
    apply_report(host, make_driver_report(*(make_card(number) for number in range(1, 9))))
    apply_report(host, make_driver_report(), seq=2)
    monkeypatch.setattr(safety, "HOLDER_CHECKS_TIMEOUT_S", 0.1)
    asked: list[int] = []

    def check(device: Device) -> HolderCheckResult:
        asked.append(device.pk)
        time.sleep(0.06)
        return HolderCheckResult()

    with safety.HOLDER_CHECKS.replaced("stranger", answer_each(check)):
        remove_missing_devices(LATER)
        assert 1 <= len(asked) <= 2 and count_missing() == 8 - len(asked)
        while count_missing():
            remove_missing_devices(LATER)
    assert sorted(asked) == sorted({*asked}) and len(asked) == 8


@pytest.mark.django_db(transaction=True)
def test_creating_event_partitions_gives_up_while_a_reader_locks_events_and_succeeds_later() -> None:
    """A backup reads for minutes. A statement that waits behind it for the table would block all writers of events."""
    newest = "SELECT max(inhrelid::regclass::text) FROM pg_inherits WHERE inhparent = 'accelerators_event'::regclass"
    with connection.cursor() as cursor:
        cursor.execute(f"{newest} AND inhrelid::regclass::text ~ '[0-9]$'")
        (month,) = cursor.fetchone()
        cursor.execute(f"DROP TABLE {month}")
        with psycopg.connect(connection.connection.info.dsn) as reader:
            reader.execute("LOCK TABLE accelerators_event IN ACCESS SHARE MODE")
            retention_sweep.run()
            cursor.execute("SELECT to_regclass(%s)", [month])
            assert cursor.fetchone() == (None,)
        retention_sweep.run()
        cursor.execute("SELECT to_regclass(%s) IS NOT NULL", [month])
        assert cursor.fetchone() == (True,)
    emptying.allow_emptying()
