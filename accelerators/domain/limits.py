"""Limit how many devices, and parts of devices, are stored for one host. This module reads and writes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
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
"""1 / RESERVED_FRACTION of the places of a host are kept for each of its drivers that uses fewer places, and for one
driver that is not known yet. So drivers that report new devices without end leave places for the devices of others."""
PARTS_PER_DEVICE = 16
"""A host may have PARTS_PER_DEVICE times as many parts (deployables and attach handles) as it may have devices. Parts
that are not reported any more stay stored with their device, so the limits of a report do not bound them."""


@dataclass(frozen=True)
class LimitedDevices:
    """The reported devices that are stored, and for each driver with other devices the fault about them."""

    accepted: list[IdentifiedDevice]
    faults: Mapping[str, Fault] = field(default_factory=dict)


class _Places:
    """The places of one host for devices, or for parts of devices: how many there are, and how many each driver uses.

    `share` of them are kept for each driver in `used` that uses fewer, and for one that is not known yet.
    """

    def __init__(self, limit: int, share: int, used: dict[str, int]) -> None:
        self._limit, self._share, self._used = limit, share, used
        self._total = sum(used.values())
        self._kept = share + sum(max(0, share - number) for number in used.values())

    def can_take(self, driver: str, number: int) -> bool:
        """Return whether a driver may use this number of further places: of its share, or of places that are kept for
        no other driver."""
        own = max(0, self._share - self._used[driver])
        kept = self._kept - own if number > own else 0
        return number == 0 or self._total + number <= self._limit - kept

    def take(self, driver: str, number: int) -> None:
        """Count this number of further places as used by a driver."""
        self._kept -= min(number, max(0, self._share - self._used[driver]))
        self._used[driver] += number
        self._total += number

    def suffices_for_all(self, number: int) -> bool:
        """Return whether this number of further places is free without any place that is kept."""
        return self._total + number <= self._limit - self._kept


def limit_devices(
    host: StoredHost, accepted: Iterable[IdentifiedDevice], max_devices: int, drivers: Iterable[str] = ()
) -> LimitedDevices:
    """Leave out new devices, and new parts of stored devices, above the limits of one host.

    Devices and parts that are stored already stay, whether they are reported or missing. `drivers` are the names of the
    host's drivers that run; places are kept for those that have few devices or none (RESERVED_FRACTION). The other
    places go first to the driver that uses the fewest; of one driver, the devices that are reported first are accepted.
    The fault of a driver names the number of its devices that were left out or lack parts, the limits, the number that
    one driver may have, and the setting.
    """
    all_devices = list(accepted)
    names = {*drivers, *(one.driver for one in host.devices), *(one.driver for one in all_devices)}
    share = max_devices // max(RESERVED_FRACTION, len(names) + 1)
    used_devices, used_parts = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    for device in host.devices:
        used_devices[device.driver] += 1
        used_parts[device.driver] += sum(1 + len(part.handles) for part in device.deployables)
    use = {name: max(used_devices[name], used_parts[name] / PARTS_PER_DEVICE) for name in names}
    device_places = _Places(max_devices, share, used_devices)
    part_places = _Places(max_devices * PARTS_PER_DEVICE, share * PARTS_PER_DEVICE, used_parts)
    if device_places.suffices_for_all(sum(one.stored is None for one in all_devices)) and (
        part_places.suffices_for_all(sum(_count_parts(one.device) for one in all_devices))
    ):
        return LimitedDevices(all_devices)
    candidates: list[_Candidate] = []
    for one in all_devices:
        known = _keep_known_parts(one.device, one.stored)
        new_parts = _count_parts(one.device) - _count_parts(known)
        use[one.driver] += max(one.stored is None, new_parts / PARTS_PER_DEVICE)
        candidates.append(_Candidate(one, known, new_parts, use[one.driver]))
    excess: Counter[str] = Counter()
    for candidate in sorted(candidates, key=attrgetter("use_of_driver")):
        driver, is_new = candidate.identified.driver, candidate.identified.stored is None
        if device_places.can_take(driver, is_new) and part_places.can_take(driver, candidate.new_parts):
            device_places.take(driver, is_new)
            part_places.take(driver, candidate.new_parts)
            candidate.is_taken = True
        else:
            excess[driver] += 1
    taken = [
        candidate.identified if candidate.is_taken else replace(candidate.identified, device=candidate.known)
        for candidate in candidates
        if candidate.is_taken or candidate.identified.stored is not None
    ]
    faults = {driver: _make_fault(host, number, max_devices, share, len(names)) for driver, number in excess.items()}
    return LimitedDevices(taken, faults)


@dataclass
class _Candidate:
    """A reported device. `known` is the device with its stored parts only, and `new_parts` the number of the others.

    `use_of_driver` is the number of places that its driver uses if this device and those before it are accepted.
    """

    identified: IdentifiedDevice
    known: Device
    new_parts: int
    use_of_driver: float
    is_taken: bool = False


def _make_fault(host: StoredHost, excess: int, max_devices: int, share: int, driver_count: int) -> Fault:
    """Return the fault of a driver about its devices that are not stored, or not completely."""
    reason = (
        f"devices that are not stored, or not with all their parts: {excess}. {SETTING} allows {max_devices}"
        f" devices of one host, and {PARTS_PER_DEVICE} times as many deployables and attach handles; {share} devices"
        f" are kept for each driver that has fewer, and for one that may be added, so that one driver has at most"
        f" {max_devices - share * driver_count}; missing ones count until they are removed. Raise it if the host"
        " really has so many, then restart the host's agent"
    )
    return Fault(host.name, reason)


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
