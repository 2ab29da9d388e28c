"""Test the limits on what is stored of one host."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace as change

from accelerators.domain.diff import INCOMPLETE_HASH
from accelerators.models import AttachHandle, Device, Host
from accelerators.workflows import retention_sweep
from drivers.inventory import MAX_FAULTS, DriverReport, Fault
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report, name_providers

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def four_devices(settings: Any) -> None:
    """Allow four devices, and 64 parts, of a host."""
    settings.KEYS = replace(settings.KEYS, max_devices_per_host=4)


def list_addresses(**conditions: object) -> list[str]:
    return sorted(f"{device.host.name} {str(device.address)[5:7]}" for device in Device.objects.filter(**conditions))


def test_X5_devices_above_the_limit_are_not_stored_and_one_fault_names_their_number_and_the_setting() -> None:
    host, other = get_or_create_host(), get_or_create_host("cmp2")
    faults = tuple(Fault(f"subject {n}", "reason") for n in range(MAX_FAULTS))
    first = change(make_driver_report(*(make_card(n) for n in range(3)), driver="first"), faults=faults)
    second = make_driver_report(*(make_card(n) for n in range(3, 9)), driver="second")
    apply_report(host, first, second)
    apply_report(other, *name_providers(other, make_driver_report(make_card(1))))
    assert list_addresses() == ["cmp1 00", "cmp1 01", "cmp1 03", "cmp1 04", "cmp2 01"], "each driver gets two"
    host.refresh_from_db()
    ((subject, reason),) = host.drivers["second"]["faults"]
    assert subject == "cmp1" and "parts: 4. CYBORG_MAX_DEVICES_PER_HOST allows 4 devices" in reason
    assert "parts: 1. CYBORG_MAX_DEVICES_PER_HOST" in host.drivers["first"]["faults"][0][1]
    assert (host.drivers["first"]["devices"], host.drivers["second"]["devices"]) == (2, 2)
    assert host.applied_hash == INCOMPLETE_HASH, "the agent sends it again with its next connection"


def test_X5_stored_devices_keep_their_places_and_missing_ones_count() -> None:
    host = get_or_create_host()
    apply_report(host, make_driver_report(*(make_card(n) for n in range(4))))
    kept = set(Device.objects.values_list("uuid", flat=True))
    for seq in range(2, 6):  # Each report has only new devices, as of a host that invents them.
        apply_report(host, make_driver_report(*(make_card(10 * seq + n) for n in range(9))), seq=seq)
    assert set(Device.objects.values_list("uuid", flat=True)) == kept
    assert set(Device.objects.values_list("state", flat=True)) == {"missing"}
    apply_report(host, make_driver_report(*(make_card(n) for n in (9, 8, 1, 2))), seq=6)
    assert list_addresses(state="inactive") == ["cmp1 01", "cmp1 02"]
    apply_report(host, make_driver_report(*(make_card(n) for n in range(4))), seq=7)
    assert list_addresses(state="inactive") == ["cmp1 00", "cmp1 01", "cmp1 02", "cmp1 03"]
    assert Host.objects.get().drivers["test_driver"]["faults"] == []
    assert Host.objects.get().applied_hash != INCOMPLETE_HASH


def test_X5_a_driver_that_invents_devices_leaves_places_for_another_driver(settings: Any) -> None:
    settings.KEYS = replace(settings.KEYS, max_devices_per_host=32)
    host, new_card = get_or_create_host(), make_driver_report(make_card(250), driver="second")
    for seq in range(1, 8):
        invented = make_driver_report(*(make_card(seq * 10 + n) for n in range(10)))
        apply_report(host, invented, make_driver_report(driver="second"), seq=seq)
    assert Device.objects.count() == 28, "two places are kept for the other driver, and two for one that may be added"
    apply_report(host, invented, new_card, seq=8)
    assert [device.driver for device in Device.objects.filter(state="inactive")] == ["second"]
    ((_, reason),) = Host.objects.get().drivers["test_driver"]["faults"]
    assert "32 devices of one host, " in reason and "; 2 devices are kept for each driver that has fewer" in reason


def test_no_places_are_kept_for_a_driver_that_is_turned_off_and_has_no_devices(settings: Any) -> None:
    settings.KEYS = replace(settings.KEYS, max_devices_per_host=32)
    off = [DriverReport(f"off{n}", "turned off", state=state) for n, state in enumerate(("disabled", "absent"))]
    apply_report(get_or_create_host(), make_driver_report(*(make_card(n) for n in range(32))), *off)
    assert Device.objects.count() == 30, "two places are kept for a driver that may be added"
    ((_, reason),) = Host.objects.get().drivers["test_driver"]["faults"]
    assert "one driver has at most 30;" in reason


def test_X5_two_drivers_that_invent_devices_leave_places_for_a_third_one_that_answers_later(settings: Any) -> None:
    settings.KEYS = replace(settings.KEYS, max_devices_per_host=64)
    host = get_or_create_host()
    silent, answering = make_driver_report(driver="good", error="it hung"), [make_card(n) for n in range(240, 244)]
    for seq in range(1, 5):
        invented = [
            make_driver_report(*(make_card(place + seq * 20 + n) for n in range(20)), driver=driver)
            for driver, place in (("bad", 0), ("worse", 110))
        ]
        apply_report(host, *invented, silent, seq=seq)
    recorded = set(Device.objects.values_list("uuid", flat=True))
    assert len(recorded) == 64 - 4 - 4, "four places for the silent driver, and four for one that is not known yet"
    apply_report(host, *invented, make_driver_report(*answering, driver="good"), seq=5)
    assert Device.objects.filter(driver="good", state="inactive").count() == 4
    assert Host.objects.get().drivers["good"]["faults"] == []
    assert recorded < set(Device.objects.values_list("uuid", flat=True)), "no recorded device is taken away"
    newcomer = make_driver_report(*(make_card(n) for n in range(250, 253)), driver="new")
    apply_report(host, *invented, newcomer, seq=6)
    assert Device.objects.filter(driver="new").count() == 3


def test_X5_in_one_report_the_driver_with_the_fewest_devices_is_served_first(settings: Any) -> None:
    settings.KEYS = replace(settings.KEYS, max_devices_per_host=64)
    host = get_or_create_host()
    greedy = [
        make_driver_report(*(make_card(place + n) for n in range(80)), driver=driver)
        for driver, place in (("bad", 0), ("worse", 100))
    ]
    good = make_driver_report(*(make_card(200 + n) for n in range(16)), driver="good")
    apply_report(host, *greedy, good)
    numbers = {driver: entry["devices"] for driver, entry in Host.objects.get().drivers.items()}
    assert numbers == {"bad": 22, "worse": 22, "good": 16}, "four places are left for a driver that is not known yet"
    assert Host.objects.get().drivers["good"]["faults"] == []


def test_an_incomplete_report_is_asked_for_again_when_the_sweep_has_removed_devices() -> None:
    host = get_or_create_host()
    apply_report(host, make_driver_report(*(make_card(n) for n in range(4))))
    apply_report(host, make_driver_report(*(make_card(n) for n in range(4, 8))), seq=2)
    retention_sweep.remove_missing_devices()
    assert Host.objects.get().applied_hash == INCOMPLETE_HASH, "no place is free yet: the report is not needed"
    retention_sweep.remove_missing_devices(datetime.now(UTC) + timedelta(days=2))
    assert Host.objects.get().applied_hash == "", "the gateway asks the agent for its report"
    apply_report(host, make_driver_report(*(make_card(n) for n in range(4, 8))), seq=3)
    assert list_addresses(state="inactive") == ["cmp1 04", "cmp1 05", "cmp1 06", "cmp1 07"]


def test_X5_parts_that_a_device_no_longer_has_count_and_stored_parts_stay() -> None:
    host = get_or_create_host()

    def report(number: int, handles: int, seq: int) -> None:
        card = make_card(1, handles)
        part = card.deployables[0]
        renamed = change(
            part, handles=tuple(change(h, info=h.info.replace('"01"', f'"{number}"')) for h in part.handles)
        )
        apply_report(host, make_driver_report(change(card, deployables=(renamed,))), seq=seq)

    report(10, 40, 1)
    report(11, 40, 2)
    assert AttachHandle.objects.count() == 40, "1 + 40 + 40 are more than 64 parts"
    assert not AttachHandle.objects.filter(missing_since__isnull=True).exists(), "the driver no longer reports them"
    (fault,) = Host.objects.get().drivers["test_driver"]["faults"]
    assert "CYBORG_MAX_DEVICES_PER_HOST" in fault[1]
    report(10, 40, 3)
    assert AttachHandle.objects.filter(missing_since__isnull=True).count() == 40
    assert Host.objects.get().drivers["test_driver"]["faults"] == []
