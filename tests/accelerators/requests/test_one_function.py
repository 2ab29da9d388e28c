"""Test that one physical function is in at most one request, whatever its key, driver or row (promises S1, L6, X1)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import IntegrityError, OperationalError, connection, transaction
from msgspec.structs import replace
from psycopg.errors import LockNotAvailable

from accelerators import conductor, safety
from accelerators.commands import programming
from accelerators.devices import lifecycle
from accelerators.domain import groups
from accelerators.domain.caller import Caller
from accelerators.domain.device_actions import Action
from accelerators.domain.diff import collect_changes
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.provider_ids import compute_provider_uuid
from accelerators.domain.traits import FUNCTION_TRAIT_KEY
from accelerators.inventory import attributes, merge
from accelerators.models import (
    AcceleratorRequest,
    AttachHandle,
    Attribute,
    Deployable,
    Device,
    DeviceProfile,
    Event,
    Host,
    Intent,
    ProviderOwner,
    ReleasedHandle,
)
from accelerators.requests import binding, profiles
from accelerators.requests.binding import BindSpec
from accelerators.runtime import generations
from drivers.inventory import Deployable as Part
from drivers.inventory import Device as Card
from tests.support.locks import wait_for_a_waiting_lock
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report, make_report

pytestmark = pytest.mark.django_db

NOVA = Caller("nova", "u", frozenset({"admin"}), "p1", service=True)
SERIAL, OTHER_SERIAL, ADDRESS = "serial:1af4:00a0:0", "serial:1af4:00b0:0", "pci:0000:01:00.0"
PROVIDER = str(compute_provider_uuid("cmp1_0000:01:00.0"))


@pytest.fixture
def host() -> Host:
    profiles.clear_profile_cache()
    with conductor.writing():
        DeviceProfile.objects.create(name="p", groups=[{"resources:FPGA": "1"}])
    return get_or_create_host()


def report_cards(host: Host, *cards: Card, driver: str = "test_driver") -> None:
    """Merge a report in which only this driver has devices."""
    report_drivers(host, **{driver: cards})


def report_drivers(host: Host, **cards_by_driver: tuple[Card, ...]) -> None:
    host.refresh_from_db()
    names = {"test_driver": (), "second_driver": ()} | cards_by_driver
    reports = [make_driver_report(*cards, driver=name) for name, cards in names.items()]
    apply_report(host, *reports, seq=host.applied_seq + 1)


def offer_all() -> None:
    """Make every device ready whose state allows it, as an operator would."""
    for device in Device.objects.all():
        with suppress(RefusedError):
            lifecycle.enable_device(device.uuid, NOVA)


def bind_request(provider: str = PROVIDER, host: str = "cmp1") -> AcceleratorRequest:
    """Bind a new request and return it; it is BindFailed if the bind was refused."""
    (uuid,) = binding.create_requests("p", NOVA)
    try:
        binding.bind_requests([BindSpec(uuid, host, provider, str(uuid4()))], NOVA)
    except RefusedError as refused:
        assert refused.reason in (RefusalReason.NONE_FREE, RefusalReason.NOT_FOUND)
    return AcceleratorRequest.objects.get(uuid=uuid)


def make_part(name: str) -> Part:
    """Return a deployable with this name, without handles."""
    return Part(name, 0, (), (), "test")


def make_held_card(host: Host, key: str = SERIAL) -> Device:
    """Report one card, offer it and bind its only handle."""
    report_cards(host, make_card(1, key=key))
    offer_all()
    assert bind_request().state == "Bound"
    return Device.objects.get()


@pytest.mark.parametrize(("before", "after"), [(SERIAL, ADDRESS), (ADDRESS, SERIAL), ("test_driver:7", SERIAL)])
def test_S1_a_new_key_at_a_known_address_is_the_same_device(host: Host, before: str, after: str) -> None:
    report_cards(host, make_card(1, key=before))
    offer_all()
    report_cards(host, make_card(1, key=after))
    device = Device.objects.get()
    assert (device.key, device.state) == (SERIAL, "ready")
    changes = [event.changes["key"] for event in Event.objects.filter(action="device.changed")]
    assert changes == ([[before, SERIAL]] if before != SERIAL else [])
    assert bind_request().state == "Bound" and bind_request().state == "BindFailed"


@pytest.mark.parametrize(("before", "after"), [(SERIAL, ADDRESS), (ADDRESS, SERIAL)])
def test_S1_a_held_device_whose_identity_changes_is_quarantined_with_the_reason(
    host: Host, before: str, after: str
) -> None:
    make_held_card(host, before)
    report_cards(host, make_card(1, key=after))
    device = Device.objects.get()
    assert (device.key, device.state) == (SERIAL, "quarantined")
    assert f"its identity changed from {before} to {after}" in device.state_reason
    assert Event.objects.get(action="device.quarantined").changes["state"] == ["ready", "quarantined"]
    assert AcceleratorRequest.objects.get().state == "Bound"
    assert bind_request().state == "BindFailed"


def test_S1_a_card_with_another_serial_number_in_the_slot_of_a_held_one_is_not_offered(host: Host) -> None:
    held = make_held_card(host)
    report_cards(host, make_card(1, key=OTHER_SERIAL))
    held.refresh_from_db()
    assert (held.state, held.returns_to) == ("missing", "quarantined")
    newcomer = Device.objects.get(key=OTHER_SERIAL)
    assert newcomer.state == "quarantined" and str(held.uuid) in newcomer.state_reason
    with conductor.writing():
        Device.objects.filter(key=OTHER_SERIAL).update(state="ready")
    failed = bind_request()
    assert failed.state == "BindFailed" and "same PCI address" in failed.fault
    with pytest.raises(RefusedError, match="held by request"):
        safety.find_holders([newcomer], safety.NO_ANSWERS).refuse_unless_free(newcomer, "reset")


def test_a_card_with_another_serial_number_in_the_slot_of_a_free_one_is_a_new_device(host: Host) -> None:
    report_cards(host, make_card(1, key=SERIAL))
    offer_all()
    report_cards(host, make_card(1, key=OTHER_SERIAL))
    assert list(Device.objects.order_by("id").values_list("key", "state", "returns_to")) == [
        (SERIAL, "missing", "ready"),
        (OTHER_SERIAL, "inactive", None),
    ]


@pytest.mark.parametrize("change", [{"key": ADDRESS}, {"key": OTHER_SERIAL}, {"key": SERIAL, "bus": 2}])
def test_S1_a_device_that_is_bound_while_its_identity_changes_is_quarantined(
    host: Host, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ADDRESS if change["key"] == OTHER_SERIAL else SERIAL
    report_cards(host, make_card(1, key=before))
    offer_all()

    def bind_and_collect(*arguments: Any) -> None:
        assert bind_request().state == "Bound"
        collect_changes(*arguments)

    monkeypatch.setattr(merge, "collect_changes", bind_and_collect)
    report_cards(host, make_card(change.get("bus", 1), key=change["key"]))
    device = Device.objects.get()
    assert device.state == "quarantined" and "a request or a released unit holds it, and its" in device.state_reason
    assert Event.objects.get(action="device.quarantined").changes["state"] == ["ready", "quarantined"]


@pytest.mark.parametrize("changes", [{"vendor": "10ee"}, {"model": "1045"}])
def test_a_card_of_another_vendor_or_model_at_a_known_address_is_a_new_device(
    host: Host, changes: dict[str, Any]
) -> None:
    report_cards(host, make_card(1, key=SERIAL))
    offer_all()
    report_cards(host, make_card(1, key=ADDRESS, **changes))
    assert list(Device.objects.order_by("id").values_list("key", "state")) == [
        (SERIAL, "missing"),
        (ADDRESS, "inactive"),
    ]


def test_S1_a_card_of_another_model_at_the_address_of_a_held_one_is_quarantined(host: Host) -> None:
    make_held_card(host)
    report_cards(host, make_card(1, key=ADDRESS, model="1045"))
    held, new = Device.objects.order_by("id")
    assert (held.state, held.returns_to, new.state) == ("missing", "quarantined", "quarantined")


@pytest.mark.parametrize(("before", "after"), [(ADDRESS, SERIAL), (SERIAL, ADDRESS)])
def test_a_device_that_gets_a_serial_number_loses_what_it_was_programmed_with(
    host: Host, before: str, after: str
) -> None:
    report_cards(host, make_card(1, key=before))
    image = uuid4()
    with conductor.writing():
        part = Deployable.objects.get()
        Deployable.objects.update(bitstream_id=image, bitstream_in_flash=True)
        Attribute.objects.create(deployable=part, key=FUNCTION_TRAIT_KEY, value="CUSTOM_F", origin="conductor")
    report_cards(host, make_card(1, key=after))
    part = Deployable.objects.get()
    is_kept = before == SERIAL
    assert part.bitstream_id == (image if is_kept else None)
    assert Attribute.objects.filter(key=FUNCTION_TRAIT_KEY).exists() is is_kept
    if not is_kept:
        event = Event.objects.get(action="device.changed")
        assert event.changes[f"{part.name} bitstream"] == [str(image), None]


def test_S1_a_held_card_that_moves_to_another_address_is_quarantined(host: Host) -> None:
    make_held_card(host)
    report_cards(host, make_card(2, key=SERIAL))
    device = Device.objects.get()
    assert (device.address, device.state) == ("0000:02:00.0", "quarantined")
    assert "its address changed from 0000:01:00.0 to 0000:02:00.0" in device.state_reason
    report_cards(host, make_card(2, key=SERIAL), make_card(1, key=OTHER_SERIAL))
    assert Device.objects.get(key=OTHER_SERIAL).state == "quarantined", "the request still has what is at 01:00.0"


def test_a_quarantine_that_each_report_repeats_says_until_when(host: Host) -> None:
    make_held_card(host)
    for _ in range(2):
        report_cards(host, make_card(1, key=ADDRESS))
        device = Device.objects.get()
        assert device.state == "quarantined"
        assert "again until nothing holds it or the serial number can be read" in device.state_reason
        lifecycle.apply_action_to_device(Action.RELEASE, device.uuid, NOVA)


def test_S1_a_held_device_whose_deployable_gets_another_name_is_quarantined(host: Host) -> None:
    make_held_card(host)
    host = conductor.ensure_host("cmp1", "renamed", "test")
    card = make_card(1, key=SERIAL)
    renamed = replace(card, deployables=(replace(card.deployables[0], name="renamed_0000:01:00.0"),))
    report_cards(host, renamed)
    device = Device.objects.get()
    assert device.state == "quarantined" and "is now named renamed_0000:01:00.0" in device.state_reason
    assert bind_request(str(compute_provider_uuid("renamed_0000:01:00.0"))).state == "BindFailed"
    binding.unbind_requests([str(AcceleratorRequest.objects.get(state="Bound").uuid)], NOVA)
    lifecycle.apply_action_to_device(Action.RELEASE, device.uuid, NOVA)
    offer_all()
    report_cards(host, renamed)
    assert Device.objects.get().state == "ready"


def test_a_free_device_whose_deployable_gets_another_name_stays_offered(host: Host) -> None:
    report_cards(host, make_card(1, key=SERIAL))
    offer_all()
    host = conductor.ensure_host("cmp1", "renamed", "test")
    card = make_card(1, key=SERIAL)
    report_cards(host, replace(card, deployables=(replace(card.deployables[0], name="renamed_0000:01:00.0"),)))
    assert Device.objects.get().state == "ready"
    assert Deployable.objects.get(missing_since=None).name == "renamed_0000:01:00.0"
    report_cards(host, card)
    assert Deployable.objects.get(missing_since=None).name == "cmp1_0000:01:00.0", "a recorded name stays accepted"


def test_S1_two_drivers_that_claim_one_address_do_not_both_get_it(host: Host) -> None:
    report_cards(host, make_card(1, key=SERIAL))
    offer_all()
    report_drivers(host, second_driver=(make_card(1, key="other:1"),), test_driver=(make_card(1, key=SERIAL),))
    assert [(one.driver, one.state) for one in Device.objects.all()] == [("test_driver", "ready")]
    ((subject, reason),) = Host.objects.get().drivers["second_driver"]["faults"]
    assert subject == "0000:01:00.0" and "already belongs to a device of test_driver; one device has one" in reason
    report_drivers(host, second_driver=(make_card(1, key="other:1"),))
    assert [(one.driver, one.key, one.state) for one in Device.objects.all()] == [("second_driver", "other:1", "ready")]


def test_L6_another_driver_does_not_get_the_address_of_a_device_whose_driver_fails(host: Host) -> None:
    make_held_card(host)
    failed = make_driver_report(driver="test_driver", error="it hung for 20 s")
    apply_report(host, failed, make_driver_report(make_card(1, key="other:1"), driver="second_driver"), seq=9)
    assert Device.objects.get().driver == "test_driver"
    ((_, reason),) = Host.objects.get().drivers["second_driver"]["faults"]
    assert "which does not answer; when that driver answers again, this is decided anew" in reason


def test_S1_a_virtual_function_that_is_a_device_of_its_own_is_not_given_beside_its_whole_card(host: Host) -> None:
    card, part = make_card(1, key=SERIAL), make_card(2, key="pci:0000:02:00.0", physical_function="0000:01:00.0")
    report_drivers(host, test_driver=(card,), second_driver=(part,))
    offer_all()
    assert bind_request().state == "Bound"
    assert bind_request(str(compute_provider_uuid("cmp1_0000:02:00.0"))).state == "BindFailed"
    assert bind_request(str(compute_provider_uuid("cmp1_0000:02:00.0"))).state == "BindFailed"
    with pytest.raises(RefusedError, match="held by request"):
        device = Device.objects.get(address="0000:01:00.0")
        safety.find_holders([device], safety.NO_ANSWERS).refuse_unless_free(device, "reset")


def hold(handle: AttachHandle) -> None:
    """Write a request that holds this handle, without any check of ours."""
    profile = DeviceProfile.objects.get()
    AcceleratorRequest.objects.create(
        project_id="p", profile=profile, group={}, state="Bound", attach_handle=handle, deployable=handle.deployable
    )


def make_handles(host: Host, address: str, *handles: tuple[str, str]) -> list[AttachHandle]:
    """Store a device at the address with these handles: attach type, and function or mark."""
    domain, bus, rest = address.split(":")
    slot = rest.split(".")[0]
    device = Device.objects.create(host=host, key=str(uuid4()), driver="d", type="GPU", address=address)
    part = Deployable.objects.create(device=device, name=str(uuid4()), num_accelerators=1)
    made = []
    for kind, name in handles:
        place = {"bus": bus, "device": slot, "domain": domain, "function": "0" if kind == "MDEV" else name}
        info = str(place | ({"vgpu_mark": name} if kind == "MDEV" else {})).replace("'", '"')
        made.append(AttachHandle.objects.create(deployable=part, attach_type=kind, attach_info=info))
    return made


@pytest.mark.parametrize(
    ("first", "second", "is_refused"),
    [
        (("0000:01:00.0", ("PCI", "0")), ("0000:01:00.0", ("PCI", "0")), True),
        (("0000:01:00.0", ("PCI", "0")), ("0000:01:00.0", ("TEST_PCI", "0")), True),
        (("0000:01:00.0", ("PCI", "0")), ("0000:02:00.0", ("PCI", "0")), False),
        (("0000:01:00.0", ("PCI", "0")), ("10000:01:00.0", ("PCI", "0")), False),
        (("0000:01:00.0", ("PCI", "0")), ("0000:01:00.0", ("PCI", "1")), True),  # the whole card, its virtual function
        (("0000:01:00.0", ("PCI", "1")), ("0000:01:00.0", ("PCI", "0")), True),
        (("0000:01:00.0", ("PCI", "1")), ("0000:01:00.0", ("PCI", "2")), False),
        (("0000:01:00.0", ("PCI", "1")), ("0000:01:00.1", ("PCI", "1")), True),  # the same, as a device of its own
        (("0000:01:00.0", ("MDEV", "a")), ("0000:01:00.0", ("MDEV", "a")), True),
        (("0000:01:00.0", ("MDEV", "a")), ("0000:01:00.0", ("MDEV", "b")), False),
        (("0000:01:00.0", ("MDEV", "a")), ("0000:01:00.0", ("PCI", "0")), True),
        (("0000:01:00.1", ("MDEV", "a")), ("0000:01:00.0", ("PCI", "2")), False),
    ],
)
def test_S1_the_database_refuses_a_second_request_for_the_same_hardware(
    host: Host, first: tuple[str, tuple[str, str]], second: tuple[str, tuple[str, str]], is_refused: bool
) -> None:
    with conductor.writing():
        (one,), (two,) = (make_handles(host, address, handle) for address, handle in (first, second))
        (elsewhere,) = make_handles(get_or_create_host("cmp2"), second[0], second[1])
        hold(one)
        hold(elsewhere)
        if is_refused:
            with pytest.raises(IntegrityError, match="request_one_per_function"), transaction.atomic():
                hold(two)
        else:
            hold(two)


def test_handles_that_one_device_has_at_the_same_time_can_be_held_by_different_requests(host: Host) -> None:
    with conductor.writing():
        for handle in make_handles(host, "0000:01:00.0", ("PCI", "0"), ("PCI", "1"), ("PCI", "2")):
            hold(handle)
    assert AcceleratorRequest.objects.count() == 3


def test_a_released_function_can_be_bound_through_another_device(host: Host) -> None:
    with conductor.writing():
        (one,), (two,) = (make_handles(host, "0000:01:00.0", ("PCI", "0")) for _ in range(2))
        hold(one)
        AcceleratorRequest.objects.update(state="Unbound", attach_handle=None)
        hold(two)


@pytest.mark.parametrize(("second", "is_refused"), [("0000:01:00.0", True), ("0000:02:00.0", False)])
def test_S1_a_function_that_waits_for_its_host_is_not_given_through_another_device(
    host: Host, second: str, is_refused: bool
) -> None:
    with conductor.writing():
        (one,), (two,) = (make_handles(host, address, ("PCI", "0")) for address in ("0000:01:00.0", second))
        ReleasedHandle.objects.create(handle=one, instance=uuid4(), ask_at=datetime.now(UTC))
        if is_refused:
            with pytest.raises(IntegrityError, match="its host has not confirmed"), transaction.atomic():
                hold(two)
        else:
            hold(two)


@pytest.mark.parametrize("is_released", [False, True])
def test_the_refusal_says_whether_the_function_is_held_or_released_through_another_device(
    host: Host, is_released: bool
) -> None:
    make_held_card(host)
    held = AcceleratorRequest.objects.get()
    report_cards(host, make_card(1, key=OTHER_SERIAL))
    with conductor.writing():
        Device.objects.filter(key=OTHER_SERIAL).update(state="ready")
        if is_released:
            handle = held.attach_handle
            AcceleratorRequest.objects.update(state="Unbound", attach_handle=None)
            ReleasedHandle.objects.create(handle=handle, instance=uuid4(), ask_at=datetime.now(UTC))
    held_text = "held by requests for another device at the same PCI address"
    released_text = "released through another device at the same PCI address and not confirmed"
    fault = bind_request().fault
    assert (held_text in fault, released_text in fault) == (not is_released, is_released), fault


def test_a_bind_takes_handles_only_of_the_host_that_it_names(host: Host) -> None:
    report_cards(host, make_card(1))
    report_cards(other := get_or_create_host("cmp2"), make_card(1))
    offer_all()
    (uuid,) = binding.create_requests("p", NOVA)
    with pytest.raises(RefusedError, match=f"not found with resource provider uuid={PROVIDER} on host cmp2") as refused:
        binding.bind_requests([BindSpec(uuid, "cmp2", PROVIDER, str(uuid4()))], NOVA)
    assert refused.value.reason == RefusalReason.NOT_FOUND
    assert AcceleratorRequest.objects.get(uuid=uuid).state == "BindFailed"
    own = bind_request(str(compute_provider_uuid("cmp2_0000:01:00.0")), "cmp2")
    assert own.attach_handle is not None and own.attach_handle.deployable.device.host == other


def test_L6_a_report_that_names_another_hosts_provider_costs_only_the_deployable_with_that_name(host: Host) -> None:
    report_cards(host, make_card(1))
    intruder = get_or_create_host("cmp2")
    report_cards(intruder, make_card(3), driver="second_driver")
    stolen, own = make_card(1), make_card(2)
    own = replace(own, deployables=(replace(own.deployables[0], name="cmp2_0000:02:00.0"),))
    second = make_driver_report(stolen, own, driver="second_driver")
    merge.merge_reports({intruder.id: [make_report(second, seq=7)]})
    intruder.refresh_from_db()
    assert set(intruder.devices.values_list("address", "state")) == {
        ("0000:01:00.0", "inactive"),
        ("0000:02:00.0", "inactive"),
        ("0000:03:00.0", "missing"),
    }
    parts = Deployable.objects.filter(device__host=intruder, device__state="inactive")
    assert [part.name for part in parts] == ["cmp2_0000:02:00.0"]
    entry = intruder.drivers["second_driver"]
    ((subject, reason),) = entry["faults"]
    assert entry["error"] == "" and subject == "0000:01:00.0"
    assert "the resource provider cmp1_0000:01:00.0 belongs to host cmp1" in reason
    assert Deployable.objects.get(name="cmp1_0000:01:00.0").device.host == host


def test_X1_names_that_a_host_took_before_their_node_existed_cost_the_new_host_only_those_deployables(
    host: Host,
) -> None:
    taken = make_card(1)
    taken = replace(taken, deployables=(replace(taken.deployables[0], name="cmp1_2_0000:01:00.0"),))
    merge.merge_reports({host.id: [make_report(make_driver_report(taken))]})
    own = [
        replace(card, deployables=(replace(card.deployables[0], name=f"cmp1_2_{card.address}"),))
        for card in (make_card(1), make_card(2))
    ]
    later = get_or_create_host("cmp1_2")
    merge.merge_reports({later.id: [make_report(make_driver_report(*own))]})
    later.refresh_from_db()
    assert later.devices.count() == 2
    assert Deployable.objects.get(device__host=later).name == "cmp1_2_0000:02:00.0"
    ((subject, reason),) = later.drivers["test_driver"]["faults"]
    assert subject == "0000:01:00.0" and "belongs to host cmp1" in reason


def test_two_hosts_that_name_the_same_new_provider_in_one_batch_do_not_both_get_it(host: Host) -> None:
    other = get_or_create_host("cmp2")
    merge.merge_reports({one.id: [make_report(make_driver_report(make_card(1)))] for one in (host, other)})
    assert Deployable.objects.get().device.host == host
    other.refresh_from_db()
    ((_, reason),) = other.drivers["test_driver"]["faults"]
    assert "belongs to host cmp1" in reason


@pytest.mark.parametrize("name", ["cmp2_0000:02:00.0", "cmp1_2_0000:02:00.0", "cmp10_0000:02:00.0", "0000:02:00.0"])
def test_X1_a_new_provider_name_that_does_not_belong_to_the_hosts_node_is_a_fault(host: Host, name: str) -> None:
    own, wrong = make_card(1), make_card(2)
    wrong = replace(wrong, deployables=(replace(wrong.deployables[0], name=name), make_part("cmp1_0000:02:00.0")))
    for other in ("cmp2", "cmp1_2"):
        get_or_create_host(other)
    report_cards(host, own, wrong)
    assert set(Device.objects.values_list("address", flat=True)) == {own.address, wrong.address}
    assert set(Deployable.objects.values_list("name", flat=True)) == {"cmp1_0000:01:00.0", "cmp1_0000:02:00.0"}
    entry = Host.objects.get(name="cmp1").drivers["test_driver"]
    ((subject, reason),) = entry["faults"]
    assert (subject, entry["error"]) == ("0000:02:00.0", "")
    assert f"its deployable {name} is not stored, because of its name: " in reason and "CYBORG_HOST_NODE" in reason
    expected = (
        "belong to the host with the node name cmp1_2" if "_2_" in name else "the node name of its host, cmp1, and"
    )
    assert expected in reason
    assert not ProviderOwner.objects.filter(provider=compute_provider_uuid(name)).exists()
    report_cards(true_owner := get_or_create_host("cmp1_2"), make_card(2))
    assert Deployable.objects.get(name="cmp1_2_0000:02:00.0").device.host == true_owner


def test_a_device_that_the_fake_driver_names_after_a_node_with_a_dot_is_stored(db: None) -> None:
    host = conductor.ensure_host("dotted", "rack.cmp1", "test")
    card = make_card(1)
    named = [
        replace(card, deployables=(make_part(name),)) for name in ("rack_cmp1_FakeDevice", "rack_cmp1_FakeDevice_1")
    ]
    report_cards(host, named[0])
    assert Deployable.objects.get().name == "rack_cmp1_FakeDevice"
    get_or_create_host("rack_cmp1")
    report_cards(host, named[1])
    ((_, reason),) = Host.objects.get(name="dotted").drivers["test_driver"]["faults"]
    assert "rack_cmp1_FakeDevice_1 is not stored" in reason, "a host with exactly this node has come"
    report_cards(host, named[0])
    assert Host.objects.get(name="dotted").drivers["test_driver"]["faults"] == [], "the recorded name stays accepted"


def test_the_database_refuses_a_second_owner_of_a_provider_and_of_a_node(host: Host) -> None:
    report_cards(host, make_card(1))
    report_cards(other := get_or_create_host("cmp2"), make_card(2))
    part = Deployable.objects.get(device__host=other)
    for values in ({"rp_uuid": UUID(PROVIDER)}, {"name": "cmp1_0000:01:00.0"}):
        with pytest.raises(IntegrityError, match="another host"), conductor.writing():
            Deployable.objects.filter(pk=part.pk).update(**values)
    with pytest.raises(IntegrityError, match="host_one_per_node"), conductor.writing():
        Host.objects.filter(pk=other.pk).update(node="cmp1")
    with pytest.raises(RefusedError, match="belongs to host cmp1"):
        conductor.ensure_host("cmp3", "cmp1", "test")
    assert not Host.objects.filter(name="cmp3").exists()


@pytest.mark.parametrize("name", ["cmp1_0000:01:00.0", "nöde_…", ""])
def test_the_database_computes_the_same_provider_ids_as_the_product(name: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT accelerators_provider_of(%s)", [name])
        assert cursor.fetchone() == (compute_provider_uuid(name),)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("same_handle", [True, False])
def test_S1_a_bind_that_waited_for_the_release_of_its_function_is_refused(host: Host, same_handle: bool) -> None:
    with conductor.writing():
        (one,), (two,) = (make_handles(host, "0000:01:00.0", ("PCI", "0")) for _ in range(2))
        hold(one)
    refusals: list[str] = []

    def bind_again() -> None:
        try:
            with conductor.writing():
                hold(one if same_handle else two)
        except IntegrityError as error:
            refusals.append(str(error))
        finally:
            connection.close()

    thread = threading.Thread(target=bind_again, daemon=True)
    with conductor.writing():
        AcceleratorRequest.objects.update(state="Unbound", attach_handle=None)
        ReleasedHandle.objects.create(handle=one, instance=uuid4(), ask_at=datetime.now(UTC))
        thread.start()
        wait_for_a_waiting_lock()
    thread.join(10)
    assert len(refusals) == 1 and "its host has not confirmed" in refusals[0]


@pytest.mark.parametrize("is_missing", [True, False])
def test_a_device_with_the_name_of_another_hosts_provider_can_be_released_and_gets_no_provider(
    host: Host, is_missing: bool
) -> None:
    report_cards(host, make_card(1))
    report_cards(other := get_or_create_host("cmp2"), make_card(2))
    intruder, owned = other.devices.get(), ProviderOwner.objects.filter(provider=PROVIDER)
    with conductor.writing():  # as rows from before the migration
        owned.update(host=other)
        missing_since = datetime.now(UTC) if is_missing else None
        Deployable.objects.filter(device=intruder).update(name="cmp1_0000:01:00.0", missing_since=missing_since)
        owned.update(host=host)
        Device.objects.filter(pk=intruder.pk).update(state="quarantined")
    lifecycle.apply_action_to_device(Action.RELEASE, intruder.uuid, NOVA)
    lifecycle.enable_device(intruder.uuid, NOVA)
    intruder.refresh_from_db()
    assert intruder.state == "ready"
    assert Deployable.objects.get(device=intruder).rp_uuid is None


def test_S1_a_function_whose_parts_are_only_in_a_missing_deployable_is_given_as_a_whole(host: Host) -> None:
    with conductor.writing():
        whole, part = make_handles(host, "0000:01:00.0", ("PCI", "0"), ("PCI", "1"))
        part.deployable = Deployable.objects.create(
            device=whole.deployable.device, name="old", num_accelerators=1, missing_since=datetime.now(UTC)
        )
        part.save()
        (other,) = make_handles(host, "0000:01:00.0", ("PCI", "2"))
        hold(whole)
        with pytest.raises(IntegrityError, match="request_one_per_function"), transaction.atomic():
            hold(other)


def test_S1_a_request_without_a_claim_gets_it_when_the_older_request_gives_it_up(host: Host) -> None:
    with conductor.writing(), connection.cursor() as cursor:
        handles = [make_handles(host, "0000:01:00.0", ("PCI", "0"))[0] for _ in range(4)]
        hold(handles[0])
        older = AcceleratorRequest.objects.get()
        for late in handles[1:3]:  # as the migration leaves them
            cursor.execute("SET LOCAL session_replication_role = replica")
            hold(late)
            cursor.execute("SET LOCAL session_replication_role = DEFAULT")
        for end in (
            lambda: AcceleratorRequest.objects.filter(pk=older.pk).update(state="Unbound", attach_handle=None),
            lambda: AcceleratorRequest.objects.filter(attach_handle=handles[1]).delete(),
        ):
            end()
            with pytest.raises(IntegrityError, match="request_one_per_function"), transaction.atomic():
                hold(handles[3])
        AcceleratorRequest.objects.filter(attach_handle=handles[2]).delete()
        hold(handles[3])


def test_a_released_handle_ends_with_its_attach_handle_whoever_deletes_it(host: Host) -> None:
    with conductor.writing(), connection.cursor() as cursor:
        (one,), (two,) = (make_handles(host, "0000:01:00.0", ("PCI", "0")) for _ in range(2))
        ReleasedHandle.objects.create(handle=one, instance=uuid4(), ask_at=datetime.now(UTC))
        cursor.execute("DELETE FROM accelerators_attachhandle WHERE id = %s", [one.id])  # as the former release does
        hold(two)
    assert not ReleasedHandle.objects.exists()


@pytest.mark.parametrize(("second", "is_refused"), [("0000:01:00.0", True), ("0000:02:00.0", False)])
def test_S1_a_device_whose_function_was_released_through_another_device_is_not_reset(
    host: Host, second: str, is_refused: bool
) -> None:
    with conductor.writing():
        (one,), (two,) = (make_handles(host, address, ("PCI", "0")) for address in ("0000:01:00.0", second))
        ReleasedHandle.objects.create(handle=one, instance=uuid4(), ask_at=datetime.now(UTC))
    devices = [one.deployable.device, two.deployable.device]
    releases = [safety.find_known_holders(devices).results[device.pk][safety.RELEASES] for device in devices]
    assert [bool(result.holders) for result in releases] == [True, is_refused]


@pytest.mark.parametrize(("address", "is_refused"), [("0000:01:00.0", True), ("0000:02:00.0", False)])
@pytest.mark.parametrize("is_released", [False, True])
def test_S1_a_bind_does_not_program_a_card_of_which_a_guest_may_use_a_function_through_another_device(
    host: Host, address: str, is_refused: bool, is_released: bool
) -> None:
    with conductor.writing():
        (former,) = make_handles(host, address, ("PCI", "1"))
        (present,) = make_handles(host, "0000:01:00.0", ("PCI", "2"))
        Device.objects.filter(pk=present.deployable.device_id).update(state="ready")
        Deployable.objects.filter(pk=present.deployable_id).update(rp_uuid=PROVIDER)
        DeviceProfile.objects.update(groups=[{"resources:FPGA": "1", groups.FUNCTION_KEY: "adder"}])
        if is_released:
            ReleasedHandle.objects.create(handle=former, instance=uuid4(), ask_at=datetime.now(UTC))
        else:
            hold(former)
    request = bind_request()
    assert request.state == ("BindFailed" if is_refused else "BindStarted")
    why = "had it, and its host has not confirmed" if is_released else "its device is held by request"
    assert (why in request.fault) == is_refused


@pytest.mark.parametrize("is_released", [False, True])
def test_S1_a_held_virtual_function_that_becomes_known_as_one_keeps_its_card_from_others(
    host: Host, is_released: bool
) -> None:
    with conductor.writing():
        (part,), (card,) = (make_handles(host, address, ("PCI", "0")) for address in ("0000:02:00.0", "0000:01:00.0"))
        if is_released:
            ReleasedHandle.objects.create(handle=part, instance=uuid4(), ask_at=datetime.now(UTC))
        else:
            hold(part)
        Device.objects.filter(pk=part.deployable.device.pk).update(physical_function="0000:01:00.0")
        with pytest.raises(IntegrityError), transaction.atomic():
            hold(card)


def learn_physical_function(*parts: AttachHandle) -> None:
    """Store that the devices of these handles are virtual functions of 0000:01:00.0, in one statement."""
    devices = [part.deployable.device.pk for part in parts]
    Device.objects.filter(pk__in=devices).update(physical_function="0000:01:00.0")


def hold_card_and_function(host: Host) -> tuple[AttachHandle, AttachHandle]:
    """Return the handles of a card and of its virtual function, which requests held before it was known as one."""
    with conductor.writing():
        (part,), (card,) = (make_handles(host, address, ("PCI", "0")) for address in ("0000:02:00.0", "0000:01:00.0"))
        for handle in (part, card):
            hold(handle)
            AcceleratorRequest.objects.filter(attach_handle=handle).update(instance_uuid=uuid4())
        Device.objects.update(state="ready")
        learn_physical_function(part)
    return part, card


def test_S1_a_held_card_and_its_held_virtual_function_are_quarantined_when_it_becomes_known_as_one(host: Host) -> None:
    part, card = hold_card_and_function(host)
    server = AcceleratorRequest.objects.get(attach_handle=part).instance_uuid
    for device in (part.deployable.device, card.deployable.device):
        device.refresh_from_db()
        assert device.state == "quarantined"
        assert "find out on the host which guest has the card" in device.state_reason
        assert f"(if no guest has one, server {server}), then release and enable" in device.state_reason
        event = Event.objects.get(action="device.quarantined", subject=device.uuid)
        assert event.changes["state"] == ["ready", "quarantined"] and event.reason == device.state_reason
    assert Intent.objects.get(kind="provider").key == str(host.uuid), "Placement is told"
    with conductor.writing():
        (again,) = make_handles(host, "0000:02:00.0", ("PCI", "0"))
        with pytest.raises(IntegrityError, match="request_one_per_function"), transaction.atomic():
            hold(again)


def test_S1_a_report_that_shows_such_a_conflict_is_merged_and_quarantines_both_devices(host: Host) -> None:
    card, part = make_card(1), make_card(2)
    report_cards(host, card, part)
    offer_all()
    for one in (card, part):
        assert bind_request(str(compute_provider_uuid(one.deployables[0].name))).state == "Bound"
    for _ in range(2):
        report_cards(host, card, replace(part, physical_function="0000:01:00.0"))
        devices = Device.objects.order_by("address").values_list("state", "state_by", "physical_function")
        assert list(devices) == [("quarantined", "upgrade", None), ("quarantined", "upgrade", "0000:01:00.0")]
    assert Event.objects.filter(action="device.quarantined").count() == 2
    assert set(AcceleratorRequest.objects.values_list("state", flat=True)) == {"Bound"}


def test_S1_a_missing_virtual_function_that_comes_back_with_such_a_conflict_is_quarantined(host: Host) -> None:
    card, part = make_card(1), make_card(2)
    report_cards(host, card, part)
    offer_all()
    for one in (card, part):
        assert bind_request(str(compute_provider_uuid(one.deployables[0].name))).state == "Bound"
    report_cards(host, card)
    report_cards(host, card, replace(part, physical_function="0000:01:00.0"))
    device = Device.objects.get(address="0000:02:00.0")
    assert (device.state, device.returns_to) == ("quarantined", None)
    events = Event.objects.filter(subject=device.uuid, changes__has_key="state").order_by("id")
    changes = [event.changes["state"] for event in events]
    assert changes[-2:] == [["missing", "ready"], ["ready", "quarantined"]], "in the order in which they were made"


def test_S1_a_card_that_is_given_up_after_such_a_conflict_is_not_given_beside_its_held_virtual_function(
    host: Host,
) -> None:
    _, card = hold_card_and_function(host)
    with conductor.writing():
        AcceleratorRequest.objects.filter(attach_handle=card).update(state="Unbound", attach_handle=None)
        with pytest.raises(IntegrityError, match="request_one_per_function"), transaction.atomic():
            hold(card)


def test_the_device_whose_virtual_function_is_given_up_after_such_a_conflict_can_be_bound_when_both_are_free(
    host: Host,
) -> None:
    part, card = hold_card_and_function(host)
    with conductor.writing():
        for handle in (part, card):
            AcceleratorRequest.objects.filter(attach_handle=handle).update(state="Unbound", attach_handle=None)
        hold(part)
        with pytest.raises(IntegrityError, match="request_one_per_function"), transaction.atomic():
            hold(card)


def test_old_claims_of_requests_whose_claims_are_corrected_together_are_not_in_the_way_of_new_ones(host: Host) -> None:
    with conductor.writing():
        whole, part = make_handles(host, "0000:02:00.0", ("PCI", "0"), ("PCI", "1"))
        hold(whole)
        hold(part)
        learn_physical_function(whole)
    assert set(Device.objects.values_list("state", flat=True)) == {"inactive"}
    assert not Event.objects.filter(action="device.quarantined").exists()
    with conductor.writing():
        (card,) = make_handles(host, "0000:01:00.0", ("PCI", "0"))
        with pytest.raises(IntegrityError, match="request_one_per_function"), transaction.atomic():
            hold(card)


def test_a_request_that_keeps_its_handle_is_not_refused_because_its_function_was_released_elsewhere(host: Host) -> None:
    with conductor.writing(), connection.cursor() as cursor:
        (one,), (two,) = (make_handles(host, "0000:01:00.0", ("PCI", "0")) for _ in range(2))
        hold(one)
        cursor.execute("SET LOCAL session_replication_role = replica")  # as the migration leaves two conflicting ones
        hold(two)
        cursor.execute("SET LOCAL session_replication_role = DEFAULT")
        AcceleratorRequest.objects.filter(attach_handle=one).update(state="Unbound", attach_handle=None)
        ReleasedHandle.objects.create(handle=one, instance=uuid4(), ask_at=datetime.now(UTC))
        assert AcceleratorRequest.objects.filter(attach_handle=two).update(state="Bound", attach_handle=two) == 1


def count_generation_writes(collection: generations.CollectionName, write: Callable[[], Any]) -> int:
    """Return how often `write` updates the generation of the collection."""
    before = generations.current_generation(collection)
    with conductor.writing():
        write()
    return generations.current_generation(collection) - before


@pytest.mark.parametrize("number", [1, 12])
@pytest.mark.parametrize("are_released", [False, True])
def test_the_deletion_of_many_handles_writes_a_constant_number_of_statements(
    host: Host, number: int, are_released: bool
) -> None:
    with conductor.writing():
        made = make_handles(host, "0000:01:00.0", *(("MDEV", str(mark)) for mark in range(number)))
        if are_released:
            for handle in made:
                ReleasedHandle.objects.create(handle=handle, instance=uuid4(), ask_at=datetime.now(UTC))

    def delete_handles() -> None:
        with connection.cursor() as cursor:
            cursor.execute("DELETE FROM accelerators_attachhandle")

    assert count_generation_writes("devices", delete_handles) == 1 + are_released
    assert not ReleasedHandle.objects.exists()


@pytest.mark.parametrize("number", [1, 12])
@pytest.mark.parametrize("are_held", [False, True])
def test_a_report_of_many_new_physical_functions_corrects_their_claims_in_a_constant_number_of_statements(
    host: Host, number: int, are_held: bool
) -> None:
    cards = [make_card(bus) for bus in range(2, 2 + number)]
    report_cards(host, *cards)
    if are_held:
        with conductor.writing():
            for handle in AttachHandle.objects.all():
                hold(handle)
    learned = [replace(card, physical_function="0000:01:00.0") for card in cards]
    requests_before = generations.current_generation("requests")
    # The merge itself writes devices once: the upsert counts as an INSERT and as an UPDATE.
    assert count_generation_writes("devices", lambda: report_cards(host, *learned)) == 2
    assert generations.current_generation("requests") - requests_before == 2 * are_held
    with conductor.writing():
        (card,) = make_handles(host, "0000:01:00.0", ("PCI", "0"))
        if are_held:
            with pytest.raises(IntegrityError, match="request_one_per_function"), transaction.atomic():
                hold(card)


@pytest.mark.django_db(transaction=True)
def test_a_report_does_not_wait_for_a_request_that_may_wait_for_the_reports_host(host: Host) -> None:
    report_cards(host, make_card(2))
    with conductor.writing():
        hold(AttachHandle.objects.get())
    causes: list[object] = []

    def report_function() -> None:
        try:
            report_cards(host, make_card(2, physical_function="0000:01:00.0"))
        except OperationalError as error:
            causes.append(error.__cause__)
        finally:
            connection.close()

    thread = threading.Thread(target=report_function, daemon=True)
    with conductor.writing():
        list(AcceleratorRequest.objects.select_for_update())  # as an unbind does, before it locks the host
        thread.start()
        thread.join(10)
        assert [type(cause) for cause in causes] == [LockNotAvailable]
        conductor.lock_devices(Device.objects.all())
    report_function()
    assert Device.objects.get().physical_function == "0000:01:00.0"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("to_delete", [False, True])
def test_a_row_that_refers_to_a_locked_device_waits_only_if_the_device_is_to_be_deleted(
    host: Host, to_delete: bool
) -> None:
    report_cards(host, make_card(1))
    results: list[str] = []

    def refer_to_device() -> None:
        try:
            with conductor.writing(), connection.cursor() as cursor:
                cursor.execute("SET LOCAL lock_timeout = '300ms'")
                cursor.execute("SELECT FROM accelerators_device FOR KEY SHARE")  # as a foreign key's check does
                results.append("inserted")
                cursor.execute("SELECT FROM accelerators_device FOR SHARE")  # as a bind does
                results.append("bound")
        except OperationalError:
            results.append("waited")
        finally:
            connection.close()

    thread = threading.Thread(target=refer_to_device, daemon=True)
    with conductor.writing():
        conductor.lock_devices(Device.objects.all(), to_delete=to_delete)
        thread.start()
        thread.join(10)
    assert results == (["waited"] if to_delete else ["inserted", "waited"])


LOCKING_WRITES: dict[str, Callable[[], object]] = {
    "a host becomes stale": lambda: conductor.set_hosts_stale_since([Host.objects.get().id], datetime.now(UTC)),
    "an agent connects": lambda: conductor.ensure_host("cmp1", "cmp1", "test"),
    "an attribute is set": lambda: attributes.set_operator_attribute(Deployable.objects.get().id, "k", "v", NOVA),
    "an image is stored": lambda: programming.store_programmed_image(
        Device.objects.get(), "", {"id": str(uuid4())}, ""
    ),
}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("name", LOCKING_WRITES)
def test_a_row_that_refers_to_a_host_or_deployable_can_be_inserted_while_another_writer_has_locked_it(
    host: Host, name: str
) -> None:
    report_cards(host, make_card(1))
    errors: list[object] = []

    def refer_to_rows() -> None:
        try:
            with transaction.atomic(), connection.cursor() as cursor:
                for table in ("host", "deployable"):  # as the checks of foreign keys do
                    cursor.execute(f"SELECT FROM accelerators_{table} FOR KEY SHARE NOWAIT")
        except OperationalError as error:
            errors.append(error.__cause__)
        finally:
            connection.close()

    thread = threading.Thread(target=refer_to_rows, daemon=True)
    with conductor.writing():
        LOCKING_WRITES[name]()
        thread.start()
        thread.join(10)
    assert not errors
