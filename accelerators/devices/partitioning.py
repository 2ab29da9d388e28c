"""Partition devices: add units to them, remove units, or change their layout, by a `partition` command for each device.

Only the commands are written here. The new units (attach handles) come with the report that the agent sends before it
answers the command.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from accelerators import conductor
from accelerators.commands import placing
from accelerators.domain.caller import Caller
from accelerators.domain.errors import Reason, RefusedError
from accelerators.domain.states import DeviceState, HandleType, Source
from accelerators.models import AttachHandle, Command, Device

MOST = 256
"""Maximum number of devices that one call changes."""
MOST_UNITS = 65_535
PATIENCE_S = 20.0
"""Seconds after which a call begins no further device. A witness that does not answer may take seconds per device."""


@dataclass(frozen=True)
class Target:
    """One device; or all devices of the backend `backend` on host `host` whose number of units can be chosen."""

    device: UUID | None = None
    host: str = ""
    backend: str = ""


@dataclass(frozen=True)
class Change:
    """The change wanted for each device.

    `unit_delta` is the number of units to add, or to remove if it is negative; None removes all units. `layout` holds
    further words of the layout that the driver takes.
    """

    by: int | None
    layout: Mapping[str, str] = field(default_factory=dict)
    generation: int | None = None
    """The device's generation that the caller has seen, None to skip the check; only with a single device."""


@dataclass(frozen=True)
class Result:
    """Outcome for one device of a target: its command, or why there is none (`refused`, `reason`).

    `device` is None if the target matches no device.
    """

    target: Target
    device: UUID | None
    command: Command | None
    refused: str = ""
    reason: Reason | None = None


def change(
    targets: Sequence[Target], wanted: Change, caller: Caller, reason: str = "", source: Source = Source.API
) -> list[Result]:
    """Place a `partition` command for each device of the targets; returns one PartitionResult per device.

    A target that matches no device gets a refused result as well. Each device is a transaction of its own, and a
    refusal of one stops no other. A device that is named twice gets one command. Devices that are not begun within
    TIME_LIMIT_S are refused with AWAY. Raises RefusedError INVALID if the arguments are not valid for any device, or if
    the targets are none or more than MAX_DEVICES.
    """
    placing.check_reason(reason)
    if wanted.by is not None and not 0 < abs(wanted.by) <= MOST_UNITS:
        raise RefusedError(Reason.INVALID, f"The number of units must be 1 to {MOST_UNITS}.")
    found = _devices(targets)
    if not 0 < len(found) <= MOST:
        raise RefusedError(Reason.INVALID, f"Name 1 to {MOST} devices, by uuid, or by host and backend.")
    if wanted.generation is not None and len(found) != 1:
        raise RefusedError(
            Reason.INVALID, f"A generation is only for a single device; the targets are {len(found)} devices."
        )
    end = time.monotonic() + PATIENCE_S
    results = []
    for device, target in found:
        if device is None:
            results.append(_nothing(target))
        elif time.monotonic() > end:
            text = f"There was no time left for device {device}: send the request for it again."
            results.append(Result(target, device, None, text, Reason.AWAY))
        else:
            results.append(_order(target, device, wanted, caller, reason, source))
    return results


def update(
    device: UUID,
    layout: Mapping[str, str],
    caller: Caller,
    generation: int | None = None,
    reason: str = "",
    source: Source = Source.API,
) -> Command:
    """Place a `partition` command that changes these words of a device's layout; returns the command.

    Raises RefusedError as `placing.order_device_command` does, and INVALID if the device's driver does not allow its
    layout to be changed.
    """
    with conductor.writing():
        found = next(iter(conductor.locked(Device.objects.filter(uuid=device))), None)
        if found and not found.changeable:
            raise RefusedError(
                Reason.INVALID, f"Device {device}: {found.driver} does not allow its layout to be changed."
            )
        return placing.ask(
            "partition", device, caller, reason=reason, layout=layout, generation=generation, source=source
        )


def numbers(devices: Collection[Device]) -> Counter[int]:
    """Count the units into which each device is divided, by device id; one statement.

    A unit that is the whole device, such as a card without virtual functions, is not counted.
    """
    whole = {device.pk: _whole(device.address) for device in devices if device.address}
    present = AttachHandle.objects.filter(
        deployable__device__in=list(devices), deployable__missing_since__isnull=True, missing_since__isnull=True
    )
    found = present.values_list("deployable__device", "attach_type", "attach_info")
    return Counter(id for id, kind, info in found if not (kind == HandleType.PCI and info == whole.get(id)))


def _whole(address: str) -> str:
    """Return the attach information of the PCI function at `address`, the same JSON text as `drivers.inventory`."""
    domain, bus, rest = address.split(":")
    device, _, function = rest.partition(".")
    return json.dumps({"bus": bus, "device": device, "domain": domain, "function": function})


def _devices(targets: Sequence[Target]) -> list[tuple[UUID | None, Target]]:
    """Return each device once, with the first target that names it; None for a target that matches no device."""
    found: list[tuple[UUID | None, Target]] = []
    known: set[UUID] = set()
    for target in targets[: MOST + 1]:
        named = list(_named(target))
        fresh = [uuid for uuid in named if uuid not in known]
        known.update(fresh)
        found += [(uuid, target) for uuid in fresh] or ([] if named else [(None, target)])
    return found


def _named(target: Target) -> Iterator[UUID]:
    """Yield the devices of a target; retired and missing ones of a backend are left out."""
    if target.device:
        yield target.device
        return
    offers = Device.objects.filter(host__name=target.host, backend=target.backend).exclude(sized_by="")
    gone = (DeviceState.RETIRED, DeviceState.MISSING)
    yield from offers.exclude(state__in=gone).order_by("id").values_list("uuid", flat=True)[: MOST + 1]


def _order(target: Target, uuid: UUID, wanted: Change, caller: Caller, reason: str, source: Source) -> Result:
    """Place the command for one device, in one transaction.

    The present units are counted while the device is locked, so the number in the command is right.
    """
    try:
        with conductor.writing():
            device = next(iter(conductor.locked(Device.objects.filter(uuid=uuid))), None)
            if device is None:
                raise RefusedError(Reason.UNKNOWN, f"Device not found with uuid={uuid}")
            placing.refuse_changed(device, wanted.generation)
            layout = _layout(device, wanted)
            command = placing.ask("partition", uuid, caller, reason=reason, layout=layout, source=source)
    except RefusedError as refused:
        return Result(target, uuid, None, refused.text, refused.reason)
    return Result(target, uuid, command)


def _layout(device: Device, wanted: Change) -> dict[str, str]:
    """Return the layout for the command: the wanted words and the new number of units. Raises RefusedError INVALID."""
    if not device.sized_by:
        text = f"Device {device.uuid}: {device.driver} does not let the number of its units be chosen."
        raise RefusedError(Reason.INVALID, text)
    if device.sized_by in wanted.layout:
        text = f"{device.sized_by} is computed from the number of units: leave it out of the layout."
        raise RefusedError(Reason.INVALID, text)
    now = numbers([device])[device.pk]
    then = now + wanted.by if wanted.by is not None else 0
    if not 0 <= then <= MOST_UNITS or then == now:
        raise RefusedError(
            Reason.INVALID, f"The number of units of device {device.uuid} is {now}; it cannot be changed to {then}."
        )
    return {**wanted.layout, device.sized_by: str(then)}


def _nothing(target: Target) -> Result:
    """Return the result for a target that matches no device."""
    text = f"Host {target.host} has no device of backend {target.backend} whose number of units can be chosen."
    return Result(target, None, None, text, Reason.UNKNOWN)
