"""End commands, and apply the consequences to their devices and to the accelerator requests that wait for them.

The job `commands` runs this: a command ends when its agent has answered and the report that belongs to the answer is
applied, or when its deadline has passed. Rows are locked in the order that all code uses: commands, requests, hosts,
devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
from django.db import transaction
from django.db.models import F, Max, Q, QuerySet
from django.db.models.functions import Now

from accelerators import conductor, outbox
from accelerators.commands import placement_delegation, placing, programming, sql
from accelerators.devices.lifecycle import Step, standing, store
from accelerators.domain.states import CommandState, DeviceState, Source
from accelerators.models import Command, Device
from accelerators.models.commands import OPEN
from accelerators.requests import binding
from accelerators.requests.binding import End, Waiting
from accelerators.runtime import jobs, metrics
from accelerators.workflows import driver_config

BATCH = 200
_C, _S = CommandState, DeviceState
_json = msgspec.json.Encoder()

APPLIED = (
    Q(host__applied_epoch__gt=F("report_epoch"))
    | Q(host__applied_epoch=F("report_epoch"), host__applied_seq__gte=F("report_seq"))
    | ~Q(report_hash="") & Q(host__applied_hash=F("report_hash"))
    | Q(end_by__lt=Now())
)
"""The report that shows what the command did is applied, or the deadline has passed, so it is not waited for."""
NOT_BEGUN = (_C.PREPARING.value, _C.QUEUED.value)
BEGUN = (_C.TAKEN.value, _C.STARTED.value)


@dataclass(frozen=True)
class Ended:
    """A locked command with its final state and a sentence about it. `device` is its locked device, not changed yet."""

    command: Command
    state: CommandState
    text: str
    device: Device | None = None

    @property
    def succeeded(self) -> bool:
        """Return True if the command did what was ordered."""
        return self.state is _C.SUCCEEDED

    @property
    def touched(self) -> bool:
        """Return True if the command may have changed something on the host: it was neither refused nor expired."""
        return self.state not in (_C.REFUSED, _C.EXPIRED)


@dataclass
class _Consequences:
    """Changes to write because a batch of commands has ended."""

    steps: list[Step] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    attach: list[placing.Order] = field(default_factory=list)
    take_back: list[int] = field(default_factory=list)
    told_first: dict[str, dict[str, str]] = field(default_factory=dict)
    """Requests that become Bound once Placement shows the traits of what was programmed: uuid → `{"host": uuid}`."""
    unclear: list[tuple[int, str]] = field(default_factory=list)
    """Deployables (device id, name; '' for all of the device) whose bitstream is unknown from now on."""


def run() -> None:
    """Run the job `commands`: end commands until none is due, or the job's time slice is over."""
    jobs.run(placing.JOB, lambda: settle() | expire())


def settle() -> bool:
    """End one batch of the commands that are answered and whose report is applied; True if there may be more."""
    return _end(Command.objects.filter(APPLIED, answered_at__isnull=False), _answered)


def expire() -> bool:
    """End one batch of the commands that were not begun, or not answered, in time; True if there may be more."""
    late = Q(state__in=NOT_BEGUN, start_by__lt=Now()) | Q(state__in=BEGUN, end_by__lt=Now())
    return _end(Command.objects.filter(late, answered_at__isnull=True), _silent)


def _answered(command: Command) -> Ended:
    """Return the end of a command as its agent answered."""
    return Ended(command, CommandState(command.outcome), command.text or command.outcome)


def _silent(command: Command) -> Ended:
    """Return the end of a command without an answer: `expired` if the agent has not taken it, otherwise `unknown`."""
    if command.state == _C.PREPARING:
        why = f": {command.progress}" if command.progress else ""
        return Ended(command, _C.EXPIRED, f"its image was not fetched in time{why}")
    if command.state == _C.QUEUED:
        return Ended(command, _C.EXPIRED, f"the agent of {command.host} did not accept it in time")
    said = f"; its last progress message: {command.progress}" if command.progress else ""
    return Ended(command, _C.UNKNOWN, f"the agent of {command.host} has not answered in time{said}")


def _end(wanted: QuerySet[Command], judge: Callable[[Command], Ended]) -> bool:
    """Lock at most BATCH_SIZE of the wanted open commands and end each as `judge` says; True if BATCH_SIZE were found.

    Commands that another transaction has locked are skipped.
    """
    with conductor.writing():
        batch = wanted.filter(OPEN).select_related("host").order_by("id")
        found = [
            judge(command) for command in batch.select_for_update(of=("self",), no_key=True, skip_locked=True)[:BATCH]
        ]
        if found:
            _settle(found)
    return len(found) == BATCH


def _settle(found: Sequence[Ended]) -> None:
    """Write the consequences of these commands, then end them.

    The number of statements is constant, except for devices that were programmed.
    """
    binds = _binds([one.command for one in found if one.command.op == "attach"])
    about = {one.command.device_id for one in found if one.command.exclusive or one.command.op == "detach"} - {None}
    devices = {device.id: device for device in conductor.locked(Device.objects.filter(id__in=about))} if about else {}
    into = _Consequences()
    for one in found:
        known = replace(one, device=devices.get(one.command.device_id or 0))
        if one.command.op == "attach":
            _attach(known, binds.get(one.command.id, []), into)
        elif known.device is not None:
            _device(known, known.device, into)
    _write(into)
    rows = [{"id": one.command.id, "was": one.command.state, "state": one.state, "text": one.text} for one in found]
    conductor.cursor().execute(sql.END, {"rows": _json.encode(rows).decode()})
    metrics.ended((one.command.op, one.state) for one in found)
    if told := {str(one.command.host.uuid) for one in found if one.command.op == placement_delegation.OP}:
        outbox.again("provider", told)
    if any(one.command.op == driver_config.OP for one in found):
        transaction.on_commit(partial(jobs.kick, "rollouts"), robust=True)
    uuids = [str(one.command.uuid) for one in found]
    transaction.on_commit(partial(placing.ring_changed, uuids), robust=True)


def _binds(attached: Sequence[Command]) -> dict[int, list[Waiting]]:
    """Lock the requests that wait for these `attach` commands, and return them by the command's id.

    A command's own request is left out if a later command was ordered for it. For a command that programs the device,
    the other requests of the same instance on that device wait as well.
    """
    if not attached:
        return {}
    own = [str(command.request) for command in attached]
    alone = [command for command in attached if command.exclusive]
    found = binding.waiting(own, [one.arguments["consumer"] for one in alone], [one.device_id or 0 for one in alone])
    named = Command.objects.filter(request__in=own).order_by().values_list("request")
    latest = {str(request): id for request, id in named.annotate(Max("id"))}
    where: dict[tuple[int, str], list[Waiting]] = defaultdict(list)
    for request in found:
        where[request.device, request.instance].append(request)
    return {
        command.id: [
            request
            for request in where[command.device_id or 0, command.arguments["consumer"]]
            if latest.get(request.uuid, 0) == command.id or (command.exclusive and request.uuid != str(command.request))
        ]
        for command in attached
    }


def _attach(one: Ended, waiting: Sequence[Waiting], into: _Consequences) -> None:
    """Collect the consequences of an `attach` command for the requests that wait for it.

    On failure all of them fail; only the command's own request may have left something on the host. On success other
    requests whose handles are made on the host get an `attach` command of their own now. After programming, the rest
    become Bound when Placement shows the new traits, or at once if no job writes to Placement; without programming they
    become Bound at once. If the command's own request waits no longer, what the command may have made on the host is
    ordered back.
    """
    command, own = one.command, str(one.command.request)
    if command.exclusive and one.device:
        _programmed(one, one.device, into)
    for request in waiting:
        if not one.succeeded:
            into.ends.append(End(request, one.text, made=one.touched and request.uuid == own))
        elif request.uuid != own and request.attach_type in placing.ON_HOST:
            into.attach.append(_next(request, command))
        elif command.exclusive and jobs.has_taker("provider"):
            into.told_first[request.uuid] = {"host": str(command.host.uuid)}
        else:
            into.ends.append(End(request))
    if one.touched and own not in (request.uuid for request in waiting):
        into.take_back.append(command.id)


def _next(request: Waiting, command: Command) -> placing.Order:
    """Build the `attach` order for a request that waited until another command had programmed its device."""
    arguments = {"consumer": request.instance}
    return placing.Order(
        "attach", handle=request.handle, arguments=arguments, actor=command.actor, request=request.uuid
    )


def _device(one: Ended, device: Device, into: _Consequences) -> None:
    """Collect the consequences of a command for its device's state.

    An install leads to ready or failed, a successful uninstall to inactive; a program stores the new content; a failed
    detach only writes an event; any other exclusive command with an unknown outcome makes the device failed. A state
    that a person has set since the command was ordered is kept.
    """
    command, now = one.command, standing(device)
    if command.op == "install" and now.here == _S.INSTALLING:
        reason = command.reason or "installed" if one.succeeded else one.text
        _move(one, device, _S.READY if one.succeeded else _S.FAILED, reason, into)
    elif command.op == "uninstall" and one.succeeded and now.here in (_S.MAINTENANCE, _S.FAILED):
        _move(one, device, _S.INACTIVE, command.reason or "uninstalled", into)
    elif command.op == "program":
        _programmed(one, device, into)
    elif command.op == "detach" and not one.succeeded:
        why = f"a handle could not be detached: {one.text}"
        into.steps.append(Step(device, now, now, command.host.name, why, name="not_detached"))
    elif command.exclusive:
        _doubtful(one, device, into)


def _programmed(one: Ended, device: Device, into: _Consequences) -> None:
    """On success store the new bitstream; otherwise, if the host may be changed, mark the content as unknown.

    If the outcome is unknown the device fails as well.
    """
    command = one.command
    name = command.arguments.get("deployable", "")
    if one.succeeded and "image" in command.arguments:
        programming.programmed(device, name, command.arguments["image"], command.actor)
    elif one.touched:
        into.unclear.append((device.id, name))
        _doubtful(one, device, into)


def _doubtful(one: Ended, device: Device, into: _Consequences) -> None:
    """Move the device to `failed` if the command's outcome is unknown, so that it is not offered.

    Only a device that is ready, installing or in maintenance is moved.
    """
    if one.state is _C.UNKNOWN and standing(device).here in (_S.READY, _S.INSTALLING, _S.MAINTENANCE):
        _move(one, device, _S.FAILED, f"{one.command.op}: {one.text}", into)


def _move(one: Ended, device: Device, to: DeviceState, reason: str, into: _Consequences) -> None:
    """Collect the device's move to state `to`.

    The device then shows who caused the state: the host after a failure, otherwise the command's actor. A device that
    becomes ready keeps the name it shows, which is that of the person who had it installed.
    """
    now, host = standing(device), one.command.host.name
    by = host if not one.succeeded else "" if to is _S.READY else one.command.actor
    into.steps.append(Step(device, now, now.at(to, now.drain_to), host, reason[:4096], by))


def _write(into: _Consequences) -> None:
    """Write the collected consequences. Inside `conductor.writing()`, with the devices locked."""
    # One step per device: a step that changes its state replaces one that only writes an event.
    steps = {step.device.id: step for step in sorted(into.steps, key=lambda step: step.now != step.after)}
    store([*steps.values()], Source.AGENT)
    for device, name in into.unclear:
        programming.unclear(device, name)
    if into.ends:
        binding.resolve(into.ends, Source.AGENT, "commands")
    conductor.intend(binding.PROGRAMMED, into.told_first)
    placing.place(into.attach)
    placing.take_back(into.take_back)
