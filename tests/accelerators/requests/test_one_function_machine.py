"""Test with random reports and binds that one PCI function of a host is never in two live requests (promise S1).

Keys flip, cards move and are exchanged, two hosts name each other's providers, drivers are exchanged, agents restart,
operators offer whatever they may. The model knows only the cards; it looks at what the requests hold.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import NamedTuple
from uuid import uuid4

import pytest
from django.db import transaction
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from accelerators import conductor
from accelerators.devices import lifecycle
from accelerators.domain.caller import Caller
from accelerators.domain.device_actions import Action
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.provider_ids import compute_provider_uuid
from accelerators.inventory import merge
from accelerators.models import AcceleratorRequest, Deployable, Device, DeviceProfile
from accelerators.requests import binding, profiles
from accelerators.requests.binding import BindSpec
from drivers.inventory import AttachHandle, Attribute
from drivers.inventory import Deployable as Part
from drivers.inventory import Device as Card
from tests.support.long import few_or_many, scaled
from tests.support.reports import get_or_create_host, make_driver_report, make_report

NOVA = Caller("nova", "u", frozenset({"admin"}), "p1", service=True)
HOSTS = ("cmp1", "cmp2")
SLOTS = (1, 2)
DRIVERS = ("first_driver", "second_driver")


class Reading(NamedTuple):
    """How a driver reports the card in one slot."""

    driver: str
    is_serial_read: bool
    units: str
    """The attach handles: `whole` for the function itself, `vfs` for two virtual functions, `mdevs` for two mediated
    devices."""
    is_foreign: bool
    """Whether the provider is named after the other host."""


READINGS = st.builds(
    Reading,
    st.sampled_from(DRIVERS),
    st.booleans(),
    st.sampled_from(["whole", "vfs", "mdevs"]),
    st.sampled_from([False, False, False, True]),
)


def make_address(slot: int, function: int = 0) -> str:
    return f"0000:{slot:02x}:00.{function}"


def make_handles(slot: int, units: str) -> tuple[AttachHandle, ...]:
    place = {"bus": f"{slot:02x}", "device": "00", "domain": "0000"}
    if units == "mdevs":
        marks = (json.dumps(place | {"function": "0", "vgpu_mark": str(mark)}) for mark in (1, 2))
        return tuple(AttachHandle("MDEV", mark) for mark in marks)
    functions = ("0",) if units == "whole" else ("1", "2")
    return tuple(AttachHandle("PCI", json.dumps(place | {"function": function})) for function in functions)


class FunctionMachine(RuleBasedStateMachine):
    """Two hosts with two slots each. `serials` maps (host, slot) to its card's serial number, or to ''."""

    @initialize(serials=st.permutations("abcd"))
    def begin(self, serials: list[str]) -> None:
        self.before = transaction.savepoint()
        self.hosts = {name: get_or_create_host(name) for name in HOSTS}
        self.serials = dict(zip([(host, slot) for host in HOSTS for slot in SLOTS], serials, strict=True))
        self.epochs, self.seq = dict.fromkeys(HOSTS, 1), 0
        for host in HOSTS:
            self.report(host, {slot: [Reading("first_driver", True, "whole", False)] for slot in SLOTS})
        self.operators_offer_everything()

    def report(self, host: str, readings: dict[int, list[Reading]]) -> None:
        cards: dict[str, list[Card]] = {driver: [] for driver in DRIVERS}
        for slot, of_slot in readings.items():
            for reading in of_slot if self.serials[host, slot] else ():
                cards[reading.driver].append(self.make_card(host, slot, reading))
        self.seq += 1
        report = make_report(
            *(make_driver_report(*found, driver=driver) for driver, found in cards.items()),
            seq=self.seq,
            epoch=self.epochs[host],
        )
        merge.merge_reports({self.hosts[host].id: [report]})

    def make_card(self, host: str, slot: int, reading: Reading) -> Card:
        address, handles = make_address(slot), make_handles(slot, reading.units)
        node = HOSTS[1 - HOSTS.index(host)] if reading.is_foreign else host
        part = Part(f"{node}_{address}", len(handles), (Attribute("rc", "FPGA"),), handles)
        key = f"serial:1af4:{self.serials[host, slot]}:0" if reading.is_serial_read else f"pci:{address}"
        return Card(key, "FPGA", "1af4", "1044", address, deployables=(part,))

    @rule(host=st.sampled_from(HOSTS), one=st.lists(READINGS, max_size=2), two=st.lists(READINGS, max_size=2))
    def an_agent_reports(self, host: str, one: list[Reading], two: list[Reading]) -> None:
        self.report(host, dict(zip(SLOTS, (one, two), strict=True)))

    @rule(host=st.sampled_from(HOSTS), one=READINGS, two=READINGS)
    def an_agent_restarts_and_reports(self, host: str, one: Reading, two: Reading) -> None:
        self.epochs[host] += 1
        self.report(host, {1: [one], 2: [two]})

    @rule(host=st.sampled_from(HOSTS), slot=st.sampled_from(SLOTS), serial=st.sampled_from(["", "a", "b", "e"]))
    def a_card_is_exchanged(self, host: str, slot: int, serial: str) -> None:
        self.serials[host, slot] = serial
        self.report(host, {each: [Reading("first_driver", True, "whole", False)] for each in SLOTS})

    @rule(host=st.sampled_from(HOSTS), one=READINGS, two=READINGS)
    def the_cards_of_a_host_change_places(self, host: str, one: Reading, two: Reading) -> None:
        first, second = self.serials[host, 1], self.serials[host, 2]
        self.serials |= {(host, 1): second, (host, 2): first}
        self.report(host, {1: [one], 2: [two]})

    def operators_offer_everything(self) -> None:
        devices = list(Device.objects.values_list("uuid", flat=True))
        lifecycle.apply_action(Action.RELEASE, devices, NOVA)
        lifecycle.apply_action(Action.ENABLE, devices, NOVA)

    @rule(data=st.data(), host=st.sampled_from(HOSTS), count=st.sampled_from([1, 1, 2]), offer=st.booleans())
    def nova_binds(self, data: st.DataObject, host: str, count: int, offer: bool) -> None:
        """Bind new requests of one server; most to a provider of its host, some to one of the other host."""
        if offer:  # otherwise most devices would soon be quarantined
            self.operators_offer_everything()
        names = [f"{host}_{make_address(slot)}" for slot in SLOTS]
        name = data.draw(st.sampled_from([*names, *names, f"{HOSTS[1 - HOSTS.index(host)]}_{make_address(1)}"]))
        uuids = [uuid for _ in range(count) for uuid in binding.create_requests("p", NOVA)]
        provider, instance = str(compute_provider_uuid(name)), str(uuid4())
        try:
            binding.bind_requests([BindSpec(uuid, host, provider, instance) for uuid in uuids], NOVA)
        except RefusedError as refused:
            assert refused.reason in (RefusalReason.NONE_FREE, RefusalReason.NOT_FOUND)

    @rule(data=st.data())
    def a_server_is_deleted(self, data: st.DataObject) -> None:
        if live := list(AcceleratorRequest.objects.filter(attach_handle__isnull=False).order_by("id")):
            with suppress(RefusedError):
                binding.unbind_requests([str(data.draw(st.sampled_from(live)).uuid)], NOVA)

    @invariant()
    def S1_no_function_is_in_two_live_requests(self) -> None:
        held: dict[tuple[str, str], list[str]] = {}
        live = AcceleratorRequest.objects.filter(state__in=["BindStarted", "Bound"])
        for request in live.select_related("attach_handle__deployable__device__host"):
            handle = request.attach_handle
            assert handle is not None
            host = handle.deployable.device.host.name
            assert request.hostname == host, "a bind takes handles only of the host that it names"
            info = json.loads(handle.attach_info)
            card = f"{info['domain']}:{info['bus']}:{info['device']}"
            is_whole = handle.attach_type == "PCI" and info["function"] == "0"
            unit = "whole" if is_whole else f"{handle.attach_type} {info['function']} {info.get('vgpu_mark', '')}"
            held.setdefault((host, card), []).append(unit)
        for place, units in held.items():
            assert len(set(units)) == len(units), f"{place} is given twice: {units}"
            assert "whole" not in units or len(units) == 1, f"{place} is given whole and in parts: {units}"

    @invariant()
    def providers_belong_to_one_host(self) -> None:
        owners: dict[object, set[int]] = {}
        for provider, host in Deployable.objects.values_list("rp_uuid", "device__host"):
            owners.setdefault(provider, set()).add(host)
        owners.pop(None, None)
        assert all(len(hosts) == 1 for hosts in owners.values())

    def teardown(self) -> None:
        if hasattr(self, "before"):
            transaction.savepoint_rollback(self.before)


@few_or_many(6, scaled(30, 1000))
@pytest.mark.django_db
@pytest.mark.slow
def test_S1_no_sequence_of_reports_and_binds_gives_one_function_twice(examples: int) -> None:
    with conductor.writing():
        DeviceProfile.objects.create(name="p", groups=[{"resources:FPGA": "1"}])
    profiles.clear_profile_cache()
    checked = settings(
        max_examples=examples,
        stateful_step_count=scaled(30, 50),
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(FunctionMachine, settings=checked)
