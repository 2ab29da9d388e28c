"""Bulk actions: apply one action to many objects. A person chooses the set, sees a forecast, confirms, can cancel.

The objects are mostly devices. An action changes the devices' state (`Action`), applies the admission rules to them
(`bulk_admission.ADMIT`), or places a command for each device (`bulk_commands.BULK_OPS`). Other actions have other
objects (`TARGET_ACTIONS`): attachments are detached, accelerators are labelled.
The job `bulks` works on confirmed sets, one slice per transaction. The outcome of each object is written in the
transaction that changes the object: a worker that is killed in a slice has done nothing of it, and no object is changed
twice. An action that this release does not know is left to a conductor of a newer release.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.db import connection, transaction
from django.db.models import BigIntegerField, Case, Count, Exists, F, OuterRef, Q, QuerySet, Subquery, Value, When
from django.db.models.functions import JSONObject, Now

from accelerators import conductor, outbox, safety
from accelerators.commands import command_queue
from accelerators.devices import admission_rules, lifecycle, partitioning
from accelerators.devices.lifecycle import ActionResult, SeenStates
from accelerators.domain.admission import AdmissionFacts
from accelerators.domain.caller import Caller, request_id
from accelerators.domain.device_actions import Action, LifecycleState, state_after_action, state_after_last_request
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import (
    BulkState,
    BulkTarget,
    CommandState,
    DeviceOutcome,
    DeviceState,
    DrainTarget,
    EventSource,
    IllegalTransitionError,
)
from accelerators.models import Bulk, BulkItem, Command, Device, Host
from accelerators.models.bulks import BULK_IS_RUNNING, ITEM_IS_WAITING
from accelerators.runtime import database_clock, jobs
from accelerators.runtime.after_commit import call_after_commit
from accelerators.workflows import bulk_admission, bulk_commands
from accelerators.workflows.bulk_commands import UnreachableAgent
from accelerators.workflows.bulk_detachments import DETACH, DETACH_ACTION
from accelerators.workflows.bulk_labels import LABEL, LABEL_ACTION
from accelerators.workflows.bulk_targets import BulkForecast, InstanceReach, TargetAction
from drivers.plan import DESTRUCTIVE

IS_DUE = Q(next_at=None) | Q(next_at__lte=Now())
HOLDER_CHECK_PAUSE = outbox.build_retry_pause(safety.HOLDER_CHECK_PAUSE_S, safety.LONGEST_HOLDER_CHECK_PAUSE_S)
MAX_BULK_OBJECTS = 100_000
"""Maximum number of objects of one bulk action."""
BULK_SLICE_SIZE = 100
"""Objects worked on in one transaction. A cancel waits for the current slice; no further object is touched then."""
TARGET_ACTIONS: Mapping[str, TargetAction] = {DETACH: DETACH_ACTION, LABEL: LABEL_ACTION}
"""The actions whose objects are not devices."""
KNOWN_ACTIONS = (*(action.value for action in Action), bulk_admission.ADMIT, *bulk_commands.BULK_OPS, *TARGET_ACTIONS)
"""The actions of this release. A conductor of a newer release may have stored others."""
MAX_DRAFTS = 5
"""Maximum number of drafts of one caller; a further one replaces the oldest."""
DRAFT_RETENTION = timedelta(days=1)
BULK_RETENTION = timedelta(days=30)
"""Sets that nobody confirmed are deleted after a day, finished ones after 30 days; the devices' events stay."""

INSERT_ITEMS = """
INSERT INTO accelerators_bulkitem (bulk_id, device_id, device_uuid, device_name, host, stood, outcome, why, state, text)
SELECT %s, d.id, d.uuid, left(d.model || ' ' || coalesce(nullif(d.address, ''), d.key), 255), h.name,
  d.state || coalesce(', returns to ' || d.returns_to, '') || coalesce(', drains to ' || d.drain_to, ''), '', '', '', ''
FROM ({chosen}) chosen JOIN accelerators_device d USING (id) JOIN accelerators_host h ON h.id = d.host_id
ORDER BY d.host_id, d.id
"""
"""Insert the items of a bulk action. The column `stood` gets `LifecycleState.as_text` of the device."""
STORE_UNITS = """
UPDATE accelerators_bulkitem t
SET stood = right(t.stood || ', ' || x.number || ' unit' || CASE WHEN x.number = 1 THEN '' ELSE 's' END, 64)
FROM ({counts}) AS x(id, number) WHERE t.id = x.id
"""
"""Append the numbers of units to the column `stood` of items, as `partitioning.describe_units` does."""
STORE_OUTCOMES = """
UPDATE accelerators_bulkitem t SET outcome = x.outcome, why = x.why, state = x.state, text = x.text
FROM jsonb_to_recordset(%s::jsonb) AS x(uuid uuid, outcome text, why text, state text, text text)
WHERE t.bulk_id = %s AND t.device_uuid = x.uuid
"""
"""Store the outcomes of items."""


@dataclass(frozen=True)
class BulkPreview:
    """A preview of a draft: the forecasts of `forecast_bulk`, the number of hosts, and the number of held objects that
    would be changed. `reach` is None for devices. `unreachable_agents` are those of `find_unreachable_agents`."""

    forecasts: Sequence[BulkForecast]
    host_count: int
    held_count: int
    reach: InstanceReach | None = None
    unreachable_agents: Mapping[int, UnreachableAgent] = field(default_factory=dict)

    @property
    def needs_confirmation(self) -> bool:
        """Return whether a person must confirm it separately: it reaches several hosts, or would change a held
        object."""
        return self.host_count > 1 or self.held_count > 0

    def count_objects(self, outcome: DeviceOutcome) -> int:
        """Return the number of objects with this forecast."""
        return sum(one.number for one in self.forecasts if one.outcome == outcome)


def create_draft(
    action: Action | str,
    drain_to: DrainTarget,
    chosen: QuerySet[Any],
    caller: Caller,
    selection: str = "",
    source: EventSource = EventSource.PERSON,
    arguments: Mapping[str, Any] | None = None,
    reason: str = "",
    project_id: str = "",
) -> Bulk:
    """Store a set of objects with the present state of each as a draft, on which nothing is done until `confirm_draft`.

    `action` is one of KNOWN_ACTIONS, and `chosen` are devices, or the objects of a TARGET_ACTIONS; `arguments` are
    those of `bulk_commands.PARTITION` or `bulk_labels.LABEL`; `drain_to` is the final state of a drain; `selection`
    describes the list's filters; `reason` is the one that its page proposes; `project_id` is the project to which all
    objects belong, if the caller sees only those. Raises RefusedError INVALID if there are no objects, or more than
    MAX_BULK_OBJECTS.
    """
    target_action = TARGET_ACTIONS.get(action)
    target = target_action.target if target_action else BulkTarget.DEVICE
    number = chosen.order_by()[: MAX_BULK_OBJECTS + 1].count()
    if not 0 < number <= MAX_BULK_OBJECTS:
        too_many_text = f"More than {MAX_BULK_OBJECTS} {target}s are chosen: narrow the list by filters first."
        raise RefusedError(RefusalReason.INVALID, too_many_text if number else f"No {target} is chosen.")
    if action == bulk_admission.ADMIT:
        arguments = bulk_admission.build_arguments()
    with conductor.writing():
        _delete_old_drafts(caller)
        bulk = Bulk.objects.create(
            action=action,
            target=target,
            project_id=project_id[:255],
            then=drain_to,
            actor=caller.name[:255],
            caller_id=caller.user_id[:255],
            source=source,
            selection=selection[:1000],
            arguments=arguments,
            reason=reason,
        )
        if target_action:
            bulk.total = len(BulkItem.objects.bulk_create(target_action.build_items(bulk, chosen), batch_size=1000))
            if not bulk.total:
                raise RefusedError(RefusalReason.INVALID, f"No {target} is chosen.")
        else:
            bulk.total = _insert_devices(bulk, chosen)
        bulk.save(update_fields=["total"])
    return bulk


def _insert_devices(bulk: Bulk, devices: QuerySet[Device]) -> int:
    """Insert an item for each device of a new draft; return their number."""
    chosen, params = devices.order_by().values("id").query.sql_with_params()
    with connection.cursor() as cursor:
        cursor.execute(INSERT_ITEMS.format(chosen=chosen), [bulk.pk, *params])
        number = int(cursor.rowcount)
    chosen_ids = list(bulk.items.values_list("device_id", flat=True))
    held_ids = {device for device, _ in safety.query_requests_of_devices(chosen_ids, "id")}
    bulk.items.filter(device__in=held_ids).update(held=True)
    if bulk.action == bulk_commands.PARTITION:
        _store_present_units(bulk)
    return number


def _store_present_units(bulk: Bulk) -> None:
    """Add the present number of units to the state with which each device of a draft was chosen; one statement."""
    counted = partitioning.annotate_unit_count(bulk.items.order_by(), "device__").values_list("pk", "unit_count")
    counts, params = counted.query.sql_with_params()
    conductor.open_cursor().execute(STORE_UNITS.format(counts=counts), params)


def _delete_old_drafts(caller: Caller) -> None:
    """Delete the caller's oldest drafts, so that with a new one there are at most MAX_DRAFTS: each may have 100 000
    rows, and a client that repeats a refused request makes one each time."""
    drafts = Bulk.objects.filter(state=BulkState.DRAFT, caller_id=caller.user_id[:255], actor=caller.name[:255])
    newest = drafts.order_by("-id").values_list("id", flat=True)[: MAX_DRAFTS - 1]
    # A draft that is locked is being confirmed.
    surplus = list(drafts.exclude(id__in=list(newest)).select_for_update(skip_locked=True))
    for draft in surplus:
        draft.delete()
    if surplus:
        reason = f"{caller.name[:200]} has made {MAX_DRAFTS} newer drafts"
        changes = {"number": [len(surplus), 0]}
        conductor.record_event("bulk.forgotten", EventSource.SYSTEM, "drafts", changes=changes, reason=reason)


def set_arguments(bulk: Bulk, arguments: Mapping[str, Any], reason: str) -> None:
    """Replace the arguments and the proposed reason of a draft. Raises RefusedError CONFLICT if it is no draft any
    more, and INVALID for a reason that cannot be stored."""
    reason = command_queue.check_reason(reason)
    with conductor.writing():
        changed = Bulk.objects.filter(pk=bulk.pk, state=BulkState.DRAFT).update(arguments=arguments, reason=reason)
        if not changed:
            raise RefusedError(RefusalReason.CONFLICT, "The bulk action was confirmed or deleted meanwhile.")


def may_confirm(bulk: Bulk, caller: Caller) -> bool:
    """Return whether the caller is the one who chose the objects of a draft; nobody else may confirm it."""
    return bulk.actor == caller.name[:255] and bulk.caller_id in ("", caller.user_id[:255])


def preview_bulk(bulk: Bulk) -> BulkPreview:
    """Return a preview of what confirming a draft now would do. Costs the statements of `forecast_bulk` and one; for
    TARGET_ACTIONS those of their `count_reach`, too."""
    unreachable_agents = find_unreachable_agents(bulk)
    forecasts = forecast_bulk(bulk, unreachable_agents)
    held_count = sum(one.number for one in forecasts if one.held and one.outcome == DeviceOutcome.MOVED)
    target_action = TARGET_ACTIONS.get(bulk.action)
    reach = target_action.count_reach(bulk) if target_action else None
    host_count = bulk.items.order_by().values("host").distinct().count()
    return BulkPreview(forecasts, host_count, held_count, reach, unreachable_agents)


def create_retry_draft(bulk: Bulk, caller: Caller, source: EventSource = EventSource.PERSON) -> Bulk:
    """Store the failed objects of a bulk action that has ended as a new draft of the same action, in their present
    states.

    Raises RefusedError: CONFLICT while it is running or a draft, or if this release does not know its action; INVALID
    if no object has failed.
    """
    _require_known_action(bulk)
    if bulk.state not in (BulkState.DONE, BulkState.CANCELLED):
        raise RefusedError(RefusalReason.CONFLICT, "The bulk action has not ended yet: wait, or cancel it.")
    failed = query_failed_objects(bulk)
    if not failed.exists():
        raise RefusedError(RefusalReason.INVALID, f"No {bulk.target} of this bulk action has failed and still exists.")
    then, arguments = DrainTarget(bulk.then), bulk.arguments
    if bulk.action == bulk_commands.PARTITION:  # the draft has the present states, so the old generation is not wanted
        arguments = {**(arguments or {}), "generation": None}
    return create_draft(bulk.action, then, failed, caller, bulk.selection, source, arguments, "", bulk.project_id)


def _require_known_action(bulk: Bulk) -> None:
    """Raise RefusedError CONFLICT if this release does not know the action of a bulk action."""
    if bulk.action not in KNOWN_ACTIONS:
        text = f"This release does not know the action {bulk.action}: ask a conductor of a newer release."
        raise RefusedError(RefusalReason.CONFLICT, text)


def query_failed_objects(bulk: Bulk) -> QuerySet[Any]:
    """Return the devices, or the other objects, of the failed items that still exist."""
    failed = query_failed_items(bulk)
    if target_action := TARGET_ACTIONS.get(bulk.action):
        return target_action.query_objects(bulk, list(failed.values_list("target_uuid", flat=True)))
    return Device.objects.filter(pk__in=failed.values("device"))


def _query_commands(action: str | OuterRef, ordered_by_request: str | OuterRef) -> QuerySet[Command]:
    """Return the commands that a bulk action with this action and `request_id` has ordered."""
    return Command.objects.filter(op=action, request_id=ordered_by_request)


def _query_commands_of_item() -> QuerySet[Command]:
    """Return the commands that were ordered for the device of an item of a bulk action, for a subquery of items."""
    ordered = _query_commands(OuterRef("bulk__action"), OuterRef("bulk__request_id"))
    return ordered.filter(device=OuterRef("device"))


ITEM_HAS_FAILED = Q(outcome=DeviceOutcome.REFUSED) | Q(
    Q(
        Exists(_query_commands_of_item().filter(ended_at__isnull=False).exclude(state=CommandState.SUCCEEDED)),
        bulk__action__in=bulk_commands.BULK_OPS,
    )
    | Q(bulk__action__in=(Action.ENABLE, bulk_admission.ADMIT), device__state=DeviceState.FAILED),
    outcome=DeviceOutcome.MOVED,
)
"""Selects items of bulk actions that were refused, or whose command or installation has failed since."""


def query_failed_items(bulk: Bulk) -> QuerySet[BulkItem]:
    """Return the items of a bulk action that were refused, or whose command or installation has failed since."""
    return bulk.items.filter(ITEM_HAS_FAILED)


def annotate_with_commands(items: QuerySet[BulkItem]) -> QuerySet[BulkItem]:
    """Add to items of bulk actions the command that was ordered for the device, as `ordered_command`: its `id`, `uuid`,
    `state`, `text` and `ended_at`; None if none was ordered, or if it is not stored any more."""
    command = JSONObject(id="id", uuid="uuid", state="state", text="text", ended_at="ended_at")
    newest = Subquery(_query_commands_of_item().order_by("-id").values(command=command)[:1])
    return items.annotate(ordered_command=Case(When(outcome=DeviceOutcome.MOVED, then=newest)))


def orders_commands(bulk: Bulk) -> bool:
    """Return whether a bulk action has ordered commands, or may order them; a dry run takes them back."""
    return bulk.action in bulk_commands.BULK_OPS and not bulk.dry


def count_commands(bulk: Bulk) -> Counter[CommandState]:
    """Count the commands that a bulk action has ordered and that are still stored, by their state; one statement.

    Returns an empty Counter for an action without commands.
    """
    if not orders_commands(bulk):
        return Counter()
    ordered = bulk.items.filter(outcome=DeviceOutcome.MOVED).values("device")
    commands = _query_commands(bulk.action, bulk.request_id).filter(device__in=ordered).order_by()
    return Counter({CommandState(state): n for state, n in commands.values_list("state").annotate(number=Count("pk"))})


def forecast_bulk(bulk: Bulk, unreachable_agents: Mapping[int, UnreachableAgent] | None = None) -> list[BulkForecast]:
    """Predict what confirming a set now would do: each kind of outcome with its number of objects.

    Sorted by outcome, and then by number, the largest first. Costs one statement, whatever the size of the set; for
    admission rules and labels two, for detachments three. `unreachable_agents` are those of `find_unreachable_agents`;
    without them, it is called. Returns [] for an action that this release does not know.
    """
    if bulk.action not in KNOWN_ACTIONS:
        return []
    if target_action := TARGET_ACTIONS.get(bulk.action):
        return _sort_forecasts(Counter(target_action.predict(bulk, list(bulk.items.all()))))
    if unreachable_agents is None:
        unreachable_agents = find_unreachable_agents(bulk)
    if bulk.action == bulk_commands.PARTITION:
        return _sort_forecasts(_count_unit_changes(bulk, unreachable_agents))
    if bulk.action == bulk_admission.ADMIT:
        return _sort_forecasts(_count_admissions(bulk, unreachable_agents))
    items = _query_items_with_facts(bulk, unreachable_agents).order_by()
    count_by_forecast: Counter[BulkForecast] = Counter()
    columns = ("stood", "unreachable_host", *FACT_COLUMNS.values())
    for word, host, *values, number in items.values_list(*columns).annotate(number=Count("id")):
        facts = DeviceFacts.from_columns(values)
        count_by_forecast[predict_outcome(bulk, word, unreachable_agents.get(host), facts)] += number
    return _sort_forecasts(count_by_forecast)


def _sort_forecasts(count_by_forecast: Counter[BulkForecast]) -> list[BulkForecast]:
    """Return the forecasts with their numbers of devices, sorted by outcome, and then by number, the largest first.

    Forecasts that differ only in their hosts are one, whose text names some of the hosts.
    """
    numbers, hosts = Counter[BulkForecast](), defaultdict[BulkForecast, set[str]](set)
    for entry, number in count_by_forecast.items():
        kind = replace(entry, unreachable_hosts=())
        numbers[kind] += number
        hosts[kind].update(entry.unreachable_hosts)
    merged = (replace(kind.name_hosts(hosts[kind]), number=number) for kind, number in numbers.items())
    return sorted(merged, key=lambda one: (one.outcome, -one.number))


_ADMISSION_FACT_COLUMNS = tuple(f"device__{name}" for name in admission_rules.FACT_COLUMNS)
"""The columns of an item that are the `AdmissionFacts` of its device."""


def _count_admissions(bulk: Bulk, unreachable_agents: Mapping[int, UnreachableAgent]) -> Counter[BulkForecast]:
    """Predict what the admission rules would do to the devices of a set: each forecast with its number of devices."""
    items = _query_items_with_facts(bulk, unreachable_agents).order_by()
    predict, numbers = _build_admission_forecaster(bulk, unreachable_agents), Counter[BulkForecast]()
    columns = ("unreachable_host", "stood", *_ADMISSION_FACT_COLUMNS, *FACT_COLUMNS.values())
    for values in items.values_list(*columns).annotate(number=Count("id")):
        host, word, *facts, number = values
        admission_facts, device_facts = AdmissionFacts(*facts[: -len(FACT_COLUMNS)]), facts[-len(FACT_COLUMNS) :]
        numbers[predict(host, word, admission_facts, DeviceFacts.from_columns(device_facts))] += number
    return numbers


def _build_admission_forecaster(
    bulk: Bulk, unreachable_agents: Mapping[int, UnreachableAgent]
) -> Callable[[int | None, str, AdmissionFacts, DeviceFacts], BulkForecast]:
    """Return a function that predicts what the admission rules would do to a device. Its arguments are the column
    `unreachable_host`, the state in which the device was chosen, and the facts about it."""
    chosen_rules, present_rules = bulk_admission.read_rules(bulk.arguments), admission_rules.load_enabled_rules()

    def predict(
        unreachable_host: int | None, word_when_chosen: str, admission_facts: AdmissionFacts, facts: DeviceFacts
    ) -> BulkForecast:
        """Return the forecast of one device."""
        if facts.state is None:
            return BulkForecast(DeviceOutcome.REFUSED, "does not exist any more", held=False)
        state_now = facts.build_lifecycle_state(0)
        outcome, text, _, after = bulk_admission.decide_admission(
            *(chosen_rules, present_rules, admission_facts, word_when_chosen, state_now),
            is_busy=facts.is_busy,
            is_held=facts.is_held,
            is_released=facts.is_released,
            is_host_removed=facts.is_host_removed,
        )
        forecast = BulkForecast(outcome, text, facts.is_held)
        unreachable = unreachable_agents.get(unreachable_host or 0)
        return _consider_agent(forecast, "install", unreachable) if _is_install_ordered(state_now, after) else forecast

    return predict


def _consider_agent(forecast: BulkForecast, op: str, unreachable: UnreachableAgent | None) -> BulkForecast:
    """Return the forecast of a device for which command `op` would be placed, or one that is refused anyway. If its
    agent is `unreachable`, the device is refused; if the command can wait for the agent, the text says so."""
    if forecast.outcome != DeviceOutcome.MOVED or not unreachable:
        return forecast
    obstacle, hosts = unreachable.obstacle, (unreachable.host,)
    if not obstacle.may_wait:
        text = obstacle.nameless_text
        return replace(forecast, outcome=DeviceOutcome.REFUSED, text=text, unreachable_hosts=hosts)
    text = f"{forecast.text}; {bulk_commands.describe_delay(op, obstacle)}"
    return replace(forecast, text=text, unreachable_hosts=hosts)


def _is_install_ordered(before: LifecycleState, after: LifecycleState | None) -> bool:
    """Return whether the command `install` is placed for a device that goes from `before` to `after`."""
    return after is not None and after.state is DeviceState.INSTALLING is not before.state


def forecast_unit_change(change: partitioning.PartitionChange, device: Device) -> tuple[BulkForecast, str]:
    """Predict what a change of units would do to one device now; return the forecast and the device's
    `describe_units`. Makes no holder checks. Costs three statements, one if `host` is not loaded, and one for each of
    the `command_queue.REACH_CHECKS`."""
    present_units = partitioning.count_units([device])[device.pk]
    seen = partitioning.describe_units(device.lifecycle_text, present_units)
    unreachable = _find_unreachable_agents_of([device.host]).get(device.host_id)
    forecast = _predict_unit_change(
        change,
        seen,
        device,
        present_units,
        is_held=bool(safety.find_requests_of_device(device)),
        is_released=bool(safety.find_releases_of_devices([device.pk])),
        is_able=bulk_commands.PARTITION in device.acts.split(),
        unreachable=unreachable,
    )
    return forecast.name_hosts(forecast.unreachable_hosts), seen


UNIT_FACT_COLUMNS = ("state", "returns_to", "drain_to", "busy_with", "driver", "changeable", "sized_by")
"""The columns of a device that decide what a change of its units does."""


def _count_unit_changes(bulk: Bulk, unreachable_agents: Mapping[int, UnreachableAgent]) -> Counter[BulkForecast]:
    """Predict what a change of units would do to the devices of a set: each forecast with its number of devices.

    Costs one statement, which groups the devices with the same facts. With a generation, which only a change of a
    single device has, the device itself is read.
    """
    change = partitioning.PartitionChange.from_arguments(bulk.arguments or {})
    items = partitioning.annotate_unit_count(_query_items_with_facts(bulk, unreachable_agents), "device__")
    if change.generation is not None:
        return Counter(one for _, one in _forecast_unit_changes(bulk, items, unreachable_agents))
    columns = (
        "unreachable_host",
        "stood",
        "unit_count",
        "is_held",
        "released",
        "able",
        *(f"device__{name}" for name in UNIT_FACT_COLUMNS),
    )
    groups = items.order_by().values_list(*columns).annotate(number=Count("id"))
    numbers = Counter[BulkForecast]()
    for unreachable_host, stood, present_units, is_held, is_released, is_able, *facts, number in groups:
        device = Device(**dict(zip(UNIT_FACT_COLUMNS, facts, strict=True))) if facts[0] else None
        forecast = _predict_unit_change(
            *(change, stood, device, present_units),
            is_held=is_held,
            is_released=is_released,
            is_able=bool(is_able),
            unreachable=unreachable_agents.get(unreachable_host),
        )
        numbers[forecast] += number
    return numbers


def _forecast_unit_changes(
    bulk: Bulk, items: QuerySet[Any], unreachable_agents: Mapping[int, UnreachableAgent]
) -> list[tuple[BulkItem, BulkForecast]]:
    """Predict what a change of units would do to each of these items, which are annotated with facts and
    `unit_count`."""
    change = partitioning.PartitionChange.from_arguments(bulk.arguments or {})
    return [
        (
            item,
            _predict_unit_change(
                *(change, item.stood, item.device, item.unit_count),
                is_held=item.is_held,
                is_released=item.released,
                is_able=item.able,
                unreachable=unreachable_agents.get(item.unreachable_host),
            ),
        )
        for item in items.select_related("device")
    ]


def _predict_unit_change(
    change: partitioning.PartitionChange,
    word_when_chosen: str,
    device: Device | None,
    present_units: int,
    *,
    is_held: bool,
    is_released: bool,
    is_able: bool,
    unreachable: UnreachableAgent | None,
) -> BulkForecast:
    """Predict what a change of units would do to one device, which has `present_units` units now; None is a device that
    is gone. `word_when_chosen` is its `describe_units` when it was chosen."""
    if device is None:
        return BulkForecast(DeviceOutcome.REFUSED, "does not exist any more", held=False)
    refusal = bulk_commands.predict_refusal(
        bulk_commands.PARTITION,
        word_when_chosen,
        partitioning.describe_units(device.lifecycle_text, present_units),
        DeviceState(device.state),
        is_supported=is_able,
        is_busy=device.busy_with is not None,
        is_held=is_held,
        is_released=is_released,
    )
    try:
        layout = partitioning.plan_layout(device, change, present_units)
    except RefusedError as refused:
        refusal = refusal or refused.text
    if refusal:
        return BulkForecast(DeviceOutcome.REFUSED, refusal, is_held)
    words = ", ".join(f"{word}={value}" for word, value in layout.items())
    text = f"is divided again with {words}; it has {present_units} units now"
    return _consider_agent(BulkForecast(DeviceOutcome.MOVED, text, held=False), bulk_commands.PARTITION, unreachable)


def forecast_first_items(
    bulk: Bulk,
    maximum: int,
    held_only: bool = False,
    unreachable_agents: Mapping[int, UnreachableAgent] | None = None,
) -> list[tuple[BulkItem, BulkForecast]]:
    """Return the first `maximum` objects of a set with their forecasts; with `held_only` only those that a request
    holds. `unreachable_agents` are those of `find_unreachable_agents`; without them, it is called. Returns [] for an
    action that this release does not know."""
    if bulk.action not in KNOWN_ACTIONS:
        return []
    if target_action := TARGET_ACTIONS.get(bulk.action):
        items = list((bulk.items.filter(held=True) if held_only else bulk.items.all())[:maximum])
        return list(zip(items, target_action.predict(bulk, items), strict=True))
    if unreachable_agents is None:
        unreachable_agents = find_unreachable_agents(bulk)
    annotated = _query_items_with_facts(bulk, unreachable_agents).order_by("id")
    if not held_only:  # select by id first, so that the database looks for holders of these devices only
        annotated = annotated.filter(pk__in=list(bulk.items.order_by("id").values_list("pk", flat=True)[:maximum]))
    chosen = (annotated.filter(Q(is_held=True)) if held_only else annotated)[:maximum]
    if bulk.action == bulk_commands.PARTITION:
        annotated_with_units = partitioning.annotate_unit_count(chosen, "device__")
        forecasts = _forecast_unit_changes(bulk, annotated_with_units, unreachable_agents)
    elif bulk.action == bulk_admission.ADMIT:
        predict = _build_admission_forecaster(bulk, unreachable_agents)
        rows = {pk: AdmissionFacts(*facts) for pk, *facts in chosen.values_list("pk", *_ADMISSION_FACT_COLUMNS)}
        items_with_facts: list[Any] = list(chosen)
        forecasts = [
            (item, predict(item.unreachable_host, item.stood, rows[item.pk], _read_facts(item)))
            for item in items_with_facts
        ]
    else:
        forecasts = [(item, _predict_outcome_of_item(bulk, item, unreachable_agents)) for item in chosen]
    return [(item, one.name_hosts(one.unreachable_hosts)) for item, one in forecasts]


def _predict_outcome_of_item(bulk: Bulk, item: Any, unreachable_agents: Mapping[int, UnreachableAgent]) -> BulkForecast:
    """Return the forecast of an item of `_query_items_with_facts`."""
    return predict_outcome(bulk, item.stood, unreachable_agents.get(item.unreachable_host), _read_facts(item))


def _read_facts(item: Any) -> DeviceFacts:
    """Return the facts about the device of an item of `_query_items_with_facts`."""
    return DeviceFacts.from_columns([getattr(item, column) for column in FACT_COLUMNS.values()])


FACT_COLUMNS = {
    "state": "now_state",
    "returns_to": "now_returns",
    "drain_to": "now_drains",
    "has_to_be_installed": "installs",
    "is_busy": "busy",
    "is_held": "is_held",
    "is_released": "released",
    "is_supported": "able",
    "was_held": "held",
    "is_host_removed": "removing",
}
"""The column of an item of `_query_items_with_facts` for each field of `DeviceFacts`."""


def find_unreachable_agents(bulk: Bulk) -> dict[int, UnreachableAgent]:
    """Return, by host id, the agents that take no commands now, of the hosts of a set whose devices get commands.

    These are the hosts of all devices for an action of `bulk_commands.BULK_OPS`. When devices are enabled or admitted,
    they are the hosts of the devices that have to be installed. Costs one statement to find the hosts, and one for each
    of the `command_queue.REACH_CHECKS`; none for another action.
    """
    if bulk.action in bulk_commands.BULK_OPS:
        with_commands = bulk.items.order_by()
    elif bulk.action in (Action.ENABLE, bulk_admission.ADMIT):
        with_commands = bulk.items.order_by().filter(device__to_install__gt="")
    else:
        return {}
    hosts = Host.objects.filter(pk__in=with_commands.values("device__host")).defer("drivers")
    return _find_unreachable_agents_of(hosts)


def _find_unreachable_agents_of(hosts: Iterable[Host]) -> dict[int, UnreachableAgent]:
    """Return, by host id, those agents of these hosts that take no commands now."""
    host_by_id = {host.pk: host for host in hosts}
    obstacles = command_queue.explain_unreachable([*host_by_id.values()], may_wait=False)
    return {pk: UnreachableAgent(host_by_id[pk].name, obstacle) for pk, obstacle in obstacles.items()}


def _query_items_with_facts(bulk: Bulk, unreachable_agents: Mapping[int, UnreachableAgent]) -> QuerySet[BulkItem]:
    """Return the items of a set, annotated with what `predict_outcome` needs to know of each device now.

    `unreachable_host` is the id of the device's host if its agent is one of `unreachable_agents`, else None.
    """
    unreachable = When(device__host__in=[*unreachable_agents], then=F("device__host_id"))
    return bulk.items.annotate(
        now_state=F("device__state"),
        now_returns=F("device__returns_to"),
        now_drains=F("device__drain_to"),
        installs=Q(device__to_install__gt=""),
        busy=Q(device__busy_with__isnull=False),
        is_held=safety.build_held_condition("device"),
        released=_build_released_fact(bulk),
        able=Q(device__acts__regex=rf"\m{bulk.action}\M"),
        removing=Q(device__host__removing_since__isnull=False),
        unreachable_host=Case(unreachable) if unreachable_agents else Value(None, output_field=BigIntegerField()),
    )


def _build_released_fact(bulk: Bulk) -> Q | Value:
    """Return the expression which says that a guest may still use a released handle of the device of an item, if this
    decides about the action; otherwise False, so that the database does not look for them."""
    if bulk.action in DESTRUCTIVE or bulk.action in (Action.RETIRE, Action.DRAIN):
        return safety.build_released_condition("device")
    if bulk.action in (Action.ENABLE, bulk_admission.ADMIT):
        return Q(device__to_install__gt="") & safety.build_released_condition("device")
    return Value(False)


@dataclass(frozen=True)
class DeviceFacts:
    """What decides about an action on a device: its columns `state`, `returns_to` and `drain_to`, and answers.

    The answers are whether its driver has to install it, whether a command is working on it (`is_busy`), whether a
    request holds it, whether a guest may still use a released handle of it (False if this does not decide about the
    action), whether its driver supports the command that is asked for, whether a request held it when the set was
    chosen, and whether its host is being removed. If the device does not exist any more, `state` is None, and the
    answers do not count.
    """

    state: str | None
    returns_to: str | None
    drain_to: str | None
    has_to_be_installed: bool
    is_busy: bool
    is_held: bool
    is_released: bool
    is_supported: bool
    was_held: bool
    is_host_removed: bool

    @classmethod
    def from_columns(cls, values: Sequence[Any]) -> DeviceFacts:
        """Return the facts of an item of `_query_items_with_facts`; `values` are those of FACT_COLUMNS."""
        return cls(**dict(zip(FACT_COLUMNS, values, strict=True)))

    def build_lifecycle_state(self, holding_requests: int) -> LifecycleState:
        """Return the lifecycle state of the device, which must exist."""
        returns_to = DeviceState(self.returns_to) if self.returns_to else None
        drain_to = DrainTarget(self.drain_to) if self.drain_to else None
        state = DeviceState(self.state or "")
        return LifecycleState(state, returns_to, drain_to, holding_requests, self.has_to_be_installed)


def predict_outcome(
    bulk: Bulk, word_when_chosen: str, unreachable: UnreachableAgent | None, facts: DeviceFacts
) -> BulkForecast:
    """Predict what the bulk action would do to one device: moved, unchanged, or refused with a reason. This is a pure
    function.

    `word_when_chosen` is what the device's `LifecycleState.as_text` was when the set was chosen. `unreachable` is the
    agent of its host if the action sends a command to it, and the agent takes none now.
    """
    held, released = facts.is_held, facts.is_released
    if facts.state is None:
        return BulkForecast(DeviceOutcome.REFUSED, "does not exist any more", held)
    state_now = facts.build_lifecycle_state(int(held))
    if bulk.action in bulk_commands.BULK_OPS:
        refusal = bulk_commands.predict_refusal(
            bulk.action,
            word_when_chosen,
            state_now.as_text,
            state_now.state,
            is_supported=facts.is_supported,
            is_busy=facts.is_busy,
            is_held=held,
            is_released=released,
        )
        in_use = held and bulk.action in DESTRUCTIVE
        if refusal:
            return BulkForecast(DeviceOutcome.REFUSED, refusal, in_use)
        text = "the command is placed" if unreachable else "the command is sent to its agent"
        return _consider_agent(BulkForecast(DeviceOutcome.MOVED, text, in_use), bulk.action, unreachable)
    action, blocked_text = Action(bulk.action), ""
    try:
        after = state_after_action(action, state_now, DrainTarget(bulk.then))
    except IllegalTransitionError as illegal:
        after, blocked_text = state_now, str(illegal)
    if after == state_now and not blocked_text:
        return BulkForecast(DeviceOutcome.UNCHANGED, f"is {state_now.as_text} already", held)
    if word_when_chosen != state_now.as_text:
        blocked_text = f"was {word_when_chosen} when it was chosen, is {state_now.as_text} now"
    elif facts.is_host_removed and not blocked_text:
        blocked_text = bulk_admission.HOST_REMOVED_TEXT
    elif (held or released) and (act := ACTS_ON_FREE_DEVICES.get(after.effective_state)):
        blocked_text = f"is held: it cannot be {act}" if held else bulk_commands.describe_release(act)
    elif held and not facts.was_held:
        blocked_text = "is held now; it was free when it was chosen"
    elif facts.is_busy and action is Action.ENABLE:
        blocked_text = "is busy with a command"
    if blocked_text:
        return BulkForecast(DeviceOutcome.REFUSED, blocked_text, held)
    waits_for_guest = released and after.drain_to is DrainTarget.RETIRED
    changed = after if held or waits_for_guest or not after.drain_to else state_after_last_request(after)
    ends = ((held, "its last request ends"), (waits_for_guest, "its host confirms that no guest uses it"))
    text = _describe_change(changed, " and ".join(end for applies, end in ends if applies))
    forecast = BulkForecast(DeviceOutcome.MOVED, text, held)
    return _consider_agent(forecast, "install", unreachable) if _is_install_ordered(state_now, after) else forecast


ACTS_ON_FREE_DEVICES = {DeviceState.RETIRED: "retired", DeviceState.INSTALLING: "installed"}
"""The states that only a free device can get, each with the word for the act."""


def _describe_change(after: LifecycleState, end_of_drain: str) -> str:
    """Return what a device becomes, and what happens at the end of its drain, as text for people."""
    text = f"becomes {replace(after, drain_to=None).as_text}"
    if after.drain_to is None:
        return text
    if after.drain_to.value == after.state.value:
        return f"{text}, and drains until {end_of_drain}"
    return f"{text}, drains, and becomes {after.drain_to} when {end_of_drain}"


def forecast_device(action: Action, drain_to: DrainTarget, device: Device) -> BulkForecast:
    """Predict what an action would do to one device now. Makes no holder checks. Costs two statements, one if `host` is
    not loaded, and one for each of the `command_queue.REACH_CHECKS` if the device would have to be installed."""
    is_held = bool(safety.find_requests_of_device(device))
    would_install = action is Action.ENABLE and device.to_install
    forecast = predict_outcome(
        Bulk(action=action, then=drain_to),
        lifecycle.build_lifecycle_state(device).as_text,
        _find_unreachable_agents_of([device.host]).get(device.host_id) if would_install else None,
        DeviceFacts(
            state=device.state,
            returns_to=device.returns_to,
            drain_to=device.drain_to,
            has_to_be_installed=bool(device.to_install),
            is_busy=device.busy_with is not None,
            is_held=is_held,
            is_released=bool(safety.find_releases_of_devices([device.pk])),
            is_supported=True,
            was_held=is_held,
            is_host_removed=device.host.removing_since is not None,
        ),
    )
    return forecast.name_hosts(forecast.unreachable_hosts)


def confirm_draft(bulk: Bulk, reason: str, held_too: bool, dry_run: bool = False) -> bool:
    """Start a bulk action that is a draft, with `dry_run` as a dry run that changes nothing.

    Returns False if it is not a draft any more. Without `held_too` an action does not change objects that requests
    hold; commands (`bulk_commands.BULK_OPS`) and labels ignore it. A set of at most BULK_SLICE_SIZE objects is finished
    when this returns, unless this process is killed; the job `bulks` works on a larger one, and finishes the set of a
    killed process. Raises RefusedError: INVALID for a reason that cannot be stored, CONFLICT if this release does not
    know the action.
    """
    _require_known_action(bulk)
    reason = command_queue.check_reason(reason)
    # Whoever has the lock works on the set alone, so that the services are asked about its devices only once.
    with _try_bulk_lock(bulk) as has_lock:
        draft = _start_draft(bulk, reason, held_too, dry_run)
        if draft is None:
            return False
        if has_lock and draft.total <= BULK_SLICE_SIZE:
            _process_slice(draft, max_attempts=1)
    return True


def _start_draft(bulk: Bulk, reason: str, held_too: bool, dry_run: bool) -> Bulk | None:
    """Mark a draft as running and wake the job `bulks`; return None if it is not a draft any more."""
    with conductor.writing():
        draft = Bulk.objects.select_for_update().filter(pk=bulk.pk, state=BulkState.DRAFT).first()
        if draft is None:
            return None
        draft.items.exclude(ITEM_IS_WAITING).update(  # results of a dry run before
            outcome="", why="", state="", text="", attempts=0, next_at=None
        )
        draft.state, draft.reason, draft.held_too, draft.dry = BulkState.RUNNING, reason, held_too, dry_run
        draft.moved = draft.unchanged = draft.refused = 0
        draft.request_id, draft.ended_at = request_id.get(), None
        draft.started_at = draft.updated_at = database_clock.now()
        draft.save()
        if not dry_run:
            changes = {f"{draft.target}s": [None, draft.total]}
            _record_bulk_event(draft, "confirmed", changes, draft.actor, EventSource(draft.source))
        call_after_commit(jobs.enqueue_job, "bulks")
    return draft


def cancel_bulk(bulk: Bulk, caller: Caller, source: EventSource = EventSource.PERSON) -> None:
    """Stop a running bulk action: after this has returned, it begins no further object.

    Objects that were changed stay changed, and commands that were placed go on. Waits for the slice that is being
    worked on. A dry run becomes a draft again. Does nothing if it is not running.
    """
    with conductor.writing():
        running = Bulk.objects.select_for_update().filter(pk=bulk.pk, state=BulkState.RUNNING).first()
        if running is not None:
            _end_bulk(running, BulkState.CANCELLED, caller.name, source)


def run() -> None:
    """Run the job `bulks`: work on running bulk actions until nothing is left to do, or its time slice is over."""
    jobs.run_steps_outside_transaction("bulks", process_next_slice)


def process_next_slice() -> bool:
    """Process one slice of the running bulk action that has waited longest; return False if there is nothing to do now.

    If it is unknown whether a device is held, the device stays waiting and is tried again after a pause,
    HOLDER_CHECK_ATTEMPTS times in all. A bulk action on which another process works is left to it, and one with an
    action that this release does not know to a conductor of a newer release.
    """
    items = BulkItem.objects.filter(ITEM_IS_WAITING, bulk=OuterRef("pk"))
    known = Bulk.objects.filter(BULK_IS_RUNNING, action__in=KNOWN_ACTIONS)
    for bulk in known.filter(Exists(items.filter(IS_DUE)) | ~Exists(items)).order_by("updated_at"):
        with _try_bulk_lock(bulk) as acquired:
            if acquired:
                _process_slice(bulk, safety.HOLDER_CHECK_ATTEMPTS)
                return True
    return False


def _try_bulk_lock(bulk: Bulk) -> AbstractContextManager[bool]:
    """Try to take the lock of a bulk action for this database connection: only its holder makes the holder checks."""
    return jobs.try_connection_lock(f"bulk {bulk.pk}")


def _process_slice(found: Bulk, max_attempts: int) -> None:
    """Process the next slice of a bulk action.

    The holder checks of the slice are made first, if the action needs them. Then one transaction changes the objects or
    places their commands, writes the outcome of each, and ends the bulk action after its last object. It locks the bulk
    action, the objects and the hosts of devices. Items of which it is unknown whether the device is held stay
    waiting until they were tried `max_attempts` times. Does nothing if another process has processed the items
    meanwhile.
    """
    asked_items = list(found.items.filter(ITEM_IS_WAITING & IS_DUE).order_by("id")[:BULK_SLICE_SIZE])
    answers = _ask_holders(found, asked_items)
    with conductor.writing():
        bulk = Bulk.objects.filter(BULK_IS_RUNNING).select_for_update().filter(pk=found.pk).first()
        waiting_items = found.items.filter(ITEM_IS_WAITING)
        if bulk is None or waiting_items.filter(pk__in=[item.pk for item in asked_items]).count() != len(asked_items):
            return
        results = _apply_to_items(bulk, asked_items, answers)
        retried = {item.target_uuid for item in asked_items if item.attempts + 1 < max_attempts}
        retried &= {result.uuid for result in results if result.reason is RefusalReason.UNAVAILABLE}
        if retried:
            waiting_items.filter(target_uuid__in=retried).update(
                attempts=F("attempts") + 1, next_at=Now() + HOLDER_CHECK_PAUSE
            )
        results = [result for result in results if result.uuid not in retried]
        rows = [
            {"uuid": str(r.uuid), "outcome": r.outcome, "why": r.reason or "", "state": r.state, "text": r.text}
            for r in results
        ]
        conductor.open_cursor().execute(STORE_OUTCOMES, [msgspec.json.encode(rows).decode(), bulk.pk])
        for outcome, number in Counter(result.outcome for result in results).items():
            setattr(bulk, outcome, getattr(bulk, outcome) + number)
        bulk.updated_at = database_clock.now()
        if bulk.finished_count >= bulk.total or not waiting_items.exists():
            _end_bulk(bulk, BulkState.DONE, bulk.actor, EventSource(bulk.source))
        bulk.save()


def _ask_holders(bulk: Bulk, items: list[BulkItem]) -> safety.HolderAnswers:
    """Make the holder checks of these items, if the action needs any."""
    if bulk.action == bulk_admission.ADMIT or bulk.action in TARGET_ACTIONS:
        return safety.NO_ANSWERS
    seen = _build_seen_states(bulk, items)
    if bulk.action in bulk_commands.BULK_OPS:
        return bulk_commands.ask_holders_for_each(bulk.action, bulk.arguments, seen.words_by_device)
    return lifecycle.ask_holders_for_action(Action(bulk.action), DrainTarget(bulk.then), seen.words_by_device, seen)


def _build_seen_states(bulk: Bulk, items: list[BulkItem]) -> SeenStates:
    """Return the states that the devices of these items showed when they were chosen. A dry run includes held ones."""
    free_devices = {item.target_uuid for item in items if not item.held}
    return SeenStates({item.target_uuid: item.stood for item in items}, bulk.held_too or bulk.dry, free_devices)


def _apply_to_items(bulk: Bulk, items: list[BulkItem], answers: safety.HolderAnswers) -> list[ActionResult]:
    """Apply the action to these items and return the results; the changes of a dry run are rolled back."""
    token = request_id.set(bulk.request_id)
    seen = _build_seen_states(bulk, items)
    caller, source = Caller(bulk.actor, bulk.caller_id, frozenset(), ""), EventSource(bulk.source)
    try:
        with transaction.atomic():
            if target_action := TARGET_ACTIONS.get(bulk.action):
                results = target_action.apply(bulk, items, caller, source)
            elif bulk.action == bulk_admission.ADMIT:
                results = bulk_admission.admit_each(bulk.arguments, seen.words_by_device, caller, bulk.reason)
            elif bulk.action in bulk_commands.BULK_OPS:
                results = bulk_commands.place_command_for_each(
                    bulk.action, bulk.arguments, seen.words_by_device, caller, bulk.reason, answers, source
                )
            else:
                action, then, uuids = Action(bulk.action), DrainTarget(bulk.then), list(seen.words_by_device)
                results = lifecycle.apply_action(action, uuids, caller, bulk.reason, then, source, seen, answers)
            if bulk.dry:
                transaction.set_rollback(True)
    finally:
        request_id.reset(token)
    return results


def _end_bulk(bulk: Bulk, state: BulkState, actor: str, source: EventSource) -> None:
    """End a bulk action in `state`, with an event; a dry run becomes a draft again instead, and keeps its results."""
    now = database_clock.now()
    bulk.state, bulk.ended_at, bulk.updated_at = (BulkState.DRAFT if bulk.dry else state), now, now
    bulk.save()
    if not bulk.dry:
        changes: dict[str, Any] = {word: [None, getattr(bulk, word)] for word in DeviceOutcome}
        changes["not done"] = [None, bulk.total - bulk.finished_count]
        _record_bulk_event(bulk, state, changes, actor, source)


def _record_bulk_event(bulk: Bulk, verb: str, changes: dict[str, Any], actor: str, source: EventSource) -> None:
    """Record the event `bulk.VERB`."""
    subject = (bulk.uuid, str(bulk))
    conductor.record_event(f"bulk.{verb}", source, actor, subject=subject, changes=changes, reason=bulk.reason)


def delete_oldest_expired_bulk(now: datetime | None = None) -> bool:
    """Delete the oldest expired bulk action (DRAFT_RETENTION, BULK_RETENTION) and its items; True if it deleted one."""
    now = now or database_clock.now()
    is_expired = Q(state=BulkState.DRAFT, created_at__lt=now - DRAFT_RETENTION) | Q(ended_at__lt=now - BULK_RETENTION)
    with conductor.writing():
        expired = Bulk.objects.exclude(BULK_IS_RUNNING).filter(is_expired).order_by("id")
        oldest = expired.select_for_update().first()  # locked, because a draft may be confirmed meanwhile
        if oldest is None:
            return False
        oldest.delete()
        if oldest.state == BulkState.DRAFT:
            conductor.record_purge("bulk", 1, DRAFT_RETENTION, verb="were created as drafts")
        else:
            conductor.record_purge("bulk", 1, BULK_RETENTION)
        return True
