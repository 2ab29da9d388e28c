"""What hosts are told to do: ordered in the transaction that wants it done, followed until they have answered.

Called by `lifecycle`, `binding`, `conductor` (orders), both APIs, console and `manage.py` (`ask`), `images` (what had
to be fetched first), `agents` (what hosts say). A row is its own outbox; `agents.gateway.command_dispatch` delivers
it. How a command ends, and what follows, is `outcomes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from django.conf import settings
from django.db import transaction

from accelerators import conductor, safety
from accelerators.commands import placement_delegation, sql
from accelerators.domain.caller import Caller, request_id
from accelerators.domain.errors import Reason, Refused
from accelerators.domain.states import DeviceState, Source
from accelerators.models import Command, Deployable, Device, Host
from accelerators.runtime import jobs, pubsub
from drivers.plan import DESTRUCTIVE

TOPIC = "commands"
"""Rung when a command is to be delivered; the detail is its host's id, or '' for several hosts."""
CHANGED = "command"
"""Rung with a command's uuid when it has got on, and when it has ended."""
JOB = "commands"

EXCLUSIVE = frozenset({"install", "uninstall", "program", "partition", "reset"})
"""Nothing is bound to the device meanwhile; so is an attachment that programs first."""
ON_HOST = ("MDEV", "DEV")
"""Handles that are made on the host before they can be used; PCI functions are libvirt's business."""
MARGIN_S = 6
"""So much earlier than a bind its command ends: then the bind's fault says why."""
MAX_REASON = 500
MAX_LAYOUT, MAX_WORD, MAX_VALUE = 64, 64, 255

_S = DeviceState
_ANYWHERE = frozenset(_S) - {_S.MISSING, _S.RETIRED}
ASKED = {
    "uninstall": frozenset({_S.INACTIVE, _S.MAINTENANCE, _S.FAILED, _S.QUARANTINED}),
    "program": _ANYWHERE - {_S.INSTALLING},
    "partition": _ANYWHERE - {_S.INSTALLING},
    "reset": _ANYWHERE - {_S.INSTALLING},
    "health": _ANYWHERE,
}
"""What can be asked of a device by name, and in which states it can be."""
ASKED_OF_HOST = ("rescan", "logs", "report")
_DONE = {"uninstall": "uninstalled", "program": "programmed", "partition": "partitioned", "reset": "reset"}

_COLUMNS = ("op", "device", "handle", "part", "host", "arguments", "exclusive", "request", "actor", "reason")
_json = msgspec.json.Encoder()
Number = tuple[int, int]
"""A command as its agent names it: the host's id, the number."""
Reach = Callable[[Host], str]
_reaches: list[Reach] = []


@dataclass(frozen=True)
class Order:
    """One command to be placed: of a device, of one of its handles (an id) or deployables (`part`, an id), or of a
    host. `arguments` are added to what those rows say; `wanted` in them is an image that is to be fetched first."""

    op: str
    device: UUID | str | None = None
    handle: int | None = None
    part: int | None = None
    host: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    actor: str = ""
    reason: str = ""
    request: UUID | str | None = None

    @property
    def programs(self) -> bool:
        """Whether an image goes into the device."""
        return "wanted" in self.arguments or "image" in self.arguments

    @property
    def exclusive(self) -> bool:
        """Whether it has the device for itself."""
        return self.op in EXCLUSIVE or self.programs


class Progress(NamedTuple):
    """How far a host says that a command of it is."""

    host: int
    number: int
    percent: int = 0
    text: str = ""


class Answer(NamedTuple):
    """How a host says that a command of it ended. The report (`epoch`, `seq`, `hash`) shows it; (0, 0, '') when what
    it shows is applied already."""

    host: int
    number: int
    outcome: str
    text: str = ""
    detail: Mapping[str, str] = {}
    epoch: int = 0
    seq: int = 0
    hash: str = ""


def register(reach: Reach) -> None:
    """Have `reach(host)` asked whether the host's agent takes commands: '' when nothing is known against it."""
    _reaches.append(reach)


def deadlines(op: str, programs: bool = False) -> tuple[int, int]:
    """Seconds within which a command is to be begun, and how many more it may take. The host may be away for the first;
    what a bind waits for ends with the bind."""
    keys = settings.KEYS
    if op in ("install", "uninstall", "detach"):
        return 3600, 600
    if op in ("attach", "program"):
        bind: int = keys.program_timeout_s if programs else keys.bind_timeout_s
        return bind - min(MARGIN_S, bind // 10), 0
    return (20, 100) if op == placement_delegation.OP else (60, 240)


def place(orders: Sequence[Order], source: Source = Source.SYSTEM) -> list[Command]:
    """Make the commands, in order, with an event each; one statement. Inside `conductor.writing()`, with the rows of
    the devices that are to be exclusive locked and not busy; agents hear of it after the commit."""
    if not orders:
        return []
    rows = []
    for n, order in enumerate(orders):
        start_s, more_s = deadlines(order.op, order.programs)
        named = {name: getattr(order, name) for name in _COLUMNS}
        rows.append(named | {"n": n, "start_s": start_s, "more_s": more_s})
    values = {"rows": _text(rows), "count": len(rows), "request_id": request_id.get(), "source": source.value}
    made = list(Command.objects.raw(sql.PLACE, values))
    assert len(made) == len(orders), "a command for what is not there"
    transaction.on_commit(partial(_ordered, {command.host_id for command in made}, made), robust=True)
    return made


def ask(
    op: str,
    device_uuid: UUID,
    caller: Caller,
    *,
    reason: str = "",
    layout: Mapping[str, str] | None = None,
    image: UUID | None = None,
    deployable: UUID | None = None,
    generation: int | None = None,
    source: Source = Source.API,
) -> Command:
    """Order one of ASKED. `layout` is partition's, `image` program's; `deployable` says which part is programmed.

    Raises Refused: UNKNOWN; INVALID arguments; CONFLICT, when the device is at another `generation` than who asks has
    seen, or its state, its driver, another command or its agent does not allow it; for what is destructive HELD, by
    whom, or AWAY, when a witness cannot be asked.
    """
    arguments = _arguments(op, layout, image)
    reason = check_reason(reason)
    with conductor.writing():
        device = next(iter(conductor.locked(Device.objects.filter(uuid=device_uuid))), None)
        if device is None:
            raise Refused(Reason.UNKNOWN, f"Device not found with uuid={device_uuid}")
        part = _part(device, deployable) if op == "program" else None
        refuse_changed(device, generation)
        _refuse_words(device, layout or {})
        _check(op, device)
        order = Order(op, device.uuid, None, part, None, arguments, caller.name, reason)
        return place([order], source)[0]


def ask_host(
    op: str, host_uuid: UUID, caller: Caller, *, driver: str = "", reason: str = "", source: Source = Source.API
) -> Command:
    """Order one of ASKED_OF_HOST; rescan and report may name one driver, and rescan releases it from quarantine.

    Raises Refused: UNKNOWN; INVALID; CONFLICT when its agent takes no commands.
    """
    if op not in ASKED_OF_HOST:
        raise Refused(Reason.INVALID, f"A host cannot be asked to {op}; it can be asked: {', '.join(ASKED_OF_HOST)}.")
    if len(driver) > MAX_WORD or "\0" in driver or (driver and op == "logs"):
        raise Refused(Reason.INVALID, "Only rescan and report take a driver, by its name.")
    reason = check_reason(reason)
    with conductor.writing():
        host = Host.objects.filter(uuid=host_uuid).first()
        if host is None:
            raise Refused(Reason.UNKNOWN, f"Host not found with uuid={host_uuid}")
        reachable(host)
        arguments = {"driver": driver} if driver else {}
        return place([Order(op, host=host.id, arguments=arguments, actor=caller.name, reason=reason)], source)[0]


def prepared(number: int, image: Mapping[str, Any]) -> bool:
    """Its image (as `agents.wire.ImageRef` has it) is here: it can be delivered. False when nobody waits any more."""
    with conductor.writing():
        found = _execute(sql.PREPARED, {"number": number, "image": _text(image)}).fetchall()
        for (host,) in found:
            transaction.on_commit(partial(pubsub.ring, TOPIC, str(host)), robust=True)
    return bool(found)


def unprepared(number: int, text: str) -> None:
    """Its image cannot be had, `text` says why: it is refused before its host has heard of it."""
    refuse([number], text)


def refuse(numbers: Sequence[int], text: str) -> None:
    """End commands that no agent has taken as refused, because of `text`."""
    with conductor.writing():
        _execute(sql.REFUSED, {"numbers": list(numbers), "text": text[:4096].replace("\0", "")})
        transaction.on_commit(partial(jobs.kick, JOB), robust=True)


def cancel(requests: Sequence[UUID | str]) -> None:
    """These requests wait no more: what was to be fetched for them is not told to hosts."""
    if requests:
        values = {"requests": [str(uuid) for uuid in requests], "text": "nobody waits for it any more"}
        if _execute(sql.CANCELLED, values).rowcount:
            transaction.on_commit(partial(jobs.kick, JOB), robust=True)


def taken(told: Iterable[Number]) -> None:
    """These are in their agents' journals."""
    with conductor.writing():
        _execute(sql.TAKEN, _columns(told))


def progressed(told: Iterable[Progress]) -> None:
    """So far these commands are; the first time says that they have begun."""
    rows = {(one.host, one.number): one._asdict() for one in told}
    with conductor.writing():
        found = _execute(sql.PROGRESSED, {"rows": _text([*rows.values()])}).fetchall()
        transaction.on_commit(partial(ring_changed, [uuid for (uuid,) in found]), robust=True)


def answer(told: Iterable[Answer]) -> set[Number]:
    """Keep how these commands ended; returns those about which nothing is left to do, so that their agents may forget
    them. The others end when the report that goes with them is applied (`outcomes.settle`)."""
    rows = {(one.host, one.number): one._asdict() for one in told}
    with conductor.writing():
        said = {"rows": _text([*rows.values()])}
        kept = _execute(sql.ANSWERED, said).rowcount
        if kept < len(rows):
            late = _execute(sql.LATE, said).fetchall()
            take_back([number for number, outcome in late if outcome != "refused"])
        settled = rows.keys() - still_open(rows)
        if kept:
            transaction.on_commit(partial(jobs.kick, JOB), robust=True)
    return settled


def still_open(told: Iterable[Number]) -> set[Number]:
    """Of these commands those that are to end yet."""
    return set(_execute(sql.OPEN, _columns(told)).fetchall())


def take_back(numbers: Sequence[int]) -> None:
    """What these attachments may have made on their hosts, and nobody waits for: order it back, once."""
    if numbers:
        found = _execute(sql.MADE, {"numbers": list(numbers), "types": list(ON_HOST)}).fetchall()
        requests = dict(Command.objects.filter(id__in=[id for id, *_ in found]).values_list("id", "request"))
        place([detach(handle, consumer, requests[id], "nobody waits for it") for id, handle, consumer in found])


def detach(handle: int, consumer: str | None, request: UUID | str | None, reason: str, actor: str = "binding") -> Order:
    """Give back on its host what was made there for a request."""
    arguments = {"consumer": str(consumer or "")}
    return Order("detach", handle=handle, arguments=arguments, actor=actor, reason=reason, request=request)


def wake() -> None:
    """Have those settled whose agents have answered, if there are any: a report was applied."""
    if _execute(sql.WAITING, {}).fetchone()[0]:
        jobs.kick(JOB)


def ring_changed(uuids: Sequence[str]) -> None:
    """Tell who follows these commands; in one transaction, after the commit of what there is to see."""
    with transaction.atomic():
        for uuid in uuids:
            pubsub.ring(CHANGED, uuid)


def _ordered(hosts: set[int], made: Sequence[Command]) -> None:
    """After the commit: agents are told, images are fetched."""
    if any("wanted" in command.arguments for command in made):
        jobs.kick("images")
    pubsub.ring(TOPIC, str(hosts.pop()) if len(hosts) == 1 else "")


def _arguments(op: str, layout: Mapping[str, str] | None, image: UUID | None) -> dict[str, Any]:
    if op not in ASKED:
        raise Refused(Reason.INVALID, f"A device cannot be asked to {op}; it can be asked: {', '.join(ASKED)}.")
    if bool(layout) != (op == "partition"):
        raise Refused(Reason.INVALID, 'Partition, and nothing else, takes a layout, for example {"vfs": "4"}.')
    if (image is not None) != (op == "program"):
        raise Refused(Reason.INVALID, "Program, and nothing else, takes an image, by its uuid.")
    if layout:
        texts = [text for pair in layout.items() for text in pair]
        if not all(isinstance(text, str) and "\0" not in text and len(text) <= MAX_VALUE for text in texts) or any(
            len(word) > MAX_WORD for word in layout
        ):
            raise Refused(Reason.INVALID, f"A layout holds words of at most {MAX_WORD} characters and short values.")
        if len(layout) > MAX_LAYOUT:
            raise Refused(Reason.INVALID, f"A layout holds at most {MAX_LAYOUT} words.")
        return {"layout": dict(layout)}
    return {"wanted": {"bitstream_id": str(image)}} if image else {}


def _part(device: Device, wanted: UUID | None) -> int:
    parts = dict(Deployable.objects.filter(device=device, missing_since__isnull=True).values_list("uuid", "id"))
    if wanted is None and len(parts) == 1:
        return next(iter(parts.values()))
    if wanted not in parts:
        raise Refused(Reason.INVALID, f"Say which deployable of device {device.uuid} is to be programmed.")
    return parts[wanted]


def _check(op: str, device: Device) -> None:
    """Raises Refused unless it can be asked of this device, locked, now."""
    if DeviceState(device.state) not in ASKED[op]:
        possible = ", ".join(sorted(ASKED[op]))
        raise Refused(
            Reason.CONFLICT, f"Device {device.uuid} is {device.state}: {op} is possible when it is {possible}."
        )
    if op not in device.acts.split():
        raise Refused(Reason.CONFLICT, f"Device {device.uuid}: {device.driver} cannot {op} it.")
    refuse_busy(device, op)
    reachable(device.host)
    if op in DESTRUCTIVE:
        safety.refuse_unless_free(device, _DONE[op])


def refuse_changed(device: Device, seen: int | None) -> None:
    """Raises Refused CONFLICT: of two who saw the same device and change it, the second looks again."""
    if seen is not None and seen != device.generation:
        now = f"generation {device.generation}"
        why = f"is at {now} now, not {seen}: somebody changed it"
        raise Refused(Reason.CONFLICT, f"Device {device.uuid} {why}. Look at it again, then say {now}.")


def _refuse_words(device: Device, layout: Mapping[str, str]) -> None:
    """An agent that does not say which words its driver takes leaves it to the driver."""
    words = device.changeable.split()
    if words and (strange := sorted(layout.keys() - words)):
        takes = f"{device.driver} takes {', '.join(words)}"
        raise Refused(Reason.INVALID, f"{', '.join(strange)[:200]}: no word for device {device.uuid}; {takes}.")


def refuse_busy(device: Device, op: str) -> None:
    """Raises Refused CONFLICT while an exclusive command is open and `op` is one."""
    if device.busy_with and op in EXCLUSIVE:
        other = Command.objects.filter(uuid=device.busy_with).values_list("op", flat=True).first()
        text = f"Device {device.uuid} is busy with {other} (command {device.busy_with}): wait for its end."
        raise Refused(Reason.CONFLICT, text)


def reachable(host: Host) -> None:
    """Raises Refused CONFLICT when its agent is known to take no commands."""
    for reach in _reaches:
        if text := reach(host):
            raise Refused(Reason.CONFLICT, f"{text[0].upper()}{text[1:]}.")


def check_reason(text: str) -> str:
    """The reason as it is stored. Raises Refused INVALID."""
    text = text.strip()
    if len(text) > MAX_REASON or "\0" in text:
        raise Refused(Reason.INVALID, f"A reason is at most {MAX_REASON} characters of text.")
    return text


def _columns(told: Iterable[Number]) -> dict[str, list[int]]:
    pairs = list(told)
    return {"hosts": [host for host, _ in pairs], "numbers": [number for _, number in pairs]}


def _execute(statement: str, values: Mapping[str, Any]) -> Any:
    return conductor.cursor().execute(statement, values)


def _text(value: object) -> str:
    return _json.encode(value).decode()
