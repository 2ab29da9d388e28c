"""How a rule says that functions are offered in Placement: resource class, traits and physical network."""

from __future__ import annotations

import json

import msgspec
import pytest

from drivers.base import Settings
from drivers.errors import Invalid
from drivers.generic import GenericDriver
from drivers.inventory import Device
from drivers.pci.functions import PciDriver
from drivers.pci.offer import MAX_TRAITS
from tests.drivers.pci.test_pci import make_config_space
from tests.drivers.tree import FakeHost

T4, OTHER = "0000:3b:00.0", "0000:5e:00.0"
SERIAL = b"\x00\x80\xee\x00\x00\x00\x41\x80"


def discover(host: FakeHost, **rule: object) -> dict[str, Device]:
    """Return the devices of one rule, by address."""
    found = PciDriver().discover(host.machine, {"rules": [{"vendor": "10de", **rule}]})
    assert found.faults == ()
    return {device.address or "": device for device in found.devices}


def read_attributes(device: Device) -> tuple[str, set[str]]:
    """Return the resource class and the traits of a device's only deployable."""
    (part,) = device.deployables
    values = {one.key: one.value for one in part.attributes}
    return values.pop("rc"), set(values.values())


def test_a_rule_sets_resource_class_traits_and_physical_network(host: FakeHost) -> None:
    host.pci(T4, "0x10de", "0x1eb8", "0x030200")
    offer = {"resource_class": "PGPU", "traits": ["HW_GPU_API_VULKAN", "CUSTOM_RACK_7"], "physical_network": "net1"}
    device = discover(host, offer=offer)[T4]
    usual_traits = {"OWNER_CYBORG", "CUSTOM_PCI_NVIDIA", "CUSTOM_PCI_PRODUCT_ID_1EB8"}
    assert read_attributes(device) == ("PGPU", usual_traits | {"HW_GPU_API_VULKAN", "CUSTOM_RACK_7"})
    (handle,) = device.deployables[0].handles
    assert json.loads(handle.info)["physical_network"] == "net1"


@pytest.mark.parametrize(
    "named", [{"address": T4}, {"serial": "00-80-ee-00-00-00-41-80"}, {"serial": "0080EE0000004180"}]
)
def test_an_entry_for_one_device_takes_precedence_over_the_offer_of_the_rule(
    host: FakeHost, named: dict[str, str]
) -> None:
    host.file(host.pci(T4, "0x10de", "0x1eb8", "0x030200") / "config", make_config_space(SERIAL))
    host.pci(OTHER, "0x10de", "0x1eb8", "0x030200")
    exception = {**named, "resource_class": "CUSTOM_TEST_GPU", "traits": ["CUSTOM_ON_LOAN"]}
    devices = discover(host, offer={"resource_class": "PGPU", "traits": ["CUSTOM_RACK_7"]}, devices=[exception])
    assert read_attributes(devices[T4])[0] == "CUSTOM_TEST_GPU"
    assert {"CUSTOM_RACK_7", "CUSTOM_ON_LOAN"} <= read_attributes(devices[T4])[1]
    assert read_attributes(devices[OTHER])[0] == "PGPU"
    assert "CUSTOM_ON_LOAN" not in read_attributes(devices[OTHER])[1]


def test_the_greatest_number_of_traits_fits_into_a_report(host: FakeHost) -> None:
    host.pci(T4, "0x10de", "0x1eb8", "0x030200")
    offer, exception = ([f"CUSTOM_{letter}{number}" for number in range(MAX_TRAITS)] for letter in "AB")
    devices = discover(host, offer={"traits": offer}, devices=[{"address": T4, "traits": exception}])
    assert msgspec.convert(msgspec.to_builtins(devices[T4]), Device) == devices[T4]
    assert {*offer, *exception} <= read_attributes(devices[T4])[1]


def test_an_entry_with_a_serial_number_does_not_apply_to_a_card_without_one(host: FakeHost) -> None:
    host.pci(T4, "0x10de", "0x1eb8", "0x030200")  # it has no serial number
    devices = discover(host, devices=[{"serial": "00-80-ee-00-00-00-41-80", "resource_class": "PGPU"}])
    assert read_attributes(devices[T4])[0] == "CUSTOM_PCI"


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"offer": {"resource_class": "PGPUS"}}, "PGPUS is no standard resource class"),
        ({"offer": {"traits": ["CUSTOM_A", "HW_GPU_API_VULCAN"]}}, "HW_GPU_API_VULCAN is no standard trait"),
        ({"offer": {"traits": ["OWNER_NOVA"]}}, "OWNER_NOVA is for providers of Nova itself"),
        ({"offer": {"traits": ["custom_a"]}}, "traits"),
        ({"offer": {"resource_clas": "PGPU"}}, "resource_clas"),
        ({"offer": {"physical_network": "a b"}}, "physical_network"),
        ({"devices": [{"resource_class": "PGPU"}]}, "entry 1 of `devices` needs either `address` or `serial`"),
        ({"devices": [{"address": T4, "serial": "00" * 8}]}, "entry 1 of `devices` needs either"),
        ({"devices": [{"address": T4, "traits": ["HW_NO"]}]}, "entry 1 of `devices`: HW_NO is no standard trait"),
        ({"devices": [{"serial": "12"}]}, "serial"),
    ],
)
@pytest.mark.parametrize("is_generic", [False, True])
def test_an_unusable_rule_is_refused_before_anything_is_offered(
    host: FakeHost, keys: Settings, reason: str, is_generic: bool
) -> None:
    host.pci(T4, "0x10de", "0x1eb8", "0x030200")
    good, bad = {"vendor": "10de"}, {"vendor": "8086"}
    with pytest.raises(Invalid) as refusal:
        if is_generic:
            sections = {"one": {"kind": "pci", "match": [good]}, "two": {"kind": "pci", "match": [bad], **keys}}
            GenericDriver().discover(host.machine, {"backends": sections})
        else:
            PciDriver().discover(host.machine, {"rules": [good, {**bad, **keys}]})
    assert reason in str(refusal.value)
    assert is_generic or "rule" in str(refusal.value)
    assert not is_generic or "backend two" in str(refusal.value)


def test_the_generic_driver_offers_functions_and_mediated_devices_as_their_section_says(host: FakeHost) -> None:
    path = host.pci(T4, "0x10de", "0x1eb8", "0x030200")
    host.file(path / "mdev_supported_types/nvidia-223/available_instances", "2\n")
    match, offer = [{"vendor": "10de"}], {"resource_class": "CUSTOM_MINE", "traits": ["CUSTOM_FAST"]}
    for kind, desired in (("pci", {}), ("mdev", {"mdev_type": "nvidia-223"})):
        section = {"kind": kind, "match": match, "offer": offer, "desired": desired}
        (device,) = GenericDriver().discover(host.machine, {"backends": {"one": section}}).devices
        resource_class, traits = read_attributes(device)
        assert resource_class == "CUSTOM_MINE"
        assert "CUSTOM_FAST" in traits


def test_without_a_chosen_class_mediated_devices_of_a_gpu_are_vgpus(host: FakeHost) -> None:
    path = host.pci(T4, "0x10de", "0x1eb8", "0x030200")
    host.file(path / "mdev_supported_types/nvidia-223/available_instances", "2\n")
    section = {"kind": "mdev", "match": [{"vendor": "10de"}], "desired": {"mdev_type": "nvidia-223"}}
    (device,) = GenericDriver().discover(host.machine, {"backends": {"one": section}}).devices
    assert read_attributes(device)[0] == "VGPU"
