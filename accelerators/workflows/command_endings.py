"""End commands, and apply the consequences to their devices and to the accelerator requests that wait for them.

The job `commands` runs this: a command ends when its agent has answered and the report that belongs to the answer is
applied, or when its deadline has passed. Rows are locked in the order that all code uses: commands, requests, hosts,
devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
from django.db.models import F, Max, Q, QuerySet
from django.db.models.functions import Now

from accelerators import conductor, outbox
from accelerators.commands import command_queue, placement_delegation, programming, sql
from accelerators.devices.lifecycle import DeviceStateChange, build_lifecycle_state, store_state_changes
from accelerators.domain.states import (
    BEGUN_COMMAND_STATES,
    NOT_BEGUN_COMMAND_STATES,
    CommandState,
    DeviceState,
    EventSource,
)
from accelerators.models import Command, Device
from accelerators.models.commands import COMMAND_IS_OPEN
from accelerators.requests import binding
from accelerators.requests.binding import BindOutcome, WaitingRequest
from accelerators.runtime import jobs, metrics
from accelerators.runtime.after_commit import call_after_commit
from accelerators.workflows import driver_config, release_checks

BATCH_SIZE = 200
_C, _S = CommandState, DeviceState
_json = msgspec.json.Encoder()

REPORT_IS_APPLIED = (
    Q(host__applied_epoch__gt=F("report_epoch"))
    | Q(host__applied_epoch=F("report_epoch"), host__applied_seq__gte=F("report_seq"))
    | ~Q(report_hash="") & Q(host__applied_hash=F("report_hash"))
    | Q(end_by__lt=Now())
)
"""The report that shows what the command did is applied, or the deadline has passed, so it is not waited for."""


@dataclass(frozen=True)
class EndedCommand:
    """A locked command with its final state and a sentence about it. `device` is its locked device, not changed yet."""

    command: Command
    state: CommandState
    text: str
    device: Device | None = None

    @property
    def succeeded(self) -> bool:
        """Return True if the final state is `succeeded`."""
        return self.state is _C.SUCCEEDED

    @property
    def may_have_changed_host(self) -> bool:
        """Return True if the command may have changed something on the host: it was neither refused nor expired."""
        return self.state not in (_C.REFUSED, _C.EXPIRED)


class _EndedProgram(NamedTuple):
    """The arguments of `programming.end_programs` for one device."""

    device: int
    deployable_name: str
    reason: str
    also_in_flash: bool


@dataclass
class _Consequences:
    """Changes to write because a batch of commands has ended."""

    state_changes: list[DeviceStateChange] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    """Events that belong to no other change; the devices keep their states and reasons."""
    bind_outcomes: list[BindOutcome] = field(default_factory=list)
    attach_orders: list[command_queue.CommandOrder] = field(default_factory=list)
    detach_numbers: list[int] = field(default_factory=list)
    bound_after_placement: dict[str, dict[str, str]] = field(default_factory=dict)
    """Requests that become Bound once Placement shows the traits of what was programmed: uuid → `{"host": uuid}`."""
    answers_about_releases: list[tuple[Command, str]] = field(default_factory=list)
    """Questions whether a released handle is unused, each with '' if it is, else with the reason (`release_checks`)."""
    ended_programs: list[_EndedProgram] = field(default_factory=list)


def run() -> None:
    """Run the job `commands`: end commands until none is due, or the job's time slice is over."""
    jobs.run_steps(command_queue.COMMANDS_JOB, lambda: end_answered_commands() | end_late_commands())


def end_answered_commands() -> bool:
    """End one batch of the commands that are answered and whose report is applied; True if there may be more."""
    return _end_batch(Command.objects.filter(REPORT_IS_APPLIED, answered_at__isnull=False), _judge_answered_command)


def end_late_commands() -> bool:
    """End one batch of the commands that were not begun, or not answered, in time; True if there may be more."""
    late = Q(state__in=NOT_BEGUN_COMMAND_STATES, start_by__lt=Now()) | Q(
        state__in=BEGUN_COMMAND_STATES, end_by__lt=Now()
    )
    return _end_batch(Command.objects.filter(late, answered_at__isnull=True), _judge_late_command)


def _judge_answered_command(command: Command) -> EndedCommand:
    """Return the end of a command as its agent answered.

    A success of programming has become a failure if the host was rebooted after it and the program did not survive.
    """
    boot_id = command.detail.get("boot_id", "")
    is_lost = boot_id not in ("", command.host.boot_id) and command.host.boot_id and not _is_in_flash(command)
    if command.outcome == _C.SUCCEEDED and is_lost:
        return EndedCommand(command, _C.FAILED, "the host was rebooted afterwards, so what was programmed is lost")
    return EndedCommand(command, CommandState(command.outcome), command.text or command.outcome)


def _is_in_flash(command: Command) -> bool:
    """Return True if the agent has answered that the device keeps the command's image in flash memory."""
    return bool(command.detail.get("lifetime") == "flash")


def _judge_late_command(command: Command) -> EndedCommand:
    """Return the end of a command without an answer: `expired` if the agent has not taken it, otherwise `unknown`."""
    if command.state == _C.PREPARING:
        why = f": {command.progress}" if command.progress else ""
        return EndedCommand(command, _C.EXPIRED, f"its image was not fetched in time{why}")
    if command.state == _C.QUEUED:
        return EndedCommand(command, _C.EXPIRED, f"the agent of {command.host} did not accept it in time")
    progress_text = f"; its last progress message: {command.progress}" if command.progress else ""
    return EndedCommand(command, _C.UNKNOWN, f"the agent of {command.host} has not answered in time{progress_text}")


def _end_batch(selected: QuerySet[Command], judge: Callable[[Command], EndedCommand]) -> bool:
    """Lock at most BATCH_SIZE of the wanted open commands and end each as `judge` says; True if BATCH_SIZE were found.

    Commands that another transaction has locked are skipped.
    """
    with conductor.writing():
        batch = selected.filter(COMMAND_IS_OPEN).select_related("host").order_by("id")
        ended_commands = [
            judge(command)
            for command in batch.select_for_update(of=("self",), no_key=True, skip_locked=True)[:BATCH_SIZE]
        ]
        if ended_commands:
            _end_with_consequences(ended_commands)
    return len(ended_commands) == BATCH_SIZE


def _end_with_consequences(ended_commands: Sequence[EndedCommand]) -> None:
    """Write the consequences of these commands, then end them.

    The number of statements is constant, except for devices that were programmed.
    """
    waiting_by_command = _lock_waiting_requests_of_commands(
        [one.command for one in ended_commands if one.command.op == "attach"]
    )
    device_ids = {
        one.command.device_id
        for one in ended_commands
        if one.command.device_id is not None and (one.command.exclusive or one.command.op == "detach")
    }
    devices = (
        {device.id: device for device in conductor.lock_devices(Device.objects.filter(id__in=device_ids))}
        if device_ids
        else {}
    )
    consequences = _Consequences()
    for ended in ended_commands:
        ended_with_device = replace(ended, device=devices.get(ended.command.device_id or 0))
        if ended.command.op == "attach":
            _collect_attach_consequences(ended_with_device, waiting_by_command.get(ended.command.id, []), consequences)
        elif ended_with_device.device is not None:
            _collect_device_consequences(ended_with_device, ended_with_device.device, consequences)
    repetitions = _write_consequences(consequences)
    rows = [
        {
            "id": one.command.id,
            "was": one.command.state,
            "state": one.state,
            "text": one.text,
            "is_repetition": one.command.id in repetitions,
        }
        for one in ended_commands
    ]
    conductor.open_cursor().execute(sql.END_COMMANDS, {"rows": _json.encode(rows).decode()})
    metrics.count_ended_commands((one.command.op, one.state) for one in ended_commands)
    if hosts_to_retry := {
        str(one.command.host.uuid) for one in ended_commands if one.command.op == placement_delegation.PLACEMENT_OP
    }:
        outbox.make_intents_due("provider", hosts_to_retry)
    if any(one.command.op == driver_config.CONFIGURE_OP for one in ended_commands):
        call_after_commit(jobs.enqueue_job, "rollouts")
    uuids = [str(one.command.uuid) for one in ended_commands]
    call_after_commit(command_queue.publish_changed_commands, uuids)


def _lock_waiting_requests_of_commands(commands: Sequence[Command]) -> dict[int, list[WaitingRequest]]:
    """Lock the requests that wait for these `attach` commands, and return them by the command's id.

    A command's own request is left out if a later command was ordered for it. For a command that programs the device,
    the other requests of the same instance on that device wait as well.
    """
    if not commands:
        return {}
    own_requests = [str(command.request) for command in commands]
    exclusive_commands = [command for command in commands if command.exclusive]
    waiting = binding.lock_waiting_requests(
        own_requests,
        [programming_command.arguments["consumer"] for programming_command in exclusive_commands],
        [one.device_id or 0 for one in exclusive_commands],
    )
    commands_of_requests = Command.objects.filter(request__in=own_requests).order_by().values_list("request")
    latest = {str(request): id for request, id in commands_of_requests.annotate(Max("id"))}
    by_device_and_instance: dict[tuple[int, str], list[WaitingRequest]] = defaultdict(list)
    for request in waiting:
        by_device_and_instance[request.device, request.instance].append(request)
    return {
        command.id: [
            request
            for request in by_device_and_instance[command.device_id or 0, command.arguments["consumer"]]
            if latest.get(request.uuid, 0) == command.id or (command.exclusive and request.uuid != str(command.request))
        ]
        for command in commands
    }


def _collect_attach_consequences(
    ended: EndedCommand, waiting: Sequence[WaitingRequest], consequences: _Consequences
) -> None:
    """Collect the consequences of an `attach` command for the requests that wait for it.

    On failure all of them fail; only the command's own request may have left something on the host. On success other
    requests whose handles are made on the host get an `attach` command of their own now. After programming, the rest
    become Bound when Placement shows the new traits, or at once if no job writes to Placement; without programming they
    become Bound at once. If the command's own request waits no longer, a `detach` is ordered, which removes what the
    command may have made on the host.
    """
    command, own_request = ended.command, str(ended.command.request)
    if command.exclusive and ended.device:
        _apply_program_result(ended, ended.device, consequences)
    for request in waiting:
        if not ended.succeeded:
            consequences.bind_outcomes.append(
                BindOutcome(
                    request, ended.text, may_exist_on_host=ended.may_have_changed_host and request.uuid == own_request
                )
            )
        elif request.uuid != own_request and request.attach_type in command_queue.TYPES_CREATED_ON_HOST:
            consequences.attach_orders.append(_build_attach_order(request, command))
        elif command.exclusive and jobs.has_handler("provider"):
            consequences.bound_after_placement[request.uuid] = {"host": str(command.host.uuid)}
        else:
            consequences.bind_outcomes.append(BindOutcome(request))
    if ended.may_have_changed_host and own_request not in (request.uuid for request in waiting):
        consequences.detach_numbers.append(command.id)


def _build_attach_order(request: WaitingRequest, command: Command) -> command_queue.CommandOrder:
    """Build the `attach` order for a request that waited until another command had programmed its device."""
    arguments = {"consumer": request.instance}
    return command_queue.CommandOrder(
        "attach", handle=request.handle, arguments=arguments, actor=command.actor, request=request.uuid
    )


def _collect_device_consequences(ended: EndedCommand, device: Device, consequences: _Consequences) -> None:
    """Collect the consequences of a command for its device's state.

    An install leads to ready or failed, a successful uninstall to inactive; a program stores the new content; a detach
    tells whether its handle is unused, and a failed one that was not repeated writes an event; a failed reset, and any
    other exclusive command with an unknown outcome, makes the device failed. A state that a person has set since the
    command was ordered is kept. A reset or an uninstall that may have been begun ends what the device was programmed
    with, unless that is in flash memory.
    """
    command, state_now = ended.command, build_lifecycle_state(device)
    if command.op in ("reset", "uninstall") and ended.may_have_changed_host:
        reason = f"{command.op} ends what the device was programmed with"
        consequences.ended_programs.append(_EndedProgram(device.id, "", reason, also_in_flash=False))
    if command.op == "install" and state_now.effective_state == _S.INSTALLING:
        reason = command.reason or "installed" if ended.succeeded else ended.text
        _add_state_change(ended, device, _S.READY if ended.succeeded else _S.FAILED, reason, consequences)
    elif command.op == "uninstall" and ended.succeeded and state_now.effective_state in (_S.MAINTENANCE, _S.FAILED):
        _add_state_change(ended, device, _S.INACTIVE, command.reason or "uninstalled", consequences)
    elif command.op == "program":
        _apply_program_result(ended, device, consequences)
    elif command.op == "reset" and ended.state is _C.FAILED:
        _fail_device(ended, device, consequences)
    elif command.op == "detach":
        consequences.answers_about_releases.append((command, "" if ended.succeeded else ended.text or ended.state))
        if not ended.succeeded and not release_checks.is_repeated_question(command):
            consequences.events.append(_build_not_detached_event(ended, device))
    elif command.exclusive:
        _fail_device_if_outcome_unknown(ended, device, consequences)


def _build_not_detached_event(ended: EndedCommand, device: Device) -> dict[str, Any]:
    """Build the event about the first `detach` of a mediated device that has failed.

    The device keeps its state and reason: only the one unit is kept back, until a later `detach` succeeds.
    """
    host = ended.command.host
    return conductor.build_event(
        "device.not_detached",
        EventSource.AGENT,
        host.name,
        host=host,
        subject=(device.uuid, str(device)),
        reason=f"a mediated device could not be removed yet: {ended.text}; it is ordered again until it succeeds, and"
        " its unit is reserved meanwhile",
    )


def _apply_program_result(ended: EndedCommand, device: Device, consequences: _Consequences) -> None:
    """On success store the new bitstream; otherwise, if the host may be changed, forget the old one.

    If the outcome is unknown the device fails as well.
    """
    command = ended.command
    name = command.arguments.get("deployable", "")
    if ended.succeeded and "image" in command.arguments:
        programming.store_programmed_image(
            device, name, command.arguments["image"], command.actor, in_flash=_is_in_flash(command)
        )
    elif ended.may_have_changed_host:
        reason = f"programming did not succeed, so what the device contains is unknown: {ended.text}"
        consequences.ended_programs.append(_EndedProgram(device.id, name, reason, also_in_flash=True))
        _fail_device_if_outcome_unknown(ended, device, consequences)


def _fail_device_if_outcome_unknown(ended: EndedCommand, device: Device, consequences: _Consequences) -> None:
    """Move the device to `failed` as `_fail_device` does, if the command's outcome is unknown."""
    if ended.state is _C.UNKNOWN:
        _fail_device(ended, device, consequences)


def _fail_device(ended: EndedCommand, device: Device, consequences: _Consequences) -> None:
    """Move the device to `failed`, so that it is not offered until somebody enables it.

    Only a device that is ready, installing or in maintenance is moved.
    """
    if build_lifecycle_state(device).effective_state in (_S.READY, _S.INSTALLING, _S.MAINTENANCE):
        _add_state_change(ended, device, _S.FAILED, f"{ended.command.op}: {ended.text}", consequences)


def _add_state_change(
    ended: EndedCommand, device: Device, to: DeviceState, reason: str, consequences: _Consequences
) -> None:
    """Collect the device's move to state `to`.

    The device then shows who caused the state: the host after a failure, otherwise the command's actor. A device that
    becomes ready keeps the name it shows, which is that of the person who had it installed.
    """
    state_now, host = build_lifecycle_state(device), ended.command.host.name
    changed_by = host if not ended.succeeded else "" if to is _S.READY else ended.command.actor
    consequences.state_changes.append(
        DeviceStateChange(
            device, state_now, state_now.with_state(to, state_now.drain_to), host, reason[:4096], changed_by
        )
    )


def _write_consequences(consequences: _Consequences) -> set[int]:
    """Write the collected consequences. Inside `conductor.writing()`, with the devices locked.

    Returns the ids of the commands that repeated a question about a released handle and got the same answer.
    """
    repetitions: set[int] = set()
    store_state_changes(consequences.state_changes, EventSource.AGENT)
    if consequences.events:
        conductor.record_events(consequences.events)
    for device, name, reason, also_in_flash in consequences.ended_programs:
        programming.end_programs(device, name, reason, also_in_flash=also_in_flash)
    if consequences.bind_outcomes:
        binding.finish_binds(consequences.bind_outcomes, EventSource.AGENT, "commands")
    conductor.raise_intents(binding.PROGRAMMED_INTENT, consequences.bound_after_placement)
    if consequences.answers_about_releases:
        repetitions = release_checks.store_answers(consequences.answers_about_releases)
    command_queue.place_commands(consequences.attach_orders)
    command_queue.order_missing_detaches(consequences.detach_numbers)
    return repetitions
