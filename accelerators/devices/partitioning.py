"""Partition devices: add units to them, remove units, or change their layout, by a `partition` command for each device.

Many devices are partitioned by a bulk action (`accelerators.workflows.bulk_actions`), which uses the functions of this
module for each device. Only the commands are written here. The new units (attach handles) come with the report that
the agent sends before it answers the command.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from django.db.models import CharField, Count, Func, OuterRef, QuerySet, Subquery, Value
from django.db.models.functions import Coalesce, Concat

from accelerators import conductor, safety
from accelerators.commands import command_queue
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import DeviceState, EventSource, HandleType
from accelerators.models import AttachHandle, Command, Device

MAX_DEVICES = 100_000
"""Maximum number of devices of one change, as of every bulk action."""
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

    `unit_delta` is the number of units to add, or to remove if it is negative; None removes all units. 0 sets only the
    keys of `layout`. Otherwise `layout` holds further keys of the layout that the driver accepts, without the key of
    the number of units. With `generation`, for a single device only, the change is refused if the device has been
    changed since then.
    """

    unit_delta: int | None
    layout: Mapping[str, str] = field(default_factory=dict)
    generation: int | None = None
    """The device's generation that the caller has seen, None to skip the check; only with a single device."""

    @property
    def adds_units(self) -> bool:
        """Return whether the change adds units; otherwise it removes some or all."""
        return self.unit_delta is not None and self.unit_delta > 0

    @property
    def sets_layout_only(self) -> bool:
        """Return whether the change sets keys of the layout, and neither adds nor removes units by their number."""
        return self.unit_delta == 0 and bool(self.layout)

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
        layout = build_layout_if_unchanged(device, change, count_units([device])[device.pk], seen)
        return command_queue.order_device_command(
            "partition", device.uuid, caller, reason=reason, layout=layout, source=source, answers=answers
        )


def build_layout_if_unchanged(device: Device, change: PartitionChange, present_units: int, seen: str) -> dict[str, str]:
    """Return the layout for the command of a locked device, which has `present_units` units now.

    Raises RefusedError: CONFLICT if the device is not as it was `seen`, or has another generation than `change` names;
    INVALID if it does not allow the change.
    """
    if seen and (present := describe_units(device.lifecycle_text, present_units)) != seen:
        text = f"It was {seen} when it was chosen; it is {present} now. Look at it again."
        raise RefusedError(RefusalReason.CONFLICT, text)
    command_queue.refuse_if_changed(device, change.generation)
    return build_layout(device, change, present_units)


def device_not_found_error(uuid: UUID) -> RefusedError:
    """Return the error for a uuid that no device has."""
    return RefusedError(RefusalReason.NOT_FOUND, f"Device not found with uuid={uuid}")


def check_change(change: PartitionChange, reason: str) -> None:
    """Raise RefusedError INVALID if the number of units is out of range, or if the layout or the reason cannot be
    stored."""
    command_queue.check_reason(reason)
    if change.layout:
        command_queue.check_arguments("partition", change.layout, None)
    minimum = 0 if change.layout else 1
    if change.unit_delta is not None and not minimum <= abs(change.unit_delta) <= MAX_UNITS:
        raise RefusedError(RefusalReason.INVALID, f"The number of units must be 1 to {MAX_UNITS}.")


def describe_units(lifecycle_text: str, number: int) -> str:
    """Return the state of a device and its number of units, such as "ready, 4 units"; at most 64 characters."""
    return f"{lifecycle_text}, {number} unit{'' if number == 1 else 's'}"[-64:]


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


def count_units(devices: Collection[Device]) -> Counter[int]:
    """Count the units into which each device is divided, by device id; one statement.

    A unit that is the whole device, such as a card without virtual functions, is not counted, and neither are missing
    units.
    """
    counted = annotate_unit_count(Device.objects.filter(pk__in=[device.pk for device in devices]))
    return Counter(dict(counted.values_list("pk", "unit_count")))


def annotate_unit_count(rows: QuerySet[Any], device_prefix: str = "") -> QuerySet[Any]:
    """Add to devices, or to rows that refer to them, the number of units of the device, as `count_units` counts it.

    The column is `unit_count`; `device_prefix` is the path to the device, such as "device__".
    """
    address = OuterRef(f"{device_prefix}address")
    present = AttachHandle.objects.filter(
        deployable__device=OuterRef(f"{device_prefix}pk"),
        deployable__missing_since__isnull=True,
        missing_since__isnull=True,
    ).exclude(attach_type=HandleType.PCI, attach_info=_build_pci_attach_info(address))
    number = Subquery(present.order_by().values("deployable__device").annotate(n=Count("pk")).values("n"))
    annotated: QuerySet[Any] = rows.annotate(unit_count=Coalesce(number, 0))
    return annotated


def _build_pci_attach_info(address: Any) -> Any:
    """Return the SQL expression of the attach information of the PCI function at `address`, the same JSON text as
    `drivers.inventory`; NULL without an address."""

    def split_part(text: Any, mark: str, number: int) -> Func:
        """Return the part with this number of a text that marks divide into parts."""
        return Func(text, Value(mark), Value(number), function="split_part", output_field=CharField())

    slot = split_part(address, ":", 3)
    parts = {
        "bus": split_part(address, ":", 2),
        "device": split_part(slot, ".", 1),
        "domain": split_part(address, ":", 1),
        "function": split_part(slot, ".", 2),
    }
    pieces: list[Any] = []
    for name, part in parts.items():
        pieces += [Value(f'{", " if pieces else "{"}"{name}": "'), part, Value('"')]
    return Concat(*pieces, Value("}"), output_field=CharField())


def resolve_targets(
    targets: Sequence[PartitionTarget], change: PartitionChange
) -> list[tuple[UUID | None, PartitionTarget]]:
    """Return each device once, with the first target that names it; None for a target that matches no device.

    A uuid that no device has is returned, too. If a target is a backend, its retired and missing devices are left out,
    and those whose number of units cannot be chosen. Costs one statement, whatever the number of targets. Raises
    RefusedError INVALID if the targets name no device or more than MAX_DEVICES, or if the change has a generation and
    is for more than one device.
    """
    uuids_by_backend = _find_devices_of_backends(targets)
    resolved: dict[UUID | PartitionTarget, tuple[UUID | None, PartitionTarget]] = {}
    for target in targets:
        uuids = [target.device] if target.device else uuids_by_backend.get((target.host, target.backend), [])
        for uuid in uuids:
            resolved.setdefault(uuid, (uuid, target))
        if not uuids:
            resolved.setdefault(target, (None, target))
    if not 0 < len(resolved) <= MAX_DEVICES:
        raise RefusedError(RefusalReason.INVALID, f"Name 1 to {MAX_DEVICES} devices, by uuid, or by host and backend.")
    if change.generation is not None and len(resolved) != 1:
        raise RefusedError(
            RefusalReason.INVALID, f"A generation is only for a single device; the targets are {len(resolved)} devices."
        )
    return list(resolved.values())


def _find_devices_of_backends(targets: Sequence[PartitionTarget]) -> dict[tuple[str, str], list[UUID]]:
    """Return the uuids of the devices of each backend that a target names, by host and backend; at most
    MAX_DEVICES + 1 in all."""
    named = {(target.host, target.backend) for target in targets if not target.device}
    divisible = Device.objects.filter(
        host__name__in={host for host, _ in named}, backend__in={backend for _, backend in named}
    ).exclude(sized_by="")
    present = divisible.exclude(state__in=(DeviceState.RETIRED, DeviceState.MISSING)).order_by("id")
    uuids: dict[tuple[str, str], list[UUID]] = {}
    number = 0
    for uuid, host, backend in present.values_list("uuid", "host__name", "backend").iterator() if named else ():
        if (host, backend) in named:
            uuids.setdefault((host, backend), []).append(uuid)
            number += 1
        if number > MAX_DEVICES:
            break
    return uuids


def build_layout(device: Device, change: PartitionChange, present_units: int) -> dict[str, str]:
    """Return the layout for the command; the device has `present_units` units now. Raises RefusedError INVALID.

    It has the keys and values that the caller gave, and the new number of units under the key `sized_by`, unless the
    change only sets keys.
    """
    if change.unit_delta == 0:
        if not change.layout:
            raise RefusedError(RefusalReason.INVALID, "No change is chosen: say how many units to add or to remove.")
        if not device.changeable:
            text = f"{device.driver} does not allow the layout of its devices to be changed."
            raise RefusedError(RefusalReason.INVALID, text)
        return dict(change.layout)
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
