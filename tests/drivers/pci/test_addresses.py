"""Tests of PCI addresses that are not written as sysfs writes them, for example in handles of a third-party driver."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drivers.errors import Busy
from drivers.inventory import AttachHandle, Deployable, Device, DriverReport
from drivers.pci.addresses import normalize_address, read_handle_address
from drivers.pci.functions import PciDriver, confirm_no_guest_uses
from drivers.pci.ownership import resolve_conflicts
from tests.support.modelmachine import ModelMachine

CARD = "0000:3b:0a.0"
SPELLINGS = [
    {"domain": "0000", "bus": "3B", "device": "0A", "function": "0"},
    {"domain": "0x0000", "bus": "0x3b", "device": "0x0a", "function": "0x0"},
    {"domain": "0", "bus": "3b", "device": "a", "function": "00"},
    {"domain": "00000000", "bus": "3b", "device": "0a", "function": "0"},
]


@pytest.fixture
def host(tmp_path: Path) -> ModelMachine:
    """Return a host with a function in the IOMMU group 7 that is bound to vfio-pci."""
    machine = ModelMachine(tmp_path)
    machine.pci(CARD, "0x15b3", "0x101e", "0x020000", group=7)
    machine.write(f"/sys/bus/pci/devices/{CARD}/driver_override", "vfio-pci")
    machine.write("/sys/bus/pci/drivers/vfio-pci/bind", CARD)
    return machine


@pytest.mark.parametrize("info", SPELLINGS)
def test_S1_a_guest_is_seen_however_the_handle_spells_the_address(host: ModelMachine, info: dict[str, str]) -> None:
    handle = AttachHandle("PCI", json.dumps(info))
    assert confirm_no_guest_uses(host.machine, handle) == f"no guest uses {CARD}"
    with host.holding("/dev/vfio/7"), pytest.raises(Busy, match=f"a guest still uses {CARD}"):
        confirm_no_guest_uses(host.machine, handle)


@pytest.mark.parametrize("info", SPELLINGS)
def test_S1_two_drivers_do_not_offer_one_function_however_its_handles_spell_the_address(info: dict[str, str]) -> None:
    handle = AttachHandle("PCI", json.dumps(info))
    device = Device("strange", "NIC", "v", "m", deployables=(Deployable("vf", 1, (), (handle,)),))
    first = DriverReport("pci_driver", devices=(Device(f"pci:{CARD}", "NIC", "v", "m", CARD),))
    _, second = resolve_conflicts([first, DriverReport("strange_driver", devices=(device,))])
    assert not second.devices and f"{CARD} already belongs to pci_driver" in second.faults[0].reason


def test_two_handles_of_a_device_are_the_same_if_they_spell_one_address_in_two_ways() -> None:
    handles = tuple(AttachHandle("PCI", json.dumps(info)) for info in SPELLINGS[:2])
    device = Device("strange", "NIC", "v", "m", deployables=(Deployable("vf", 2, (), handles),))
    (report,) = resolve_conflicts([DriverReport("strange_driver", devices=(device,))])
    assert not report.devices and "two attach handles of vf are the same" in report.faults[0].reason


def test_a_pci_handle_without_an_address_is_a_fault_because_no_host_could_confirm_that_it_is_unused() -> None:
    part = Deployable("vf", 1, (), (AttachHandle("PCI", '{"domain": "0000"}'),))
    device = Device("strange", "NIC", "v", "m", deployables=(part,))
    (report,) = resolve_conflicts([DriverReport("strange_driver", devices=(device,))])
    assert not report.devices and "a PCI handle of vf names no PCI address" in report.faults[0].reason


@pytest.mark.parametrize(
    "text",
    ["", "3b:00.0", "0000:3b:00.8", "0000:3b:20.0", "0000:3b:00", "0000:g0:00.0", "0000:3b:00.0 "],
)
def test_what_is_no_full_pci_address_is_none(text: str) -> None:
    assert normalize_address(text) == ""


def test_the_address_of_a_controller_with_a_long_domain_stays_as_it_is() -> None:
    assert normalize_address("10000:e1:00.0") == "10000:e1:00.0"


def test_an_operator_may_write_the_address_of_a_permitted_card_in_capital_letters(host: ModelMachine) -> None:
    host.load("ice", "8086:1593")
    path = host.pci("0000:5e:00.0", "0x8086", "0x1593", "0x020000", group=9, vfs=4)
    host.net("ens1", path)
    host.default_route("ens1")
    for name, is_offered in (("0000:5E:00.0", True), ("0000:5F:00.0", False)):
        rule = {"vendor": "8086", "vfs": 2, "vfs_beside_host": [name]}
        assert bool(PciDriver().discover(host.machine, {"rules": [rule]}).devices) is is_offered


@pytest.mark.parametrize("bus", ["59", "true", "null", "[]"])
def test_a_handle_whose_address_is_not_of_strings_names_no_function_as_in_the_database(bus: str) -> None:
    handle = f'{{"domain": "0000", "bus": {bus}, "device": "00", "function": "0"}}'
    assert read_handle_address(handle) == ""
    assert read_handle_address(handle.replace(bus, f'"{59}"')) == "0000:59:00.0"
