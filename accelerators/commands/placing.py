"""Place commands for agents, and store the progress and the answers that agents send.

A command is inserted in the transaction that needs it (`place_commands`, `order_device_command`, `order_host_command`);
its row is its own outbox, and `agents.gateway.command_dispatch` delivers it. `accelerators.workflows.command_results`
ends commands and applies the consequences. `accelerators.images` reports here when an image that a command waits for
has been fetched.
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
from accelerators.domain.errors import Reason, RefusedError
from accelerators.domain.states import DeviceState, Source
from accelerators.models import Command, Deployable, Device, Host
from accelerators.runtime import jobs, pubsub
from drivers.plan import DESTRUCTIVE

TOPIC = "commands"
"""Topic of notifications that commands can be delivered; the detail is the host's id, or '' for several hosts."""
CHANGED = "command"
"""Topic of notifications that a command has made progress or has ended; the detail is the command's uuid."""
JOB = "commands"

EXCLUSIVE = frozenset({"install", "uninstall", "program", "partition", "reset"})
"""Commands during which nothing is bound to the device. An `attach` that programs first is exclusive, too."""
ON_HOST = ("MDEV", "DEV")
"""Types of handles that must be created on the host before they can be used. libvirt prepares PCI functions itself."""
MARGIN_S = 6
"""A command for a bind ends this many seconds before the bind's deadline, so that the bind's fault tells the reason."""
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
"""Commands that people can order for a device, and the device states in which each is possible."""
ASKED_OF_HOST = ("rescan", "logs", "report")
"""Commands that people can order for a host."""
_DONE = {"uninstall": "uninstalled", "program": "programmed", "partition": "partitioned", "reset": "reset"}

_COLUMNS = ("op", "device", "handle", "part", "host", "arguments", "exclusive", "request", "actor", "reason")
_json = msgspec.json.Encoder()
Number = tuple[int, int]
"""How an agent identifies a command: the host's id and the command's number (its primary key)."""
Reach = Callable[[Host], str]
_reaches: list[Reach] = []


@dataclass(frozen=True)
class Order:
    """A command to be placed. Its target is a device, a handle or a deployable (`part`) of one, or a host.

    `device` is a uuid; `handle`, `part` and `host` are primary keys. `arguments` are added to those that are read from
    the target's rows. The argument `wanted` names an image that must be fetched before the command is delivered.
    """

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
        """Return True if the command loads an image into the device."""
        return "wanted" in self.arguments or "image" in self.arguments

    @property
    def exclusive(self) -> bool:
        """Return True if nothing may be bound to the device while the command is open."""
        return self.op in EXCLUSIVE or self.programs


class Progress(NamedTuple):
    """An agent's message about the progress of one of its host's commands."""

    host: int
    number: int
    percent: int = 0
    text: str = ""


class Answer(NamedTuple):
    """An agent's message that one of its host's commands has ended.

    `epoch`, `seq` and `hash` identify the report that shows the result. They are (0, 0, '') if that report is applied
    already.
    """

    host: int
    number: int
    outcome: str
    text: str = ""
    detail: Mapping[str, str] = {}
    epoch: int = 0
    seq: int = 0
    hash: str = ""


def register(reach: Reach) -> None:
    """Register a check whether a host's agent takes commands.

    `check(host)` returns the reason why it does not, or '' if no reason is known.
    """
    _reaches.append(reach)


def deadlines(op: str, programs: bool = False) -> tuple[int, int]:
    """Return two times in seconds: until a command must have begun, and how much longer it may run.

    The first is long for commands that may wait for a host that is away. A command for a bind gets one time limit for
    both, which ends shortly before the bind's deadline (`BIND_MARGIN_S`).
    """
    keys = settings.KEYS
    if op in ("install", "uninstall", "detach"):
        return 3600, 600
    if op in ("attach", "program"):
        bind: int = keys.program_timeout_s if programs else keys.bind_timeout_s
        return bind - min(MARGIN_S, bind // 10), 0
    return (20, 100) if op == placement_delegation.OP else (60, 240)


def place(orders: Sequence[Order], source: Source = Source.SYSTEM) -> list[Command]:
    """Insert one command and one event for each order, in that order; return the commands. Costs one statement.

    Call it inside `conductor.writing()`. For exclusive commands the caller must have locked the device rows and checked
    that they are not busy. After the commit, agents are notified and the job that fetches images is woken if needed.
    """
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
    """Place one of the commands in `ALLOWED_STATES` for a device, and return it. The device and its host are locked.

    `layout` is required for `partition`, `image` for `program`. `deployable` selects the deployable to program; it may
    be left out if the device has only one. `generation` is the device generation that the caller has seen.

    Raise RefusedError: UNKNOWN if there is no such device; INVALID for wrong arguments; CONFLICT if the device has
    another generation, or its state, its driver, another command or its agent does not allow the command. Destructive
    commands also raise HELD, with the holders, or AWAY if a witness cannot be asked.
    """
    arguments = _arguments(op, layout, image)
    reason = check_reason(reason)
    with conductor.writing():
        device = next(iter(conductor.locked(Device.objects.filter(uuid=device_uuid))), None)
        if device is None:
            raise RefusedError(Reason.UNKNOWN, f"Device not found with uuid={device_uuid}")
        part = _part(device, deployable) if op == "program" else None
        refuse_changed(device, generation)
        _refuse_words(device, layout or {})
        _check(op, device)
        order = Order(op, device.uuid, None, part, None, arguments, caller.name, reason)
        return place([order], source)[0]


def ask_host(
    op: str, host_uuid: UUID, caller: Caller, *, driver: str = "", reason: str = "", source: Source = Source.API
) -> Command:
    """Place one of the commands in `HOST_OPS` for a host, and return it.

    `rescan` and `report` may be limited to one driver; `rescan` also releases that driver from quarantine.

    Raise RefusedError: UNKNOWN if there is no such host; INVALID for wrong arguments; CONFLICT if its agent takes no
    commands.
    """
    if op not in ASKED_OF_HOST:
        raise RefusedError(
            Reason.INVALID, f"{op} is no command for a host; the commands for hosts are {', '.join(ASKED_OF_HOST)}."
        )
    if len(driver) > MAX_WORD or "\0" in driver or (driver and op == "logs"):
        raise RefusedError(Reason.INVALID, "Only rescan and report take the name of a driver.")
    reason = check_reason(reason)
    with conductor.writing():
        host = Host.objects.filter(uuid=host_uuid).first()
        if host is None:
            raise RefusedError(Reason.UNKNOWN, f"Host not found with uuid={host_uuid}")
        reachable(host)
        arguments = {"driver": driver} if driver else {}
        return place([Order(op, host=host.id, arguments=arguments, actor=caller.name, reason=reason)], source)[0]


def prepared(number: int, image: Mapping[str, Any]) -> bool:
    """Queue a command whose image has been fetched, so that it is delivered after the commit.

    `image` has the fields of `agents.wire.ImageRef`. Return False if the command no longer waits for an image.
    """
    with conductor.writing():
        found = _execute(sql.PREPARED, {"number": number, "image": _text(image)}).fetchall()
        for (host,) in found:
            transaction.on_commit(partial(pubsub.ring, TOPIC, str(host)), robust=True)
    return bool(found)


def unprepared(number: int, text: str) -> None:
    """Refuse a command whose image cannot be fetched, before its agent receives it. `text` is the reason."""
    refuse([number], text)


def refuse(numbers: Sequence[int], text: str) -> None:
    """Store the answer "refused", with the reason `text`, for commands that no agent has taken; skip all others.

    After the commit the job `commands` is woken, which ends them.
    """
    with conductor.writing():
        _execute(sql.REFUSED, {"numbers": list(numbers), "text": text[:4096].replace("\0", "")})
        transaction.on_commit(partial(jobs.kick, JOB), robust=True)


def cancel(requests: Sequence[UUID | str]) -> None:
    """Refuse the commands of these accelerator requests that still wait for an image. Agents never receive them.

    Commands that another transaction has locked are skipped, because it is ending them. After the commit the job
    `commands` is woken. Call it inside `conductor.writing()`.
    """
    if requests:
        values = {"requests": [str(uuid) for uuid in requests], "text": "its request does not need it any more"}
        if _execute(sql.CANCELLED, values).rowcount:
            transaction.on_commit(partial(jobs.kick, JOB), robust=True)


def taken(told: Iterable[Number]) -> None:
    """Mark queued commands as taken: their agents have written them to their journals."""
    with conductor.writing():
        _execute(sql.TAKEN, _columns(told))


def progressed(told: Iterable[Progress]) -> None:
    """Store progress messages and notify watchers after the commit. The first message marks a command as started.

    Of several messages about one command the last one counts. Commands that are answered or ended are skipped.
    """
    rows = {(one.host, one.number): one._asdict() for one in told}
    with conductor.writing():
        found = _execute(sql.PROGRESSED, {"rows": _text([*rows.values()])}).fetchall()
        transaction.on_commit(partial(ring_changed, [uuid for (uuid,) in found]), robust=True)


def answer(told: Iterable[Answer]) -> set[Number]:
    """Store answers of agents; return the commands that need nothing more, so that their agents may forget them.

    The other commands end when the report that belongs to the answer is applied
    (`command_results.end_answered_commands`). An answer to a command that has already ended as expired or unknown is
    only noted; if that command was an attachment and the agent did not refuse it, what it made on the host is removed
    (`order_missing_detaches`).
    """
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
    """Return those of these commands that have not ended. Commands that wait for an image are left out."""
    return set(_execute(sql.OPEN, _columns(told)).fetchall())


def take_back(numbers: Sequence[int]) -> None:
    """Place a `detach` for each of these attachments that may have made something on its host and is no longer wanted.

    Commands that are not such attachments are skipped, and so are those that already have a later `detach`. Call it
    inside `conductor.writing()`.
    """
    if numbers:
        found = _execute(sql.MADE, {"numbers": list(numbers), "types": list(ON_HOST)}).fetchall()
        requests = dict(Command.objects.filter(id__in=[id for id, *_ in found]).values_list("id", "request"))
        place(
            [
                detach(handle, consumer, requests[id], "its request does not need it any more")
                for id, handle, consumer in found
            ]
        )


def detach(handle: int, consumer: str | None, request: UUID | str | None, reason: str, actor: str = "binding") -> Order:
    """Build an order that removes from the host what was made there for a request. Nothing is placed."""
    arguments = {"consumer": str(consumer or "")}
    return Order("detach", handle=handle, arguments=arguments, actor=actor, reason=reason, request=request)


def wake() -> None:
    """Wake the job `commands` if any answered command has not ended. Call it after a report was applied."""
    if _execute(sql.WAITING, {}).fetchone()[0]:
        jobs.kick(JOB)


def ring_changed(uuids: Sequence[str]) -> None:
    """Notify the watchers of these commands, in one transaction. Call it after the commit of the changes."""
    with transaction.atomic():
        for uuid in uuids:
            pubsub.ring(CHANGED, uuid)


def _ordered(hosts: set[int], made: Sequence[Command]) -> None:
    """After the commit: notify the gateways, and wake the job that fetches images if a command needs one."""
    if any("wanted" in command.arguments for command in made):
        jobs.kick("images")
    pubsub.ring(TOPIC, str(hosts.pop()) if len(hosts) == 1 else "")


def _arguments(op: str, layout: Mapping[str, str] | None, image: UUID | None) -> dict[str, Any]:
    """Check what the caller gave for the device command `op`; return the command arguments. Raise RefusedError
    INVALID."""
    if op not in ASKED:
        raise RefusedError(Reason.INVALID, f"{op} is no command for a device; these are: {', '.join(ASKED)}.")
    if bool(layout) != (op == "partition"):
        raise RefusedError(Reason.INVALID, 'Only partition takes a layout, and it needs one, for example {"vfs": "4"}.')
    if (image is not None) != (op == "program"):
        raise RefusedError(Reason.INVALID, "Only program takes an image, and it needs one: give its uuid.")
    if layout:
        texts = [text for pair in layout.items() for text in pair]
        if not all(isinstance(text, str) and "\0" not in text and len(text) <= MAX_VALUE for text in texts) or any(
            len(word) > MAX_WORD for word in layout
        ):
            raise RefusedError(
                Reason.INVALID, f"A word of a layout has at most {MAX_WORD} characters, its value at most {MAX_VALUE}."
            )
        if len(layout) > MAX_LAYOUT:
            raise RefusedError(Reason.INVALID, f"A layout holds at most {MAX_LAYOUT} words.")
        return {"layout": dict(layout)}
    return {"wanted": {"bitstream_id": str(image)}} if image else {}


def _part(device: Device, wanted: UUID | None) -> int:
    """Return the id of the deployable to program; without `deployable_uuid`, of the only one. Raise RefusedError
    INVALID."""
    parts = dict(Deployable.objects.filter(device=device, missing_since__isnull=True).values_list("uuid", "id"))
    if wanted is None and len(parts) == 1:
        return next(iter(parts.values()))
    if wanted not in parts:
        raise RefusedError(Reason.INVALID, f"Say which deployable of device {device.uuid} is to be programmed.")
    return parts[wanted]


def _check(op: str, device: Device) -> None:
    """Raise RefusedError unless the command `op` is possible for the device now. The device must be locked."""
    if DeviceState(device.state) not in ASKED[op]:
        possible = ", ".join(sorted(ASKED[op]))
        raise RefusedError(
            Reason.CONFLICT, f"Device {device.uuid} is {device.state}: {op} is possible when it is {possible}."
        )
    if op not in device.acts.split():
        raise RefusedError(Reason.CONFLICT, f"Device {device.uuid}: {device.driver} cannot {op} it.")
    refuse_busy(device, op)
    reachable(device.host)
    if op in DESTRUCTIVE:
        safety.refuse_unless_free(device, _DONE[op])


def refuse_changed(device: Device, seen: int | None) -> None:
    """Raise RefusedError CONFLICT if the device's generation is not `expected_generation`; do nothing if that is None.

    Of two callers who saw the same device and change it, the second must read it again.
    """
    if seen is not None and seen != device.generation:
        now = f"generation {device.generation}"
        why = f"is at {now} now, not {seen}: somebody changed it"
        raise RefusedError(Reason.CONFLICT, f"Device {device.uuid} {why}. Read it again, then send {now}.")


def _refuse_words(device: Device, layout: Mapping[str, str]) -> None:
    """Raise RefusedError INVALID if the layout has words that the device's driver does not take.

    If the agent has not reported which words the driver takes, all are accepted here, and the driver decides.
    """
    words = device.changeable.split()
    if words and (strange := sorted(layout.keys() - words)):
        takes = f"{device.driver} takes {', '.join(words)}"
        refused = ", ".join(strange)[:200]
        raise RefusedError(Reason.INVALID, f"The layout of device {device.uuid} has no word {refused}; {takes}.")


def refuse_busy(device: Device, op: str) -> None:
    """Raise RefusedError CONFLICT if `op` is exclusive and another exclusive command for the device is open."""
    if device.busy_with and op in EXCLUSIVE:
        other = Command.objects.filter(uuid=device.busy_with).values_list("op", flat=True).first()
        text = f"Device {device.uuid} is busy with {other} (command {device.busy_with}): wait for its end."
        raise RefusedError(Reason.CONFLICT, text)


def reachable(host: Host) -> None:
    """Raise RefusedError CONFLICT if the host's agent is known to take no commands."""
    for reach in _reaches:
        if text := reach(host):
            raise RefusedError(Reason.CONFLICT, f"{text[0].upper()}{text[1:]}.")


def check_reason(text: str) -> str:
    """Return the reason without surrounding white space. Raise RefusedError INVALID if it is too long or not text."""
    text = text.strip()
    if len(text) > MAX_REASON or "\0" in text:
        raise RefusedError(Reason.INVALID, f"A reason is at most {MAX_REASON} characters of text.")
    return text


def _columns(told: Iterable[Number]) -> dict[str, list[int]]:
    pairs = list(told)
    return {"hosts": [host for host, _ in pairs], "numbers": [number for _, number in pairs]}


def _execute(statement: str, values: Mapping[str, Any]) -> Any:
    return conductor.cursor().execute(statement, values)


def _text(value: object) -> str:
    return _json.encode(value).decode()
