"""Place the commands of a bulk action: one for each device, or a reason why the device gets none.

The commands are placed by `command_queue.order_command_for_each`, whose checks decide, whatever `predict_refusal`
predicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple
from uuid import UUID

from accelerators import conductor, safety
from accelerators.commands import command_queue
from accelerators.commands.command_queue import Obstacle
from accelerators.devices import partitioning
from accelerators.devices.lifecycle import ActionResult
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import DeviceState, EventSource
from accelerators.models import Device
from drivers.plan import DESTRUCTIVE

PARTITION = "partition"
"""The bulk action that changes the number of units of its devices. Its arguments are those of a `PartitionChange`."""
LISTED_OPS = ("health", "reset")
"""Commands without arguments that a bulk action can place."""
BULK_OPS = (*LISTED_OPS, PARTITION)
"""Commands that a bulk action can place."""


class UnreachableAgent(NamedTuple):
    """An agent that takes no commands now: the name of its host, and the reason."""

    host: str
    obstacle: Obstacle


def predict_refusal(
    op: str,
    word_when_chosen: str,
    word_now: str,
    state: DeviceState,
    *,
    is_supported: bool,
    is_busy: bool,
    is_held: bool,
    is_released: bool,
) -> str:
    """Return why command `op` would be refused for a device whatever its agent is, or ''. This is a pure function, for
    forecasts.

    `word_when_chosen` and `word_now` are the device's `LifecycleState.as_text`. `is_supported` says that its driver
    supports `op`; `is_held` is known from our own requests only, and `is_released` says that a guest may still use a
    released handle of the device. A held or changed device is refused destructive commands only.
    """
    if op in DESTRUCTIVE and word_when_chosen != word_now:
        return f"was {word_when_chosen} when it was chosen, is {word_now} now"
    if state not in command_queue.ALLOWED_STATES[op]:
        return f"is {state}: {op} is not possible"
    if not is_supported:
        return f"its driver does not support {op}"
    if op in DESTRUCTIVE and (is_held or is_released):
        act = command_queue.PAST_PARTICIPLES[op]
        return f"is held: it cannot be {act}" if is_held else describe_release(act)
    if is_busy and op in command_queue.EXCLUSIVE_OPS:
        return "is busy with a command"
    return ""


def describe_release(act: str, device: str = "it") -> str:
    """Return why an act is refused because of a device with a released handle, which is called `device`; `act`
    completes "it cannot be ..."."""
    return f"a guest may still use {device}, because the host has not confirmed that none does: it cannot be {act}"


def describe_delay(op: str, obstacle: Obstacle) -> str:
    """Return what has to be done for command `op` that is placed although the agent takes no commands now."""
    start_s, _ = command_queue.get_time_limits(op)
    return f"{obstacle.waiting_text} within {start_s} seconds, or the command expires"


def ask_holders_for_each(
    op: str, arguments: Mapping[str, Any] | None, words_when_chosen: Mapping[UUID, str]
) -> safety.HolderAnswers:
    """Ask all holder checks for `place_command_for_each`, about the devices that are not refused anyway."""
    if op == PARTITION:
        change = partitioning.PartitionChange.from_arguments(arguments or {})
        return partitioning.ask_holders_for_partition(list(words_when_chosen), change)
    selected = Device.objects.filter(uuid__in=list(words_when_chosen))
    return command_queue.ask_holders_for_command(
        op, selected, lambda device: _refuse_if_changed(op, device, words_when_chosen[device.uuid])
    )


def place_command_for_each(
    op: str,
    arguments: Mapping[str, Any] | None,
    words_when_chosen: Mapping[UUID, str],
    caller: Caller,
    reason: str,
    answers: safety.HolderAnswers,
    source: EventSource = EventSource.PERSON,
) -> list[ActionResult]:
    """Place command `op` for each of these devices in one transaction; a refusal of one device stops no other.

    Returns one result per device; `moved` means that the command was placed. Only PARTITION has `arguments`.
    `words_when_chosen` maps each device to its `LifecycleState.as_text` when it was chosen, for PARTITION to its
    `describe_units`. Locks the devices and their hosts. `answers` are those of `ask_holders_for_each` for these
    devices. A device that is gone is refused with NOT_FOUND.
    """
    results: dict[UUID, ActionResult] = {}
    layouts: dict[Device, dict[str, str] | None] = {}

    def refuse(device: Device, refused: RefusedError) -> None:
        """Store the result of a device that is refused."""
        columns = (str(device), device.host.name, device.state)
        results[device.uuid] = ActionResult(device.uuid, "refused", *columns, refused.text, refused.reason)

    with conductor.writing():
        devices = conductor.lock_devices(Device.objects.filter(uuid__in=list(words_when_chosen)))
        units = partitioning.count_units(devices) if op == PARTITION else Counter[int]()
        for device in devices:
            try:
                layouts[device] = _check_device(op, arguments, device, units[device.pk], words_when_chosen[device.uuid])
            except RefusedError as refused:
                refuse(device, refused)
        ordered = command_queue.order_command_for_each(op, layouts, caller, reason, source, answers)
    for device, command in ordered.items():
        if isinstance(command, RefusedError):
            refuse(device, command)
        else:
            columns = (str(device), device.host.name, device.state)
            results[device.uuid] = ActionResult(device.uuid, "moved", *columns, f"command {command.pk}")
    missing = RefusalReason.NOT_FOUND
    return [
        results.get(uuid) or ActionResult(uuid, "refused", text="The device does not exist any more.", reason=missing)
        for uuid in words_when_chosen
    ]


def _check_device(
    op: str, arguments: Mapping[str, Any] | None, device: Device, present_units: int, word_when_chosen: str
) -> dict[str, str] | None:
    """Return the layout for the command of a locked device, None unless the command is PARTITION; `present_units` is
    its number of units, which only PARTITION needs. Raises RefusedError if the device has changed since it was chosen,
    or does not allow the change."""
    if op == PARTITION:
        change = partitioning.PartitionChange.from_arguments(arguments or {})
        return partitioning.build_layout_if_unchanged(device, change, present_units, word_when_chosen)
    _refuse_if_changed(op, device, word_when_chosen)
    return None


def _refuse_if_changed(op: str, device: Device, word_when_chosen: str) -> None:
    """Raise RefusedError CONFLICT if `op` is destructive, and the device's state differs from the one when it was
    chosen."""
    if op in DESTRUCTIVE and device.lifecycle_text != word_when_chosen:
        text = f"It was {word_when_chosen} when it was chosen; it is {device.lifecycle_text} now. Look at it again."
        raise RefusedError(RefusalReason.CONFLICT, text)
