"""How PCI functions are offered in Placement: the resource class, traits and physical network that an operator chooses.

Standard names are those of the libraries os-resource-classes and os-traits, which Placement itself accepts; every other
name begins with `CUSTOM_`. The libraries are imported only when a name is to be looked up in them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta, Struct

from drivers.inventory import Attribute, PciAddress, Word

CUSTOM = "CUSTOM_"
OWNER_TRAIT, NOVA_OWNER_TRAIT = "OWNER_CYBORG", "OWNER_NOVA"
MAX_TRAITS, MAX_DEVICES = 24, 256
"""Maximum traits of an offer and of an exception, which fit together into the attributes of a deployable, and maximum
exceptions of a rule."""

PlacementName = Annotated[str, Meta(pattern=r"^[A-Z0-9_]+$", min_length=1, max_length=255)]
"""A resource class or a trait (placement/schemas/{resource_class,trait}.py)."""
SerialNumber = Annotated[str, Meta(pattern=r"^[0-9A-Fa-f]{2}([-:]?[0-9A-Fa-f]{2}){7}$")]
"""A PCIe Device Serial Number: eight bytes in hex, with or without separators."""


class Offer(Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of `offer` in a rule; what is not set is chosen by the driver.

    `traits` are added to those of the driver. `physical_network` is the network that a port needs whose request Neutron
    makes; it becomes part of the attach handles, because Nova reads it there.
    """

    resource_class: PlacementName | None = None
    traits: Annotated[list[PlacementName], Meta(max_length=MAX_TRAITS)] = []
    physical_network: Word | None = None


class DeviceOffer(Offer, frozen=True, forbid_unknown_fields=True):
    """The same keys for one device of the rule, which `address` or `serial` names."""

    address: PciAddress | None = None
    serial: SerialNumber | None = None


def describe_problem(offer: Offer, devices: Iterable[DeviceOffer]) -> str:
    """Return what is wrong with the keys of a rule, as a sentence for the operator; '' if nothing is."""
    places: list[tuple[str, Offer]] = [("offer", offer)]
    for number, device in enumerate(devices, 1):
        if (device.address is None) == (device.serial is None):
            return f"entry {number} of `devices` needs either `address` or `serial`"
        places.append((f"entry {number} of `devices`", device))
    for place, each in places:
        if problem := _describe_unknown_name(each):
            return f"{place}: {problem}"
    return ""


def _describe_unknown_name(offer: Offer) -> str:
    """Return which name Placement would refuse, or which one is not the operator's to set; '' if there is none."""
    if NOVA_OWNER_TRAIT in offer.traits:
        return f"the trait {NOVA_OWNER_TRAIT} is for providers of Nova itself"
    if _is_unknown_class(offer.resource_class):
        return (
            f"{offer.resource_class} is no standard resource class: use one, such as PGPU or VGPU, or a name that"
            f" begins with {CUSTOM}"
        )
    if unknown := sorted(set(filter(_is_custom_missing, offer.traits)) - _get_standard_traits(offer.traits)):
        return f"{unknown[0]} is no standard trait: use one, such as HW_NIC_SRIOV, or a name that begins with {CUSTOM}"
    return ""


def _is_custom_missing(name: str) -> bool:
    """Return whether the name can only be a standard one."""
    return not name.startswith(CUSTOM)


def _is_unknown_class(name: str | None) -> bool:
    """Return whether Placement does not know this resource class."""
    if name is None or name.startswith(CUSTOM):
        return False
    from os_resource_classes import STANDARDS

    return name not in STANDARDS


def _get_standard_traits(names: Iterable[str]) -> frozenset[str]:
    """Return all standard traits; none if no name needs to be looked up in them."""
    if not any(map(_is_custom_missing, names)):
        return frozenset()
    import os_traits

    return frozenset(os_traits.get_traits())


def merge_offers(offer: Offer, devices: Iterable[DeviceOffer], address: str, serial: str) -> Offer:
    """Return how the device at `address` with this serial number ('' for none) is offered.

    The first entry of `devices` that names it takes precedence over `offer`, key by key; its traits are added.
    """
    for device in devices:
        if device.address == address or (serial and _normalize_serial(device.serial) == serial):
            return Offer(
                device.resource_class or offer.resource_class,
                [*offer.traits, *device.traits],
                device.physical_network or offer.physical_network,
            )
    return offer


def _normalize_serial(serial: str | None) -> str:
    """Return a serial number as 16 hex digits in lower case, without separators."""
    return (serial or "").lower().replace("-", "").replace(":", "")


def make_attributes(resource_class: str, traits: Iterable[str]) -> tuple[Attribute, ...]:
    """Return the attributes of a deployable with this resource class and these traits, without repeated traits."""
    numbered = enumerate(dict.fromkeys(traits))
    return (Attribute("rc", resource_class), *(Attribute(f"trait{number}", trait) for number, trait in numbered))
