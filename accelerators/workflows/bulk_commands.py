"""Place the commands of a bulk action: one for each device, or a reason why the device gets none.

Each command is placed by `placing.order_device_command`, whose checks decide, whatever `predict_refusal` predicted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from uuid import UUID

from accelerators import conductor
from accelerators.commands import placing
from accelerators.devices.lifecycle import PATIENCE_S, Result
from accelerators.domain.caller import Caller
from accelerators.domain.errors import Reason, RefusedError
from accelerators.domain.states import DeviceState, Source
from accelerators.models import Device
from drivers.plan import DESTRUCTIVE

OPS = ("health", "reset")
"""Commands that a bulk action can place."""
DONE = {"reset": "reset"}


def blocked(op: str, stood: str, word: str, state: DeviceState, *, able: bool, busy: bool, held: bool) -> str:
    """Return why command `op` would be refused for a device, or '' if it would be placed. Pure, for forecasts.

    `word_when_chosen` and `word_now` are the device's `Standing.word`. `is_supported` says that its driver supports
    `op`; `is_held` is known from our own requests only. A held or changed device is refused destructive commands only.
    """
    if op in DESTRUCTIVE and stood != word:
        return f"was {stood} when it was chosen, is {word} now"
    if state not in placing.ASKED[op]:
        return f"is {state}: {op} is not possible"
    if not able:
        return f"its driver does not support {op}"
    if op in DESTRUCTIVE and held:
        return f"is held: it cannot be {DONE[op]}"
    return "is busy with a command" if busy and op in placing.EXCLUSIVE else ""


def many(op: str, seen: Mapping[UUID, str], caller: Caller, reason: str) -> list[Result]:
    """Place command `op` for each of these devices in one transaction; a refusal of one device stops no other.

    `words_when_chosen` maps each device to its `Standing.word` when it was chosen. Locks the devices and their hosts.
    Once HOLDER_CHECKS_TIMEOUT_S have passed, mostly in questions to witnesses, destructive commands for the remaining
    devices are refused with AWAY, so that they are tried again. A device that is gone is refused with UNKNOWN.
    """
    until = time.monotonic() + PATIENCE_S
    with conductor.writing():
        found = {device.uuid: device for device in conductor.locked(Device.objects.filter(uuid__in=list(seen)))}
        results: Sequence[Result] = [_one(op, found[uuid], seen[uuid], caller, reason, until) for uuid in found]
    gone = seen.keys() - found.keys()
    lost = (Result(uuid, "refused", text="The device does not exist any more.", reason=Reason.UNKNOWN) for uuid in gone)
    return [*results, *lost]


def _one(op: str, device: Device, stood: str, caller: Caller, reason: str, until: float) -> Result:
    """Place the command for one locked device, or return the refusal."""
    about = (str(device), device.host.name, device.state)
    try:
        if op in DESTRUCTIVE and device.stands != stood:
            said = f"It was {stood} when it was chosen; it is {device.stands} now. Look at it again."
            raise RefusedError(Reason.CONFLICT, said)
        if op in DESTRUCTIVE and time.monotonic() > until:
            raise RefusedError(Reason.AWAY, "The check whether it is held took too long: try again.")
        command = placing.ask(op, device.uuid, caller, reason=reason, source=Source.PERSON)
    except RefusedError as refused:
        return Result(device.uuid, "refused", *about, refused.text, refused.reason)
    return Result(device.uuid, "moved", *about, f"command {command.pk}")
