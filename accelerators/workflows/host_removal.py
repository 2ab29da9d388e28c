"""Remove a decommissioned host: its agent, devices, providers and wanted drivers. Its events are kept.

`order_removal` marks the host in one transaction: the agent is revoked, the devices are retired, and an intent is
raised. From then on nothing of the host is offered or bound, no report of it is merged, and no agent joins for it. The
job `removals` then deletes the providers in Placement, the devices and at last the host. Each of its steps may be
repeated, and the intent is deleted together with the host, so a killed worker's work is continued by the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db.models import ProtectedError, Q

from accelerators import conductor, outbox, safety
from accelerators.commands.command_queue import check_reason
from accelerators.devices import deletion, lifecycle
from accelerators.domain.caller import Caller
from accelerators.domain.device_actions import LifecycleState
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import DeviceState, EventSource
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

It is called in a transaction, before the host is locked."""
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
    """Begin to remove a host: revoke its agent, retire its devices and raise the intent that the job handles.

    Does nothing more for a host that is being removed already. Asks Placement and Nova first, so call it outside
    transactions. Locks the agent, the host and its devices. Raises RefusedError: NOT_FOUND; CONFLICT if `typed_name` is
    not the host's name, or a command for it is open; IN_USE while a request or an allocation exists, or while the host
    is live and has not confirmed yet that no guest uses a released handle; UNAVAILABLE if a service cannot tell.
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
        for revoke in AGENT_REVOKERS.values():
            revoke(host, caller.name, reason or "its host is removed", source)
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
        lifecycle.store_state_changes(changes, source)
        now = database_clock.now()
        Host.objects.filter(pk=locked.pk).update(removing_since=now, updated_at=now)
        values: dict[str, Any] = {"removing_since": [None, now.isoformat(timespec="seconds")]}
        conductor.record_event("host.removing", source, caller.name, host=locked, changes=values, reason=reason)
        payload = {"host": locked.name, "actor": caller.name, "reason": reason}
        conductor.raise_intents(REMOVAL_INTENT, {str(locked.uuid): payload})


def _ask_holders(host: Host) -> tuple[list[Device], safety.HolderAnswers]:
    """Return the devices of the host, and what other services answered to the question who holds them."""
    devices = list(Device.objects.filter(host=host).select_related("host").order_by("id"))
    return devices, safety.ask_holders(devices, despite_releases=host.stale_since is not None)


def _refuse_if_needed(host: Host, devices: Sequence[Device], answers: safety.HolderAnswers) -> None:
    """Raise RefusedError, as `order_removal` describes, if the host may not be removed now.

    A released handle counts only while the host is live: a host that is gone never confirms it.
    """
    requests = AcceleratorRequest.objects.filter(
        Q(hostname=host.name) | Q(deployable__device__host=host) | Q(attach_handle__deployable__device__host=host)
    )
    if uuids := list(requests.order_by("id").values_list("uuid", flat=True)[: MAX_REQUESTS_NAMED + 1]):
        named = ", ".join(map(str, uuids[:MAX_REQUESTS_NAMED]))
        more = " and others" if len(uuids) > MAX_REQUESTS_NAMED else ""
        raise RefusedError(
            RefusalReason.IN_USE, f"Host {host.name} has accelerator requests: {named}{more}. Delete them first."
        )
    if Command.objects.filter(COMMAND_IS_OPEN, host=host).exists():
        raise RefusedError(
            RefusalReason.CONFLICT, f"A command for host {host.name} is open: wait until it has ended, then try again."
        )
    holders = safety.find_holders(devices, answers)
    is_gone = host.stale_since is not None
    for device in devices:
        results = {name: result for name, result in holders.results[device.pk].items() if name != safety.RELEASES}
        relevant = safety.DeviceHolders({device.pk: results}) if is_gone else holders
        relevant.refuse_unless_free(device, "removed with its host")


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
    """Delete what is left of a host, and at last the host; return '' if that was done, otherwise what prevents it."""
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
