"""Create, bind, unbind and delete accelerator requests (contract sections 2.3 and 4.1).

This module is the only writer of requests; the life cycle is `states.REQUEST_TRANSITIONS`. It is also the last guard
against giving one handle to two requests (promises S1 and S2): a bind finds free handles with FOR NO KEY UPDATE SKIP
LOCKED, so it waits for no row lock on them, and a unique index in the database rejects a handle that was taken
meanwhile. An exclusion constraint rejects a handle whose PCI function another request holds through another handle,
device or driver (`accelerators/migrations/sql/claims.sql`). A bind takes handles only of the host that it names.

Lock order: requests first, then hosts and devices.

While a bind programs a device, no other bind may use that device. One command programs it; if it fails, all requests of
that bind on that device fail.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import msgspec
from django.conf import settings
from django.db import IntegrityError, OperationalError
from psycopg.errors import DeadlockDetected

from accelerators import conductor, safety
from accelerators.commands import command_queue
from accelerators.commands.command_queue import TYPES_CREATED_ON_HOST, CommandOrder
from accelerators.domain import groups, offer, redaction
from accelerators.domain.bind_failures import BindFailure, BindRefusedError
from accelerators.domain.caller import Caller, request_id
from accelerators.domain.errors import AcceleratorsError, RefusalReason, RefusedError
from accelerators.domain.states import BINDABLE_STATES, CommandState, EventSource, RequestState
from accelerators.models import Command, Host, Intent
from accelerators.requests import binding_sql as sql
from accelerators.requests import notices, profiles, refused_binds, releases
from accelerators.runtime import jobs, metrics
from accelerators.runtime.after_commit import call_after_commit

log = logging.getLogger(__name__)

RETRY_TIMEOUT_S = 2.0
"""How long a bind is retried while other transactions reserve or release the handles it needs."""
INSTANCE_LOCK_KEY = 0x7162
"""First key of the advisory lock that a bind takes for each instance; the second key is a hash of the instance id."""
OVERDUE_BATCH_SIZE = 200
"""Number of overdue requests that one call of `fail_overdue_binds` fails."""
PROGRAMMED_INTENT = "programmed"
"""Kind of the intent that waits until a programmed device's new traits are in Placement. Its key is the request's uuid;
its payload has the uuid of the host."""
STORED_FAILURES = frozenset(
    {
        BindFailure.UNKNOWN_PROVIDER,
        BindFailure.OTHER_HOST,
        BindFailure.NONE_FREE,
        BindFailure.NOT_OFFERED,
        BindFailure.BUSY,
        BindFailure.DEVICE_NODE,
        BindFailure.IMAGE_CONFLICT,
        BindFailure.INVALID_GROUP,
    }
)
"""Failures that move the requests to BindFailed; all others of a bind change nothing."""

_json = msgspec.json.Encoder()
_S = RequestState


@dataclass(frozen=True)
class BindSpec:
    """One request to bind: the host, the resource provider and the instance. An empty `project_id` means the project of
    the caller."""

    uuid: str
    hostname: str
    device_rp_uuid: str
    instance_uuid: str
    project_id: str = ""


@dataclass(frozen=True)
class _LockedRequest:
    """A request whose row is locked, as it was before this bind, unbind or deletion."""

    uuid: str
    id: int
    state: str
    group: dict[str, str]
    instance_uuid: str | None
    handle: int | None
    attach_type: str | None
    project_id: str

    @classmethod
    def from_row(cls, row: tuple[Any, ...]) -> _LockedRequest:
        """Build a request from a row of `sql.LOCK_REQUESTS` or `sql.LOCK_REQUESTS_OF_INSTANCE`; the row has the group
        as JSON text."""
        uuid, id, state, group, *rest = row
        return cls(uuid, id, state, msgspec.json.decode(group), *rest)


@dataclass(frozen=True)
class _FreeHandle:
    """A free handle whose row is locked. `deployable` and `device` are the ids of the rows that it belongs to.

    `bitstream` is the id of the image that the deployable was programmed with, None if no image is recorded.
    """

    id: int
    attach_type: str
    deployable: int
    bitstream: str | None
    device: int


@dataclass(frozen=True)
class WaitingRequest:
    """A locked request in state BindStarted, which waits for its host. The fields are the columns of
    `sql.LOCK_WAITING`; `waited_s` is the time since the bind began, in seconds, and `group` is JSON text."""

    uuid: str
    id: int
    hostname: str
    provider: str
    instance: str
    deployable: int
    handle: int
    attach_type: str
    device: int
    waited_s: float
    group: str


@dataclass(frozen=True)
class BindOutcome:
    """The end of a BindStarted request: it becomes Bound if `fault` is empty, otherwise BindFailed with `fault` as the
    reason.

    `failure` is the kind of the fault, if there is one. `may_exist_on_host` says that the handle may already exist on
    the host. A failed bind then also orders a detach there.
    """

    request: WaitingRequest
    fault: str = ""
    may_exist_on_host: bool = True
    failure: BindFailure = BindFailure.HOST_FAILED


class _HandlesContendedError(AcceleratorsError):
    """Enough handles are free, but other transactions have them locked: retry the bind."""


def create_requests(profile_name: str, caller: Caller) -> list[str]:
    """Create the requests that a device profile asks for, in the caller's project, with an event for each.

    Returns their uuids in the order of the profile's groups; empty if the groups ask for nothing. Raises RefusedError
    NOT_FOUND if there is no such profile. The profile comes from the cache; if it was changed or replaced since, it is
    read again and the creation is retried once. Costs one statement if the cached profile is current.
    """
    for _ in range(2):
        profile = profiles.get_profile_by_name(profile_name)
        if profile is None:
            break
        if not (group_indexes := groups.list_requested_groups(profile.groups)):
            return []
        values = {
            "profile": profile.id,
            "name": profile.name,
            "updated_at": profile.updated_at,
            "groups": group_indexes,
        }
        with conductor.writing():
            if created_rows := _fetch_all(
                sql.INSERT_REQUESTS, values | {"project": caller.project_id} | _build_actor_values(caller)
            ):
                return [str(uuid) for (uuid,) in created_rows]
        profiles.clear_profile_cache()
    raise RefusedError(RefusalReason.NOT_FOUND, f"Device Profile not found with name={profile_name}")


@metrics.measure_bind()
def bind_requests(specs: Sequence[BindSpec], caller: Caller, allow_existing: bool = False) -> None:
    """Reserve a free handle for every request in `specs`, or for none of them, in one transaction.

    A request becomes Bound at once if nothing has to be done on its host; otherwise it becomes BindStarted and a
    command for the host is placed. `allow_existing=True` allows an instance that already has other requests; Nova never
    needs it. Waits while another transaction binds for the same instance or has locked one of the requests.

    Raises RefusedError. With NONE_FREE, with NOT_FOUND for a provider and with INVALID for a group, all requests become
    BindFailed with that reason. With NOT_FOUND for a request, with INVALID for an instance that already has requests
    and with WRONG_STATE, nothing is changed. If other transactions keep the needed handles, the bind is retried with a
    back-off for RETRY_TIMEOUT_S seconds, then UNAVAILABLE is raised and nothing is changed.

    Every failure is logged and counted by its reason, and events have it, so that the overview shows those that repeat.
    A refusal that has nothing to do with the bind itself, such as that of `conductor.checking_writes`, is not reported.
    """
    try:
        _bind_or_refuse(specs, caller, allow_existing)
    except BindRefusedError as error:
        if error.failure not in STORED_FAILURES:  # the others were reported where they were stored
            metrics.count_bind_failures([error.failure] * len(specs))
            for spec in specs:
                subject = (spec.uuid, spec.instance_uuid, spec.hostname, spec.device_rp_uuid)
                refused_binds.note_refused_bind(error.failure, *subject, error.text)
                _log_failure(error.failure, *subject, error.text)
        raise


def _bind_or_refuse(specs: Sequence[BindSpec], caller: Caller, allow_existing: bool) -> None:
    """Bind the requests, as `bind_requests` describes it, or raise RefusedError."""
    give_up_at, pause_s, check_claims = time.monotonic() + RETRY_TIMEOUT_S, 0.01, False
    while True:
        try:
            with conductor.writing():
                refusal = _try_bind(specs, caller, allow_existing, check_claims)
            break
        except (_HandlesContendedError, IntegrityError, OperationalError) as error:
            check_claims = check_claims or isinstance(error, IntegrityError)
            if isinstance(error, OperationalError) and not isinstance(error.__cause__, DeadlockDetected):
                raise
            if time.monotonic() > give_up_at:
                raise BindRefusedError(
                    BindFailure.CONTENTION, "Others are taking the same accelerators: try again."
                ) from error
            time.sleep(random.uniform(pause_s, 2 * pause_s))
            pause_s = min(2 * pause_s, 0.1)
    if refusal:
        raise refusal


def unbind_requests(uuids: Sequence[str], caller: Caller) -> None:
    """Unbind all of these requests or none: release their handles and clear their host, provider and instance.

    Every state is allowed (contract section 4.1); a request that is Unbound already does not change. Handles that were
    made on a host are detached there by a command, and commands that still wait for an image are cancelled. Handles are
    free when their host has confirmed that they are unused (`releases`). Locks the requests. Raises RefusedError
    NOT_FOUND if a request does not exist or is not the caller's.
    """
    with conductor.writing():
        requests = _load_requests_for_update(uuids, caller)
        _move_requests(
            [_build_unbind_row(request) for request in requests if request.state != _S.UNBOUND],
            EventSource.API,
            caller.name,
        )
        _release_on_hosts(requests, caller, instance_is_gone=False)


def delete_requests(uuids: Sequence[str], caller: Caller) -> None:
    """Delete all of these requests or none, in any state, and release their handles; records an event for each.

    Handles that were made on a host are detached there by a command. Handles are free when their host has confirmed
    that they are unused (`releases`). Raises RefusedError: NOT_FOUND if a request does not exist or is not the
    caller's; SERVICE_TOKEN if a request belongs to an instance and the caller sent no service token.
    """
    with conductor.writing():
        requests = _load_requests_for_update(uuids, caller)
        for request in requests:
            if request.instance_uuid and not caller.service:
                text = (
                    f"ARQ {request.uuid} is bound to instance {request.instance_uuid}. Use the Compute API to manage "
                )
                raise RefusedError(RefusalReason.SERVICE_TOKEN, text + "instance accelerators.")
        _delete_locked_requests(requests, caller, instance_is_gone=False)


def delete_requests_of_instance(instance_uuid: str, caller: Caller) -> None:
    """Delete the requests of an instance that the caller may see, and release their handles; there may be none.

    Nova calls this when it deletes the instance. It has then ended the guest, unless it could not reach the host.
    Therefore a PCI handle is free at once only if the last report shows that no guest uses it, and still describes the
    host (`releases`). This function does not check for a service token; its caller must.
    """
    with conductor.writing():
        rows = _fetch_all(
            sql.LOCK_REQUESTS_OF_INSTANCE, {"instance": instance_uuid, "project": _get_visible_project(caller)}
        )
        if rows:
            _delete_locked_requests([_LockedRequest.from_row(row) for row in rows], caller, instance_is_gone=True)


def fail_overdue_binds() -> bool:
    """Set at most OVERDUE_BATCH_SIZE BindStarted requests whose deadline has passed to BindFailed; return True if there
    may be more.

    Requests that another transaction has locked are skipped. `finish_binds` carries out the consequences of a failed
    bind.
    """
    with conductor.writing():
        overdue = [WaitingRequest(*row) for row in _fetch_all(sql.LOCK_OVERDUE, {"count": OVERDUE_BATCH_SIZE})]
        reasons = _explain_overdue_binds(overdue) if overdue else {}
        finish_binds(
            [BindOutcome(request, reasons[request.uuid], failure=BindFailure.DEADLINE) for request in overdue],
            EventSource.SYSTEM,
            "deadlines",
        )
    return len(overdue) == OVERDUE_BATCH_SIZE


def _explain_overdue_binds(overdue: Sequence[WaitingRequest]) -> dict[str, str]:
    """Return by the request's uuid what each of these binds still waited for at its deadline. Costs three
    statements."""
    uuids = [request.uuid for request in overdue]
    programmed = Intent.objects.filter(kind=PROGRAMMED_INTENT, key__in=uuids)
    host_by_request = dict(programmed.values_list("key", "payload__host"))
    provider_intents = Intent.objects.filter(kind="provider", key__in={*host_by_request.values()})
    error_by_host = dict(provider_intents.values_list("key", "last_error"))
    commands = Command.objects.filter(request__in=uuids).order_by("id")
    last_command = {str(command.request): command for command in commands}
    reasons = {}
    for request in overdue:
        if request.uuid in host_by_request:
            error = error_by_host.get(host_by_request[request.uuid], "")
            reason = (
                f"host {request.hostname} was programmed, but its new traits were not in Placement before the deadline:"
                f" {error or 'the job placement had not written them yet'}"
            )
        else:
            reason = _describe_unfinished_command(request.hostname, last_command.get(request.uuid))
        reasons[request.uuid] = reason[:1024]
    return reasons


def _describe_unfinished_command(host: str, command: Command | None) -> str:
    """Return how far the last command of a bind had come at the bind's deadline."""
    if command is None or (command.taken_at is None and command.answered_at is None):
        if command is not None and command.state == CommandState.PREPARING:
            return f"the image for host {host} was not ready before the deadline"
        return f"nothing was heard from host {host} before the deadline"
    if command.answered_at is None:
        return f"host {host} accepted the command {command.op}, but did not answer it before the deadline"
    return f"host {host} answered the command {command.op}, but its report was not applied before the deadline"


def lock_waiting_requests(
    uuids: Sequence[str], instances: Sequence[str], devices: Sequence[int]
) -> list[WaitingRequest]:
    """Lock and return the requests in state BindStarted that have one of these uuids, or that belong to one of these
    instances and hold a handle of one of these devices.

    Ordered by id; one statement. The rows stay locked until the end of the caller's transaction.
    """
    values = {"uuids": list(uuids), "instances": list(instances), "devices": list(devices)}
    return [WaitingRequest(*row) for row in _fetch_all(sql.LOCK_WAITING, values)]


def finish_binds(outcomes: Sequence[BindOutcome], source: EventSource, actor: str) -> None:
    """Move BindStarted requests to Bound or BindFailed, and write their events and the intents that notify Nova.

    After a bind has been answered, only this function makes its requests Bound or BindFailed. The requests must be
    locked (`lock_waiting_requests`) in the caller's transaction. For a failed request, also cancels commands that still
    wait for their image, and orders a detach if the handle may already exist on the host. `actor` is the author of the
    events.
    """
    moves = [_build_finish_row(outcome) for outcome in outcomes]
    _move_requests(moves, source, actor)
    notices.raise_notice_intents(moves)
    command_queue.cancel_preparing_commands([end.request.uuid for end in outcomes if end.fault])
    to_detach = [
        end.request
        for end in outcomes
        if end.fault and end.may_exist_on_host and end.request.attach_type in TYPES_CREATED_ON_HOST
    ]
    releases.release_handles(
        {request.handle: request.instance for request in to_detach},
        [
            command_queue.build_detach_order(request.handle, request.instance, request.uuid, "its bind failed", actor)
            for request in to_detach
        ],
        actor,
        EventSource.SYSTEM,
        instance_is_gone=False,
    )


def _build_finish_row(outcome: BindOutcome) -> dict[str, Any]:
    """Build the row with which `_move_requests` moves the request from BindStarted to Bound or BindFailed."""
    request = outcome.request
    return {
        "id": request.id,
        "uuid": request.uuid,
        "was": _S.BIND_STARTED,
        "state": _S.BIND_FAILED if outcome.fault else _S.BOUND,
        "hostname": request.hostname,
        "rp": request.provider,
        "instance": request.instance,
        "deployable": request.deployable,
        "handle": None if outcome.fault else request.handle,
        "fault": outcome.fault,
        "failure": outcome.failure if outcome.fault else None,
        "group": request.group,
        "had_instance": request.instance,
        "had_handle": request.handle,
        "waited": request.waited_s,
    }


def run_deadlines() -> None:
    """Run the job `deadlines`: fail all binds whose deadline has passed."""
    jobs.run_steps("deadlines", fail_overdue_binds)


def _try_bind(
    specs: Sequence[BindSpec], caller: Caller, allow_existing: bool, check_claims: bool
) -> RefusedError | None:
    """Try the bind once, in the caller's transaction; locks the requests and the handles.

    `check_claims` leaves out handles whose PCI function is held through another handle (`sql.RESERVE_HANDLES`).
    Returns None on success. Returns (does not raise) a RefusedError if the requests were moved to BindFailed: the
    caller must commit that and then raise it. A raised RefusedError or _HandlesContendedError means that the
    transaction must be rolled back.
    """
    instances = sorted({one.instance_uuid for one in specs})
    _fetch_all(sql.LOCK_INSTANCES, {"lock": INSTANCE_LOCK_KEY, "instances": instances})
    if not allow_existing and (
        instances_with_requests := _fetch_all(
            sql.SELECT_INSTANCE_WITH_REQUESTS, {"instances": instances, "project": _get_visible_project(caller)}
        )
    ):
        text = (
            f"Instance {instances_with_requests[0][0]} already has accelerator requests. Cannot bind additional ARQs."
        )
        raise BindRefusedError(BindFailure.INSTANCE_HAS_REQUESTS, f"Couldn't apply patch. Reason: {text}")
    spec_by_uuid = {spec.uuid: spec for spec in specs}
    try:
        requests = _load_requests_for_update([*spec_by_uuid], caller)
    except RefusedError as error:
        raise BindRefusedError(BindFailure.UNKNOWN_REQUEST, error.text) from error
    for request in requests:
        if request.state not in BINDABLE_STATES:
            text = f"Bad state: {request.state} for ARQ: {request.uuid}. Expected state(s): {list(BINDABLE_STATES)}"
            raise BindRefusedError(BindFailure.WRONG_STATE, text)
    pairs = [(request, spec_by_uuid[request.uuid]) for request in requests]
    try:
        handles = _reserve_handles(pairs, check_claims)
        programmed_by = _choose_programming_requests(pairs, handles)
    except BindRefusedError as error:
        _move_requests([_build_failure_row(*pair, caller, error) for pair in pairs], EventSource.API, caller.name)
        if error.failure in (BindFailure.UNKNOWN_PROVIDER, BindFailure.OTHER_HOST):
            # The host's tree in Placement differs from what is stored here: compare it, so that operators see why.
            # An intent that is there already keeps its progress and its back-off.
            hosts = Host.objects.filter(name__in={spec.hostname for _, spec in pairs})
            conductor.raise_provider_intents(hosts, keep_existing=True)
        return BindRefusedError(error.failure, redaction.hide_foreign_ids(error.text, str(pairs)))
    plans = [_plan_bind(*pair, caller, handles[pair[0].id], programmed_by) for pair in pairs]
    command_queue.place_commands([order for _, order in plans if order], EventSource.API)
    moves = [move for move, _ in plans]
    _move_requests(moves, EventSource.API, caller.name)
    notices.raise_notice_intents(moves)
    return None


def _reserve_handles(pairs: Sequence[tuple[_LockedRequest, BindSpec]], check_claims: bool) -> dict[int, _FreeHandle]:
    """Lock one free handle for each request, without waiting for locks; return request id → handle. Nothing is written.

    If a request may need programming, the device is locked exclusively, otherwise shared. Raises RefusedError: INVALID
    for a group that names no resource, or that names both a bitstream and a function; NOT_FOUND for a provider that
    does not exist or is not on the host that the bind names; NONE_FREE if too few handles are available. Raises
    _HandlesContendedError if enough handles are free but locked by others.
    """
    requests_by_provider: dict[tuple[str, str], list[_LockedRequest]] = {}
    for request, spec in pairs:
        if groups.BITSTREAM_KEY in request.group and groups.FUNCTION_KEY in request.group:
            raise BindRefusedError(
                BindFailure.INVALID_GROUP,
                f"{groups.BITSTREAM_KEY} and {groups.FUNCTION_KEY} exclude each other in one group.",
            )
        if not groups.first_resource_class(request.group):
            raise BindRefusedError(BindFailure.INVALID_GROUP, f"Group of ARQ {request.uuid} asks for no resource.")
        requests_by_provider.setdefault((spec.hostname, spec.device_rp_uuid), []).append(request)
    handles: dict[int, _FreeHandle] = {}
    for (host, rp), requests in requests_by_provider.items():
        exclusively = any(groups.needs_programming(request.group, None) for request in requests)
        selection = {"host": host, "rp": rp, "check_claims": check_claims}
        rows = _fetch_all(
            sql.RESERVE_HANDLES_EXCLUSIVELY if exclusively else sql.RESERVE_HANDLES,
            selection | {"count": len(requests)},
        )
        if len(rows) < len(requests):
            _raise_shortage_error(selection, len(requests))
        handles |= {request.id: _FreeHandle(*row) for request, row in zip(requests, rows, strict=True)}
    return handles


def _raise_shortage_error(selection: Mapping[str, Any], count: int) -> None:
    """Raise the error that says why `count` handles could not be locked: RefusedError or _HandlesContendedError.

    `selection` has the parameters of the statement that selected them: `host`, `rp` and `check_claims`.
    """
    rows = _fetch_all(sql.SELECT_SHORTAGE_FACTS, selection)
    if not rows:
        text = f"Deployable not found with resource provider uuid={selection['rp']}"
        raise BindRefusedError(BindFailure.UNKNOWN_PROVIDER, text)
    ((deployable, state, busy, free, has_device_nodes, is_on_host, health, released, *elsewhere),) = rows
    if not is_on_host:
        text = f"Deployable not found with resource provider uuid={selection['rp']} on host {selection['host']}"
        raise BindRefusedError(BindFailure.OTHER_HOST, text)
    if free >= count:
        raise _HandlesContendedError
    if has_device_nodes:
        why = "its handles are device nodes (DEV), which no guest gets"
        raise _build_none_free_error(BindFailure.DEVICE_NODE, deployable, why)
    if busy:
        raise _build_none_free_error(BindFailure.BUSY, deployable, "its device is busy with a command")
    if state != offer.OFFERED_STATE:
        why = f"its device is {state}, not {offer.OFFERED_STATE}"
        raise _build_none_free_error(BindFailure.NOT_OFFERED, deployable, why)
    if withheld := offer.describe_withheld_health(health):
        raise _build_none_free_error(BindFailure.NOT_OFFERED, deployable, withheld)
    is_held_elsewhere, is_released_elsewhere = elsewhere
    reasons = ["all are held"]
    if is_held_elsewhere:
        reasons.append("held by requests for another device at the same PCI address")
    if released:
        reasons.append(f"released and not confirmed by the host as unused ({released})")
    if is_released_elsewhere:
        reasons.append("released through another device at the same PCI address and not confirmed as unused")
    raise _build_none_free_error(BindFailure.NONE_FREE, deployable, ", or ".join(reasons))


def _build_none_free_error(failure: BindFailure, deployable: int, why: str) -> BindRefusedError:
    """Return an error with the beginning of upstream's error message, followed by the reason `why`."""
    return BindRefusedError(failure, f"AttachHandle not found Matching deployable_id {deployable}: {why}")


def _choose_programming_requests(
    pairs: Sequence[tuple[_LockedRequest, BindSpec]], handles: Mapping[int, _FreeHandle]
) -> dict[int, int]:
    """Return, for each device that must be programmed, the id of the request whose image it gets.

    Raises RefusedError NONE_FREE if requests of this bind need different images or different deployables of one device,
    if another request holds the device, or if a guest may still use a released function of it. Requests and releases
    through another device at the same PCI address count, too.
    """
    first_by_device: dict[int, _LockedRequest] = {}
    for request, _ in pairs:
        handle = handles[request.id]
        if not groups.needs_programming(request.group, handle.bitstream):
            continue
        other = first_by_device.setdefault(handle.device, request)
        if (handles[other.id].deployable, _get_wanted_image(other.group)) != (
            handle.deployable,
            _get_wanted_image(request.group),
        ):
            raise _build_none_free_error(
                BindFailure.IMAGE_CONFLICT,
                handle.deployable,
                "its device cannot be programmed with two images at once",
            )
    for device, uuid in safety.query_requests_of_devices([*first_by_device], "uuid") if first_by_device else ():
        why = f"its device is held by request {uuid}: it cannot be programmed for another"
        raise _build_none_free_error(BindFailure.IMAGE_CONFLICT, handles[first_by_device[device].id].deployable, why)
    for device, release in safety.find_releases_of_devices([*first_by_device]) if first_by_device else ():
        why = f"its device cannot be programmed: {release.description}"
        raise _build_none_free_error(BindFailure.IMAGE_CONFLICT, handles[first_by_device[device].id].deployable, why)
    return {device: request.id for device, request in first_by_device.items()}


def _get_wanted_image(group: Mapping[str, str]) -> dict[str, str]:
    """Return the image that a group names, as a command's `wanted` argument: `bitstream_id` or `function_id`."""
    name = groups.BITSTREAM_KEY if groups.BITSTREAM_KEY in group else groups.FUNCTION_KEY
    return {name.removeprefix("accel:"): group[name]}


def _plan_bind(
    request: _LockedRequest, spec: BindSpec, caller: Caller, handle: _FreeHandle, programmed_by: Mapping[int, int]
) -> tuple[dict[str, Any], CommandOrder | None]:
    """Build the row for `_move_requests`, and the `attach` command if the host has to do something first, otherwise
    None.

    The request becomes Bound if its handle needs nothing on the host and its device is not programmed; otherwise
    BindStarted with a deadline. `programmed_by` maps a device to the request whose image it gets. Only that request
    gets a command here; the other requests on the device follow when the command has ended. Nothing is written.
    """
    move = _build_bind_columns(request, spec, caller) | {
        "state": _S.BOUND,
        "deployable": handle.deployable,
        "handle": handle.id,
    }
    keys, programming_request = settings.KEYS, programmed_by.get(handle.device)
    if programming_request is None and handle.attach_type not in TYPES_CREATED_ON_HOST:
        return move, None
    move |= {
        "state": _S.BIND_STARTED,
        "wait": keys.bind_timeout_s if programming_request is None else keys.program_timeout_s,
    }
    if programming_request not in (None, request.id):
        return move, None  # another request of this bind programs the device first
    arguments: dict[str, Any] = {"consumer": str(UUID(spec.instance_uuid))}
    if programming_request is not None:
        arguments["wanted"] = _get_wanted_image(request.group)
    return move, CommandOrder("attach", handle=handle.id, arguments=arguments, actor=caller.name, request=request.uuid)


def _build_failure_row(
    request: _LockedRequest, spec: BindSpec, caller: Caller, error: BindRefusedError
) -> dict[str, Any]:
    """Build the row with which `_move_requests` moves the request to BindFailed because of `error`."""
    end = {"state": _S.BIND_FAILED, "fault": error.text, "failure": error.failure, "group": str(request.group)}
    return _build_bind_columns(request, spec, caller) | end


def _build_bind_columns(request: _LockedRequest, spec: BindSpec, caller: Caller) -> dict[str, Any]:
    """Build the columns that every result of a bind sets, without the new state."""
    return {
        "id": request.id,
        "uuid": request.uuid,
        "was": request.state,
        "hostname": spec.hostname,
        "rp": spec.device_rp_uuid,
        "instance": spec.instance_uuid,
        "project": spec.project_id or caller.project_id,
        "had_project": request.project_id,
    }


def _build_unbind_row(request: _LockedRequest) -> dict[str, Any]:
    """Build the row with which `_move_requests` moves the request to Unbound.

    The request keeps its project; `_move_requests` clears the other columns that the row does not name.
    """
    before = {"had_instance": request.instance_uuid, "had_handle": request.handle}
    return {"id": request.id, "was": request.state, "state": _S.UNBOUND} | before


def _move_requests(moves: Sequence[dict[str, Any]], source: EventSource, actor: str) -> None:
    """Update locked requests and write an event for each; one statement. Does nothing if `moves` is empty.

    This is the only writer of faults, which the project of the request reads: identifiers that do not occur in the
    request or its bind are hidden in them, and the log has the whole text. A row with a `fault` has its `failure` and
    the `group` of its request, too. Raises AssertionError if a request is not in the state `was` of its row.
    """
    if moves:
        rows = [move | {"fault": _hide_foreign_ids(move)} if move.get("fault") else move for move in moves]
        values = {"rows": _json.encode(rows).decode(), "count": len(moves), "source": source.value}
        cursor = conductor.open_cursor()
        cursor.execute(sql.MOVE_REQUESTS, values | {"actor": actor, "request_id": request_id.get()})
        assert cursor.rowcount == len(moves), "a request moved although it was locked"
        metrics.count_bind_outcomes(moves)
        failed = [move for move in moves if move.get("fault")]
        metrics.count_bind_failures([move["failure"] for move in failed])
        for move in failed:
            subject = (move["uuid"], move["instance"], move["hostname"], move["rp"])
            call_after_commit(_log_failure, move["failure"], *subject, move["fault"])


def _log_failure(failure: BindFailure, uuid: str, instance: str, host: str, provider: str, text: str) -> None:
    """Log a failed bind with all that an operator needs to find its cause. `text` may name other projects' objects."""
    log.warning(
        "the bind of request %s failed (%s): instance %s, host %r, provider %s, request id %s: %s",
        *(uuid, failure, instance, host[:255], provider, request_id.get() or "none", text[:1024]),
    )


def _hide_foreign_ids(move: Mapping[str, Any]) -> str:
    """Return the fault of the row without identifiers that are not the request's own."""
    own = (str(move[name]) for name in ("uuid", "rp", "instance", "group"))
    return redaction.hide_foreign_ids(move["fault"], " ".join(own))


def _delete_locked_requests(requests: Sequence[_LockedRequest], caller: Caller, *, instance_is_gone: bool) -> None:
    """Delete locked requests and record an event for each; release their handles as `_release_on_hosts` does.

    A programmed image stays on its device.
    """
    conductor.open_cursor().execute(
        sql.DELETE_REQUESTS, {"ids": [request.id for request in requests]} | _build_actor_values(caller)
    )
    _release_on_hosts(requests, caller, instance_is_gone=instance_is_gone)


def _release_on_hosts(requests: Sequence[_LockedRequest], caller: Caller, *, instance_is_gone: bool) -> None:
    """Cancel the commands of these requests that still wait for an image, and order a detach of each handle that is
    made on a host. Keep these, and PCI handles that a guest may still use, from other requests (`releases`).

    The requests need not hold their handles any more; their state and handle are those from before the change.
    """
    command_queue.cancel_preparing_commands([request.uuid for request in requests if request.state == _S.BIND_STARTED])
    to_detach = [
        (held_request, held_request.handle)
        for held_request in requests
        if held_request.handle and held_request.attach_type in TYPES_CREATED_ON_HOST
    ]
    reason_and_actor = "its request is gone", caller.name
    releases.release_handles(
        {
            request.handle: request.instance_uuid
            for request in requests
            if request.handle and (request.state == _S.BOUND or request.attach_type in TYPES_CREATED_ON_HOST)
        },
        [
            command_queue.build_detach_order(handle, one.instance_uuid, one.uuid, *reason_and_actor)
            for one, handle in to_detach
        ],
        caller.name,
        EventSource.API,
        instance_is_gone=instance_is_gone,
    )


def _load_requests_for_update(uuids: Sequence[str], caller: Caller) -> list[_LockedRequest]:
    """Lock and return these requests, by id. Raises RefusedError NOT_FOUND for the first uuid that does not exist or
    that the caller may not see."""
    rows = _fetch_all(sql.LOCK_REQUESTS, {"uuids": list(uuids), "project": _get_visible_project(caller)})
    requests = [_LockedRequest.from_row(row) for row in rows]
    found_uuids = {request.uuid for request in requests}
    for uuid in uuids:
        if uuid not in found_uuids:
            raise RefusedError(RefusalReason.NOT_FOUND, f"ExtArq not found with uuid={uuid}")
    return requests


def _get_visible_project(caller: Caller) -> str | None:
    """Return the project whose requests the caller may see, as the SQL parameter `project`; None, for all, if an
    admin."""
    return None if caller.is_admin else caller.project_id


def _build_actor_values(caller: Caller) -> dict[str, str]:
    """Return the parameters for an event's author: the caller's name and the id of the current request to the API."""
    return {"actor": caller.name, "request_id": request_id.get()}


def _fetch_all(statement: str, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Execute the statement with these parameters and return all rows."""
    rows: list[tuple[Any, ...]] = conductor.open_cursor().execute(statement, values).fetchall()
    return rows
