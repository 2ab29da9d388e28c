"""Partition devices: add units to them, remove units, or change their layout, by a `partition` command for each device.

Many devices are partitioned by a bulk action (`accelerators.workflows.bulk_actions`), which uses the functions of this
module for each device. Only the commands are written here. The new units (attach handles) come with the report that
the agent sends before it answers the command.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from accelerators import conductor, safety
from accelerators.commands import command_queue
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import DeviceState, EventSource, HandleType
from accelerators.models import AttachHandle, Command, Device

MAX_DEVICES = 256
"""Maximum number of devices of one change."""
MAX_UNITS = 65_535


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

    @property
    def adds_units(self) -> bool:
        """Return whether the change adds units; otherwise it removes some or all."""
        return self.unit_delta is not None and self.unit_delta > 0

    def to_arguments(self) -> dict[str, Any]:
        """Return the change as values that JSON can represent."""
        return {"units": self.unit_delta, "layout": dict(self.layout), "generation": self.generation}

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> PartitionChange:
        """Return the change that `to_arguments` has converted."""
        return cls(arguments["units"], arguments["layout"], arguments["generation"])


def partition_device(
    uuid: UUID,
    change: PartitionChange,
    caller: Caller,
    reason: str = "",
    source: EventSource = EventSource.API,
    answers: safety.HolderAnswers | None = None,
    seen: str = "",
) -> Command:
    """Place a `partition` command that changes the number of units of one device, and return it.

    The present units are counted while the device is locked, so the number in the command is right. `answers` are those
    of `ask_holders_for_partition`; a caller that is inside a transaction must have asked before it was opened. Without
    them, this function asks. `seen` is `describe_units` of the device when it was chosen; '' compares nothing. Raises
    RefusedError as `command_queue.order_device_command` does; INVALID if the device does not allow the change; CONFLICT
    if it is not as it was `seen`.
    """
    check_change(change, reason)
    if answers is None:
        answers = ask_holders_for_partition([uuid], change)
    with conductor.writing():
        device = next(iter(conductor.lock_devices(Device.objects.filter(uuid=uuid))), None)
        if device is None:
            raise device_not_found_error(uuid)
        present_units = count_units([device])[device.pk]
        if seen and (present := describe_units(device.lifecycle_text, present_units)) != seen:
            text = f"It was {seen} when it was chosen; it is {present} now. Look at it again."
            raise RefusedError(RefusalReason.CONFLICT, text)
        command_queue.refuse_if_changed(device, change.generation)
        layout = build_layout(device, change, present_units)
        return command_queue.order_device_command(
            "partition", uuid, caller, reason=reason, layout=layout, source=source, answers=answers
        )


def device_not_found_error(uuid: UUID) -> RefusedError:
    """Return the error for a uuid that no device has."""
    return RefusedError(RefusalReason.NOT_FOUND, f"Device not found with uuid={uuid}")


def check_change(change: PartitionChange, reason: str) -> None:
    """Raise RefusedError INVALID if the number of units is out of range, or if the reason cannot be stored."""
    command_queue.check_reason(reason)
    if change.unit_delta is not None and not 0 < abs(change.unit_delta) <= MAX_UNITS:
        raise RefusedError(RefusalReason.INVALID, f"The number of units must be 1 to {MAX_UNITS}.")


def describe_units(lifecycle_text: str, number: int) -> str:
    """Return the state of a device and its number of units, such as "ready, 4 units"; at most 64 characters."""
    return f"{lifecycle_text}, {number} unit{'' if number == 1 else 's'}"[-64:]


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


def ask_holders_for_partition(uuids: Collection[UUID], wanted: PartitionChange) -> safety.HolderAnswers:
    """Ask all holder checks about those of these devices whose partition is not refused anyway."""
    if not safety.HOLDER_CHECKS:
        return safety.NO_ANSWERS
    selected = Device.objects.filter(uuid__in=uuids)
    present_units = count_units(list(selected))

    def refuse(device: Device) -> None:
        """Raise RefusedError if the device does not allow the change."""
        plan_layout(device, wanted, present_units[device.pk])

    return command_queue.ask_holders_for_command("partition", selected, refuse)


def plan_layout(device: Device, wanted: PartitionChange, present_units: int) -> dict[str, str]:
    """Return the layout for the command; the device has `present_units` units now.

    Raises RefusedError if the device has another generation, or if it does not allow the change.
    """
    command_queue.refuse_if_changed(device, wanted.generation)
    layout = build_layout(device, wanted, present_units)
    command_queue.check_arguments("partition", layout, None)
    command_queue.refuse_unknown_words(device, layout)
    return layout


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


def resolve_targets(
    targets: Sequence[PartitionTarget], change: PartitionChange
) -> list[tuple[UUID | None, PartitionTarget]]:
    """Return each device once, with the first target that names it; None for a target that matches no device.

    A uuid that no device has is returned, too. Raises RefusedError INVALID if the targets name no device or more than
    MAX_DEVICES, or if the change has a generation and is for more than one device.
    """
    resolved: list[tuple[UUID | None, PartitionTarget]] = []
    known_uuids: set[UUID] = set()
    for target in targets[: MAX_DEVICES + 1]:
        uuids_of_target = list(_query_target_devices(target))
        new_uuids = [uuid for uuid in uuids_of_target if uuid not in known_uuids]
        known_uuids.update(new_uuids)
        resolved += [(uuid, target) for uuid in new_uuids] or ([] if uuids_of_target else [(None, target)])
    if not 0 < len(resolved) <= MAX_DEVICES:
        raise RefusedError(RefusalReason.INVALID, f"Name 1 to {MAX_DEVICES} devices, by uuid, or by host and backend.")
    if change.generation is not None and len(resolved) != 1:
        raise RefusedError(
            RefusalReason.INVALID, f"A generation is only for a single device; the targets are {len(resolved)} devices."
        )
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


def build_layout(device: Device, change: PartitionChange, present_units: int) -> dict[str, str]:
    """Return the layout for the command; the device has `present_units` units now. Raises RefusedError INVALID.

    It has the keys and values that the caller gave, and the new number of units under the key `sized_by`.
    """
    if not device.sized_by:
        text = f"{device.driver} does not let the number of its units be chosen."
        raise RefusedError(RefusalReason.INVALID, text)
    if device.sized_by in change.layout:
        text = f"{device.sized_by} is computed from the number of units: leave it out of the layout."
        raise RefusedError(RefusalReason.INVALID, text)
    wanted_units = present_units + change.unit_delta if change.unit_delta is not None else 0
    if not 0 <= wanted_units <= MAX_UNITS or wanted_units == present_units:
        raise RefusedError(
            RefusalReason.INVALID,
            f"The number of its units is {present_units}; it cannot be changed to {wanted_units}.",
        )
    return {**change.layout, device.sized_by: str(wanted_units)}
