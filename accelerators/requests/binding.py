"""Accelerator requests: create, bind, unbind, delete. The only writer of requests, and the last guard of a handle.

Called by the v2 API (Nova), `attachments`, `outcomes`, and the job `deadlines`. Contract sections 2.3 and 4.1; the life
cycle is `states.REQUEST_MOVES`. A bind finds free handles with SKIP LOCKED under a unique index: it waits for nobody,
and what it believes free is checked again by the database (S1, S2). Requests are locked before hosts and devices.

A bind that programs has its device for itself: one command programs it, and all requests of that bind there share its
fate.
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
from accelerators.domain.errors import Reason, Refused
from accelerators.domain.states import BINDABLE, RequestState, Source
from accelerators.requests import binding_sql as sql
from accelerators.requests import notices, profiles
from accelerators.runtime import jobs, metrics

PATIENCE_S = 2.0
"""How long a bind tries again while what it needs is being taken or given back by others."""
INSTANCE_LOCK = 0x7162
BATCH = 200
PROGRAMMED = "programmed"
"""The kind of intent (key: a request, `host` in its payload) that waits for new traits to be in Placement."""

_json = msgspec.json.Encoder()
_S = RequestState


@dataclass(frozen=True)
class Bind:
    """One request to be bound: to which provider, for which instance. `project_id` '' is the caller's."""

    uuid: str
    hostname: str
    device_rp_uuid: str
    instance_uuid: str
    project_id: str = ""


@dataclass(frozen=True)
class _Request:
    """A request as a bind, an unbind or a deletion found it, locked."""

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
        """A row of `sql.LOAD`; its group is JSON text."""
        uuid, id, state, group, *rest = row
        return cls(uuid, id, state, msgspec.json.decode(group), *rest)


@dataclass(frozen=True)
class _Handle:
    """A free handle, locked, and the deployable and the device it belongs to."""

    id: int
    attach_type: str
    deployable: int
    bitstream: str | None
    device: int


@dataclass(frozen=True)
class Waiting:
    """A request that is BindStarted, locked: it waits for its host. The columns of `sql.WAITING`."""

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
    """How a request's waiting ends: Bound, or BindFailed with a `fault`. `made`: its handle may be made on the host."""

    request: Waiting
    fault: str = ""
    made: bool = True


class _Contended(Exception):
    """Something is free, but others are at it."""


def create(profile_name: str, caller: Caller) -> list[str]:
    """Make the requests a profile asks for, in the caller's project; returns their uuids in order."""
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
    raise Refused(Reason.UNKNOWN, f"Device Profile not found with name={profile_name}")


@metrics.answering()
def bind(wanted: Sequence[Bind], caller: Caller, beside: bool = False) -> None:
    """Reserve a handle for every one of `wanted`, or for none; those that need nothing on their host are Bound.

    `beside`: also beside requests that the instance has already; Nova never asks for that. Raises Refused; NONE_FREE,
    UNKNOWN provider and INVALID groups leave all of them BindFailed with the reason.
    """
    end, pause = time.monotonic() + PATIENCE_S, 0.01
    while True:
        try:
            with conductor.writing():
                refused = _bind(wanted, caller, beside)
            break
        except (_Contended, IntegrityError, OperationalError) as error:
            if isinstance(error, OperationalError) and not isinstance(error.__cause__, DeadlockDetected):
                raise
            if time.monotonic() > end:
                raise Refused(Reason.AWAY, "Others are taking the same accelerators: try again.") from error
            time.sleep(random.uniform(pause, 2 * pause))
            pause = min(2 * pause, 0.1)
    if refused:
        raise refused


def unbind(uuids: Sequence[str], caller: Caller) -> None:
    """Give back what these requests hold; from any state (contract section 4.1). All of them or none."""
    with conductor.writing():
        found = _load(uuids, caller)
        _move([_unbound(request) for request in found if request.state != _S.UNBOUND], Source.API, caller.name)
        _release(found, caller)


def delete(uuids: Sequence[str], caller: Caller) -> None:
    """Remove requests, free what they hold. All of them or none; SERVICE_TOKEN for one that belongs to an instance."""
    with conductor.writing():
        found = _load(uuids, caller)
        for request in found:
            if request.instance_uuid and not caller.service:
                text = (
                    f"ARQ {request.uuid} is bound to instance {request.instance_uuid}. Use the Compute API to manage "
                )
                raise Refused(Reason.SERVICE_TOKEN, text + "instance accelerators.")
        _delete(found, caller)


def delete_of_instance(instance_uuid: str, caller: Caller) -> None:
    """Remove an instance's requests, if it has any."""
    with conductor.writing():
        rows = _execute(sql.LOAD_OF_INSTANCE, {"instance": instance_uuid, "project": _project(caller)})
        if rows:
            _delete([_Request.of(row) for row in rows], caller)


def expire() -> bool:
    """Fail one batch of binds whose host was silent past their deadline; True when there may be more."""
    with conductor.writing():
        late = [Waiting(*row) for row in _execute(sql.OVERDUE, {"count": BATCH})]
        fault = "nothing was heard from host {} before the deadline"
        resolve([End(request, fault.format(request.hostname)) for request in late], Source.SYSTEM, "deadlines")
    return len(late) == BATCH


def waiting(uuids: Sequence[str], instances: Sequence[str], devices: Sequence[int]) -> list[Waiting]:
    """Lock these requests, and those of these instances on these devices, as far as they wait for their host."""
    values = {"uuids": list(uuids), "instances": list(instances), "devices": list(devices)}
    return [Waiting(*row) for row in _execute(sql.WAITING, values)]


def resolve(ends: Sequence[End], source: Source, actor: str) -> None:
    """End the waiting of requests; the only way to Bound or BindFailed after the answer to the bind."""
    moves = [_resolved(end) for end in ends]
    _move(moves, source, actor)
    notices.raised(moves)
    placing.cancel([end.request.uuid for end in ends if end.fault])
    made = [end.request for end in ends if end.fault and end.made and end.request.attach_type in ON_HOST]
    placing.place([placing.detach(one.handle, one.instance, one.uuid, "its bind failed", actor) for one in made])


def _resolved(end: End) -> dict[str, Any]:
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
    """The job `deadlines`."""
    jobs.run("deadlines", expire)


def _bind(wanted: Sequence[Bind], caller: Caller, beside: bool) -> Refused | None:
    """One attempt, in the caller's transaction; a Refused that is returned is to be committed with what it says."""
    instances = sorted({one.instance_uuid for one in wanted})
    _execute(sql.LOCK_INSTANCES, {"lock": INSTANCE_LOCK, "instances": instances})
    if not beside and (taken := _execute(sql.TAKEN, {"instances": instances, "project": _project(caller)})):
        text = f"Instance {taken[0][0]} already has accelerator requests. Cannot bind additional ARQs."
        raise Refused(Reason.INVALID, f"Couldn't apply patch. Reason: {text}")
    by_uuid = {one.uuid: one for one in wanted}
    found = _load([*by_uuid], caller)
    for request in found:
        if request.state not in BINDABLE:
            text = f"Bad state: {request.state} for ARQ: {request.uuid}. Expected state(s): {list(BINDABLE)}"
            raise Refused(Reason.STATE, text)
    pairs = [(request, by_uuid[request.uuid]) for request in found]
    try:
        held = _reserve(pairs)
        programs = _programs(pairs, held)
    except Refused as refused:
        _move([_failed(*pair, caller, refused.text) for pair in pairs], Source.API, caller.name)
        return refused
    plans = [_bound(*pair, caller, held[pair[0].id], programs) for pair in pairs]
    placing.place([order for _, order in plans if order], Source.API)
    moves = [move for move, _ in plans]
    _move(moves, Source.API, caller.name)
    notices.raised(moves)
    return None


def _reserve(pairs: Sequence[tuple[_Request, Bind]]) -> dict[int, _Handle]:
    """A handle for each request's id; raises Refused when one cannot be had, _Contended when it may be had soon."""
    needed: dict[str, list[_Request]] = {}
    for request, one in pairs:
        if groups.BITSTREAM in request.group and groups.FUNCTION in request.group:
            raise Refused(Reason.INVALID, f"{groups.BITSTREAM} and {groups.FUNCTION} exclude each other in one group.")
        if not groups.resource_class(request.group):
            raise Refused(Reason.INVALID, f"Group of ARQ {request.uuid} asks for no resource.")
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
    found = _execute(sql.WHY_NONE, {"rp": rp})
    if not found:
        raise Refused(Reason.UNKNOWN, f"Deployable not found with resource provider uuid={rp}")
    ((deployable, state, busy, free, nodes),) = found
    if free >= count:
        raise _Contended
    if nodes:
        raise _none_free(deployable, "its handles are device nodes (DEV), which no guest gets")
    why = "all are held" if state == "ready" else f"its device is {state}, not ready"
    raise _none_free(deployable, "its device is busy with a command" if busy else why)


def _none_free(deployable: int, why: str) -> Refused:
    return Refused(Reason.NONE_FREE, f"AttachHandle not found Matching deployable_id {deployable}: {why}")


def _programs(pairs: Sequence[tuple[_Request, Bind]], held: Mapping[int, _Handle]) -> dict[int, int]:
    """Device → the request by whose image it is to be programmed; raises Refused when others would suffer from it."""
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
    """The image that a group names, as a command wants it: a bitstream, or the one with a function."""
    name = groups.BITSTREAM if groups.BITSTREAM in group else groups.FUNCTION
    return {name.removeprefix("accel:"): group[name]}


def _bound(
    request: _Request, one: Bind, caller: Caller, handle: _Handle, programs: Mapping[int, int]
) -> tuple[dict[str, Any], Order | None]:
    """The move to Bound; or to BindStarted, when the host has to do something first, and the command for it."""
    move = _asked(request, one, caller) | {"state": _S.BOUND, "deployable": handle.deployable, "handle": handle.id}
    keys, by = settings.KEYS, programs.get(handle.device)
    if by is None and handle.attach_type not in ON_HOST:
        return move, None
    move |= {"state": _S.BIND_STARTED, "wait": keys.bind_timeout_s if by is None else keys.program_timeout_s}
    if by not in (None, request.id):
        return move, None  # who programs the device goes first (`outcomes`)
    arguments: dict[str, Any] = {"consumer": str(UUID(one.instance_uuid))}
    if by is not None:
        arguments["wanted"] = _image(request.group)
    return move, Order("attach", handle=handle.id, arguments=arguments, actor=caller.name, request=request.uuid)


def _failed(request: _Request, one: Bind, caller: Caller, fault: str) -> dict[str, Any]:
    return _asked(request, one, caller) | {"state": _S.BIND_FAILED, "fault": fault}


def _asked(request: _Request, one: Bind, caller: Caller) -> dict[str, Any]:
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
    before = {"had_instance": request.instance_uuid, "had_handle": request.handle}
    return {"id": request.id, "was": request.state, "state": _S.UNBOUND} | before


def _move(moves: Sequence[Mapping[str, Any]], source: Source, actor: str) -> None:
    if moves:
        values = {"rows": _json.encode(moves).decode(), "count": len(moves), "source": source.value}
        write = conductor.cursor()
        write.execute(sql.MOVE, values | {"actor": actor, "request_id": request_id.get()})
        assert write.rowcount == len(moves), "a request moved although it was locked"
        metrics.moved(moves)


def _delete(found: Sequence[_Request], caller: Caller) -> None:
    conductor.cursor().execute(sql.DELETE, {"ids": [request.id for request in found]} | _who(caller))
    _release(found, caller)


def _release(found: Sequence[_Request], caller: Caller) -> None:
    """What was made on the host for these requests is to be taken away there; what was not begun need not be."""
    placing.cancel([request.uuid for request in found if request.state == _S.BIND_STARTED])
    made = [(one, one.handle) for one in found if one.handle and one.attach_type in ON_HOST]
    gone = "its request is gone", caller.name
    placing.place([placing.detach(handle, one.instance_uuid, one.uuid, *gone) for one, handle in made], Source.API)


def _load(uuids: Sequence[str], caller: Caller) -> list[_Request]:
    """Lock these requests; raises Refused for the first one that is not there, or not the caller's."""
    rows = _execute(sql.LOAD, {"uuids": list(uuids), "project": _project(caller)})
    found = [_Request.of(row) for row in rows]
    there = {request.uuid for request in found}
    for uuid in uuids:
        if uuid not in there:
            raise Refused(Reason.UNKNOWN, f"ExtArq not found with uuid={uuid}")
    return found


def _project(caller: Caller) -> str | None:
    return None if caller.is_admin else caller.project_id


def _who(caller: Caller) -> dict[str, str]:
    return {"actor": caller.name, "request_id": request_id.get()}


def _execute(statement: str, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return conductor.cursor().execute(statement, values).fetchall()
