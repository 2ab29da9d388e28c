"""One owner for each thing, where several drivers look at one host. Pure; asked by the agent before it reports.

A PCI address belongs to the first driver in enabled order that claims it; later claims are Faults. The same holds for
device keys. Within a device, two deployables of one name or two handles of one info are the driver's mistake.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from drivers.base import at_most
from drivers.inventory import Device, DriverReport, Fault


def settle(reports: Iterable[DriverReport], held: Mapping[str, str] | None = None) -> tuple[DriverReport, ...]:
    """The reports, in their (enabled) order, with every later claim turned into a Fault.

    `held` maps a PCI address or device key to the driver whose last good answer had it, for drivers that fail now:
    what they hold stays theirs.
    """
    reports = tuple(reports)
    failing = {report.driver for report in reports if report.error}
    owners = {thing: driver for thing, driver in (held or {}).items() if driver in failing}
    return tuple(report if report.error else _settled(report, owners) for report in reports)


def _settled(report: DriverReport, owners: dict[str, str]) -> DriverReport:
    devices: list[Device] = []
    faults = list(report.faults)
    for device in report.devices:
        if reason := _ambiguous(device) or _claimed(report.driver, device, owners):
            faults.append(Fault(device.address or device.key, reason))
        else:
            owners.update(dict.fromkeys(_things(device), report.driver))
            devices.append(device)
    return replace(report, devices=tuple(devices), faults=at_most(faults))


def _things(device: Device) -> tuple[str, ...]:
    return (device.key,) if device.address is None else (device.key, device.address)


def _claimed(driver: str, device: Device, owners: Mapping[str, str]) -> str:
    for thing in _things(device):
        if owner := owners.get(thing):
            whose = (
                "this driver named it twice" if owner == driver else f"it belongs to {owner}, which is enabled first"
            )
            return f"{driver} claims {thing}: {whose}"
    return ""


def _ambiguous(device: Device) -> str:
    for name, count in Counter(deployable.name for deployable in device.deployables).items():
        if count > 1:
            return f"{count} deployables are called {name!r}"
    for deployable in device.deployables:
        for info, count in Counter(handle.info for handle in deployable.handles).items():
            if count > 1:
                return f"{count} handles of {deployable.name!r} are {info}"
    return ""
