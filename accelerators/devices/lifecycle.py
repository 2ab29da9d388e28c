"""Change the state of devices: offer them, take them out of offer, drain them, retire them, and so on.

The module `domain.device_actions` decides which actions a state allows. An action on up to 200 devices is one
transaction with a constant number of statements. Rows are locked in the same order as by a merge of reports (hosts
before devices, each by id), so that the two cannot deadlock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal
from uuid import UUID

import msgspec
from django.db.models import Exists, OuterRef, QuerySet

from accelerators import conductor, safety
from accelerators.commands import command_queue
from accelerators.commands.command_queue import CommandOrder, check_reason
from accelerators.conductor import lock_devices
from accelerators.domain.caller import Caller
from accelerators.domain.device_actions import Action, LifecycleState, state_after_action, state_after_last_request
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.provider_ids import compute_provider_uuid
from accelerators.domain.states import DeviceState, DrainTarget, EventSource, IllegalTransitionError
from accelerators.models import AcceleratorRequest, Deployable, Device
from accelerators.runtime import database_clock, jobs

MAX_REASON = command_queue.MAX_REASON
SLICE_SIZE = 200
"""Maximum number of devices that are moved in one transaction."""

DEFAULT_REASONS = {
    Action.ENABLE: "enabled",
    Action.DRAIN: "drained",
    Action.DISABLE: "disabled",
    Action.RELEASE: "released",
    Action.QUARANTINE: "quarantined",
    Action.REINSTATE: "reinstated",
    Action.RETIRE: "retired",
}
"""Default reason for each action."""

UPDATE_STATES = """
UPDATE accelerators_device t SET state = x.state, returns_to = x.returns_to, drain_to = x.drain_to,
  state_since = CASE WHEN x.state = t.state THEN t.state_since ELSE %s::timestamptz END,
  state_reason = coalesce(x.reason, t.state_reason), state_by = coalesce(x.who, t.state_by), updated_at = now()
FROM jsonb_to_recordset(%s::jsonb) AS x(id bigint, was text, state text, returns_to text, drain_to text, reason text,
  who text)
WHERE t.id = x.id AND t.state = x.was
"""
"""Change the state of devices by compare and set. It is raw SQL because the ORM's `bulk_update` of 200 devices took
17 times as long, and cannot compare."""
STORE_PROVIDER_IDS = """
UPDATE accelerators_deployable t SET rp_uuid = x.rp, updated_at = now()
FROM jsonb_to_recordset(%s::jsonb) AS x(id bigint, rp uuid) WHERE t.id = x.id AND t.rp_uuid IS NULL
  AND NOT EXISTS (SELECT FROM accelerators_providerowner o JOIN accelerators_device d ON d.id = t.device_id
    WHERE o.provider = x.rp AND o.host_id <> d.host_id)
"""
"""Store the provider ids of deployables that have none, unless another host owns the provider. It is raw SQL for the
same reason."""

_S = DeviceState
_json = msgspec.json.Encoder()


@dataclass(frozen=True)
class ActionResult:
    """Outcome of an action for one device. `state` is the device's state afterwards, '' if there is no such device."""

    uuid: UUID
    outcome: Literal["moved", "unchanged", "refused"]
    name: str = ""
    host: str = ""
    state: str = ""
    text: str = ""
    reason: RefusalReason | None = None
    """Kind of refusal, None if it was not refused; `text` explains it in a sentence."""


@dataclass(frozen=True)
class DeviceStateChange:
    """A change of one locked device from `before` to `after`.

    `actor` is the actor of the event. `changed_by` is stored with the device as the cause of its state; '' keeps the
    old one.
    """

    device: Device
    before: LifecycleState
    after: LifecycleState
    actor: str
    reason: str
    changed_by: str = ""
    name: str | None = None
    """Name of the event after `device.`; by default the new state."""


@dataclass(frozen=True)
class SeenStates:
    """The states that the devices showed when a person decided (`LifecycleState.as_text`, by the device's uuid).

    A device that is not in `words_by_device` counts as unchanged. `held_too` says that the person confirmed the action
    for held devices, too; it does not include the `free_devices`, which nobody held then.
    """

    words_by_device: Mapping[UUID, str]
    held_too: bool
    free_devices: Set[UUID] = frozenset()


def enable_device(uuid: UUID, caller: Caller, reason: str = "") -> None:
    """Offer a device: it becomes ready, or installing if its driver has to install it first.

    Changes nothing if the device is offered already. Raises RefusedError: NOT_FOUND; INVALID for a reason that cannot
    be stored; CONFLICT if it is missing, quarantined, retired or busy with a command, or if an agent that is barred or
    too old would have to install it; IN_USE, naming the holders, if it would have to be installed.
    """
    apply_action_to_device(Action.ENABLE, uuid, caller, reason)


def disable_device(uuid: UUID, caller: Caller, reason: str = "") -> None:
    """Take a device out of offer; bound requests stay bound. Changes nothing if the device is not offered.

    Raises RefusedError NOT_FOUND, and INVALID for a reason that cannot be stored; a known device is never refused.
    """
    apply_action_to_device(Action.DISABLE, uuid, caller, reason)


def apply_action_to_device(
    action: Action,
    uuid: UUID,
    caller: Caller,
    reason: str = "",
    drain_to: DrainTarget = DrainTarget.MAINTENANCE,
    source: EventSource = EventSource.API,
    seen: SeenStates | None = None,
) -> ActionResult:
    """Apply an action to one device and return the result; as `apply_action`, but a refusal is raised.

    Raises RefusedError: NOT_FOUND; INVALID for a reason that cannot be stored; CONFLICT if its state, a running
    command, or the agent that has to install it does not allow the action, or the device has changed since it was
    `seen`; IN_USE, naming the holders, if it would be retired or installed, or if it was not confirmed for held
    devices; UNAVAILABLE if a holder check cannot answer before it is retired.
    """
    (result,) = apply_action(action, [uuid], caller, reason, drain_to, source, seen)
    if result.reason is not None:
        raise RefusedError(result.reason, result.text)
    return result


def apply_action(
    action: Action,
    uuids: Sequence[UUID],
    caller: Caller,
    reason: str = "",
    drain_to: DrainTarget = DrainTarget.MAINTENANCE,
    source: EventSource = EventSource.API,
    seen: SeenStates | None = None,
    answers: safety.HolderAnswers | None = None,
    state_by: str = "",
) -> list[ActionResult]:
    """Apply an action to at most SLICE_SIZE devices in one transaction; return one ActionResult per uuid.

    The results have the order of `uuids`, each uuid once; an unknown uuid gives a result that is refused as NOT_FOUND.
    A refusal of one device stops no other. A device whose state differs from the one that was `seen` is refused, unless
    nothing has to be changed. `drain_to` is the final state of a drain. After a drain, devices that nobody holds get
    that state at once, in a second transaction. `state_by` is stored as the cause of the new state; by default the
    caller's name. Locks the devices and their hosts. `answers` are those of
    `ask_holders_for_action`; a caller that is inside a transaction must have asked before it was opened. Without them,
    this function asks. Raises RefusedError INVALID for a reason that cannot be stored.
    """
    assert len(uuids) <= SLICE_SIZE, "more than a slice"
    reason = check_reason(reason) or DEFAULT_REASONS[action]
    if answers is None:
        answers = ask_holders_for_action(action, drain_to, uuids, seen)
    changes: list[DeviceStateChange] = []
    with conductor.writing():
        devices = {device.uuid: device for device in lock_devices(Device.objects.filter(uuid__in=uuids))}
        requests = safety.find_requests_of_devices([device.id for device in devices.values()])
        holders = safety.find_holders(devices.values(), answers, requests) if action is Action.RETIRE else None
        to_install = [one for one in devices.values() if one.to_install] if action is Action.ENABLE else []
        own_holders = safety.find_known_holders(to_install, requests)
        busy_ops = command_queue.load_busy_ops(devices.values(), "install") if action is Action.ENABLE else {}
        unreachable = command_queue.explain_unreachable({device.host for device in to_install})
        results = {}
        for uuid, device in devices.items():
            before = build_lifecycle_state(device, len(requests[device.id]))
            try:
                after = _decide_new_state(action, device, before, drain_to, seen, requests[device.id])
                if holders and after.effective_state == _S.RETIRED != before.effective_state:
                    holders.refuse_unless_free(device, "retired")
                if action is Action.ENABLE and after != before:
                    _refuse_unless_idle(device, after, busy_ops, own_holders)
                    if after.state == _S.INSTALLING != before.state:
                        command_queue.refuse_if_explained(device.host, unreachable)
            except RefusedError as refused:
                results[uuid] = _build_refused_result(device, refused.reason, refused.text)
            else:
                if after != before:
                    name = "draining" if action is Action.DRAIN else ""
                    cause = state_by or caller.name
                    changes.append(DeviceStateChange(device, before, after, caller.name, reason, cause, name))
                results[uuid] = _build_result(device, after, "unchanged" if after == before else "moved")
        store_state_changes(changes, source)
    if draining := [change.device.uuid for change in changes if change.after.drain_to]:
        for device, after in _finish_drains(Device.objects.filter(uuid__in=draining), answers):
            results[device.uuid] = _build_result(device, after, "moved")
    unknown = {result.uuid: result for result in refuse_unknown_devices(uuid for uuid in uuids if uuid not in results)}
    return [results.get(uuid) or unknown[uuid] for uuid in dict.fromkeys(uuids)]


def ask_holders_for_action(
    action: Action, drain_to: DrainTarget, uuids: Iterable[UUID], seen: SeenStates | None = None
) -> safety.HolderAnswers:
    """Ask all holder checks about those of these devices that the action would retire, or drain to be retired.

    They are not asked about a device for which the action is refused anyway, or changes nothing, as far as the database
    tells. Call it before a transaction is opened, and give the answers to `apply_action`, which checks everything
    again.
    """
    retires = action is Action.RETIRE or (action is Action.DRAIN and drain_to is DrainTarget.RETIRED)
    if not retires or not safety.HOLDER_CHECKS:
        return safety.NO_ANSWERS
    devices = list(Device.objects.filter(uuid__in=list(uuids)).select_related("host").order_by("id"))
    requests, to_ask = safety.find_requests_of_devices([device.id for device in devices]), []
    for device in devices:
        before = build_lifecycle_state(device, len(requests[device.id]))
        try:
            after = _decide_new_state(action, device, before, drain_to, seen, requests[device.id])
        except RefusedError:
            continue
        if after != before:
            to_ask.append(device)
    return safety.ask_holders(to_ask)


def _decide_new_state(
    action: Action,
    device: Device,
    before: LifecycleState,
    drain_to: DrainTarget,
    seen: SeenStates | None,
    requests: Sequence[str],
) -> LifecycleState:
    """Return the lifecycle state that the action gives to a locked device, equal to `before` if nothing has to change.

    `drain_to` is the final state of a drain; `requests` describe those that hold the device. `seen` holds the states
    that a person saw before the decision; if it is None, no state is compared, and held devices are not refused here.
    Raises RefusedError: CONFLICT if the state does not allow the action, if the device would change but is not in the
    state that was `seen`, or if its host is being removed; IN_USE if it would change, requests hold it, and `seen` does
    not say that held devices are included, or says that it was free.
    """
    seen_word = seen.words_by_device.get(device.uuid, before.as_text) if seen else before.as_text
    changed_by = f"{device.state_by}: {device.state_reason or 'no reason given'}"
    since = f"since {device.state_since.astimezone(UTC):%H:%M:%S} UTC, by {changed_by}"
    text = (
        f"Device {device.uuid} was {seen_word} when this was decided; it is {before.as_text} now, {since}."
        " Look at it again."
    )
    changed_error = RefusedError(RefusalReason.CONFLICT, text)
    try:
        after = state_after_action(action, before, drain_to)
    except IllegalTransitionError as illegal:
        raise (
            changed_error
            if seen_word != before.as_text
            else RefusedError(RefusalReason.CONFLICT, f"Device {device.uuid} {illegal}.")
        ) from None
    if after != before and seen_word != before.as_text:
        raise changed_error
    if after != before and device.host.removing_since:
        raise RefusedError(RefusalReason.CONFLICT, f"Host {device.host.name} of device {device.uuid} is being removed.")
    if after != before and before.holding_requests and seen:
        holders = ", ".join(requests[: safety.MAX_HOLDERS_NAMED])
        if not seen.held_too:
            text = f"Device {device.uuid} is held by {holders}: confirm that held devices are included."
            raise RefusedError(RefusalReason.IN_USE, text)
        if device.uuid in seen.free_devices:
            text = (
                f"Device {device.uuid} was free when this was decided; it is held by {holders} now. Look at it again."
            )
            raise RefusedError(RefusalReason.IN_USE, text)
    return after


def build_lifecycle_state(device: Device, held: int = 0) -> LifecycleState:
    """Return the lifecycle state of a device as `domain.device_actions` needs it.

    `held` is the number of requests that hold it.
    """
    return LifecycleState(
        DeviceState(device.state),
        DeviceState(device.returns_to) if device.returns_to else None,
        DrainTarget(device.drain_to) if device.drain_to else None,
        held,
        bool(device.to_install),
    )


def run_drains() -> None:
    """Run the job `drains`: go once through the draining devices that no request holds, and finish their drains."""
    last_id = 0

    def finish_slice() -> bool:
        """Finish the drains of the next SLICE_SIZE devices by id; return True if there may be more."""
        nonlocal last_id
        holding = AcceleratorRequest.objects.filter(attach_handle__deployable__device=OuterRef("pk"))
        drained_devices = Device.objects.filter(~Exists(holding), drain_to__isnull=False, id__gt=last_id)
        ids = list(drained_devices.order_by("id").values_list("id", flat=True)[:SLICE_SIZE])
        drained = Device.objects.filter(id__in=ids)
        to_retire = drained.filter(drain_to=DrainTarget.RETIRED).select_related("host").order_by("id")
        _finish_drains(drained, safety.ask_holders(list(to_retire)))
        last_id = ids[-1] if ids else last_id
        return len(ids) == SLICE_SIZE

    jobs.run_steps_outside_transaction("drains", finish_slice)


def store_state_changes(state_changes: Sequence[DeviceStateChange], source: EventSource) -> None:
    """Write state changes of locked devices: rows, provider ids, events, `provider` intents and `install` commands.

    Costs at most seven statements, whatever the number of devices.
    """
    if not state_changes:
        return
    changed_at, cursor = database_clock.now(), conductor.open_cursor()
    cursor.execute(UPDATE_STATES, [changed_at, _encode_json([_build_state_row(step) for step in state_changes])])
    assert cursor.rowcount == len(state_changes), "a device moved although it was locked"
    present_devices = [
        change.device.id for change in state_changes if change.after.state not in (_S.INACTIVE, _S.MISSING)
    ]
    # A device that leaves inactive gets its provider ids. An id that is recorded already (adopted, say) is kept. A
    # missing deployable gets none: it may have a name that another host owns.
    unnamed_deployables = Deployable.objects.filter(
        device__in=present_devices, rp_uuid__isnull=True, missing_since__isnull=True
    ).values_list("id", "name")
    if provider_rows := [{"id": id, "rp": str(compute_provider_uuid(name))} for id, name in unnamed_deployables]:
        cursor.execute(STORE_PROVIDER_IDS, [_encode_json(provider_rows)])
    conductor.record_events([_build_state_event(step, source, changed_at) for step in state_changes])
    conductor.raise_provider_intents({step.device.host_id: step.device.host for step in state_changes}.values())
    installs = [step for step in state_changes if step.after.state == _S.INSTALLING != step.before.state]
    command_queue.place_commands(
        [CommandOrder("install", step.device.uuid, actor=step.actor, reason=step.reason) for step in installs], source
    )


def _build_state_row(change: DeviceStateChange) -> dict[str, Any]:
    """Return the row of a state change for UPDATE_STATES; `reason` or `who` None keeps the stored value.

    A device that stays missing keeps both, which say why it is missing.
    """
    stays_missing = change.after.state == _S.MISSING  # keep the reason why it is missing
    return {
        "id": change.device.id,
        "was": change.before.state,
        "state": change.after.state,
        "returns_to": change.after.returns_to,
        "drain_to": change.after.drain_to,
        "reason": None if stays_missing else change.reason,
        "who": None if stays_missing or not change.changed_by else change.changed_by[:255],
    }


def _build_state_event(change: DeviceStateChange, source: EventSource, at: datetime) -> dict[str, Any]:
    """Return the event of a state change, a row for `conductor.record_events`."""
    pairs = {field: [getattr(change.before, field), getattr(change.after, field)] for field in STATE_FIELDS}
    changes: dict[str, Any] = {field: pair for field, pair in pairs.items() if pair[0] != pair[1]}
    if "state" in changes:
        changes["state_since"] = [moment.isoformat(timespec="seconds") for moment in (change.device.state_since, at)]
    return conductor.build_event(
        f"device.{change.name or change.after.effective_state}",
        source,
        change.actor,
        host=change.device.host,
        subject=(change.device.uuid, str(change.device)),
        changes=changes,
        reason=change.reason,
    )


STATE_FIELDS = ("state", "returns_to", "drain_to")


def _finish_drains(selected: QuerySet[Device], answers: safety.HolderAnswers) -> list[tuple[Device, LifecycleState]]:
    """Give those of these devices that are draining and free their final state, in one transaction; return them.

    To be retired, a device must be free according to every holder check, whose `answers` were asked for before;
    otherwise only our own requests count.
    """
    changes: list[DeviceStateChange] = []
    with conductor.writing():
        devices = lock_devices(selected.filter(drain_to__isnull=False))
        to_retire = [device for device in devices if device.drain_to == DrainTarget.RETIRED]
        holder_counts, holders = _count_holding_requests(devices), safety.find_holders(to_retire, answers)
        for device in devices:
            before = build_lifecycle_state(device, holder_counts[device.id])
            after = state_after_last_request(before)
            try:
                if after.effective_state == _S.RETIRED:
                    holders.refuse_unless_free(device, "retired")
            except RefusedError:
                continue  # the device keeps draining; the job tries again
            if not before.holding_requests:
                reason = f"its last request is gone; {device.state_by}: {device.state_reason}"
                name = "" if after.effective_state == _S.RETIRED else "drained"
                changes.append(DeviceStateChange(device, before, after, "drains", reason, name=name))
        store_state_changes(changes, EventSource.SYSTEM)
    return [(change.device, change.after) for change in changes]


def _count_holding_requests(devices: Iterable[Device]) -> Counter[int]:
    """Return how many requests hold each device, by device id; one statement."""
    return Counter(device for device, _ in safety.query_requests_of_devices([device.id for device in devices], "id"))


def _refuse_unless_idle(
    device: Device, after: LifecycleState, busy_ops: Mapping[UUID, str], own_holders: safety.DeviceHolders
) -> None:
    """Raise RefusedError CONFLICT if a command is working on the device; `busy_ops` are those of `load_busy_ops`.

    Raise RefusedError IN_USE if the device would be installed while it is held or a guest may still use it (S1);
    `own_holders` are those of `safety.find_known_holders`.
    """
    command_queue.refuse_if_busy(device, "install", busy_ops)
    if after.effective_state == _S.INSTALLING:
        own_holders.refuse_if_held(device, "installed")


def _build_result(device: Device, after: LifecycleState, outcome: Literal["moved", "unchanged"]) -> ActionResult:
    """Return the result for a device that was not refused; its text tells what a missing or draining one waits for."""
    notes = [f"{after.effective_state} when its driver reports it again"] if after.state == _S.MISSING else []
    notes += [f"draining: {describe_requests_left(after.holding_requests)}"] if after.drain_to else []
    return ActionResult(device.uuid, outcome, str(device), device.host.name, after.state, ", ".join(notes))


def _build_refused_result(device: Device, reason: RefusalReason, text: str) -> ActionResult:
    """Return the result for a device whose action was refused."""
    return ActionResult(device.uuid, "refused", str(device), device.host.name, device.state, text, reason)


def refuse_unknown_devices(uuids: Iterable[UUID]) -> list[ActionResult]:
    """Return the results for uuids that no device has."""
    return [
        ActionResult(uuid, "refused", text=f"Device not found with uuid={uuid}", reason=RefusalReason.NOT_FOUND)
        for uuid in uuids
    ]


def describe_requests_left(number: int) -> str:
    """Return the number of requests that a drain still waits for as text, such as “1 request left”."""
    return f"{number} request{'' if number == 1 else 's'} left"


def _encode_json(rows: object) -> str:
    """Return the rows as JSON text, for a parameter of a statement."""
    return _json.encode(rows).decode()
