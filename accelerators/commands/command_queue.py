"""Place commands for agents, and store the progress and the answers that agents send.

A command is inserted in the transaction that needs it (`place_commands`, `order_device_command`, `order_host_command`);
its row is its own outbox, and `agents.gateway.command_dispatch` delivers it. `accelerators.workflows.command_endings`
ends commands and applies the consequences. `accelerators.images` reports here when an image that a command waits for
has been fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from uuid import UUID

import msgspec
from django.conf import settings
from django.db import transaction
from django.db.models import Exists, OuterRef, QuerySet
from django.db.models.functions import Now

from accelerators import conductor, safety
from accelerators.commands import placement_delegation, sql
from accelerators.domain import generations
from accelerators.domain.caller import Caller, request_id
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import NOT_BEGUN_COMMAND_STATES, CommandState, DeviceState, EventSource
from accelerators.models import AttachHandle, Command, Deployable, Device, Host
from accelerators.models.commands import COMMAND_IS_OPEN
from accelerators.runtime import jobs, pubsub
from accelerators.runtime.after_commit import call_after_commit
from accelerators.runtime.registry import Registry
from drivers.plan import DESTRUCTIVE

COMMANDS_TOPIC = "commands"
"""Topic of notifications that commands can be delivered; the detail is the host's id, or '' for several hosts."""
COMMAND_CHANGED_TOPIC = "command"
"""Topic of notifications that a command has made progress or has ended; the detail is the command's uuid."""
COMMANDS_JOB = "commands"

EXCLUSIVE_OPS = frozenset({"install", "uninstall", "program", "partition", "reset"})
"""Commands during which nothing is bound to the device. An `attach` that programs first is exclusive, too."""
TYPES_CREATED_ON_HOST = ("MDEV", "DEV")
"""Types of handles that must be created on the host before they can be used. libvirt prepares PCI functions itself."""
BIND_MARGIN_S = 6
"""A command for a bind ends this many seconds before the bind's deadline (at most a tenth of the bind's time limit),
so that the bind's fault tells the reason."""
MAX_REASON = 500
MAX_LAYOUT, MAX_WORD, MAX_VALUE = 64, 64, 255

_S = DeviceState
_PRESENT_STATES = frozenset(_S) - {_S.MISSING, _S.RETIRED}
ALLOWED_STATES = {
    "uninstall": frozenset({_S.INACTIVE, _S.MAINTENANCE, _S.FAILED, _S.QUARANTINED}),
    "program": _PRESENT_STATES - {_S.INSTALLING},
    "partition": _PRESENT_STATES - {_S.INSTALLING},
    "reset": _PRESENT_STATES - {_S.INSTALLING},
    "health": _PRESENT_STATES,
}
"""Commands that people can order for a device, and the device states in which each is possible."""
HOST_OPS = ("rescan", "logs", "report")
"""Commands that people can order for a host."""
PAST_PARTICIPLES = {"uninstall": "uninstalled", "program": "programmed", "partition": "partitioned", "reset": "reset"}
"""Destructive command → its past participle, which completes the messages of refusals: "it cannot be programmed"."""

_ORDER_COLUMNS = ("op", "device", "handle", "part", "host", "arguments", "exclusive", "request", "actor", "reason")
_json = msgspec.json.Encoder()
CommandId = tuple[int, int]
"""How an agent identifies a command: the host's id and the command's number (its primary key)."""


class Obstacle(NamedTuple):
    """The reason why the agent of a host takes no commands.

    `text` names the host; `nameless_text` does not, so that hosts with the same reason can be counted together.
    `may_pass` is True if the agent is only down: it may come back by itself, for example after the conductor was away.
    `waiting_text` is not '' if a command can be placed nevertheless, because it waits for an agent that is down or has
    not joined; it says what has to be done for the command, without the host's name and without the time that is left.
    """

    text: str
    nameless_text: str
    may_pass: bool = False
    waiting_text: str = ""

    @property
    def may_wait(self) -> bool:
        """Return whether a command can be placed nevertheless, because it waits for the agent."""
        return bool(self.waiting_text)


class ReachCheck(Protocol):
    """A function that finds out why the agents of hosts take no commands."""

    def __call__(self, hosts: Collection[Host]) -> dict[int, Obstacle]:
        """Return the obstacles by host id; hosts without one are left out."""
        ...


REACH_CHECKS: Registry[ReachCheck] = Registry("reach check")
"""Functions that tell why the agents of hosts take no commands. `explain_unreachable` calls them."""


class AgentDownError(RefusedError):
    """The command was refused because the host's agent is down. The agent may come back by itself."""


@dataclass(frozen=True)
class CommandOrder:
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
    def is_programming(self) -> bool:
        """Return True if the command loads an image into the device."""
        return "wanted" in self.arguments or "image" in self.arguments

    @property
    def exclusive(self) -> bool:
        """Return True if nothing may be bound to the device while the command is open."""
        return self.op in EXCLUSIVE_OPS or self.is_programming


class CommandProgress(NamedTuple):
    """An agent's message about the progress of one of its host's commands. `host` and `number` are primary keys."""

    host: int
    number: int
    percent: int = 0
    text: str = ""


class CommandAnswer(NamedTuple):
    """An agent's message that one of its host's commands has ended.

    `host` and `number` are primary keys; `outcome` is succeeded, failed, refused or unknown. `epoch`, `seq` and `hash`
    identify the report that shows the result. They are (0, 0, '') if that report is applied already.
    """

    host: int
    number: int
    outcome: str
    text: str = ""
    detail: Mapping[str, str] = {}
    epoch: int = 0
    seq: int = 0
    hash: str = ""


def get_time_limits(op: str, is_programming: bool = False) -> tuple[int, int]:
    """Return two times in seconds: a command must begin within the first and end within the sum of both.

    Both count from the moment when the command is placed. The first is long for commands that may wait for a host that
    is away. For `attach` and `program` the second is 0, and the first is shorter than a bind's time limit by
    `BIND_MARGIN_S` (at most a tenth of it). `is_programming` selects the longer limit of binds that program a device.
    """
    keys = settings.KEYS
    if op in ("install", "uninstall", "detach"):
        return 3600, 600
    if op in ("attach", "program"):
        bind_timeout_s: int = keys.program_timeout_s if is_programming else keys.bind_timeout_s
        return bind_timeout_s - min(BIND_MARGIN_S, bind_timeout_s // 10), 0
    return (20, 100) if op == placement_delegation.PLACEMENT_OP else (60, 240)


def place_commands(orders: Sequence[CommandOrder], source: EventSource = EventSource.SYSTEM) -> list[Command]:
    """Insert one command and one event per order, and mark the devices of exclusive commands busy; return the commands.

    The commands have the order of `orders`. Costs one statement. Call it inside `conductor.writing()`. For exclusive
    commands the caller must have locked the device rows and checked that they are not busy. After the commit, agents
    are notified and the job that fetches images is woken if needed. Raises AssertionError if the target of an order
    does not exist.
    """
    if not orders:
        return []
    rows = []
    for n, order in enumerate(orders):
        start_s, more_s = get_time_limits(order.op, order.is_programming)
        columns = {name: getattr(order, name) for name in _ORDER_COLUMNS}
        rows.append(columns | {"n": n, "start_s": start_s, "more_s": more_s})
    values = {"rows": _encode_json(rows), "count": len(rows), "request_id": request_id.get(), "source": source.value}
    commands = list(Command.objects.raw(sql.INSERT_COMMANDS, values))
    assert len(commands) == len(orders), "a command for what is not there"
    call_after_commit(_notify_of_placed_commands, {command.host_id for command in commands}, commands)
    return commands


def order_device_command(
    op: str,
    device_uuid: UUID,
    caller: Caller,
    *,
    reason: str = "",
    layout: Mapping[str, str] | None = None,
    image: UUID | None = None,
    deployable: UUID | None = None,
    generation: int | None = None,
    source: EventSource = EventSource.API,
    answers: safety.HolderAnswers | None = None,
) -> Command:
    """Place one of the commands in `ALLOWED_STATES` for a device, and return it. The device and its host are locked.

    `layout` is required for `partition`, `image` for `program`. `deployable` selects the deployable to program; it may
    be left out if the device has only one. `generation` is the device generation that the caller has seen. Other
    devices that a destructive command affects (`safety.find_affected_siblings`) must be free, too, and are busy until
    the command has ended. `answers` are those of `ask_holders_for_command`; a caller that is inside a transaction must
    have asked before it was opened. Without them, this function asks.

    Raise RefusedError: NOT_FOUND if there is no such device; INVALID for wrong arguments; CONFLICT if the device has
    another generation, or its state, its driver, another command or its agent does not allow the command. Destructive
    commands also raise IN_USE, with the holders, or UNAVAILABLE if a holder check cannot answer in time or the device
    has changed since it was asked for.
    """
    arguments = check_arguments(op, layout, image)
    reason = check_reason(reason)
    if answers is None:
        answers = ask_holders_if_possible(op, device_uuid, layout, deployable, generation)
    with conductor.writing():
        device = next(iter(conductor.lock_devices(Device.objects.filter(uuid=device_uuid))), None)
        deployable_id = _check_order(op, device_uuid, device, layout, deployable, generation)
        assert device is not None
        affected = _lock_affected_siblings(op, device)
        if op in DESTRUCTIVE:
            _refuse_if_held_or_affecting(op, device, affected, safety.find_holders([device, *affected], answers))
        order = CommandOrder(op, device.uuid, None, deployable_id, None, arguments, caller.name, reason)
        (command,) = place_commands([order], source)
        if affected:  # nothing is bound to them either, until the command has ended
            Device.objects.filter(pk__in=[one.pk for one in affected]).update(busy_with=command.uuid)
        return command


def order_command_for_each(
    op: str,
    layouts: Mapping[Device, Mapping[str, str] | None],
    caller: Caller,
    reason: str,
    source: EventSource,
    answers: safety.HolderAnswers,
) -> dict[Device, Command | RefusedError]:
    """Place command `op` for each of these devices with its layout; return the command or the refusal of each.

    The devices and their hosts must be locked, and `host` loaded. `answers` are those of `ask_holders_for_command`.
    The refusals are those of `order_device_command`. Costs a constant number of statements and some for each host,
    except for devices whose driver declares that the command affects other devices: these are ordered last, one by one.
    Raises RefusedError INVALID for a reason that cannot be stored.
    """
    reason = check_reason(reason)
    affecting = [one for one in layouts if op in DESTRUCTIVE and safety.affects_others(one, op)]
    separate = [one for one in layouts if one not in affecting]
    results: dict[Device, Command | RefusedError] = {}
    orders: dict[Device, CommandOrder] = {}
    with conductor.writing():
        holders = safety.find_holders(separate, answers) if op in DESTRUCTIVE else None
        unreachable, busy_ops = explain_unreachable({one.host for one in separate}), load_busy_ops(separate, op)
        for device in separate:
            try:
                arguments = check_arguments(op, layouts[device], None)
                refuse_unknown_words(device, layouts[device] or {})
                _refuse_if_impossible(op, device, unreachable, busy_ops)
                if holders:
                    _refuse_if_held_or_affecting(op, device, (), holders)
            except RefusedError as refused:
                results[device] = refused
            else:
                orders[device] = CommandOrder(op, device.uuid, arguments=arguments, actor=caller.name, reason=reason)
        results |= zip(orders, place_commands(list(orders.values()), source), strict=True)
        for device in affecting:
            try:
                results[device] = order_device_command(
                    op, device.uuid, caller, reason=reason, layout=layouts[device], source=source, answers=answers
                )
            except RefusedError as refused:
                results[device] = refused
    return results


def ask_holders_if_possible(
    op: str,
    device_uuid: UUID,
    layout: Mapping[str, str] | None = None,
    deployable: UUID | None = None,
    generation: int | None = None,
) -> safety.HolderAnswers:
    """Ask all holder checks for `order_device_command`, unless it is clear already that the command will be refused.

    The services may take seconds. Raises RefusedError as `order_device_command` does, without locking the device.
    """
    if op not in DESTRUCTIVE or not safety.HOLDER_CHECKS:
        return safety.NO_ANSWERS
    device = Device.objects.filter(uuid=device_uuid).select_related("host").first()
    _check_order(op, device_uuid, device, layout, deployable, generation)
    assert device is not None
    affected = safety.find_affected_siblings(device, op)
    _refuse_if_held_or_affecting(op, device, affected, safety.find_known_holders([device, *affected]))
    for sibling in affected:
        sibling.host = device.host
    return safety.ask_holders([device, *affected])


def ask_holders_for_command(
    op: str, selected: QuerySet[Device], refuse: Callable[[Device], None] = lambda device: None
) -> safety.HolderAnswers:
    """Ask all holder checks for a destructive command on each of the selected devices.

    They are asked about the devices on which the command is possible as far as the database tells, and about the others
    that it affects. A caller with further conditions gives `refuse`, which raises RefusedError for a device that does
    not meet them. Call this before a transaction is opened, and give the answers to `order_device_command`, which
    checks everything again.
    """
    if op not in DESTRUCTIVE or not safety.HOLDER_CHECKS:
        return safety.NO_ANSWERS
    devices = list(selected.select_related("host"))
    loaded = {one.pk: one for one in [*devices, *safety.find_affected_outside(selected, op)]}
    known, to_ask = safety.find_known_holders(loaded.values()), dict[int, Device]()
    unreachable, busy_ops = explain_unreachable({one.host for one in devices}), load_busy_ops(loaded.values(), op)
    for device in devices:
        affected = [loaded[one.pk] for one in safety.find_affected_siblings(device, op) if one.pk in loaded]
        try:
            refuse(device)
            _refuse_if_impossible(op, device, unreachable, busy_ops)
            _refuse_if_held_or_affecting(op, device, affected, known, busy_ops)
        except RefusedError:
            continue
        to_ask |= {one.pk: one for one in [device, *affected]}
    return safety.ask_holders(to_ask.values())


def describe_acts(op: str, device: Device, affected: Iterable[Device]) -> dict[Device, str]:
    """Return for the device and the others that the command affects what would be done to them, for refusals."""
    acts = dict.fromkeys(affected, f"affected by the {op} of device {device.uuid}")
    return {device: PAST_PARTICIPLES[op]} | acts


def _refuse_if_held_or_affecting(
    op: str,
    device: Device,
    affected: Sequence[Device],
    holders: safety.DeviceHolders,
    busy_ops: Mapping[UUID, str] | None = None,
) -> None:
    """Raise RefusedError if the device is held, or another one that the command affects is held or busy. `busy_ops` are
    those of `load_busy_ops`; without them, it is called."""
    for sibling in affected:
        refuse_if_busy(sibling, op, busy_ops)
    holders.refuse_unless_all_free(describe_acts(op, device, affected))


def order_host_command(
    op: str,
    host_uuid: UUID,
    caller: Caller,
    *,
    driver: str = "",
    reason: str = "",
    source: EventSource = EventSource.API,
) -> Command:
    """Place one of the commands in `HOST_OPS` for a host, and return it.

    `rescan` and `report` may be limited to one driver; `rescan` also releases that driver from quarantine.

    Raise RefusedError: NOT_FOUND if there is no such host; INVALID for wrong arguments; CONFLICT if its agent takes no
    commands.
    """
    if op not in HOST_OPS:
        raise RefusedError(
            RefusalReason.INVALID, f"{op} is no command for a host; the commands for hosts are {', '.join(HOST_OPS)}."
        )
    if len(driver) > MAX_WORD or "\0" in driver or (driver and op == "logs"):
        raise RefusedError(RefusalReason.INVALID, "Only rescan and report take the name of a driver.")
    reason = check_reason(reason)
    with conductor.writing():
        host = Host.objects.filter(uuid=host_uuid).first()
        if host is None:
            raise RefusedError(RefusalReason.NOT_FOUND, f"Host not found with uuid={host_uuid}")
        refuse_if_unreachable(host)
        arguments = {"driver": driver} if driver else {}
        return place_commands(
            [CommandOrder(op, host=host.id, arguments=arguments, actor=caller.name, reason=reason)], source
        )[0]


def mark_image_ready(number: int, image: Mapping[str, Any]) -> bool:
    """Queue a command whose image has been fetched, so that it is delivered after the commit.

    `image` has the fields of `agents.wire.ImageRef`. Return False if the command no longer waits for an image.
    """
    with conductor.writing():
        rows = _execute(sql.MARK_IMAGE_READY, {"number": number, "image": _encode_json(image)}).fetchall()
        for (host,) in rows:
            call_after_commit(pubsub.publish, COMMANDS_TOPIC, str(host))
    return bool(rows)


def mark_image_failed(number: int, text: str) -> None:
    """Refuse a command whose image cannot be fetched, before its agent receives it. `text` is the reason.

    Does nothing if the command does not exist, is answered, or was taken by its agent.
    """
    refuse_undelivered_commands([number], text)


def refuse_undelivered_commands(numbers: Sequence[int], text: str) -> None:
    """Store the answer "refused", with the reason `text`, for commands that no agent has taken; skip all others.

    `numbers` are primary keys. Commands that have an answer already are skipped, too. After the commit the job
    `commands` is woken, which ends the refused ones.
    """
    with conductor.writing():
        _refuse(
            Command.objects.filter(id__in=numbers, state__in=NOT_BEGUN_COMMAND_STATES), text[:4096].replace("\0", "")
        )
        call_after_commit(jobs.enqueue_job, COMMANDS_JOB)


def cancel_preparing_commands(requests: Sequence[UUID | str]) -> None:
    """Refuse the commands of these accelerator requests that still wait for an image. Agents never receive them.

    Commands that another transaction has locked are skipped, because it is ending them. If any was refused, the job
    `commands` is woken after the commit. Call it inside `conductor.writing()`.
    """
    if requests:
        preparing = Command.objects.filter(request__in=requests, state=CommandState.PREPARING, answered_at__isnull=True)
        unlocked = preparing.select_for_update(no_key=True, skip_locked=True)
        if _refuse(
            Command.objects.filter(id__in=unlocked.order_by().values("id")), "its request does not need it any more"
        ):
            call_after_commit(jobs.enqueue_job, COMMANDS_JOB)


def _refuse(commands: QuerySet[Command], text: str) -> int:
    """Store the answer "refused" for those of these commands that have no answer yet; return their number."""
    unanswered = commands.filter(answered_at__isnull=True)
    return unanswered.update(answered_at=Now(), updated_at=Now(), outcome=CommandState.REFUSED, text=text)


def mark_commands_taken(ids: Iterable[CommandId]) -> None:
    """Mark queued commands as taken: their agents have written them to their journals.

    Commands in another state, or of another host than the id says, are skipped.
    """
    with conductor.writing():
        pairs = list(ids)
        _execute(sql.MARK_TAKEN, {"hosts": [host for host, _ in pairs], "numbers": [number for _, number in pairs]})


def store_progress(messages: Iterable[CommandProgress]) -> None:
    """Store progress messages and notify watchers after the commit. The first message marks a command as started.

    If there are several messages about a command, only the last one is stored. Commands that are answered or ended
    are skipped.
    """
    rows = {(message.host, message.number): message._asdict() for message in messages}
    with conductor.writing():
        changed_rows = _execute(sql.STORE_PROGRESS, {"rows": _encode_json([*rows.values()])}).fetchall()
        call_after_commit(publish_changed_commands, [uuid for (uuid,) in changed_rows])


def store_answers(answers: Iterable[CommandAnswer]) -> set[CommandId]:
    """Store answers of agents; return the commands that need nothing more, so that their agents may forget them.

    The other commands end when the report that belongs to the answer is applied
    (`command_endings.end_answered_commands`); the job `commands` is woken after the commit. An answer to a command that
    has already ended as expired or unknown is only noted, with an event; if that command was an `attach` that the agent
    did not refuse, a `detach` removes what it made on the host (`order_missing_detaches`).
    """
    rows = {(message.host, message.number): message._asdict() for message in answers}
    with conductor.writing():
        values = {"rows": _encode_json([*rows.values()])}
        stored_count = _execute(sql.STORE_ANSWERS, values).rowcount
        if stored_count < len(rows):
            late = _execute(sql.STORE_LATE_ANSWERS, values).fetchall()
            order_missing_detaches([number for number, outcome in late if outcome != "refused"])
        settled = rows.keys() - select_open_commands(rows)
        if stored_count:
            call_after_commit(jobs.enqueue_job, COMMANDS_JOB)
    return settled


def select_open_commands(ids: Iterable[CommandId]) -> set[CommandId]:
    """Return those of these commands that have not ended. Commands that wait for an image are left out."""
    ids = set(ids)
    open_commands = Command.objects.filter(COMMAND_IS_OPEN, id__in=[number for _, number in ids])
    delivered = open_commands.exclude(state=CommandState.PREPARING).order_by()
    return ids.intersection(delivered.values_list("host_id", "id"))


def order_missing_detaches(numbers: Sequence[int]) -> None:
    """Place a `detach` for each of these `attach` commands that may have made something on its host.

    `numbers` are the commands' primary keys; the caller must know that their requests no longer need the handles. Other
    commands are skipped, and so are those with a later `detach`, or whose handle is gone or needs nothing on the host.
    Call it inside `conductor.writing()`.
    """
    if numbers:
        later_detaches = Command.objects.filter(request=OuterRef("request"), op="detach", id__gt=OuterRef("id"))
        attaches = list(Command.objects.filter(~Exists(later_detaches), id__in=numbers, op="attach").order_by("id"))
        handles = AttachHandle.objects.filter(
            uuid__in=[command.arguments.get("uuid") for command in attaches], attach_type__in=TYPES_CREATED_ON_HOST
        )
        handle_ids = {str(uuid): id for uuid, id in handles.values_list("uuid", "id")}
        place_commands(
            [
                build_detach_order(
                    handle_ids[command.arguments["uuid"]],
                    command.arguments.get("consumer"),
                    command.request,
                    "its request does not need it any more",
                )
                for command in attaches
                if command.arguments.get("uuid") in handle_ids
            ]
        )


def build_detach_order(
    handle: int, consumer: str | None, request: UUID | str | None, reason: str, actor: str = "binding"
) -> CommandOrder:
    """Build the order of a `detach` command: the host removes what it has made of this handle for a request.

    `handle` is the primary key, `consumer` the uuid of the instance. The order is returned and not placed.
    """
    arguments = {"consumer": str(consumer or "")}
    return CommandOrder("detach", handle=handle, arguments=arguments, actor=actor, reason=reason, request=request)


def wake_job_for_answers() -> None:
    """Wake the job `commands` if the result of a command has arrived but the command has not ended yet.

    Call it after a report was applied.
    """
    if Command.objects.filter(COMMAND_IS_OPEN, answered_at__isnull=False).exists():
        jobs.enqueue_job(COMMANDS_JOB)


def publish_changed_commands(uuids: Sequence[str]) -> None:
    """Notify the watchers of these commands, in one transaction. Call it after the commit of the changes."""
    with transaction.atomic():
        for uuid in uuids:
            pubsub.publish(COMMAND_CHANGED_TOPIC, uuid)


def _notify_of_placed_commands(hosts: set[int], commands: Sequence[Command]) -> None:
    """Notify the gateways, and wake the job `images` if a command needs an image. Call it after the commit.

    `hosts` are the ids of the commands' hosts.
    """
    if any("wanted" in command.arguments for command in commands):
        jobs.enqueue_job("images")
    pubsub.publish(COMMANDS_TOPIC, str(hosts.pop()) if len(hosts) == 1 else "")


def check_arguments(op: str, layout: Mapping[str, str] | None, image: UUID | None) -> dict[str, Any]:
    """Check what the caller gave for the device command `op`, and return the arguments of its CommandOrder.

    An image becomes the argument `wanted`. Raises RefusedError INVALID for an unknown `op`, for an argument that `op`
    lacks or does not take, and for a layout that breaks a limit.
    """
    if op not in ALLOWED_STATES:
        raise RefusedError(
            RefusalReason.INVALID, f"{op} is no command for a device; these are: {', '.join(ALLOWED_STATES)}."
        )
    if bool(layout) != (op == "partition"):
        raise RefusedError(
            RefusalReason.INVALID, 'Only partition takes a layout, and it needs one, for example {"vfs": "4"}.'
        )
    if (image is not None) != (op == "program"):
        raise RefusedError(RefusalReason.INVALID, "Only program takes an image, and it needs one: give its uuid.")
    if layout:
        texts = [text for pair in layout.items() for text in pair]
        if not all(isinstance(text, str) and "\0" not in text and len(text) <= MAX_VALUE for text in texts) or any(
            len(word) > MAX_WORD for word in layout
        ):
            raise RefusedError(
                RefusalReason.INVALID,
                f"A word of a layout has at most {MAX_WORD} characters, its value at most {MAX_VALUE}.",
            )
        if len(layout) > MAX_LAYOUT:
            raise RefusedError(RefusalReason.INVALID, f"A layout holds at most {MAX_LAYOUT} words.")
        return {"layout": dict(layout)}
    return {"wanted": {"bitstream_id": str(image)}} if image else {}


def _check_order(
    op: str,
    device_uuid: UUID,
    device: Device | None,
    layout: Mapping[str, str] | None,
    deployable: UUID | None,
    generation: int | None,
) -> int | None:
    """Check everything about a command for this device but who holds it; return the id of the deployable to program.

    `device` is None if there is no such device. Returns None unless the command is `program`. Raises RefusedError as
    `order_device_command` does.
    """
    if device is None:
        raise RefusedError(RefusalReason.NOT_FOUND, f"Device not found with uuid={device_uuid}")
    deployable_id = _choose_deployable(device, deployable) if op == "program" else None
    refuse_if_changed(device, generation)
    refuse_unknown_words(device, layout or {})
    _refuse_if_impossible(op, device)
    return deployable_id


def _choose_deployable(device: Device, deployable_uuid: UUID | None) -> int:
    """Return the id of the deployable to program; without `deployable_uuid`, that of the device's only one.

    Missing deployables do not count. Raises RefusedError INVALID if the device has no such deployable, or if none is
    named and there is not exactly one.
    """
    ids_by_uuid = dict(Deployable.objects.filter(device=device, missing_since__isnull=True).values_list("uuid", "id"))
    if deployable_uuid is None and len(ids_by_uuid) == 1:
        return next(iter(ids_by_uuid.values()))
    if deployable_uuid not in ids_by_uuid:
        raise RefusedError(RefusalReason.INVALID, f"Say which deployable of device {device.uuid} is to be programmed.")
    return ids_by_uuid[deployable_uuid]


def _refuse_if_impossible(
    op: str,
    device: Device,
    unreachable: Mapping[int, Obstacle] | None = None,
    busy_ops: Mapping[UUID, str] | None = None,
) -> None:
    """Raise RefusedError CONFLICT if the state of the device, its driver, another command or its agent does not allow
    the command `op` now. `unreachable` are the reasons of `explain_unreachable`, and `busy_ops` those of
    `load_busy_ops`; without them, these are called.
    """
    if DeviceState(device.state) not in ALLOWED_STATES[op]:
        possible = ", ".join(sorted(ALLOWED_STATES[op]))
        raise RefusedError(
            RefusalReason.CONFLICT, f"Device {device.uuid} is {device.state}: {op} is possible when it is {possible}."
        )
    if op not in device.acts.split():
        raise RefusedError(RefusalReason.CONFLICT, f"Device {device.uuid}: {device.driver} cannot {op} it.")
    refuse_if_busy(device, op, busy_ops)
    refuse_if_explained(device.host, explain_unreachable([device.host]) if unreachable is None else unreachable)


def _lock_affected_siblings(op: str, device: Device) -> list[Device]:
    """Lock and return the other devices that a destructive command affects, as the device's driver declares.

    The device and its host must be locked.
    """
    pks = [one.pk for one in safety.find_affected_siblings(device, op)] if op in DESTRUCTIVE else []
    return conductor.lock_devices(Device.objects.filter(pk__in=pks)) if pks else []


def refuse_if_changed(device: Device, expected_generation: int | None) -> None:
    """Raise ChangedMeanwhileError if the device's generation is not `expected_generation`; do nothing if that is None.

    If two callers change a device that both have read, the second one is refused and must read it again.
    """
    generations.refuse_if_changed(f"Device {device.uuid}", device.generation, expected_generation)


def refuse_unknown_words(device: Device, layout: Mapping[str, str]) -> None:
    """Raise RefusedError INVALID if the layout has keys that the device's driver does not accept.

    If the agent has not reported which keys the driver accepts, all are accepted here, and the driver decides.
    """
    known_words = device.changeable.split()
    if known_words and (unknown_words := sorted(layout.keys() - known_words)):
        known_text = f"{device.driver} takes {', '.join(known_words)}"
        refused = ", ".join(unknown_words)[:200]
        raise RefusedError(RefusalReason.INVALID, f"The device's layout has no setting {refused}; {known_text}.")


def load_busy_ops(devices: Iterable[Device], op: str) -> dict[UUID, str]:
    """Return the names of the commands, by their uuids, that keep these devices busy for `op`. Costs one statement, and
    none if no device is busy, or if `op` is not exclusive."""
    busy_with = [device.busy_with for device in devices if device.busy_with and op in EXCLUSIVE_OPS]
    return dict(Command.objects.filter(uuid__in=busy_with).values_list("uuid", "op")) if busy_with else {}


def refuse_if_busy(device: Device, op: str, busy_ops: Mapping[UUID, str] | None = None) -> None:
    """Raise RefusedError CONFLICT if `op` is exclusive and another exclusive command for the device is open. `busy_ops`
    are those of `load_busy_ops`; without them, it is called."""
    if device.busy_with and op in EXCLUSIVE_OPS:
        busy_op = (load_busy_ops([device], op) if busy_ops is None else busy_ops).get(device.busy_with, "a command")
        text = f"Device {device.uuid} is busy with {busy_op} (command {device.busy_with}): wait for its end."
        raise RefusedError(RefusalReason.CONFLICT, text)


def explain_unreachable(hosts: Collection[Host], *, may_wait: bool = True) -> dict[int, Obstacle]:
    """Return, by host id, why the agents of these hosts take no commands; hosts without an obstacle are left out.

    If `may_wait` is True, an obstacle for which a command can wait is left out, too. If the checks find several
    obstacles of a host, the first one for which no command can wait is returned, otherwise the first one. Costs one
    statement per check, and none without hosts.
    """
    refusing: dict[int, Obstacle] = {}
    delaying: dict[int, Obstacle] = {}
    for check in REACH_CHECKS.values() if hosts else ():
        for pk, obstacle in check(hosts).items():
            (delaying if obstacle.may_wait else refusing).setdefault(pk, obstacle)
    return refusing if may_wait else delaying | refusing


def refuse_if_unreachable(host: Host, *, may_wait: bool = True) -> None:
    """Raise RefusedError CONFLICT if the host's agent takes no commands, with the reason of `explain_unreachable`; it
    is an AgentDownError if the agent is only down."""
    refuse_if_explained(host, explain_unreachable([host], may_wait=may_wait))


def refuse_if_explained(host: Host, obstacles: Mapping[int, Obstacle]) -> None:
    """Raise RefusedError CONFLICT if `obstacles`, those of `explain_unreachable`, has one for this host; it is an
    AgentDownError if the agent is only down."""
    if obstacle := obstacles.get(host.pk):
        error = AgentDownError if obstacle.may_pass else RefusedError
        raise error(RefusalReason.CONFLICT, f"{obstacle.text[0].upper()}{obstacle.text[1:]}.")


def check_reason(text: str) -> str:
    """Return the reason without surrounding white space.

    Raises RefusedError INVALID if it is longer than MAX_REASON characters or contains NUL.
    """
    text = text.strip()
    if len(text) > MAX_REASON or "\0" in text:
        raise RefusedError(RefusalReason.INVALID, f"A reason is at most {MAX_REASON} characters of text.")
    return text


def _execute(statement: str, values: Mapping[str, Any]) -> Any:
    """Execute a statement whose parameters are bound on the server; return the cursor."""
    return conductor.open_cursor().execute(statement, values)


def _encode_json(value: object) -> str:
    """Return the value as JSON text, for a parameter of a statement."""
    return _json.encode(value).decode()
