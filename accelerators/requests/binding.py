"""Create, bind, unbind and delete accelerator requests (contract sections 2.3 and 4.1).

This module is the only writer of requests; the life cycle is `states.REQUEST_MOVES`. It is also the last guard against
giving one handle to two requests (promises S1 and S2): a bind finds free handles with FOR UPDATE SKIP LOCKED, so it
waits for no row lock on them, and a unique index in the database rejects a handle that was taken meanwhile.

Lock order: requests first, then hosts and devices.

While a bind programs a device, no other bind may use that device. One command programs it; if it fails, all requests of
that bind on that device fail.
"""

from __future__ import annotations

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
from accelerators.commands import placing
from accelerators.commands.placing import ON_HOST, Order
from accelerators.domain import groups
from accelerators.domain.caller import Caller, request_id
from accelerators.domain.errors import Reason, RefusedError
from accelerators.domain.states import BINDABLE, RequestState, Source
from accelerators.requests import binding_sql as sql
from accelerators.requests import notices, profiles
from accelerators.runtime import jobs, metrics

PATIENCE_S = 2.0
"""How long a bind is retried while other transactions reserve or release the handles it needs."""
INSTANCE_LOCK = 0x7162
"""First key of the advisory lock that a bind takes for each instance; the second key is a hash of the instance id."""
BATCH = 200
"""Number of overdue requests that one call of `fail_overdue_binds` fails."""
PROGRAMMED = "programmed"
"""Kind of the intent that waits until a programmed device's new traits are in Placement. Its key is the request's uuid;
its payload has the uuid of the host."""

_json = msgspec.json.Encoder()
_S = RequestState


@dataclass(frozen=True)
class Bind:
    """One request to bind: the host, the resource provider and the instance. An empty `project_id` means the project of
    the caller."""

    uuid: str
    hostname: str
    device_rp_uuid: str
    instance_uuid: str
    project_id: str = ""


@dataclass(frozen=True)
class _Request:
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
    def of(cls, row: tuple[Any, ...]) -> _Request:
        """Build a request from a row of `sql.LOCK_REQUESTS` or `sql.LOCK_REQUESTS_OF_INSTANCE`; the row has the group
        as JSON text."""
        uuid, id, state, group, *rest = row
        return cls(uuid, id, state, msgspec.json.decode(group), *rest)


@dataclass(frozen=True)
class _Handle:
    """A free handle whose row is locked, with its deployable (`bitstream` is what that was programmed with) and its
    device."""

    id: int
    attach_type: str
    deployable: int
    bitstream: str | None
    device: int


@dataclass(frozen=True)
class Waiting:
    """A locked request in state BindStarted, which waits for its host. The fields are the columns of
    `sql.LOCK_WAITING`; `waited_s` is the time since the bind began, in seconds."""

    uuid: str
    id: int
    hostname: str
    provider: str
    instance: str
    deployable: int
    handle: int
    attach_type: str
    device: int
    waited: float


@dataclass(frozen=True)
class End:
    """How a BindStarted request ends: Bound if `fault` is empty, otherwise BindFailed with `fault` as the reason.

    `may_exist_on_host` says that the handle may already exist on the host. A failed bind then also orders a detach
    there.
    """

    request: Waiting
    fault: str = ""
    made: bool = True


class _ContendedError(Exception):
    """Enough handles are free, but other transactions have them locked: retry the bind."""


def create(profile_name: str, caller: Caller) -> list[str]:
    """Create the requests that a device profile asks for, in the caller's project, with an event for each.

    Returns their uuids in the order of the profile's groups; empty if the groups ask for nothing. Raises RefusedError
    UNKNOWN if there is no such profile. The profile comes from the cache; if it was changed or replaced since, it is
    read again and the creation is retried once. One statement if the cached profile is current.
    """
    for _ in range(2):
        profile = profiles.by_name(profile_name)
        if profile is None:
            break
        if not (plan := groups.plan(profile.groups)):
            return []
        values = {"profile": profile.id, "name": profile.name, "updated_at": profile.updated_at, "groups": plan}
        with conductor.writing():
            if made := _execute(sql.CREATE, values | {"project": caller.project_id} | _who(caller)):
                return [str(uuid) for (uuid,) in made]
        profiles.forget()
    raise RefusedError(Reason.UNKNOWN, f"Device Profile not found with name={profile_name}")


@metrics.answering()
def bind(wanted: Sequence[Bind], caller: Caller, beside: bool = False) -> None:
    """Reserve a free handle for every request in `specs`, or for none of them, in one transaction.

    A request becomes Bound at once if nothing has to be done on its host; otherwise it becomes BindStarted and a
    command for the host is placed. `allow_existing=True` allows an instance that already has other requests; Nova never
    needs it.

    Raises RefusedError. With NONE_FREE, with UNKNOWN for a provider and with INVALID for a group, all requests become
    BindFailed with that reason. With UNKNOWN for a request, with INVALID for an instance that already has requests and
    with STATE, nothing is changed. If other transactions keep the needed handles, the bind is retried with a back-off
    for RETRY_TIMEOUT_S seconds, then AWAY is raised and nothing is changed.
    """
    end, pause = time.monotonic() + PATIENCE_S, 0.01
    while True:
        try:
            with conductor.writing():
                refused = _bind(wanted, caller, beside)
            break
        except (_ContendedError, IntegrityError, OperationalError) as error:
            if isinstance(error, OperationalError) and not isinstance(error.__cause__, DeadlockDetected):
                raise
            if time.monotonic() > end:
                raise RefusedError(Reason.AWAY, "Others are taking the same accelerators: try again.") from error
            time.sleep(random.uniform(pause, 2 * pause))
            pause = min(2 * pause, 0.1)
    if refused:
        raise refused


def unbind(uuids: Sequence[str], caller: Caller) -> None:
    """Unbind all of these requests or none: release their handles and clear their host, provider and instance.

    Every state is allowed (contract section 4.1); a request that is Unbound already does not change. Handles that were
    made on a host are detached there by a command. Raises RefusedError UNKNOWN if a request does not exist or is not
    the caller's.
    """
    with conductor.writing():
        found = _load(uuids, caller)
        _move([_unbound(request) for request in found if request.state != _S.UNBOUND], Source.API, caller.name)
        _release(found, caller)


def delete(uuids: Sequence[str], caller: Caller) -> None:
    """Delete all of these requests or none, in any state, and release their handles.

    Raises RefusedError: UNKNOWN if a request does not exist or is not the caller's; SERVICE_TOKEN if a request belongs
    to an instance and the caller sent no service token.
    """
    with conductor.writing():
        found = _load(uuids, caller)
        for request in found:
            if request.instance_uuid and not caller.service:
                text = (
                    f"ARQ {request.uuid} is bound to instance {request.instance_uuid}. Use the Compute API to manage "
                )
                raise RefusedError(Reason.SERVICE_TOKEN, text + "instance accelerators.")
        _delete(found, caller)


def delete_of_instance(instance_uuid: str, caller: Caller) -> None:
    """Delete the requests of an instance that the caller may see, and release their handles; there may be none.

    This function does not check for a service token; its caller must.
    """
    with conductor.writing():
        rows = _execute(sql.LOAD_OF_INSTANCE, {"instance": instance_uuid, "project": _project(caller)})
        if rows:
            _delete([_Request.of(row) for row in rows], caller)


def expire() -> bool:
    """Set at most OVERDUE_BATCH_SIZE BindStarted requests whose deadline has passed to BindFailed; return True if there
    may be more.

    Requests that another transaction has locked are skipped.
    """
    with conductor.writing():
        late = [Waiting(*row) for row in _execute(sql.OVERDUE, {"count": BATCH})]
        fault = "nothing was heard from host {} before the deadline"
        resolve([End(request, fault.format(request.hostname)) for request in late], Source.SYSTEM, "deadlines")
    return len(late) == BATCH


def waiting(uuids: Sequence[str], instances: Sequence[str], devices: Sequence[int]) -> list[Waiting]:
    """Lock and return the requests in state BindStarted that have one of these uuids, or that belong to one of these
    instances and hold a handle of one of these devices. Ordered by id; one statement."""
    values = {"uuids": list(uuids), "instances": list(instances), "devices": list(devices)}
    return [Waiting(*row) for row in _execute(sql.WAITING, values)]


def resolve(ends: Sequence[End], source: Source, actor: str) -> None:
    """Move BindStarted requests to Bound or BindFailed. After the bind was answered, this is the only way there.

    The requests must be locked (`lock_waiting_requests`) in the caller's transaction. Writes their events and the
    intents that notify Nova. For a failed request, also cancels commands that still wait for their image, and orders a
    detach if the handle may already exist on the host.
    """
    moves = [_resolved(end) for end in ends]
    _move(moves, source, actor)
    notices.raised(moves)
    placing.cancel([end.request.uuid for end in ends if end.fault])
    made = [end.request for end in ends if end.fault and end.made and end.request.attach_type in ON_HOST]
    placing.place([placing.detach(one.handle, one.instance, one.uuid, "its bind failed", actor) for one in made])


def _resolved(end: End) -> dict[str, Any]:
    """Build the row for `_move_requests` from BindStarted to Bound or BindFailed."""
    request = end.request
    return {
        "id": request.id,
        "uuid": request.uuid,
        "was": _S.BIND_STARTED,
        "state": _S.BIND_FAILED if end.fault else _S.BOUND,
        "hostname": request.hostname,
        "rp": request.provider,
        "instance": request.instance,
        "deployable": request.deployable,
        "handle": None if end.fault else request.handle,
        "fault": end.fault,
        "had_instance": request.instance,
        "had_handle": request.handle,
        "waited": request.waited,
    }


def run_deadlines() -> None:
    """Run the job `deadlines`: fail all binds whose deadline has passed."""
    jobs.run("deadlines", expire)


def _bind(wanted: Sequence[Bind], caller: Caller, beside: bool) -> RefusedError | None:
    """Try the bind once, in the caller's transaction.

    Returns None on success. Returns (does not raise) a RefusedError if the requests were moved to BindFailed: the
    caller must commit that and then raise it. A raised RefusedError or _HandlesContendedError means that the
    transaction must be rolled back.
    """
    instances = sorted({one.instance_uuid for one in wanted})
    _execute(sql.LOCK_INSTANCES, {"lock": INSTANCE_LOCK, "instances": instances})
    if not beside and (taken := _execute(sql.TAKEN, {"instances": instances, "project": _project(caller)})):
        text = f"Instance {taken[0][0]} already has accelerator requests. Cannot bind additional ARQs."
        raise RefusedError(Reason.INVALID, f"Couldn't apply patch. Reason: {text}")
    by_uuid = {one.uuid: one for one in wanted}
    found = _load([*by_uuid], caller)
    for request in found:
        if request.state not in BINDABLE:
            text = f"Bad state: {request.state} for ARQ: {request.uuid}. Expected state(s): {list(BINDABLE)}"
            raise RefusedError(Reason.STATE, text)
    pairs = [(request, by_uuid[request.uuid]) for request in found]
    try:
        held = _reserve(pairs)
        programs = _programs(pairs, held)
    except RefusedError as refused:
        _move([_failed(*pair, caller, refused.text) for pair in pairs], Source.API, caller.name)
        return refused
    plans = [_bound(*pair, caller, held[pair[0].id], programs) for pair in pairs]
    placing.place([order for _, order in plans if order], Source.API)
    moves = [move for move, _ in plans]
    _move(moves, Source.API, caller.name)
    notices.raised(moves)
    return None


def _reserve(pairs: Sequence[tuple[_Request, Bind]]) -> dict[int, _Handle]:
    """Lock one free handle for each request; return request id → handle.

    Raises RefusedError: INVALID for a group that names no resource or both a bitstream and a function; UNKNOWN for a
    provider that does not exist; NONE_FREE. Raises _HandlesContendedError if enough handles are free but locked by
    others.
    """
    needed: dict[str, list[_Request]] = {}
    for request, one in pairs:
        if groups.BITSTREAM in request.group and groups.FUNCTION in request.group:
            raise RefusedError(
                Reason.INVALID, f"{groups.BITSTREAM} and {groups.FUNCTION} exclude each other in one group."
            )
        if not groups.resource_class(request.group):
            raise RefusedError(Reason.INVALID, f"Group of ARQ {request.uuid} asks for no resource.")
        needed.setdefault(one.device_rp_uuid, []).append(request)
    held: dict[int, _Handle] = {}
    for rp, requests in needed.items():
        alone = any(groups.programs(request.group, None) for request in requests)
        free = _execute(sql.RESERVE_ALONE if alone else sql.RESERVE, {"rp": rp, "count": len(requests)})
        if len(free) < len(requests):
            _refuse(rp, len(requests))
        held |= {request.id: _Handle(*row) for request, row in zip(requests, free, strict=True)}
    return held


def _refuse(rp: str, count: int) -> None:
    """Raise the error that says why `count` handles of provider `rp` could not be locked: RefusedError or
    _HandlesContendedError."""
    found = _execute(sql.WHY_NONE, {"rp": rp})
    if not found:
        raise RefusedError(Reason.UNKNOWN, f"Deployable not found with resource provider uuid={rp}")
    ((deployable, state, busy, free, nodes),) = found
    if free >= count:
        raise _ContendedError
    if nodes:
        raise _none_free(deployable, "its handles are device nodes (DEV), which no guest gets")
    why = "all are held" if state == "ready" else f"its device is {state}, not ready"
    raise _none_free(deployable, "its device is busy with a command" if busy else why)


def _none_free(deployable: int, why: str) -> RefusedError:
    """Return a RefusedError NONE_FREE with the beginning of upstream's error message, followed by the reason `why`."""
    return RefusedError(Reason.NONE_FREE, f"AttachHandle not found Matching deployable_id {deployable}: {why}")


def _programs(pairs: Sequence[tuple[_Request, Bind]], held: Mapping[int, _Handle]) -> dict[int, int]:
    """Return, for each device that must be programmed, the id of the request whose image it gets.

    Raises RefusedError NONE_FREE if requests of this bind need different images or different deployables of one device,
    or if another request holds the device.
    """
    first: dict[int, _Request] = {}
    for request, _ in pairs:
        handle = held[request.id]
        if not groups.programs(request.group, handle.bitstream):
            continue
        other = first.setdefault(handle.device, request)
        if (held[other.id].deployable, _image(other.group)) != (handle.deployable, _image(request.group)):
            raise _none_free(handle.deployable, "its device cannot be programmed with two images at once")
    for device, uuid in safety.holding([*first], "uuid") if first else ():
        why = f"its device is held by request {uuid}: it cannot be programmed for another"
        raise _none_free(held[first[device].id].deployable, why)
    return {device: request.id for device, request in first.items()}


def _image(group: Mapping[str, str]) -> dict[str, str]:
    """Return the image that a group names, as a command's `wanted` argument: `bitstream_id` or `function_id`."""
    name = groups.BITSTREAM if groups.BITSTREAM in group else groups.FUNCTION
    return {name.removeprefix("accel:"): group[name]}


def _bound(
    request: _Request, one: Bind, caller: Caller, handle: _Handle, programs: Mapping[int, int]
) -> tuple[dict[str, Any], Order | None]:
    """Build the row for `_move_requests`, and the `attach` command if the host has to do something first.

    The request becomes Bound if its handle needs nothing on the host and its device is not programmed; otherwise
    BindStarted with a deadline. Only one request per programmed device gets a command here; the others follow when that
    command has ended.
    """
    move = _asked(request, one, caller) | {"state": _S.BOUND, "deployable": handle.deployable, "handle": handle.id}
    keys, by = settings.KEYS, programs.get(handle.device)
    if by is None and handle.attach_type not in ON_HOST:
        return move, None
    move |= {"state": _S.BIND_STARTED, "wait": keys.bind_timeout_s if by is None else keys.program_timeout_s}
    if by not in (None, request.id):
        return move, None  # another request of this bind programs the device first
    arguments: dict[str, Any] = {"consumer": str(UUID(one.instance_uuid))}
    if by is not None:
        arguments["wanted"] = _image(request.group)
    return move, Order("attach", handle=handle.id, arguments=arguments, actor=caller.name, request=request.uuid)


def _failed(request: _Request, one: Bind, caller: Caller, fault: str) -> dict[str, Any]:
    """Build the row for `_move_requests` to BindFailed."""
    return _asked(request, one, caller) | {"state": _S.BIND_FAILED, "fault": fault}


def _asked(request: _Request, one: Bind, caller: Caller) -> dict[str, Any]:
    """Build the columns that every result of a bind sets, without the new state."""
    return {
        "id": request.id,
        "uuid": request.uuid,
        "was": request.state,
        "hostname": one.hostname,
        "rp": one.device_rp_uuid,
        "instance": one.instance_uuid,
        "project": one.project_id or caller.project_id,
        "had_project": request.project_id,
    }


def _unbound(request: _Request) -> dict[str, Any]:
    """Build the row for `_move_requests` to Unbound. The project stays; `_move_requests` clears all other columns that
    the row lacks."""
    before = {"had_instance": request.instance_uuid, "had_handle": request.handle}
    return {"id": request.id, "was": request.state, "state": _S.UNBOUND} | before


def _move(moves: Sequence[Mapping[str, Any]], source: Source, actor: str) -> None:
    """Update locked requests and write an event for each; one statement. AssertionError if one is not in `was`."""
    if moves:
        values = {"rows": _json.encode(moves).decode(), "count": len(moves), "source": source.value}
        write = conductor.cursor()
        write.execute(sql.MOVE, values | {"actor": actor, "request_id": request_id.get()})
        assert write.rowcount == len(moves), "a request moved although it was locked"
        metrics.moved(moves)


def _delete(found: Sequence[_Request], caller: Caller) -> None:
    """Delete locked requests, write an event for each, and undo on the hosts what was made for them."""
    conductor.cursor().execute(sql.DELETE, {"ids": [request.id for request in found]} | _who(caller))
    _release(found, caller)


def _release(found: Sequence[_Request], caller: Caller) -> None:
    """Cancel commands that still wait for their image, and order a detach of each handle that is made on a host."""
    placing.cancel([request.uuid for request in found if request.state == _S.BIND_STARTED])
    made = [(one, one.handle) for one in found if one.handle and one.attach_type in ON_HOST]
    gone = "its request is gone", caller.name
    placing.place([placing.detach(handle, one.instance_uuid, one.uuid, *gone) for one, handle in made], Source.API)


def _load(uuids: Sequence[str], caller: Caller) -> list[_Request]:
    """Lock and return these requests, by id. Raises RefusedError UNKNOWN for the first uuid that does not exist or that
    the caller may not see."""
    rows = _execute(sql.LOAD, {"uuids": list(uuids), "project": _project(caller)})
    found = [_Request.of(row) for row in rows]
    there = {request.uuid for request in found}
    for uuid in uuids:
        if uuid not in there:
            raise RefusedError(Reason.UNKNOWN, f"ExtArq not found with uuid={uuid}")
    return found


def _project(caller: Caller) -> str | None:
    """Return the value of `project` in the statements: None for an admin, who sees the requests of every project."""
    return None if caller.is_admin else caller.project_id


def _who(caller: Caller) -> dict[str, str]:
    return {"actor": caller.name, "request_id": request_id.get()}


def _execute(statement: str, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return conductor.cursor().execute(statement, values).fetchall()
