"""Who may have what: no two devices of a host share an address, an identity or a provider name. Pure.

A PCI address belongs to one driver per host: the first in `enabled_drivers` that claims it. Whoever comes later gets a
Fault in place of the device. A driver that failed keeps what it had, so its failure never changes what the others get.
Asked by the agent before it reports.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from drivers.base import at_most
from drivers.inventory import Device, DriverReport, Fault


def settle(reports: Sequence[DriverReport], held: Mapping[str, str] | None = None) -> list[DriverReport]:
    """The same reports, in `enabled_drivers` order as given, with every contested device turned into a Fault.

    `held` is `claimed(…)` of the last settled good answers; only drivers that have an `error` now keep theirs.
    """
    owners: dict[str, str] = {}
    settled = []
    for report in reports:
        if report.error:
            for claim, driver in (held or {}).items():
                if driver == report.driver:
                    owners.setdefault(claim, driver)
            settled.append(report)
        else:
            settled.append(_settled(report, owners))
    return settled


def claimed(reports: Iterable[DriverReport]) -> dict[str, str]:
    """Claim → driver. A PCI address stands for itself; identities and provider names are marked as such."""
    return {claim: report.driver for report in reports for device in report.devices for claim in _claims(device)}


def carried(report: DriverReport, before: DriverReport | None) -> DriverReport:
    """The report with what `before` had of the backends that failed now, which so keep it: before `settle`."""
    failed = _failed(report)
    kept = [device for device in before.devices if device.backend in failed] if before else []
    keys = {device.key for device in kept}
    found = (device for device in report.devices if device.key not in keys)
    return msgspec.structs.replace(report, devices=(*kept, *found)) if kept else report


def without_carried(report: DriverReport) -> DriverReport:
    """What the driver itself answered of it: after `settle`."""
    failed = _failed(report)
    devices = tuple(device for device in report.devices if device.backend not in failed)
    return msgspec.structs.replace(report, devices=devices)


def _failed(report: DriverReport) -> set[str]:
    return {backend.name for backend in report.backends if backend.error}


def _settled(report: DriverReport, owners: dict[str, str]) -> DriverReport:
    keys = Counter(device.key for device in report.devices)
    devices, faults = [], list(report.faults)
    for device in report.devices:
        if problem := _problem(device, keys[device.key], owners):
            faults.append(Fault(device.address or device.key, problem))
        else:
            owners.update(dict.fromkeys(_claims(device), report.driver))
            devices.append(device)
    return msgspec.structs.replace(report, devices=tuple(devices), faults=at_most(faults))


def _problem(device: Device, same_key: int, owners: Mapping[str, str]) -> str:
    """Why the device cannot be taken, '' when it can. One identity on several devices makes all of them ambiguous."""
    if same_key > 1:
        return f"{same_key} devices of this driver have the identity {device.key}: none of them can be told apart"
    names = [deployable.name for deployable in device.deployables]
    if len(set(names)) < len(names):
        return "two of its deployables have the same name"
    for deployable in device.deployables:
        if len({handle.info for handle in deployable.handles}) < len(deployable.handles):
            return f"two attach handles of {deployable.name} are the same"
    taken = next((claim for claim in _claims(device) if claim in owners), "")
    return f"{taken} already belongs to {owners[taken]}" if taken else ""


def _claims(device: Device) -> list[str]:
    """Everything of a device that must be its own, the PCI addresses it hands out included."""
    addresses = [device.address] if device.address else []
    names = []
    for deployable in device.deployables:
        names.append(f"deployable {deployable.name}")
        addresses += [_handed_out(handle.info) for handle in deployable.handles if handle.attach_type == "PCI"]
    return [*dict.fromkeys(filter(None, addresses)), f"identity {device.key}", *names]


def _handed_out(info: str) -> str:
    """The address in a PCI handle's JSON; '' when it names none."""
    try:
        where = json.loads(info)
        return f"{where['domain']}:{where['bus']}:{where['device']}.{where['function']}"
    except (ValueError, KeyError, TypeError):
        return ""
