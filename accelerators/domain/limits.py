"""Limit how many devices, and parts of devices, are stored for one host. This module reads and writes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from accelerators.domain.identity import IdentifiedDevice
from drivers.inventory import Deployable, Device, Fault

if TYPE_CHECKING:
    from accelerators.domain.diff import StoredDevice, StoredHost

SETTING = "CYBORG_MAX_DEVICES_PER_HOST"
DEFAULT_MAX_DEVICES = 4096
"""Default of `CYBORG_MAX_DEVICES_PER_HOST`."""
RESERVED_FRACTION = 16
"""One driver may use all places of a host but 1 / RESERVED_FRACTION of them. So a driver that reports new devices
without end leaves places for the devices of other drivers."""
PARTS_PER_DEVICE = 16
"""A host may have PARTS_PER_DEVICE times as many parts (deployables and attach handles) as it may have devices. Parts
that are not reported any more stay stored with their device, so the limits of a report do not bound them."""


@dataclass(frozen=True)
class LimitedDevices:
    """The reported devices that are stored, and the fault of the host about the others, None if there are none.

    `driver` is the driver that gets the fault, '' if there is none.
    """

    accepted: list[IdentifiedDevice]
    driver: str = ""
    fault: Fault | None = None


@dataclass
class _FreePlaces:
    """The numbers of devices, and of parts of devices, that may be stored in addition."""

    devices: int
    parts: int


def limit_devices(host: StoredHost, accepted: Iterable[IdentifiedDevice], max_devices: int) -> LimitedDevices:
    """Leave out new devices, and new parts of stored devices, above the limits of one host, and of each of its drivers.

    Devices and parts that are stored already stay, whether they are reported or missing. Of new devices, those that are
    reported first are accepted. The fault names the number of devices that were left out or lack parts, the limits and
    the setting.
    """
    all_devices = list(accepted)
    max_of_driver = max_devices - max_devices // RESERVED_FRACTION
    free = _count_free_places(host.devices, max_of_driver)
    new_devices = sum(one.stored is None for one in all_devices)
    if new_devices <= max(0, free.devices) and sum(_count_parts(one.device) for one in all_devices) <= free.parts:
        return LimitedDevices(all_devices)
    free_of_host = _count_free_places(host.devices, max_devices)
    free_of_driver = {
        driver: _count_free_places([one for one in host.devices if one.driver == driver], max_of_driver)
        for driver in {one.driver for one in all_devices}
    }
    taken: list[IdentifiedDevice] = []
    exceeding: list[str] = []
    for one in all_devices:
        known = _keep_known_parts(one.device, one.stored)
        new_parts = _count_parts(one.device) - _count_parts(known)
        limits = (free_of_host, free_of_driver[one.driver])
        if all(new_parts <= limit.parts and (one.stored is not None or limit.devices > 0) for limit in limits):
            taken.append(one)
            for limit in limits:
                limit.devices -= one.stored is None
                limit.parts -= new_parts
            continue
        exceeding.append(one.driver)
        if one.stored is not None:
            taken.append(replace(one, device=known))
    if not exceeding:
        return LimitedDevices(taken)
    reason = (
        f"devices that are not stored, or not with all their parts: {len(exceeding)}. {SETTING} allows {max_devices}"
        f" devices of one host, {max_of_driver} of one driver, and {PARTS_PER_DEVICE} times as many deployables and"
        " attach handles; missing ones count until they are removed. Raise it if the host really has so many, then"
        " restart the host's agent"
    )
    return LimitedDevices(taken, exceeding[0], Fault(host.name, reason))


def _count_free_places(devices: Sequence[StoredDevice], max_devices: int) -> _FreePlaces:
    """Return the numbers of devices and parts that may be stored beside these devices if `max_devices` are allowed."""
    parts = sum(1 + len(part.handles) for device in devices for part in device.deployables)
    return _FreePlaces(max_devices - len(devices), PARTS_PER_DEVICE * max_devices - parts)


def _count_parts(device: Device) -> int:
    """Return the number of the device's deployables and attach handles."""
    return sum(1 + len(part.handles) for part in device.deployables)


def _keep_known_parts(device: Device, stored: StoredDevice | None) -> Device:
    """Return the reported device with only those deployables and attach handles that are stored already."""
    known = {part.name: {handle.info for handle in part.handles} for part in (stored.deployables if stored else ())}
    parts: list[Deployable] = []
    for part in device.deployables:
        if part.name in known:
            handles = tuple(handle for handle in part.handles if handle.info in known[part.name])
            parts.append(msgspec.structs.replace(part, handles=handles))
    return msgspec.structs.replace(device, deployables=tuple(parts))
