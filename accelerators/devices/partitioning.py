"""Units of devices: so many more of them, so many fewer, or devices divided otherwise. Each is a `partition` command.

Called by whoever offers it: our own API, the console, `manage.py accelerator`. Which units there are then is what the
agent reports before it answers; nothing is written here but the commands.
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
from accelerators.domain.errors import Reason, Refused
from accelerators.domain.states import DeviceState, HandleType, Source
from accelerators.models import AttachHandle, Command, Device

MOST = 256
"""So many devices one call changes."""
MOST_UNITS = 65_535
PATIENCE_S = 20.0
"""How long one call goes on to the next device; witnesses that are away may take seconds about each."""


@dataclass(frozen=True)
class Target:
    """A device; or, of the backend of this name on this host, all devices whose number of units can be chosen."""

    device: UUID | None = None
    host: str = ""
    backend: str = ""


@dataclass(frozen=True)
class Change:
    """What is wanted of each device: `by` so many units more or fewer (None: none left), and the words of `layout`."""

    by: int | None
    layout: Mapping[str, str] = field(default_factory=dict)
    generation: int | None = None
    """What who asks has seen; for one device alone."""


@dataclass(frozen=True)
class Result:
    """What became of one device of a target: the command, or why there is none. Without a device nothing was found."""

    target: Target
    device: UUID | None
    command: Command | None
    refused: str = ""
    reason: Reason | None = None


def change(
    targets: Sequence[Target], wanted: Change, caller: Caller, reason: str = "", source: Source = Source.API
) -> list[Result]:
    """Order it of each device by itself: one that is refused stops no other. A device named twice is ordered once.

    Raises Refused INVALID for what makes no sense of any device.
    """
    placing.check_reason(reason)
    if wanted.by is not None and not 0 < abs(wanted.by) <= MOST_UNITS:
        raise Refused(Reason.INVALID, f"Say how many units: 1 to {MOST_UNITS}.")
    found = _devices(targets)
    if not 0 < len(found) <= MOST:
        raise Refused(Reason.INVALID, f"Name 1 to {MOST} devices, by themselves or by their backends.")
    if wanted.generation is not None and len(found) != 1:
        raise Refused(Reason.INVALID, f"A generation is one device's; these targets are {len(found)} devices.")
    end = time.monotonic() + PATIENCE_S
    results = []
    for device, target in found:
        if device is None:
            results.append(_nothing(target))
        elif time.monotonic() > end:
            text = f"Device {device} was not come to in time: ask for it again."
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
    """Give one device these words of a layout. Raises Refused as `commands.ask` does, and INVALID for a device of
    which its driver lets nothing be changed."""
    with conductor.writing():
        found = next(iter(conductor.locked(Device.objects.filter(uuid=device))), None)
        if found and not found.changeable:
            raise Refused(Reason.INVALID, f"Device {device}: {found.driver} lets nothing of its layout be changed.")
        return placing.ask(
            "partition", device, caller, reason=reason, layout=layout, generation=generation, source=source
        )


def numbers(devices: Collection[Device]) -> Counter[int]:
    """Device id → how many units it is divided into; one that is its own only unit, as a card without virtual
    functions, is not divided. One statement."""
    whole = {device.pk: _whole(device.address) for device in devices if device.address}
    present = AttachHandle.objects.filter(
        deployable__device__in=list(devices), deployable__missing_since__isnull=True, missing_since__isnull=True
    )
    found = present.values_list("deployable__device", "attach_type", "attach_info")
    return Counter(id for id, kind, info in found if not (kind == HandleType.PCI and info == whole.get(id)))


def _whole(address: str) -> str:
    """The attach information of a PCI function, as `drivers.inventory` has it."""
    domain, bus, rest = address.split(":")
    device, _, function = rest.partition(".")
    return json.dumps({"bus": bus, "device": device, "domain": domain, "function": function})


def _devices(targets: Sequence[Target]) -> list[tuple[UUID | None, Target]]:
    """Each device once, with the target that named it first; a target without any stands alone."""
    found: list[tuple[UUID | None, Target]] = []
    known: set[UUID] = set()
    for target in targets[: MOST + 1]:
        named = list(_named(target))
        fresh = [uuid for uuid in named if uuid not in known]
        known.update(fresh)
        found += [(uuid, target) for uuid in fresh] or ([] if named else [(None, target)])
    return found


def _named(target: Target) -> Iterator[UUID]:
    if target.device:
        yield target.device
        return
    offers = Device.objects.filter(host__name=target.host, backend=target.backend).exclude(sized_by="")
    gone = (DeviceState.RETIRED, DeviceState.MISSING)
    yield from offers.exclude(state__in=gone).order_by("id").values_list("uuid", flat=True)[: MOST + 1]


def _order(target: Target, uuid: UUID, wanted: Change, caller: Caller, reason: str, source: Source) -> Result:
    """One transaction: how many there are is counted under the lock under which the command is placed."""
    try:
        with conductor.writing():
            device = next(iter(conductor.locked(Device.objects.filter(uuid=uuid))), None)
            if device is None:
                raise Refused(Reason.UNKNOWN, f"Device not found with uuid={uuid}")
            placing.refuse_changed(device, wanted.generation)
            layout = _layout(device, wanted)
            command = placing.ask("partition", uuid, caller, reason=reason, layout=layout, source=source)
    except Refused as refused:
        return Result(target, uuid, None, refused.text, refused.reason)
    return Result(target, uuid, command)


def _layout(device: Device, wanted: Change) -> dict[str, str]:
    if not device.sized_by:
        text = f"Device {device.uuid}: how many units it has cannot be chosen, says {device.driver}."
        raise Refused(Reason.INVALID, text)
    if device.sized_by in wanted.layout:
        text = f"{device.sized_by} follows from the number of units: leave it out of the layout, or change the device."
        raise Refused(Reason.INVALID, text)
    now = numbers([device])[device.pk]
    then = now + wanted.by if wanted.by is not None else 0
    if not 0 <= then <= MOST_UNITS or then == now:
        raise Refused(Reason.INVALID, f"Device {device.uuid} has {now} units: there is no such number to take away.")
    return {**wanted.layout, device.sized_by: str(then)}


def _nothing(target: Target) -> Result:
    text = f"Host {target.host} has no device of backend {target.backend} of which the number of units can be chosen."
    return Result(target, None, None, text, Reason.UNKNOWN)
