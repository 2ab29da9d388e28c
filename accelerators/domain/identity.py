"""Decide which stored device a reported one is, and whether it may be offered. Pure: it reads and writes nothing.

The key of a device is its identity. A new key at a known PCI address is the same device, unless the hardware proves
otherwise: both keys have a serial number, and these differ. If the serial number cannot be read any more, the stored
key stays. At one address, and behind one attach handle, there is one device, whatever the drivers report. A held device
whose identity or address changes is quarantined, and so is a device that is now where another one is held: a person has
to look before it is offered again (promise S1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from drivers.inventory import Device, Fault

if TYPE_CHECKING:
    from accelerators.domain.diff import CombinedDriverReport, StoredDevice

SERIAL_PREFIX = "serial:"
MAX_FAULTS = 256
"""Maximum number of faults of one driver, as in `drivers.inventory.DriverReport`."""
REMEDY = "look at the hardware and at the servers that use it, then release the device"


@dataclass(frozen=True)
class IdentifiedDevice:
    """A reported device, with the key under which it is to be stored.

    `stored` is the device that it is, None if it is new. `doubt` is the reason why it must not be offered, or ''.
    """

    driver: str
    device: Device
    stored: StoredDevice | None
    doubt: str = ""


@dataclass(frozen=True)
class IdentifiedDevices:
    """The accepted devices of one host, and the drivers' reports, in which each of the others became a fault.

    `displaced` has the reason, by uuid, why a held device that was not reported must not be offered when it comes back.
    """

    accepted: Sequence[IdentifiedDevice]
    driver_reports: dict[str, CombinedDriverReport]
    displaced: Mapping[str, str]


def identify_devices(
    stored_devices: Sequence[StoredDevice], driver_reports: Mapping[str, CombinedDriverReport]
) -> IdentifiedDevices:
    """Match the reported devices of one host with its stored ones.

    A device whose driver or backend did not answer keeps its identity, address and handles: no other device gets them.
    If several devices claim one of them, it belongs to the one that had it and is still reported by the same driver,
    else to the one that is reported first.
    """
    stored_by_key = {device.key: device for device in stored_devices}
    reported = [(driver, device) for driver, report in driver_reports.items() for device in report.devices or ()]
    taken: dict[str, str] = {}
    for stored in stored_devices:
        report = driver_reports.get(str(stored.reported_by[0]))
        if report is not None and not report.is_complete_for(stored):
            places = _list_stored_places(stored) if stored.state != "missing" else []
            owner = f"{stored.reported_by[0]}, which does not answer"
            taken.update(dict.fromkeys([*places, _name_identity(stored.key)], owner))
    reported_keys = {device.key for _, device in reported}
    unmatched: dict[str, list[StoredDevice]] = {}
    for stored in stored_devices:
        if stored.address and stored.key not in reported_keys:
            unmatched.setdefault(stored.address, []).append(stored)
    accepted: list[IdentifiedDevice] = []
    faults: dict[str, list[Fault]] = {}
    reported.sort(key=lambda pair: _rank_claimant(pair[0], pair[1], stored_by_key.get(pair[1].key)))
    for driver, device in reported:
        places = [*_list_places(device), _name_identity(device.key)]
        if place := next((place for place in places if place in taken), ""):
            problem = f"{place} already belongs to a device of {taken[place]}"
            faults.setdefault(driver, []).append(Fault(device.address or device.key, problem))
            continue
        taken.update(dict.fromkeys(places, driver))
        same = stored_by_key.get(device.key)
        same = same or _choose_same_device(driver, device, unmatched.get(device.address or "", ()))
        accepted.append(IdentifiedDevice(driver, device, same))
    return _judge_held_devices(accepted, stored_devices, _leave_out_others(driver_reports, accepted, faults))


def _rank_claimant(driver: str, device: Device, stored: StoredDevice | None) -> int:
    """Return the rank of a reported device among those that claim the same: the lowest one gets it."""
    if stored is None or stored.reported_by != (driver, device.backend) or stored.state == "missing":
        return 2
    return 0 if stored.held_handles else 1


def _choose_same_device(driver: str, device: Device, at_address: Iterable[StoredDevice]) -> StoredDevice | None:
    """Return which of the stored devices at its address a device with an unknown key must be, None if it is new."""
    candidates = [
        stored
        for stored in at_address
        if not (stored.key.startswith(SERIAL_PREFIX) and device.key.startswith(SERIAL_PREFIX))
    ]
    return min(
        candidates,
        key=lambda stored: (stored.state == "missing", not stored.held_handles, stored.reported_by[0] != driver),
        default=None,
    )


def _leave_out_others(
    driver_reports: Mapping[str, CombinedDriverReport],
    accepted: Sequence[IdentifiedDevice],
    faults: Mapping[str, Sequence[Fault]],
) -> dict[str, CombinedDriverReport]:
    """Return the reports with only the accepted devices; the faults of the others are added."""
    devices: dict[str, list[Device]] = {}
    for one in accepted:
        devices.setdefault(one.driver, []).append(one.device)
    return {
        driver: report
        if report.devices is None
        else replace(
            report,
            devices=tuple(devices.get(driver, ())),
            faults=(*report.faults, *faults.get(driver, ()))[:MAX_FAULTS],
        )
        for driver, report in driver_reports.items()
    }


def _judge_held_devices(
    accepted: Sequence[IdentifiedDevice],
    stored_devices: Sequence[StoredDevice],
    driver_reports: dict[str, CombinedDriverReport],
) -> IdentifiedDevices:
    """Add the doubts about devices whose identity or place is that of a held device, and settle the keys to store."""
    held_places: dict[str, StoredDevice] = {}
    for stored in stored_devices:
        if stored.held_handles:
            places = [*stored.held_handles, *filter(None, [stored.address])]
            held_places.update(dict.fromkeys(places, stored))
    judged: list[IdentifiedDevice] = []
    displaced: dict[str, str] = {}
    for one in accepted:
        doubt = _describe_change(one.stored, one.device) if one.stored and one.stored.held_handles else ""
        for place in _list_places(one.device) if held_places else ():
            holder = held_places.get(place)
            if holder is not None and (one.stored is None or holder.uuid != one.stored.uuid):
                doubt = f"a request holds {place} through device {holder.uuid} ({holder.key}): {REMEDY}"
                displaced[holder.uuid] = f"a request holds it, and {one.device.key} is at its place now: {REMEDY}"
        judged.append(IdentifiedDevice(one.driver, _with_key_to_store(one.device, one.stored), one.stored, doubt))
    for one in accepted:
        if one.stored:
            displaced.pop(one.stored.uuid, None)
    return IdentifiedDevices(judged, driver_reports, displaced)


def _describe_change(stored: StoredDevice, device: Device) -> str:
    """Return how the identity or the address of a held device has changed, '' if neither has."""
    if stored.key != device.key:
        return f"a request holds it, and its identity changed from {stored.key} to {device.key}: {REMEDY}"
    if stored.address and stored.address != device.address:
        return f"a request holds it, and its address changed from {stored.address} to {device.address}: {REMEDY}"
    return ""


def _with_key_to_store(device: Device, stored: StoredDevice | None) -> Device:
    """Return the device with the stored key if that has a serial number and the reported one is only the address."""
    if stored and stored.key.startswith(SERIAL_PREFIX) and device.key == f"pci:{device.address}":
        return msgspec.structs.replace(device, key=stored.key)
    return device


def _list_places(device: Device) -> list[str]:
    """Return what only one device of a host can have: its address and its attach handles."""
    handles = [
        _name_handle(handle.attach_type, handle.info, device.address)
        for deployable in device.deployables
        for handle in deployable.handles
    ]
    return [device.address, *handles] if device.address else handles


def _list_stored_places(stored: StoredDevice) -> list[str]:
    """Return the same for a stored device; handles that are missing do not count."""
    handles = [
        _name_handle(handle.attach_type, handle.info, stored.address)
        for deployable in stored.deployables
        for handle in deployable.handles
        if not (handle.missing or deployable.missing)
    ]
    return [stored.address, *handles] if stored.address else handles


def _name_handle(attach_type: str, info: str, address: str | None) -> str:
    """Return the name of a handle that is unique on its host. The text of a device node is unique on its card."""
    return f"{address or ''} {info}" if attach_type == "DEV" else info


def _name_identity(key: str) -> str:
    """Return the name under which the identity `key` is compared with addresses and handles."""
    return f"identity {key}"
