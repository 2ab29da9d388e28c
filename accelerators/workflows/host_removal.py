"""Remove a decommissioned host: its agent, devices, providers and wanted drivers. Its events are kept.

`order_removal` marks the host in one transaction (`removing_since`): its devices are retired, and an intent is raised.
From then on nothing of the host is offered or bound, no report of it is merged, no join token is made for it, and no
agent joins for it. Until the deletion begins, `cancel_removal` undoes the order in one transaction.

The job `removals` begins the deletion (`deleting_since`) when CYBORG_HOST_REMOVAL_DELAY_S have passed. That is the
point of no return. It then revokes the agent, and deletes the providers in Placement, the devices and at last the host.
Each of its steps may be repeated, and the intent is deleted together with the host, so a killed worker's work is
continued by the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db.models import ProtectedError, Q, QuerySet
from django.db.models.functions import Now

from accelerators import conductor, outbox, safety
from accelerators.commands.command_queue import check_reason
from accelerators.devices import deletion, lifecycle
from accelerators.domain.caller import Caller
from accelerators.domain.device_actions import LifecycleState
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import DeviceState, DrainTarget, EventSource
from accelerators.models import (
    AcceleratorRequest,
    AttachHandle,
    Command,
    Deployable,
    Device,
    DriverWish,
    Host,
    Intent,
    ReleasedHandle,
)
from accelerators.models.commands import COMMAND_IS_OPEN
from accelerators.outbox import DueIntent
from accelerators.runtime import database_clock, jobs
from accelerators.runtime.registry import Registry

REMOVAL_INTENT = "removal"
JOB = "removals"
INTENT_BATCH = 1
"""Removals of one step. Deleting the providers of one host may take most of the time that a job has."""
ROW_BATCH = 200
MAX_REQUESTS_NAMED = 5

AgentRevoker = Callable[[Host, str, str, EventSource], None]
AGENT_REVOKERS: Registry[AgentRevoker] = Registry("revoker of agents", single=True)
"""Function that revokes the agent of a host and its join tokens, given the actor, the reason and the source.

The caller runs it in a transaction in which the host is not locked, and may run it again."""
HOST_CLEANUPS: Registry[Callable[[Host], str]] = Registry("cleanup of hosts")
"""Functions that delete what other services have of a host that is being removed. Each returns '' when nothing is left,
otherwise why it could not be deleted yet. They are called outside transactions, and may be called again."""


@dataclass(frozen=True)
class RemovalPreview:
    """The numbers of rows that would be deleted with a host, and the reason why the removal would be refused now.

    `refused` is '' if it would not be refused. `guests_unconfirmed` is the number of handles of which the host has not
    confirmed that no guest uses them.
    """

    host: str
    devices: int
    handles: int
    providers: int
    wanted_drivers: int
    commands: int
    guests_unconfirmed: int
    refused: str


@dataclass(frozen=True)
class RemovalProgress:
    """When the removal of a host goes on, and why it could not go on the last time ('' if nothing went wrong)."""

    next_at: datetime
    obstacle: str


def preview_removal(host: Host) -> RemovalPreview:
    """Return what would be deleted with a host, and why that would be refused now. Changes nothing.

    Asks Placement and Nova, so call it outside transactions.
    """
    devices, answers = _ask_holders(host)
    try:
        _refuse_if_needed(host, devices, answers)
        refused = ""
    except RefusedError as error:
        refused = error.text
    return count_removed_rows(host, refused)


def count_removed_rows(host: Host, refused: str = "") -> RemovalPreview:
    """Return what would be deleted with a host, without asking whether that would be refused."""
    return RemovalPreview(
        host.name,
        Device.objects.filter(host=host).count(),
        AttachHandle.objects.filter(deployable__device__host=host).count(),
        Deployable.objects.filter(device__host=host, rp_uuid__isnull=False).count(),
        DriverWish.objects.filter(host=host).count(),
        Command.objects.filter(host=host).count(),
        ReleasedHandle.objects.filter(handle__deployable__device__host=host).count(),
        refused,
    )


def order_removal(uuid: UUID, typed_name: str, caller: Caller, reason: str, source: EventSource) -> None:
    """Begin to remove a host: retire its devices and raise the intent that the job handles.

    Does nothing more for a host that is being removed already. Asks Placement and Nova first, so call it outside
    transactions. Locks the host and its devices. Raises RefusedError: NOT_FOUND; CONFLICT if `typed_name` is not the
    host's name, or a command for it is open; IN_USE while a request or an allocation exists, or while the host is live
    and has not confirmed yet that no guest uses a released handle; UNAVAILABLE if a service cannot tell.
    """
    reason = check_reason(reason)
    host = Host.objects.filter(uuid=uuid).first()
    if host is None:
        raise RefusedError(RefusalReason.NOT_FOUND, f"There is no host {uuid}.")
    if typed_name != host.name:
        raise RefusedError(
            RefusalReason.CONFLICT, f"To confirm that host {host.name} is to be removed, enter exactly this name."
        )
    if host.removing_since:
        return
    _, answers = _ask_holders(host)
    with conductor.writing():
        locked = Host.objects.select_for_update(no_key=True).filter(pk=host.pk).first()
        if locked is None or locked.removing_since:
            return
        devices = conductor.lock_devices(Device.objects.filter(host=locked), to_delete=True)
        _refuse_if_needed(locked, devices, answers)
        text = "its host is being removed"
        retired = LifecycleState(DeviceState.RETIRED)
        changes = [
            lifecycle.DeviceStateChange(
                device, lifecycle.build_lifecycle_state(device), retired, caller.name, text, caller.name
            )
            for device in devices
            if device.state != DeviceState.RETIRED
        ]
        former_states = {
            str(change.device.uuid): [change.before.state, change.before.returns_to, change.before.drain_to]
            for change in changes
        }
        lifecycle.store_state_changes(changes, source)
        now = database_clock.now()
        Host.objects.filter(pk=locked.pk).update(removing_since=now, updated_at=now)
        values: dict[str, Any] = {"removing_since": [None, now.isoformat(timespec="seconds")]}
        conductor.record_event("host.removing", source, caller.name, host=locked, changes=values, reason=reason)
        payload = {"host": locked.name, "actor": caller.name, "reason": reason, "former_states": former_states}
        conductor.raise_intents(REMOVAL_INTENT, {str(locked.uuid): payload})
        begins_at = now + timedelta(seconds=settings.KEYS.host_removal_delay_s)
        _query_intents(locked).update(next_at=begins_at)


def cancel_removal(uuid: UUID, caller: Caller, reason: str, source: EventSource) -> None:
    """Cancel the removal of a host: its devices get the states back that they had, and its reports are merged again.

    One transaction; locks the host and its devices, and asks no service. Raises RefusedError: NOT_FOUND if there is no
    such host (any more); CONFLICT if it is not being removed, or if the deletion has begun.
    """
    reason = check_reason(reason)
    with conductor.writing():
        host = Host.objects.select_for_update(no_key=True).filter(uuid=uuid).first()
        if host is None:
            raise RefusedError(
                RefusalReason.NOT_FOUND, f"There is no host {uuid}. If it was removed, its events say so."
            )
        if not host.removing_since:
            raise RefusedError(RefusalReason.CONFLICT, f"Host {host.name} is not being removed.")
        if host.deleting_since:
            raise RefusedError(
                RefusalReason.CONFLICT,
                f"The removal of host {host.name} cannot be cancelled any more: it has been deleting since "
                f"{host.deleting_since.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC. When it has ended, the host may join "
                "again with a new join token.",
            )
        former_states = _query_intents(host).values_list("payload__former_states", flat=True).first() or {}
        devices = conductor.lock_devices(Device.objects.filter(host=host))
        text = "the removal of its host was cancelled"
        changes = [
            lifecycle.DeviceStateChange(
                device,
                lifecycle.build_lifecycle_state(device),
                _decode_state(*former_states[str(device.uuid)]),
                caller.name,
                text,
                caller.name,
            )
            for device in devices
            if str(device.uuid) in former_states
        ]
        lifecycle.store_state_changes(changes, source)
        values: dict[str, Any] = {"removing_since": [host.removing_since.isoformat(timespec="seconds"), None]}
        conductor.record_event("host.removal_cancelled", source, caller.name, host=host, changes=values, reason=reason)
        _query_intents(host).delete()
        host.removing_since, host.updated_at = None, database_clock.now()
        conductor.forget_applied_report(host, "removing_since", "updated_at")


def load_progress(host: Host) -> RemovalProgress | None:
    """Return the time of the next step of the removal of a host, and what prevented the last one; one statement.

    None if the host is not being removed.
    """
    row = _query_intents(host).values_list("next_at", "last_error").first()
    return row and RemovalProgress(*row)


def _query_intents(host: Host) -> QuerySet[Intent]:
    """Query the intent that stands for the removal of this host."""
    return Intent.objects.filter(kind=REMOVAL_INTENT, key=str(host.uuid))


def _decode_state(state: str, returns_to: str | None, drain_to: str | None) -> LifecycleState:
    """Return the lifecycle state that an order has stored in its intent."""
    return LifecycleState(
        DeviceState(state),
        DeviceState(returns_to) if returns_to else None,
        DrainTarget(drain_to) if drain_to else None,
    )


def _ask_holders(host: Host) -> tuple[list[Device], safety.HolderAnswers]:
    """Return the devices of the host, and what other services answered to the question who holds them."""
    devices = list(Device.objects.filter(host=host).select_related("host").order_by("id"))
    return devices, safety.ask_holders(devices, despite_releases=host.stale_since is not None)


def _refuse_if_needed(host: Host, devices: Sequence[Device], answers: safety.HolderAnswers) -> None:
    """Raise RefusedError, as `order_removal` describes, if the host may not be removed now.

    A released handle counts only while the host is live: a host that is gone never confirms it.
    """
    _refuse_if_requested_or_commanded(host)
    holders = safety.find_holders(devices, answers)
    is_gone = host.stale_since is not None
    for device in devices:
        results = {name: result for name, result in holders.results[device.pk].items() if name != safety.RELEASES}
        relevant = safety.DeviceHolders({device.pk: results}) if is_gone else holders
        relevant.refuse_unless_free(device, "removed with its host")


def _refuse_if_requested_or_commanded(host: Host) -> None:
    """Raise RefusedError IN_USE while there are requests of the host, and CONFLICT while a command for it is open.

    Two statements, each of which reads a few rows by indexes, whatever the number of requests.
    """
    requests = AcceleratorRequest.objects.order_by()
    few = slice(MAX_REQUESTS_NAMED + 1)  # of each kind, and in all
    by_name, by_deployable, by_handle = (
        requests.filter(**{path: value}).values_list("uuid", flat=True)[few]
        for path, value in (
            ("hostname", host.name),
            ("deployable__device__host", host),
            ("attach_handle__deployable__device__host", host),
        )
    )  # a union, because with OR PostgreSQL would scan all requests
    if uuids := sorted(map(str, by_name.union(by_deployable, by_handle)[few])):
        named = ", ".join(uuids[:MAX_REQUESTS_NAMED])
        more = " and others" if len(uuids) > MAX_REQUESTS_NAMED else ""
        raise RefusedError(
            RefusalReason.IN_USE, f"Host {host.name} has accelerator requests: {named}{more}. Delete them first."
        )
    if Command.objects.filter(COMMAND_IS_OPEN, host=host).exists():
        raise RefusedError(
            RefusalReason.CONFLICT, f"A command for host {host.name} is open: wait until it has ended, then try again."
        )


def run() -> None:
    """Run the job `removals`: continue the removal of hosts."""
    jobs.run_steps_outside_transaction(JOB, step)


def step() -> bool:
    """Continue the removals that are due; return True if there may be more.

    What another service refuses, or a row that still refers to a device, counts as a failure: it is tried again later.
    """
    due = outbox.load_due_intents(REMOVAL_INTENT, INTENT_BATCH)
    for intent in due:
        host = Host.objects.filter(uuid=intent.key).first()
        if host is None:
            outbox.delete_done_intents([intent])
        elif obstacle := _continue_removal(host, intent):
            outbox.record_failures([intent], obstacle)
    return len(due) == INTENT_BATCH


def _continue_removal(host: Host, intent: DueIntent) -> str:
    """Delete what is left of a host, and at last the host; return '' if that was done, otherwise what prevents it.

    Does nothing if the removal was cancelled since the intent was loaded.
    """
    try:
        if not _begin_deletion(host, intent):
            return ""
    except RefusedError as refused:
        return refused.text
    with conductor.writing():
        for revoke in AGENT_REVOKERS.values():
            reason = intent.payload["reason"] or "its host is removed"
            revoke(host, intent.payload["actor"], reason, EventSource.SYSTEM)
    for cleanup in HOST_CLEANUPS.values():
        if obstacle := cleanup(host):
            return obstacle
    try:
        while _delete_some_devices(host, intent.payload["actor"]):
            pass
        while _delete_some_commands(host, intent.payload["actor"]):
            pass
        _delete_host(host, intent)
    except ProtectedError as error:
        return f"rows that refer to it still exist: {', '.join(sorted(map(str, error.protected_objects))[:5])}"
    return ""


def _begin_deletion(host: Host, intent: DueIntent) -> bool:
    """Store that the deletion begins, after which the removal cannot be cancelled; return whether it has begun.

    Returns False if the removal was cancelled meanwhile, also if it was ordered again and is not due yet. Locks the
    host. Raises RefusedError if a request or a command was made since the order.
    """
    with conductor.writing():
        locked = Host.objects.select_for_update(no_key=True).filter(pk=host.pk).first()
        if locked is None or not Intent.objects.filter(pk=intent.id, next_at__lte=Now()).exists():
            return False
        if locked.deleting_since is None:
            _refuse_if_requested_or_commanded(locked)
            now = database_clock.now()
            Host.objects.filter(pk=locked.pk).update(deleting_since=now, updated_at=now)
            values: dict[str, Any] = {"deleting_since": [None, now.isoformat(timespec="seconds")]}
            actor, reason = intent.payload["actor"], intent.payload["reason"]
            conductor.record_event(
                "host.deleting", EventSource.SYSTEM, actor, host=locked, changes=values, reason=reason
            )
        return True


def _delete_some_devices(host: Host, actor: str) -> bool:
    """Delete at most ROW_BATCH devices of the host, each with an event; return whether there were any."""
    with conductor.writing():
        ids = list(Device.objects.filter(host=host).order_by("id").values_list("pk", flat=True)[:ROW_BATCH])
        devices = conductor.lock_devices(Device.objects.filter(pk__in=ids), to_delete=True)
        deletion.delete_devices(dict.fromkeys(devices, "its host was removed"), actor)
    return bool(ids)


def _delete_some_commands(host: Host, actor: str) -> bool:
    """Delete at most ROW_BATCH commands of the host, with one event; return whether there were any.

    The agent can take none of them any more.
    """
    with conductor.writing():
        ids = list(Command.objects.filter(host=host).order_by("id").values_list("pk", flat=True)[:ROW_BATCH])
        Command.objects.filter(pk__in=ids).delete()
        if ids:
            values, reason = {"number": [len(ids), 0]}, f"host {host.name} was removed"
            conductor.record_event("command.forgotten", EventSource.SYSTEM, actor, changes=values, reason=reason)
    return bool(ids)


def _delete_host(host: Host, intent: DueIntent) -> None:
    """Delete the host, all rows of it that are left, and the intent, with an event, in one transaction."""
    with conductor.writing():
        locked = Host.objects.select_for_update().filter(pk=host.pk).first()
        if locked is None:
            return
        actor, reason = intent.payload["actor"], intent.payload["reason"]
        drivers = list(DriverWish.objects.filter(host=host).order_by("driver").values_list("driver", flat=True))
        values: dict[str, Any] = {"name": [host.name, None], "node": [host.node, None]}
        values |= {"wanted drivers": [drivers, None]} if drivers else {}
        conductor.record_event("host.removed", EventSource.SYSTEM, actor, host=locked, changes=values, reason=reason)
        Intent.objects.filter(Q(kind="provider") | Q(kind=REMOVAL_INTENT), key=str(host.uuid)).delete()
        locked.delete()
