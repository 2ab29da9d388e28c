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

from accelerators import conductor, safety
from accelerators.commands import command_queue
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError, WritesRefusedError
from accelerators.domain.states import DeviceState, EventSource, HandleType
from accelerators.models import AttachHandle, Command, Device

MAX_DEVICES = 256
"""Maximum number of devices that one call changes."""
MAX_UNITS = 65_535
TIME_LIMIT_S = 20.0
"""Seconds after which a call begins no further device, because it had to wait for others' locks."""


@dataclass(frozen=True)
class PartitionTarget:
    """One device; or all devices of the backend `backend` on host `host` whose number of units can be chosen."""

    device: UUID | None = None
    host: str = ""
    backend: str = ""


@dataclass(frozen=True)
class PartitionChange:
    """The change wanted for each device.

    `unit_delta` is the number of units to add, or to remove if it is negative; None removes all units, 0 is refused.
    `layout` holds further keys of the layout that the driver accepts, without the key of the number of units. With
    `generation`, for a single device only, the change is refused if the device has been changed since then.
    """

    unit_delta: int | None
    layout: Mapping[str, str] = field(default_factory=dict)
    generation: int | None = None
    """The device's generation that the caller has seen, None to skip the check; only with a single device."""


@dataclass(frozen=True)
class PartitionResult:
    """Outcome for one device of a target: its command, or why there is none (`refused`, `reason`).

    `device` is None if the target matches no device.
    """

    target: PartitionTarget
    device: UUID | None
    command: Command | None
    refused: str = ""
    reason: RefusalReason | None = None


def partition_devices(
    targets: Sequence[PartitionTarget],
    wanted: PartitionChange,
    caller: Caller,
    reason: str = "",
    source: EventSource = EventSource.API,
) -> list[PartitionResult]:
    """Place a `partition` command for each device of the targets; return one PartitionResult for each device.

    A target that matches no device gets a refused result, too. Each device is changed in a transaction of its own, so a
    refused device does not stop the others. A device that is named twice gets one command. The holder checks are made
    before, for all devices at once that are not refused anyway. Devices whose turn has not come within TIME_LIMIT_S
    seconds after that are refused with UNAVAILABLE, and so are the rest if writes are refused after the first command.
    Raises RefusedError INVALID, and places no command, if the reason
    or the number of units is out of range, if the targets name no device or more than MAX_DEVICES, or if a generation
    is given for more than one device.
    """
    command_queue.check_reason(reason)
    if wanted.unit_delta is not None and not 0 < abs(wanted.unit_delta) <= MAX_UNITS:
        raise RefusedError(RefusalReason.INVALID, f"The number of units must be 1 to {MAX_UNITS}.")
    devices = _resolve_targets(targets)
    if not 0 < len(devices) <= MAX_DEVICES:
        raise RefusedError(RefusalReason.INVALID, f"Name 1 to {MAX_DEVICES} devices, by uuid, or by host and backend.")
    if wanted.generation is not None and len(devices) != 1:
        raise RefusedError(
            RefusalReason.INVALID, f"A generation is only for a single device; the targets are {len(devices)} devices."
        )
    answers = _ask_holders([device for device, _ in devices if device is not None], wanted)
    give_up_at = time.monotonic() + TIME_LIMIT_S
    results: list[PartitionResult] = []
    refusal_of_rest = ""
    for device, target in devices:
        if device is None:
            results.append(_build_no_match_result(target))
            continue
        if not refusal_of_rest and time.monotonic() <= give_up_at:
            try:
                results.append(_order_partition(target, device, wanted, caller, reason, source, answers))
                continue
            except WritesRefusedError as refused:
                if not any(result.command for result in results):
                    raise
                refusal_of_rest = str(refused)
        text = refusal_of_rest or f"There was no time left for device {device}: send the request for it again."
        results.append(PartitionResult(target, device, None, text, RefusalReason.UNAVAILABLE))
    return results


def update_layout(
    device: UUID,
    layout: Mapping[str, str],
    caller: Caller,
    generation: int | None = None,
    reason: str = "",
    source: EventSource = EventSource.API,
) -> Command:
    """Place a `partition` command that sets these keys of the device's layout, and return it.

    Raises RefusedError as `command_queue.order_device_command` does, and INVALID if the device's driver does not allow
    its layout to be changed.
    """
    command_queue.check_arguments("partition", layout, None)
    command_queue.check_reason(reason)
    _refuse_if_unchangeable(Device.objects.filter(uuid=device).first())
    answers = command_queue.ask_holders_if_possible("partition", device, layout, generation=generation)
    with conductor.writing():
        _refuse_if_unchangeable(next(iter(conductor.lock_devices(Device.objects.filter(uuid=device))), None))
        return command_queue.order_device_command(
            "partition",
            device,
            caller,
            reason=reason,
            layout=layout,
            generation=generation,
            source=source,
            answers=answers,
        )


def _ask_holders(uuids: Collection[UUID], wanted: PartitionChange) -> safety.HolderAnswers:
    """Ask all holder checks about those of these devices whose partition is not refused anyway."""
    if not safety.HOLDER_CHECKS:
        return safety.NO_ANSWERS
    selected = Device.objects.filter(uuid__in=uuids)
    present_units = count_units(list(selected))

    def refuse(device: Device) -> None:
        """Raise RefusedError if the device does not allow the change."""
        command_queue.refuse_if_changed(device, wanted.generation)
        layout = _build_layout(device, wanted, present_units[device.pk])
        command_queue.check_arguments("partition", layout, None)
        command_queue.refuse_unknown_words(device, layout)

    return command_queue.ask_holders_for_command("partition", selected, refuse)


def _refuse_if_unchangeable(device: Device | None) -> None:
    """Raise RefusedError INVALID if there is such a device, and its driver does not allow its layout to be changed."""
    if device and not device.changeable:
        text = f"Device {device.uuid}: {device.driver} does not allow its layout to be changed."
        raise RefusedError(RefusalReason.INVALID, text)


def count_units(devices: Collection[Device]) -> Counter[int]:
    """Count the units into which each device is divided, by device id; one statement.

    A unit that is the whole device, such as a card without virtual functions, is not counted, and neither are missing
    units.
    """
    whole_device_infos = {device.pk: _encode_pci_attach_info(device.address) for device in devices if device.address}
    present = AttachHandle.objects.filter(
        deployable__device__in=list(devices), deployable__missing_since__isnull=True, missing_since__isnull=True
    )
    handles = present.values_list("deployable__device", "attach_type", "attach_info")
    return Counter(
        id for id, kind, info in handles if not (kind == HandleType.PCI and info == whole_device_infos.get(id))
    )


def _encode_pci_attach_info(address: str) -> str:
    """Return the attach information of the PCI function at `address`, the same JSON text as `drivers.inventory`."""
    domain, bus, slot = address.split(":")
    device, _, function = slot.partition(".")
    return json.dumps({"bus": bus, "device": device, "domain": domain, "function": function})


def _resolve_targets(targets: Sequence[PartitionTarget]) -> list[tuple[UUID | None, PartitionTarget]]:
    """Return each device once, with the first target that names it; None for a target that matches no device.

    A uuid that no device has is returned, too. Targets after the first MAX_DEVICES + 1 are ignored.
    """
    resolved: list[tuple[UUID | None, PartitionTarget]] = []
    known_uuids: set[UUID] = set()
    for target in targets[: MAX_DEVICES + 1]:
        uuids_of_target = list(_query_target_devices(target))
        new_uuids = [uuid for uuid in uuids_of_target if uuid not in known_uuids]
        known_uuids.update(new_uuids)
        resolved += [(uuid, target) for uuid in new_uuids] or ([] if uuids_of_target else [(None, target)])
    return resolved


def _query_target_devices(target: PartitionTarget) -> Iterator[UUID]:
    """Yield the uuids of a target's devices, at most MAX_DEVICES + 1.

    The uuid of a single device is not looked up. If the target is a backend, its retired and missing devices are left
    out, and those whose number of units cannot be chosen.
    """
    if target.device:
        yield target.device
        return
    divisible = Device.objects.filter(host__name=target.host, backend=target.backend).exclude(sized_by="")
    excluded_states = (DeviceState.RETIRED, DeviceState.MISSING)
    yield from (
        divisible.exclude(state__in=excluded_states).order_by("id").values_list("uuid", flat=True)[: MAX_DEVICES + 1]
    )


def _order_partition(
    target: PartitionTarget,
    uuid: UUID,
    change: PartitionChange,
    caller: Caller,
    reason: str,
    source: EventSource,
    answers: safety.HolderAnswers,
) -> PartitionResult:
    """Place the command for one device, in one transaction; return its result. A RefusedError becomes a refused result.

    The present units are counted while the device is locked, so the number in the command is right.
    """
    try:
        with conductor.writing():
            device = next(iter(conductor.lock_devices(Device.objects.filter(uuid=uuid))), None)
            if device is None:
                raise RefusedError(RefusalReason.NOT_FOUND, f"Device not found with uuid={uuid}")
            command_queue.refuse_if_changed(device, change.generation)
            layout = _build_layout(device, change, count_units([device])[device.pk])
            command = command_queue.order_device_command(
                "partition", uuid, caller, reason=reason, layout=layout, source=source, answers=answers
            )
    except RefusedError as refused:
        return PartitionResult(target, uuid, None, refused.text, refused.reason)
    return PartitionResult(target, uuid, command)


def _build_layout(device: Device, change: PartitionChange, present_units: int) -> dict[str, str]:
    """Return the layout for the command; the device has `present_units` units now. Raises RefusedError INVALID.

    It has the keys and values that the caller gave, and the new number of units under the key `sized_by`.
    """
    if not device.sized_by:
        text = f"Device {device.uuid}: {device.driver} does not let the number of its units be chosen."
        raise RefusedError(RefusalReason.INVALID, text)
    if device.sized_by in change.layout:
        text = f"{device.sized_by} is computed from the number of units: leave it out of the layout."
        raise RefusedError(RefusalReason.INVALID, text)
    wanted_units = present_units + change.unit_delta if change.unit_delta is not None else 0
    if not 0 <= wanted_units <= MAX_UNITS or wanted_units == present_units:
        raise RefusedError(
            RefusalReason.INVALID,
            f"The number of units of device {device.uuid} is {present_units}; it cannot be changed to {wanted_units}.",
        )
    return {**change.layout, device.sized_by: str(wanted_units)}


def _build_no_match_result(target: PartitionTarget) -> PartitionResult:
    """Return the result for a target that matches no device."""
    text = f"Host {target.host} has no device of backend {target.backend} whose number of units can be chosen."
    return PartitionResult(target, None, None, text, RefusalReason.NOT_FOUND)
