"""Match each reported device with a stored device, and decide whether it may be offered. Pure: it reads and writes
nothing.

The key of a device is its identity. If the key of a reported device is unknown, but the device is at the PCI address of
a stored device whose key was not reported, both are the same device, unless both keys have a serial number, or vendor
or model differ. If the serial number cannot be read any more, so that the reported key is only the address, the stored
key stays.

Only one device can be at an address or behind an attach handle, whatever the drivers report. A device is held if a
request holds one of its handles, or if a released handle waits until its host has confirmed that no guest uses it. A
held device whose reported key or address changes is quarantined, also if only its serial number cannot be read any
more. So is a device that is reported at the address of another held device, or with a handle that is held through
another device. An operator has to look at a quarantined device before it is offered again (promise S1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from drivers.inventory import MAX_FAULTS, Device, Fault

if TYPE_CHECKING:
    from accelerators.domain.diff import CombinedDriverReport, StoredDevice

SERIAL_PREFIX = "serial:"
HOLDER = "a request or a released unit"
"""The subject of every reason that says that a device is held. A report does not tell which of the two holds it."""
REMEDY = "look at the hardware and at the servers that use it, then release the device"
"""The end of every reason for not offering a device: what the operator has to do."""
SILENT_OWNER = ", which does not answer; when that driver answers again, this is decided anew"
"""The end of the name of an owner whose driver or backend did not answer."""


@dataclass(frozen=True)
class IdentifiedDevice:
    """A reported device, with the key under which it is to be stored.

    `driver` is the name of the driver that reported it. `stored` is the stored device that it was matched with, None if
    the device is new. `doubt` is the reason why the device must not be offered, '' if there is none. `doubt_if_held` is
    the reason if the device is not held now, but is bound before the change is written.
    """

    driver: str
    device: Device
    stored: StoredDevice | None
    doubt: str = ""
    doubt_if_held: str = ""


@dataclass(frozen=True)
class IdentifiedDevices:
    """The accepted devices of one host, and its drivers' reports, in which each device that was not accepted became a
    fault.

    `driver_reports` maps the name of a driver to its report. `displaced` maps the uuid of a held stored device that was
    not reported, and whose address or handle a reported device has now, to the reason why the stored device must not be
    offered when it is reported again.
    """

    accepted: Sequence[IdentifiedDevice]
    driver_reports: dict[str, CombinedDriverReport]
    displaced: Mapping[str, str]


def identify_devices(
    stored_devices: Sequence[StoredDevice], driver_reports: Mapping[str, CombinedDriverReport]
) -> IdentifiedDevices:
    """Match the reported devices of one host with its stored devices. `driver_reports` maps a driver's name to its
    report.

    A key, an address and an attach handle each belong to one device only. A device of `stored_devices` whose driver or
    backend did not answer keeps all three, so no reported device can have one of them; if it is missing, it keeps only
    its key. If several reported devices have the same key, address or handle, the one with the lowest rank
    (`_rank_claimant`) is accepted; of equal ranks, the one that is reported first. Each of the others becomes a fault.
    """
    stored_by_key = {device.key: device for device in stored_devices}
    reported = [(driver, device) for driver, report in driver_reports.items() for device in report.devices or ()]
    taken: dict[str, str] = {}
    for stored in stored_devices:
        report = driver_reports.get(stored.driver)
        if report is not None and not report.is_complete_for(stored):
            places = _list_stored_places(stored) if stored.state != "missing" else []
            owner = f"{stored.driver}{SILENT_OWNER}"
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
            problem = f"{place} already belongs to a device of {taken[place]}{_advise_on_owner(taken[place], driver)}"
            faults.setdefault(driver, []).append(Fault(device.address or device.key, problem))
            continue
        taken.update(dict.fromkeys(places, driver))
        same = stored_by_key.get(device.key)
        same = same or _choose_same_device(driver, device, unmatched.get(device.address or "", ()))
        accepted.append(IdentifiedDevice(driver, device, same))
    return _judge_held_devices(accepted, stored_devices, _leave_out_others(driver_reports, accepted, faults))


def _advise_on_owner(owner: str, driver: str) -> str:
    """Return the end of a fault of `driver` about something that already belongs to a device of `owner`.

    It says what to do; '' if `owner` says it itself (SILENT_OWNER).
    """
    if owner.endswith(SILENT_OWNER):
        return ""
    if owner == driver:
        return "; it is reported twice: remove it from the rules of one backend, or correct the driver"
    return "; one device has one driver: remove it from the rules of one of the two"


def _rank_claimant(driver: str, device: Device, stored: StoredDevice | None) -> int:
    """Return the rank of a reported device among those with the same key, address or handle: the lowest rank is
    accepted.

    `stored` is the stored device with the key of `device`, None if there is none. The rank is 0 if `stored` is held, 1
    if it is not held, and 2 if there is none, if it is missing, or if another driver or backend reported it.
    """
    if stored is None or (stored.driver, stored.backend) != (driver, device.backend) or stored.state == "missing":
        return 2
    return 0 if stored.held_handles else 1


def _choose_same_device(driver: str, device: Device, at_address: Iterable[StoredDevice]) -> StoredDevice | None:
    """Return which of the stored devices at its address the reported device, whose key is unknown, must be.

    Stored devices are left out if `may_be_same_card` denies it. Of several, one that is not missing is preferred,
    then a held one, then one that the same driver reported. Returns None if the reported device is new.
    """
    candidates = [
        stored for stored in at_address if may_be_same_card(stored.key, (stored.vendor, stored.model), device)
    ]
    return min(
        candidates,
        key=lambda stored: (stored.state == "missing", not stored.held_handles, stored.driver != driver),
        default=None,
    )


def may_be_same_card(key: str, vendor_and_model: tuple[str, str], device: Device) -> bool:
    """Return whether `device`, which was reported under another key at the address of a known device, may be that one.

    `key` and `vendor_and_model` are the known device's. It is another card if both keys have a serial number, or if
    vendor or model differ.
    """
    both_have_serials = key.startswith(SERIAL_PREFIX) and device.key.startswith(SERIAL_PREFIX)
    return not both_have_serials and vendor_and_model == (device.vendor, device.model)


def _leave_out_others(
    driver_reports: Mapping[str, CombinedDriverReport],
    accepted: Sequence[IdentifiedDevice],
    faults: Mapping[str, Sequence[Fault]],
) -> dict[str, CombinedDriverReport]:
    """Return the reports with only the accepted devices, and with `faults` (by driver name) added, up to MAX_FAULTS.

    The report of a driver that did not answer is returned unchanged.
    """
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
    """Return the accepted devices with the keys under which they are to be stored, and with their doubts.

    A device gets a doubt if it is held and its reported key or its address differs from the stored one, if a held
    handle is reported under a new name of its deployable, or if its address or one of its handles belongs to another
    device that is held. `driver_reports` is passed on unchanged.
    """
    held_places: dict[str, StoredDevice] = {}
    for stored in stored_devices:
        if stored.held_handles:
            places = [*stored.held_handles, *filter(None, [stored.address])]
            held_places.update(dict.fromkeys(places, stored))
    judged: list[IdentifiedDevice] = []
    displaced: dict[str, str] = {}
    for one in accepted:
        change, doubt = _describe_change(one.stored, one.device) if one.stored else "", ""
        if one.stored and one.stored.held_handles:
            doubt = change or _describe_new_name(one.stored, one.device)
        for place in _list_places(one.device) if held_places else ():
            holder = held_places.get(place)
            if holder is not None and holder is not one.stored:
                doubt = (
                    f"{HOLDER} holds {place} through device {holder.uuid} ({holder.key}): {REMEDY}; each report "
                    "quarantines it again until nothing holds that"
                )
                displaced[holder.uuid] = f"{HOLDER} holds it, and {one.device.key} is at its place now: {REMEDY}"
        to_store = _with_key_to_store(one.device, one.stored)
        judged.append(IdentifiedDevice(one.driver, to_store, one.stored, doubt, "" if doubt else change))
    for one in accepted:
        if one.stored:
            displaced.pop(one.stored.uuid, None)
    return IdentifiedDevices(judged, driver_reports, displaced)


def _describe_change(stored: StoredDevice, device: Device) -> str:
    """Return how the reported key or the address of a held device differs from the stored one, as the reason for a
    doubt; '' if neither differs.

    A key that lost its serial number is not stored, so each report finds this difference again; the reason says so.
    """
    if stored.key != device.key:
        change = f"{HOLDER} holds it, and its identity changed from {stored.key} to {device.key}: {REMEDY}"
        if _with_key_to_store(device, stored).key != stored.key:
            return change
        return f"{change}; each report quarantines it again until nothing holds it or the serial number can be read"
    if stored.address and stored.address != device.address:
        return f"{HOLDER} holds it, and its address changed from {stored.address} to {device.address}: {REMEDY}"
    return ""


def _describe_new_name(stored: StoredDevice, device: Device) -> str:
    """Return under which new name the deployable of a held handle is reported, as the reason for a doubt; '' if none.

    The handle is stored again under the new name, where no request holds it, so it must not be offered there.
    """
    known = {(deployable.name, handle.info) for deployable in stored.deployables for handle in deployable.handles}
    for reported in device.deployables:
        for handle in reported.handles:
            if handle.info in stored.held_handles and (reported.name, handle.info) not in known:
                return (
                    f"{HOLDER} holds it, and its deployable is now named {reported.name}, perhaps because its node "
                    "was renamed: release the device when nothing holds it any more"
                )
    return ""


def _with_key_to_store(device: Device, stored: StoredDevice | None) -> Device:
    """Return the device; with the stored key if the stored key has a serial number and the reported key is only the
    address."""
    if stored and stored.key.startswith(SERIAL_PREFIX) and device.key == f"pci:{device.address}":
        return msgspec.structs.replace(device, key=stored.key)
    return device


def _list_places(device: Device) -> list[str]:
    """Return the address of a device, if it has one, and the names of its attach handles.

    Each of them can belong to only one device of the host.
    """
    handles = [
        _name_handle(handle.attach_type, handle.info, device.address)
        for deployable in device.deployables
        for handle in deployable.handles
    ]
    return [device.address, *handles] if device.address else handles


def _list_stored_places(stored: StoredDevice) -> list[str]:
    """Return the address of a stored device, if it has one, and the names of its attach handles.

    Handles that are missing, or whose deployable is missing, are left out.
    """
    handles = [
        _name_handle(handle.attach_type, handle.info, stored.address)
        for deployable in stored.deployables
        for handle in deployable.handles
        if not (handle.missing or deployable.missing)
    ]
    return [stored.address, *handles] if stored.address else handles


def _name_handle(attach_type: str, info: str, address: str | None) -> str:
    """Return a name for a handle that is unique on its host.

    `address` is the PCI address of the device, None if it has none. The name of a handle of type DEV begins with the
    address, because its `info` (a device node) is unique only on the card.
    """
    return f"{address or ''} {info}" if attach_type == "DEV" else info


def _name_identity(key: str) -> str:
    """Return the text that stands for `key` in a list that also contains addresses and names of handles."""
    return f"identity {key}"
