"""Settle the keys of PCI devices by what the agent remembers of each address. Pure: it reads nothing from the host.

A key with a serial number comes from configuration space, which cannot be read while a card is off the bus or the agent
is not root, and some cards of one model have the same number (FPGA cores with its default). So a serial number that was
read once at an address stays the identity of the device there, until another one is read at that address; and of
several functions with one serial number, only the one that had it before keeps it: the others have their address as
identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct

from drivers.inventory import Device, DriverReport

SERIAL_PREFIX = "serial:"


class RememberedIdentity(Struct, frozen=True):
    """The identity of the device at a PCI address.

    `key` is its key, and `read` the key with the serial number that was read there; they differ if another function has
    the same number. `hardware` is vendor and model: the serial number of one model says nothing about another.
    """

    key: str
    read: str
    hardware: str


Identities = Mapping[str, RememberedIdentity]
"""PCI address → the identity of the device there."""


def settle_keys(
    reports: Sequence[DriverReport], remembered: Identities
) -> tuple[list[DriverReport], dict[str, RememberedIdentity]]:
    """Return the reports with the keys that their devices keep, and what to remember from now on.

    Only keys with a serial number or a PCI address change; those that a driver chose itself stay.
    """
    keys = {
        (device.address, device.key): _choose_key(device, remembered.get(device.address))
        for device in _list_devices(reports)
        if device.address
    }
    addresses_by_key: dict[str, set[str]] = {}
    for (address, _), key in keys.items():
        addresses_by_key.setdefault(key, set()).add(address)
    for place, key in keys.items():
        if len(addresses_by_key[key]) > 1 and key.startswith(SERIAL_PREFIX):
            before = [
                each for each in sorted(addresses_by_key[key]) if each in remembered and remembered[each].key == key
            ]
            if place[0] not in before[:1]:
                keys[place] = f"pci:{place[0]}"
    settled = [
        msgspec.structs.replace(
            report,
            devices=tuple(
                msgspec.structs.replace(device, key=keys[device.address, device.key]) if device.address else device
                for device in report.devices
            ),
        )
        for report in reports
    ]
    return settled, _remember(reports, keys, remembered)


def _list_devices(reports: Iterable[DriverReport]) -> list[Device]:
    """Return the devices of all drivers."""
    return [device for report in reports for device in report.devices]


def _choose_key(device: Device, known: RememberedIdentity | None) -> str:
    """Return the remembered key if the device must be the same one, else its own."""
    if known is None:
        return device.key
    is_same_number = device.key == known.read
    is_unreadable = device.key == f"pci:{device.address}" and known.hardware == _name_hardware(device)
    return known.key if is_same_number or is_unreadable else device.key


def _remember(
    reports: Iterable[DriverReport], keys: Mapping[tuple[str, str], str], remembered: Identities
) -> dict[str, RememberedIdentity]:
    """Return `remembered` with the serial numbers that were read now; a key that is elsewhere now is forgotten."""
    read_now = {
        device.address: RememberedIdentity(keys[device.address, device.key], device.key, _name_hardware(device))
        for device in _list_devices(reports)
        if device.address and device.key.startswith(SERIAL_PREFIX)
    }
    moved_keys = {identity.key for identity in read_now.values()}
    kept = {
        address: identity
        for address, identity in remembered.items()
        if address not in read_now and identity.key not in moved_keys
    }
    return kept | read_now


def _name_hardware(device: Device) -> str:
    """Return vendor and model of a device as one text."""
    return f"{device.vendor}:{device.model}"
