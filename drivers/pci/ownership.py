"""Resolve conflicts between drivers: no two devices of a host share a PCI address, an identity or a provider name.

A PCI address belongs to one driver per host, and to one backend of that driver. The owner is the one that had it before
and still reports it, else the first in `enabled_drivers` that reports it. Any other driver gets a Fault in place of the
device. A driver or backend that failed keeps the devices it had. Therefore neither a failure nor a change of order or
settings moves a device to another driver. The functions here are pure: they read nothing from the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from drivers.base import at_most
from drivers.inventory import AttachHandle, Device, DriverReport, Fault
from drivers.pci.addresses import read_handle_address


def resolve_conflicts(
    reports: Sequence[DriverReport], previous: Mapping[str, DriverReport] | None = None
) -> list[DriverReport]:
    """Return the reports with a Fault in place of each device that is invalid or belongs to another driver or backend.

    `reports` must be in the order of `enabled_drivers`. `previous` is the last result by driver name: a driver or a
    backend that failed now gets the devices it had then.
    """
    previous_reports = previous or {}
    complete_reports = carry_devices_over(reports, previous_reports)
    current_claims = set(_iterate_claims(complete_reports))
    owners = dict(pair for pair in _iterate_claims(previous_reports.values()) if pair in current_claims)
    granted_claims: set[str] = set()
    return [_replace_conflicting_devices(report, owners, granted_claims) for report in complete_reports]


def carry_devices_over(reports: Iterable[DriverReport], previous: Mapping[str, DriverReport]) -> list[DriverReport]:
    """Return the reports, where each driver or backend that failed now has the devices that it had in `previous`.

    `previous` maps the name of a driver to its last report. A second call with the result changes nothing.
    """
    return [_carry_over_failed_parts(report, previous.get(report.driver)) for report in reports]


def _iterate_claims(reports: Iterable[DriverReport]) -> Iterator[tuple[str, str]]:
    """Yield (claim, owner) for all devices. A claim is a PCI address, `identity …` or `deployable …`."""
    for report in reports:
        for device in report.devices:
            yield from ((claim, _get_owner_name(report, device)) for claim in _list_claims(device))


def _get_owner_name(report: DriverReport, device: Device) -> str:
    """Return the name under which the device's claims are recorded: `driver:backend`, or `driver` without a backend."""
    return f"{report.driver}:{device.backend}" if device.backend else report.driver


def _carry_over_failed_parts(report: DriverReport, previous: DriverReport | None) -> DriverReport:
    """Return the report with the devices of `previous` for a driver or backends that failed now.

    Devices that the report itself lists for a failed driver or backend are dropped.
    """
    failed = _list_failed_backends(report)
    previous_devices = previous.devices if previous else ()
    if report.error:
        return msgspec.structs.replace(report, devices=previous_devices)
    carried_over = (device for device in previous_devices if device.backend in failed)
    reported = (device for device in report.devices if device.backend not in failed)
    return msgspec.structs.replace(report, devices=(*carried_over, *reported))


def _list_failed_backends(report: DriverReport) -> set[str]:
    """Return the names of the report's backends that have an error."""
    return {backend.name for backend in report.backends if backend.error}


def _replace_conflicting_devices(
    report: DriverReport, owners: dict[str, str], granted_claims: set[str]
) -> DriverReport:
    """Return the report with a Fault in place of each device that is invalid or belongs to another owner.

    The claims of the devices that stay are added to `owners` (claim → owner) and `granted_claims`.
    """
    keys = Counter((_get_owner_name(report, device), device.key) for device in report.devices)
    devices, faults = [], list(report.faults)
    for device in report.devices:
        owner = _get_owner_name(report, device)
        problem = _describe_problem(device, keys[owner, device.key])
        foreign_claims = (
            claim for claim in _list_claims(device) if claim in granted_claims or owners.get(claim, owner) != owner
        )
        if not problem and (claim := next(foreign_claims, "")):
            problem = f"{claim} already belongs to {owners[claim]}"
        if problem:
            faults.append(Fault(device.address or device.key, problem))
        else:
            owners.update(dict.fromkeys(_list_claims(device), owner))
            granted_claims.update(_list_claims(device))
            devices.append(device)
    return msgspec.structs.replace(report, devices=tuple(devices), faults=at_most(faults))


def _describe_problem(device: Device, same_key: int) -> str:
    """Return why the device cannot be used, whoever owns it; '' if it can.

    `same_key` is the number of devices with its identity: if there are several, none of them can be told apart.
    """
    if same_key > 1:
        return f"{same_key} devices of this driver have the identity {device.key}, so none of them can be used"
    names = [deployable.name for deployable in device.deployables]
    if len(set(names)) < len(names):
        return "two of its deployables have the same name"
    for deployable in device.deployables:
        if len({*map(_identify_handle, deployable.handles)}) < len(deployable.handles):
            return f"two attach handles of {deployable.name} are the same"
        if any(one.attach_type == "PCI" and not read_handle_address(one.info) for one in deployable.handles):
            return (
                f"a PCI handle of {deployable.name} names no PCI address: this is an error of the driver, so report it"
                " to its author"
            )
    return ""


def _identify_handle(handle: AttachHandle) -> str:
    """Return what no two handles of a deployable may have in common: the function of a PCI handle, else its text."""
    return (read_handle_address(handle.info) if handle.attach_type == "PCI" else "") or handle.info


def _list_claims(device: Device) -> list[str]:
    """Return everything that only one device may have: PCI addresses, those of its handles included, and names."""
    addresses = [device.address] if device.address else []
    names = []
    for deployable in device.deployables:
        names.append(f"deployable {deployable.name}")
        addresses += [read_handle_address(handle.info) for handle in deployable.handles if handle.attach_type == "PCI"]
    return [*dict.fromkeys(filter(None, addresses)), f"identity {device.key}", *names]
