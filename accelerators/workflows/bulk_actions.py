"""Bulk actions: apply one action to many devices. A person chooses the set, sees a forecast, confirms, can cancel.

An action either changes the devices' state (`Action`) or places a command for each device (`bulk_commands.BULK_OPS`).
The job `bulks` works on confirmed sets, one slice per transaction. The outcome of each device is written in the
transaction that moves the device: a worker that is killed in a slice has done nothing of it, and no device is moved
twice.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial, reduce
from operator import or_
from typing import Any

import msgspec
from django.db import connection, transaction
from django.db.models import Count, Exists, F, OuterRef, Q, QuerySet

from accelerators import conductor
from accelerators.commands import placing
from accelerators.devices import lifecycle
from accelerators.devices.lifecycle import Result, Seen
from accelerators.domain.actions import Action, Standing, decide, drained
from accelerators.domain.caller import Caller, request_id
from accelerators.domain.errors import Reason, RefusedError
from accelerators.domain.states import BulkState, DeviceState, Drain, IllegalTransitionError, Outcome, Source
from accelerators.models import AcceleratorRequest, Bulk, BulkItem, Device
from accelerators.models.bulks import UNDER_WAY, WAITING
from accelerators.runtime import jobs
from accelerators.workflows import bulk_commands
from drivers.plan import DESTRUCTIVE

MOST = 100_000
"""Maximum number of devices of one bulk action."""
SLICE = 100
"""Devices worked on in one transaction. A cancel waits for the current slice; no further device is touched then."""
FORGOTTEN = timedelta(days=1)
REMEMBERED = timedelta(days=30)
"""Sets that nobody confirmed are deleted after a day, finished ones after 30 days; the devices' events stay."""

CHOOSE = """
INSERT INTO accelerators_bulkitem (bulk_id, device_id, device_uuid, device_name, host, stood, outcome, why, state, text)
SELECT %s, d.id, d.uuid, left(d.model || ' ' || coalesce(nullif(d.address, ''), d.key), 255), h.name,
  d.state || coalesce(', returns to ' || d.returns_to, '') || coalesce(', drains to ' || d.drain_to, ''), '', '', '', ''
FROM ({chosen}) chosen JOIN accelerators_device d USING (id) JOIN accelerators_host h ON h.id = d.host_id
ORDER BY d.host_id, d.id
"""
"""Insert the items of a bulk action. The column `stood` gets the text of `Standing.word`, the device's state now."""
SETTLE = """
UPDATE accelerators_bulkitem t SET outcome = x.outcome, why = x.why, state = x.state, text = x.text
FROM jsonb_to_recordset(%s::jsonb) AS x(uuid uuid, outcome text, why text, state text, text text)
WHERE t.bulk_id = %s AND t.device_uuid = x.uuid
"""
"""Store the outcomes of items."""


@dataclass(frozen=True)
class Forecast:
    """Predicted outcome for one device, or for `number` devices of a set with the same outcome.

    `held` tells whether one of our own requests holds the device; other witnesses are not asked.
    """

    outcome: Outcome
    text: str
    held: bool
    number: int = 1


def choose(action: Action | str, then: Drain, devices: QuerySet[Device], caller: Caller, selection: str = "") -> Bulk:
    """Store a set of devices with the present state of each as a draft, on which nothing is done until `confirm_draft`.

    `action` may also be one of `bulk_commands.BULK_OPS`; `drain_to` is the final state of a drain; `selection`
    describes the list's filters. Raises RefusedError INVALID if there are no devices, or more than MAX_BULK_DEVICES.
    """
    number = devices.order_by()[: MOST + 1].count()
    if not 0 < number <= MOST:
        many = f"More than {MOST} devices are chosen: narrow the list by filters first."
        raise RefusedError(Reason.INVALID, many if number else "No device is chosen.")
    chosen, params = devices.order_by().values("id").query.sql_with_params()
    with conductor.writing():
        bulk = Bulk.objects.create(action=action, then=then, actor=caller.name[:255], selection=selection[:1000])
        with connection.cursor() as cursor:
            cursor.execute(CHOOSE.format(chosen=chosen), [bulk.pk, *params])
            bulk.total = cursor.rowcount
        bulk.save(update_fields=["total"])
    return bulk


def forecast(bulk: Bulk) -> list[Forecast]:
    """Predict what confirming a set now would do: each kind of outcome with its number of devices.

    Sorted by outcome, and then by number, the largest first. Costs one statement, whatever the size of the set.
    """
    kinds = _standing(bulk).order_by().values_list("stood", *COLUMNS).annotate(number=Count("id"))
    told: Counter[Forecast] = Counter()
    for *kind, number in kinds:
        told[foresee(bulk, *kind)] += number
    return sorted((replace(one, number=n) for one, n in told.items()), key=lambda one: (one.outcome, -one.number))


def first(bulk: Bulk, most: int, held: bool = False) -> list[tuple[BulkItem, Forecast]]:
    """Return the first `maximum` devices of a set with their forecasts; with `held_only` only those that a request
    holds."""
    found = _standing(bulk).order_by("id")
    if not held:  # select by id first, so that the database looks for holders of these devices only
        found = found.filter(pk__in=list(bulk.items.order_by("id").values_list("pk", flat=True)[:most]))
    items = list((found.filter(is_held=True) if held else found)[:most])
    return [(item, foresee(bulk, item.stood, *(getattr(item, name) for name in SHOWN))) for item in items]


COLUMNS = ("device__state", "device__returns_to", "device__drain_to", "installs", "busy", "is_held", "able")
SHOWN = ("now_state", "now_returns", "now_drains", "installs", "busy", "is_held", "able")
"""The arguments of `predict_outcome` after `word_when_chosen`: FACT_COLUMNS for queries, FACT_ATTRIBUTES the same as
attributes of loaded items."""


def _standing(bulk: Bulk) -> QuerySet[BulkItem]:
    """Return the items of a set, annotated with what `predict_outcome` needs to know of each device now."""
    live = AcceleratorRequest.objects.filter(state__in=["BindStarted", "Bound"])
    holds = (Exists(live.filter(**{path: OuterRef("device")})) for path in HOLDING)
    return bulk.items.annotate(
        now_state=F("device__state"),
        now_returns=F("device__returns_to"),
        now_drains=F("device__drain_to"),
        installs=Q(device__to_install__gt=""),
        busy=Q(device__busy_with__isnull=False),
        is_held=reduce(or_, holds),
        able=Q(device__acts__regex=rf"\m{bulk.action}\M"),
    )


HOLDING = ("deployable__device", "attach_handle__deployable__device")
"""The paths from a request to the device that it holds."""


def foresee(
    bulk: Bulk, stood: str, state: str | None, returns: str | None, drains: str | None, *facts: bool | None
) -> Forecast:
    """Predict what the bulk action would do to one device: moved, unchanged, or refused with a reason. Pure.

    `word_when_chosen` is its `Standing.word` when the set was chosen; `state`, `returns` and `drains` are its columns
    now, `state` None if the device is gone. `facts` are four answers: whether its driver has to install it, whether a
    command is working on it, whether a request holds it, and whether its driver supports the command that is asked for.
    """
    installs, busy, held, able = map(bool, facts)
    if state is None:
        return Forecast(Outcome.REFUSED, "does not exist any more", held)
    here, drain_to = returns and DeviceState(returns), drains and Drain(drains)
    now = Standing(DeviceState(state), here or None, drain_to or None, int(held), installs)
    if bulk.action in bulk_commands.OPS:
        said = bulk_commands.blocked(bulk.action, stood, now.word, now.state, able=able, busy=busy, held=held)
        in_use = held and bulk.action in DESTRUCTIVE
        return Forecast(Outcome.REFUSED if said else Outcome.MOVED, said or "the command is sent to its agent", in_use)
    action, blocked = Action(bulk.action), ""
    try:
        after = decide(action, now, Drain(bulk.then))
    except IllegalTransitionError as illegal:
        after, blocked = now, str(illegal)
    if after == now and not blocked:
        return Forecast(Outcome.UNCHANGED, f"is {now.word} already", held)
    if stood != now.word:
        blocked = f"was {stood} when it was chosen, is {now.word} now"
    elif held and after.here in (DeviceState.RETIRED, DeviceState.INSTALLING):
        blocked = f"is held: it cannot be {'retired' if after.here == DeviceState.RETIRED else 'installed'}"
    elif busy and action is Action.ENABLE:
        blocked = "is busy with a command"
    if blocked:
        return Forecast(Outcome.REFUSED, blocked, held)
    return Forecast(Outcome.MOVED, f"becomes {(after if held or not after.drain_to else drained(after)).word}", held)


def confirm(bulk: Bulk, reason: str, held_too: bool, dry: bool = False) -> bool:
    """Start a bulk action that is a draft, with `dry_run` as a dry run that changes no device.

    Returns False if it is not a draft any more. Without `held_too` an action does not move devices that requests hold;
    commands (`bulk_commands.BULK_OPS`) ignore it. A set of at most BULK_SLICE_SIZE devices is finished when this
    returns; the job `bulks` works on a larger one. Raises RefusedError INVALID for a reason that cannot be stored.
    """
    reason = placing.check_reason(reason)
    with conductor.writing():
        draft = Bulk.objects.select_for_update().filter(pk=bulk.pk, state=BulkState.DRAFT).first()
        if draft is None:
            return False
        draft.items.exclude(WAITING).update(outcome="", why="", state="", text="")  # results of a dry run before
        draft.state, draft.reason, draft.held_too, draft.dry = BulkState.RUNNING, reason, held_too, dry
        draft.moved = draft.unchanged = draft.refused = 0
        draft.request_id, draft.ended_at = request_id.get(), None
        draft.started_at = draft.updated_at = datetime.now(UTC)
        draft.save()
        if not dry:
            _record(draft, "confirmed", {"devices": [None, draft.total]})
        transaction.on_commit(partial(jobs.kick, "bulks"), robust=True)
    if draft.total <= SLICE:
        step(draft.pk)
    return True


def cancel(bulk: Bulk, caller: Caller) -> None:
    """Stop a running bulk action; no further device is touched when this returns, and what was done stays done.

    Waits for the slice that is being worked on. A dry run becomes a draft again. Does nothing if it is not running.
    """
    with conductor.writing():
        running = Bulk.objects.select_for_update().filter(pk=bulk.pk, state=BulkState.RUNNING).first()
        if running is not None:
            _end(running, BulkState.CANCELLED, caller.name)


def run() -> None:
    """Run the job `bulks`: work on running bulk actions until nothing is left to do, or its time slice is over."""
    jobs.run("bulks", step)


def step(only: int | None = None) -> bool:
    """Work on one slice of the running set that has waited longest, or of the set `bulk_id` (a primary key).

    One transaction: moves the devices, writes the outcome of each, and ends the set after its last device. Returns
    False if there was nothing to do.
    """
    with conductor.writing():
        running = Bulk.objects.filter(UNDER_WAY).order_by("updated_at")
        running = running.filter(pk=only) if only else running
        bulk = running.select_for_update(skip_locked=only is None).first()
        if bulk is None:
            return False
        items = list(bulk.items.filter(WAITING).order_by("id")[:SLICE])
        results = _move(bulk, items)
        rows = [
            {"uuid": str(r.uuid), "outcome": r.outcome, "why": r.reason or "", "state": r.state, "text": r.text}
            for r in results
        ]
        conductor.cursor().execute(SETTLE, [msgspec.json.encode(rows).decode(), bulk.pk])
        for outcome, number in Counter(result.outcome for result in results).items():
            setattr(bulk, outcome, getattr(bulk, outcome) + number)
        bulk.updated_at = datetime.now(UTC)
        if bulk.worked >= bulk.total or not items:
            _end(bulk, BulkState.DONE, bulk.actor)
        bulk.save()
    return True


def _move(bulk: Bulk, items: list[BulkItem]) -> list[Result]:
    """Apply the action to these items and return the results; the changes of a dry run are rolled back."""
    token = request_id.set(bulk.request_id)
    seen = Seen({item.device_uuid: item.stood for item in items}, bulk.held_too or bulk.dry)
    caller = Caller(bulk.actor, "", frozenset(), "")
    try:
        with transaction.atomic():
            if bulk.action in bulk_commands.OPS:
                results = bulk_commands.many(bulk.action, seen.words, caller, bulk.reason)
            else:
                action, then, uuids = Action(bulk.action), Drain(bulk.then), list(seen.words)
                results = lifecycle.act(action, uuids, caller, bulk.reason, then, Source.PERSON, seen)
            if bulk.dry:
                transaction.set_rollback(True)
    finally:
        request_id.reset(token)
    return results


def _end(bulk: Bulk, state: BulkState, who: str) -> None:
    """End a bulk action in `state`, with an event; a dry run becomes a draft again instead, and keeps its results."""
    now = datetime.now(UTC)
    bulk.state, bulk.ended_at, bulk.updated_at = (BulkState.DRAFT if bulk.dry else state), now, now
    bulk.save()
    if not bulk.dry:
        counts = {word: [None, getattr(bulk, word)] for word in Outcome}
        _record(bulk, state, {**counts, "not done": [None, bulk.total - bulk.worked]}, who)


def _record(bulk: Bulk, verb: str, changes: dict[str, Any], who: str = "") -> None:
    subject = (bulk.uuid, str(bulk))
    conductor.record(
        f"bulk.{verb}", Source.PERSON, who or bulk.actor, subject=subject, changes=changes, reason=bulk.reason
    )


def forget(now: datetime | None = None) -> bool:
    """Delete the oldest bulk action that has expired (DRAFT_RETENTION, BULK_RETENTION); True if there may be more."""
    now = now or datetime.now(UTC)
    old = Q(state=BulkState.DRAFT, created_at__lt=now - FORGOTTEN) | Q(ended_at__lt=now - REMEMBERED)
    with conductor.writing():
        oldest = Bulk.objects.exclude(UNDER_WAY).filter(old).order_by("id").values("pk")[:1]
        count = Bulk.objects.filter(pk__in=oldest).delete()[1].get("accelerators.Bulk", 0)
        conductor.forgot("bulk", count, REMEMBERED)
        return bool(count)
