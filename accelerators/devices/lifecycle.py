"""Change the state of devices: offer them, take them out of offer, drain them, retire them, and so on.

The module `domain.actions` decides which actions a state allows. An action on up to 200 devices is one transaction with
a constant number of statements. Rows are locked in the same order as by a merge of reports (hosts before devices, each
by id), so that the two cannot deadlock.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import Any, Literal
from uuid import UUID

import msgspec
from django.db.models import Exists, OuterRef, QuerySet

from accelerators import conductor, safety
from accelerators.commands import placing
from accelerators.commands.placing import Order, check_reason
from accelerators.conductor import locked
from accelerators.domain.actions import Action, Standing, decide, drained
from accelerators.domain.caller import Caller, request_id
from accelerators.domain.errors import Reason, RefusedError
from accelerators.domain.provider_ids import provider_uuid
from accelerators.domain.states import DeviceState, Drain, IllegalTransitionError, Source
from accelerators.models import AcceleratorRequest, Deployable, Device
from accelerators.runtime import jobs

MAX_REASON = placing.MAX_REASON
SLICE = 200
"""Maximum number of devices that are moved in one transaction."""
PATIENCE_S = 10.0
"""Seconds that one transaction spends on questions to witnesses. Devices whose witnesses have not been asked by then
are refused with AWAY, so that they are tried again."""

DONE = {
    Action.ENABLE: "enabled",
    Action.DRAIN: "drained",
    Action.DISABLE: "disabled",
    Action.RELEASE: "released",
    Action.QUARANTINE: "quarantined",
    Action.REINSTATE: "reinstated",
    Action.RETIRE: "retired",
}
"""Default reason for each action."""

MOVE = """
UPDATE accelerators_device t SET state = x.state, returns_to = x.returns_to, drain_to = x.drain_to,
  state_since = CASE WHEN x.state = t.state THEN t.state_since ELSE %s::timestamptz END,
  state_reason = coalesce(x.reason, t.state_reason), state_by = coalesce(x.who, t.state_by), updated_at = now()
FROM jsonb_to_recordset(%s::jsonb) AS x(id bigint, was text, state text, returns_to text, drain_to text, reason text,
  who text)
WHERE t.id = x.id AND t.state = x.was
"""
"""Change the state of devices by compare and set."""
NAMED = """
UPDATE accelerators_deployable t SET rp_uuid = x.rp, updated_at = now()
FROM jsonb_to_recordset(%s::jsonb) AS x(id bigint, rp uuid) WHERE t.id = x.id AND t.rp_uuid IS NULL
"""
"""Store the provider ids of deployables that have none."""

_S = DeviceState
_json = msgspec.json.Encoder()


@dataclass(frozen=True)
class Result:
    """Outcome of an action for one device. `state` is the device's state afterwards, '' if there is no such device."""

    uuid: UUID
    outcome: Literal["moved", "unchanged", "refused"]
    name: str = ""
    host: str = ""
    state: str = ""
    text: str = ""
    reason: Reason | None = None
    """Kind of refusal, None if it was not refused; `text` explains it in a sentence."""


@dataclass(frozen=True)
class Step:
    """A change of one locked device from `before` to `after`.

    `actor` is the actor of the event. `changed_by` is stored with the device as the cause of its state; '' keeps the
    old one.
    """

    device: Device
    now: Standing
    after: Standing
    actor: str
    reason: str
    by: str = ""
    name: str | None = None
    """Name of the event after `device.`; by default the new state."""


@dataclass(frozen=True)
class Seen:
    """What a person saw when deciding: `Standing.word` of each device, and whether they confirmed held devices too."""

    words: Mapping[UUID, str]
    held_too: bool = False


def enable(uuid: UUID, caller: Caller, reason: str = "") -> None:
    """Offer a device: it becomes ready, or installing if its driver has to install it first.

    Changes nothing if the device is offered already. Raises RefusedError: UNKNOWN; INVALID for a reason that cannot be
    stored; CONFLICT if it is missing, quarantined, retired or busy with a command; HELD, naming the holders, if it
    would have to be installed.
    """
    ask(Action.ENABLE, uuid, caller, reason)


def disable(uuid: UUID, caller: Caller, reason: str = "") -> None:
    """Take a device out of offer; bound requests stay bound. Changes nothing if the device is not offered.

    Raises RefusedError UNKNOWN, and INVALID for a reason that cannot be stored; a known device is never refused.
    """
    ask(Action.DISABLE, uuid, caller, reason)


def ask(
    action: Action,
    uuid: UUID,
    caller: Caller,
    reason: str = "",
    then: Drain = Drain.MAINTENANCE,
    source: Source = Source.API,
    seen: Seen | None = None,
) -> Result:
    """Apply an action to one device and return the result; as `apply_action`, but a refusal is raised.

    Raises RefusedError: UNKNOWN; INVALID for a reason that cannot be stored; CONFLICT if its state or a running command
    does not allow the action, or the device has changed since it was `seen`; HELD, naming the holders, if it would be
    retired or installed, or if it was not confirmed for held devices; AWAY if a witness cannot be asked before it is
    retired.
    """
    (result,) = act(action, [uuid], caller, reason, then, source, seen)
    if result.reason is not None:
        raise RefusedError(result.reason, result.text)
    return result


def many(
    action: Action, uuids: Iterable[UUID], caller: Caller, reason: str = "", then: Drain = Drain.MAINTENANCE
) -> Iterator[list[Result]]:
    """Apply an action to any number of devices in slices of SLICE_SIZE, with source PERSON; yield the results of each
    slice.

    Each slice is one transaction: slices that are done stay done if the caller stops or a later one fails.
    """
    rest = iter(uuids)
    while part := list(islice(rest, SLICE)):
        yield act(action, part, caller, reason, then, Source.PERSON)


def act(
    action: Action,
    uuids: Sequence[UUID],
    caller: Caller,
    reason: str = "",
    then: Drain = Drain.MAINTENANCE,
    source: Source = Source.API,
    seen: Seen | None = None,
) -> list[Result]:
    """Apply an action to at most SLICE_SIZE devices in one transaction; returns one ActionResult per device.

    A refusal of one device stops no other. A device whose state differs from the one that was `seen` is refused, unless
    nothing has to be changed. `drain_to` is the final state of a drain. After a drain, devices that nobody holds get
    that state at once, in a second transaction. Locks the devices and their hosts; asks witnesses about devices to be
    retired, for HOLDER_CHECKS_TIMEOUT_S at most in all. Raises RefusedError INVALID for a reason that cannot be stored.
    """
    assert len(uuids) <= SLICE, "more than a slice"
    reason = check_reason(reason) or DONE[action]
    steps: list[Step] = []
    with conductor.writing():
        found = {device.uuid: device for device in locked(Device.objects.filter(uuid__in=uuids))}
        held = _held(found.values())
        free = _guard()
        results = {}
        for uuid, device in found.items():
            now = standing(device, held[device.id])
            try:
                after = _decide(action, device, now, then, seen)
                if after.here == _S.RETIRED != now.here:
                    free(device, now)
                if action is Action.ENABLE and after != now:
                    _refuse_unless_idle(device, after)
            except RefusedError as refused:
                results[uuid] = _refused(device, refused.reason, refused.text)
            else:
                if after != now:
                    name = "draining" if action is Action.DRAIN else ""
                    steps.append(Step(device, now, after, caller.name, reason, caller.name, name))
                results[uuid] = _result(device, after, "unchanged" if after == now else "moved")
        store(steps, source)
    if draining := [step.device.uuid for step in steps if step.after.drain_to]:
        for device, after in _finish(Device.objects.filter(uuid__in=draining)):
            results[device.uuid] = _result(device, after, "moved")
    return [results.get(uuid) or _unknown(uuid) for uuid in dict.fromkeys(uuids)]


def _decide(action: Action, device: Device, now: Standing, then: Drain, seen: Seen | None) -> Standing:
    """Return the new standing of a locked device, equal to `before` if there is nothing to do.

    Raises RefusedError: CONFLICT if its state does not allow the action or differs from the one that was `seen`; HELD
    if requests hold it and the person did not confirm the action for held devices.
    """
    was = seen.words.get(device.uuid, now.word) if seen else now.word
    by = f"{device.state_by}: {device.state_reason or 'no reason given'}"
    since = f"since {device.state_since.astimezone(UTC):%H:%M:%S} UTC, by {by}"
    text = f"Device {device.uuid} was {was} when this was decided; it is {now.word} now, {since}. Look at it again."
    changed = RefusedError(Reason.CONFLICT, text)
    try:
        after = decide(action, now, then)
    except IllegalTransitionError as illegal:
        raise (
            changed if was != now.word else RefusedError(Reason.CONFLICT, f"Device {device.uuid} {illegal}.")
        ) from None
    if after != now and was != now.word:
        raise changed
    if after != now and now.held and seen and not seen.held_too:
        holders = ", ".join(safety.requests(device).holders)
        raise RefusedError(
            Reason.HELD, f"Device {device.uuid} is held by {holders}: confirm that held devices are included."
        )
    return after


def standing(device: Device, held: int = 0) -> Standing:
    """Return the standing of a device as `domain.actions` needs it; `held` is the number of requests that hold it."""
    returns_to, drain_to = device.returns_to, device.drain_to
    return Standing(
        DeviceState(device.state),
        returns_to and DeviceState(returns_to),
        drain_to and Drain(drain_to),
        held,
        bool(device.to_install),
    )


def run_drains() -> None:
    """Run the job `drains`: go once through the draining devices that no request holds, and finish their drains."""
    last = 0

    def step() -> bool:
        nonlocal last
        holding = AcceleratorRequest.objects.filter(attach_handle__deployable__device=OuterRef("pk"))
        waiting = Device.objects.filter(~Exists(holding), drain_to__isnull=False, id__gt=last)
        ids = list(waiting.order_by("id").values_list("id", flat=True)[:SLICE])
        _finish(Device.objects.filter(id__in=ids))
        last = ids[-1] if ids else last
        return len(ids) == SLICE

    jobs.run("drains", step)


def store(steps: Sequence[Step], source: Source) -> None:
    """Write state changes of locked devices: rows, provider ids, events, `provider` intents and `install` commands.

    Costs at most seven statements, whatever the number of devices.
    """
    if not steps:
        return
    now, write = datetime.now(UTC), conductor.cursor()
    write.execute(MOVE, [now, _encode([_row(step) for step in steps])])
    assert write.rowcount == len(steps), "a device moved although it was locked"
    out = [step.device.id for step in steps if step.after.state not in (_S.INACTIVE, _S.MISSING)]
    # A device that leaves inactive gets its provider ids. An id that is recorded already (adopted, say) is kept.
    parts = Deployable.objects.filter(device__in=out, rp_uuid__isnull=True).values_list("id", "name")
    if named := [{"id": id, "rp": str(provider_uuid(name))} for id, name in parts]:
        write.execute(NAMED, [_encode(named)])
    conductor.record_all([_event(step, source, now) for step in steps])
    conductor.providers_changed({step.device.host_id: step.device.host for step in steps}.values())
    installs = [step for step in steps if step.after.state == _S.INSTALLING != step.now.state]
    placing.place(
        [Order("install", step.device.uuid, actor=step.actor, reason=step.reason) for step in installs], source
    )


def _row(step: Step) -> dict[str, Any]:
    """Return the row of a state change for UPDATE_STATES; None keeps what is stored."""
    stays_missing = step.after.state == _S.MISSING  # keep the reason why it is missing
    return {
        "id": step.device.id,
        "was": step.now.state,
        "state": step.after.state,
        "returns_to": step.after.returns_to,
        "drain_to": step.after.drain_to,
        "reason": None if stays_missing else step.reason,
        "who": None if stays_missing or not step.by else step.by[:255],
    }


def _event(step: Step, source: Source, at: datetime) -> dict[str, Any]:
    """Return the event of a state change, a row for `conductor.record_all`."""
    pairs = {field: [getattr(step.now, field), getattr(step.after, field)] for field in FIELDS}
    changes: dict[str, Any] = {field: pair for field, pair in pairs.items() if pair[0] != pair[1]}
    if "state" in changes:
        changes["state_since"] = [moment.isoformat(timespec="seconds") for moment in (step.device.state_since, at)]
    return {
        "source": source,
        "actor": step.actor[:255],
        "request_id": request_id.get(),
        "action": f"device.{step.name or step.after.here}",
        "subject_type": "device",
        "subject": str(step.device.uuid),
        "subject_name": str(step.device)[:255],
        "host": step.device.host.name,
        "changes": changes,
        "reason": step.reason,
    }


FIELDS = ("state", "returns_to", "drain_to")


def _finish(wanted: QuerySet[Device]) -> list[tuple[Device, Standing]]:
    """Give those of these devices that are draining and free their final state, in one transaction; return them.

    To be retired, a device must be free according to every witness; otherwise only our own requests count.
    """
    steps: list[Step] = []
    with conductor.writing():
        devices = locked(wanted.filter(drain_to__isnull=False))
        held, free = _held(devices), _guard()
        for device in devices:
            now = standing(device, held[device.id])
            after = drained(now)
            try:
                if after.here == _S.RETIRED:
                    free(device, now)
            except RefusedError:
                continue  # the device keeps draining; the job tries again
            if not now.held:
                why = f"its last request is gone; {device.state_by}: {device.state_reason}"
                name = "" if after.here == _S.RETIRED else "drained"
                steps.append(Step(device, now, after, "drains", why, name=name))
        store(steps, Source.SYSTEM)
    return [(step.device, step.after) for step in steps]


def _held(devices: Iterable[Device]) -> Counter[int]:
    """Return how many requests hold each device, by device id; one statement."""
    return Counter(device for device, _ in safety.holding([device.id for device in devices], "id"))


def _guard() -> Callable[[Device, Standing], None]:
    """Return a function that raises RefusedError unless a device may be retired; all its calls together have
    HOLDER_CHECKS_TIMEOUT_S."""
    return partial(_refuse_unless_free, time.monotonic() + PATIENCE_S)


def _refuse_unless_free(end: float, device: Device, now: Standing) -> None:
    """Raise RefusedError HELD or AWAY unless every witness says that nobody holds the device; AWAY after the time
    `give_up_at`."""
    if time.monotonic() > end:
        raise RefusedError(Reason.AWAY, f"The check whether device {device.uuid} is held took too long: try again.")
    safety.refuse_unless_free(device, "retired", () if now.held else (safety.REQUESTS,))


def _refuse_unless_idle(device: Device, after: Standing) -> None:
    """Raise RefusedError CONFLICT if a command is working on the device, HELD if it is held and would be installed
    (S1)."""
    placing.refuse_busy(device, "install")
    if after.here == _S.INSTALLING and (holders := safety.requests(device).holders):
        raise RefusedError(
            Reason.HELD, f"Device {device.uuid} is held by {', '.join(holders)}: it cannot be installed."
        )


def _result(device: Device, after: Standing, outcome: Literal["moved", "unchanged"]) -> Result:
    """Return the result for a device that was not refused; its text tells what a missing or draining one waits for."""
    said = [f"{after.here} when its driver reports it again"] if after.state == _S.MISSING else []
    said += [f"draining: {requests_left(after.held)}"] if after.drain_to else []
    return Result(device.uuid, outcome, str(device), device.host.name, after.state, ", ".join(said))


def _refused(device: Device, reason: Reason, text: str) -> Result:
    """Return the result for a device whose action was refused."""
    return Result(device.uuid, "refused", str(device), device.host.name, device.state, text, reason)


def _unknown(uuid: UUID) -> Result:
    """Return the result for a uuid that no device has."""
    return Result(uuid, "refused", text=f"Device not found with uuid={uuid}", reason=Reason.UNKNOWN)


def requests_left(number: int) -> str:
    """Say in words how many requests a drain still waits for."""
    return f"{number} request{'' if number == 1 else 's'} left"


def _encode(rows: object) -> str:
    return _json.encode(rows).decode()
