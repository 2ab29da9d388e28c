"""Resolve conflicts between drivers: no two devices of a host share a PCI address, an identity or a provider name.

A PCI address belongs to one driver per host, and to one backend of that driver. The owner is the one that had it before
and still reports it, else the first in `enabled_drivers` that reports it. Any other driver gets a Fault in place of the
device. A driver or backend that failed keeps the devices it had. Therefore neither a failure nor a change of order or
settings moves a device to another driver. The functions here are pure: they read nothing from the host.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from drivers.base import at_most
from drivers.inventory import Device, DriverReport, Fault


def settle(reports: Sequence[DriverReport], before: Mapping[str, DriverReport] | None = None) -> list[DriverReport]:
    """Return the reports with a Fault in place of each device that belongs to another driver or backend.

    `reports` must be in the order of `enabled_drivers`. `before` is the last result by driver name: a driver or a
    backend that failed now gets the devices it had then.
    """
    had = before or {}
    whole = [_carried(report, had.get(report.driver)) for report in reports]
    named = set(_claimed(whole))
    owners = dict(pair for pair in _claimed(had.values()) if pair in named)
    taken: set[str] = set()
    return [_settled(report, owners, taken) for report in whole]


def _claimed(reports: Iterable[DriverReport]) -> Iterator[tuple[str, str]]:
    """Yield (claim, owner) for all devices. A claim is a PCI address, `identity …` or `deployable …`."""
    for report in reports:
        for device in report.devices:
            yield from ((claim, _owner(report, device)) for claim in _claims(device))


def _owner(report: DriverReport, device: Device) -> str:
    return f"{report.driver}:{device.backend}" if device.backend else report.driver


def _carried(report: DriverReport, before: DriverReport | None) -> DriverReport:
    """Return the report with the devices of `before` for a driver or backends that failed now.

    Devices that the report itself lists for a failed driver or backend are dropped.
    """
    failed = _failed(report)
    known = before.devices if before else ()
    if report.error:
        return msgspec.structs.replace(report, devices=known)
    kept = (device for device in known if device.backend in failed)
    found = (device for device in report.devices if device.backend not in failed)
    return msgspec.structs.replace(report, devices=(*kept, *found))


def _failed(report: DriverReport) -> set[str]:
    return {backend.name for backend in report.backends if backend.error}


def _settled(report: DriverReport, owners: dict[str, str], taken: set[str]) -> DriverReport:
    """Return the report with a Fault in place of each device that is invalid or belongs to another owner.

    The claims of the devices that stay are added to `owners` (claim → owner) and `taken`.
    """
    keys = Counter((_owner(report, device), device.key) for device in report.devices)
    devices, faults = [], list(report.faults)
    for device in report.devices:
        owner = _owner(report, device)
        problem = _problem(device, keys[owner, device.key])
        lost = (claim for claim in _claims(device) if claim in taken or owners.get(claim, owner) != owner)
        if not problem and (claim := next(lost, "")):
            problem = f"{claim} already belongs to {owners[claim]}"
        if problem:
            faults.append(Fault(device.address or device.key, problem))
        else:
            owners.update(dict.fromkeys(_claims(device), owner))
            taken.update(_claims(device))
            devices.append(device)
    return msgspec.structs.replace(report, devices=tuple(devices), faults=at_most(faults))


def _problem(device: Device, same_key: int) -> str:
    """Return why the device cannot be used, whoever owns it; '' if it can.

    `same_key` is the number of devices with its identity: if there are several, none of them can be told apart.
    """
    if same_key > 1:
        return f"{same_key} devices of this driver have the identity {device.key}, so none of them can be used"
    names = [deployable.name for deployable in device.deployables]
    if len(set(names)) < len(names):
        return "two of its deployables have the same name"
    for deployable in device.deployables:
        if len({handle.info for handle in deployable.handles}) < len(deployable.handles):
            return f"two attach handles of {deployable.name} are the same"
    return ""


def _claims(device: Device) -> list[str]:
    """Return everything that only one device may have: PCI addresses, those of its handles included, and names."""
    addresses = [device.address] if device.address else []
    names = []
    for deployable in device.deployables:
        names.append(f"deployable {deployable.name}")
        addresses += [_handed_out(handle.info) for handle in deployable.handles if handle.attach_type == "PCI"]
    return [*dict.fromkeys(filter(None, addresses)), f"identity {device.key}", *names]


def _handed_out(info: str) -> str:
    """Return the PCI address in a handle's JSON; '' if it contains none."""
    try:
        where = json.loads(info)
        return f"{where['domain']}:{where['bus']}:{where['device']}.{where['function']}"
    except (ValueError, KeyError, TypeError):
        return ""
