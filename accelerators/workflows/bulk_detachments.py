"""Detach many attachments: a bulk action.

Each attachment is ordered to be detached by `attachment_orders.order_detachment`, which compares it with what it was
when it was chosen. The job `attachments` then detaches it. A detachment never fails: it is retried until it succeeds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from uuid import UUID

from django.db.models import Q, QuerySet

from accelerators import conductor
from accelerators.devices.lifecycle import ActionResult
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import BulkTarget, DeviceOutcome, EventSource
from accelerators.models import Attachment, Bulk, BulkItem
from accelerators.models.attachments import AttachmentState
from accelerators.workflows import attachment_orders
from accelerators.workflows.attachment_orders import DetachmentForecast
from accelerators.workflows.bulk_targets import BulkForecast, InstanceReach, TargetAction

DETACH = "detach"
"""The bulk action that detaches attachments."""
BATCH_SIZE = 1000
_NOT_CONFIRMED_TEXT = "Requests hold units for it, and the confirmation did not include attachments that hold units."


def predict_detachment(item: BulkItem, forecast: DetachmentForecast | None) -> BulkForecast:
    """Predict what the detachment of an item's attachment would do. This is a pure function.

    `forecast` is that of the attachment now; None if it does not exist any more.
    """
    if forecast is None:
        return BulkForecast(DeviceOutcome.REFUSED, "does not exist any more", held=False)
    if not forecast.changes_something:
        return BulkForecast(DeviceOutcome.UNCHANGED, f"is {forecast.state} already", held=False)
    is_held = bool(forecast.held_units)
    if forecast.as_text != item.stood:
        text = f"has changed since it was chosen; it is {forecast.state} now"
        return BulkForecast(DeviceOutcome.REFUSED, text, is_held)
    is_attached = forecast.state == AttachmentState.ATTACHED
    text = "is detached" if is_attached else "is undone before it is attached"
    return BulkForecast(DeviceOutcome.MOVED, text, is_held)


def _build_items(bulk: Bulk, chosen: QuerySet[Attachment]) -> Iterator[BulkItem]:
    """Yield an item for each attachment, in the order of their ids. Costs two statements per BATCH_SIZE attachments."""
    chosen_ids = list(chosen.order_by("id").values_list("id", flat=True))
    for start in range(0, len(chosen_ids), BATCH_SIZE):
        batch = list(Attachment.objects.filter(id__in=chosen_ids[start : start + BATCH_SIZE]).order_by("id"))
        forecasts = attachment_orders.forecast_detachments(batch)
        for row in batch:
            forecast = forecasts[row.uuid]
            yield BulkItem(
                bulk=bulk,
                target_uuid=row.uuid,
                target_name=str(row)[:255],
                host=row.host,
                stood=forecast.as_text,
                held=forecast.held_device_count > 0,
            )


def _predict(bulk: Bulk, items: Sequence[BulkItem]) -> list[BulkForecast]:
    """Return a forecast for each item. Costs two statements."""
    rows = _query_attachments(bulk, [item.target_uuid for item in items])
    forecasts = attachment_orders.forecast_detachments(list(rows))
    return [predict_detachment(item, forecasts.get(item.target_uuid)) for item in items]


def _apply(bulk: Bulk, items: Sequence[BulkItem], caller: Caller, source: EventSource) -> list[ActionResult]:
    """Order the detachment of each item's attachment; return a result for each. Locks the attachments.

    Without `held_too`, an attachment for which requests hold units is refused; a dry run includes it.
    """
    with conductor.writing():
        locked = _query_attachments(bulk, [item.target_uuid for item in items]).order_by("id").select_for_update()
        rows = {row.uuid: row for row in locked}
        forecasts = attachment_orders.forecast_detachments(list(rows.values()))
        return [_detach(bulk, item, rows.get(item.target_uuid), forecasts, caller, source) for item in items]


def _detach(
    bulk: Bulk,
    item: BulkItem,
    row: Attachment | None,
    forecasts: dict[UUID, DetachmentForecast],
    caller: Caller,
    source: EventSource,
) -> ActionResult:
    """Order the detachment of one locked attachment; return the result. `row` is None if it does not exist any more."""
    if row is None:
        text, reason = "The attachment does not exist any more.", RefusalReason.NOT_FOUND
        return ActionResult(item.target_uuid, "refused", text=text, reason=reason)
    described, forecast = (item.target_name, row.host), forecasts[row.uuid]
    if not forecast.changes_something:
        return ActionResult(row.uuid, "unchanged", *described, row.state, f"is {row.state} already")
    try:
        if forecast.held_units and forecast.as_text == item.stood and not (bulk.held_too or bulk.dry):
            raise RefusedError(RefusalReason.IN_USE, _NOT_CONFIRMED_TEXT)
        after = attachment_orders.order_detachment(row.uuid, caller, bulk.reason, source, seen=item.stood)
    except RefusedError as refused:
        return ActionResult(row.uuid, "refused", *described, row.state, refused.text, refused.reason)
    return ActionResult(row.uuid, "moved", *described, after.state)


def _query_attachments(bulk: Bulk, uuids: Collection[UUID]) -> QuerySet[Attachment]:
    """Return the attachments with these uuids that the bulk action may reach."""
    of_project = Q(project_id=bulk.project_id) if bulk.project_id else Q()
    return Attachment.objects.filter(of_project, uuid__in=uuids)


def _count_reach(bulk: Bulk) -> InstanceReach:
    """Return the number of instances, and of units that requests hold for attachments which would be detached. Costs
    three statements."""
    rows = list(_query_attachments(bulk, list(bulk.items.values_list("target_uuid", flat=True))))
    forecasts = attachment_orders.forecast_detachments(rows).values()
    units = sum(len(one.held_units) for one in forecasts if one.changes_something)
    return InstanceReach(len({row.instance for row in rows}), units)


DETACH_ACTION = TargetAction(BulkTarget.ATTACHMENT, _build_items, _predict, _apply, _query_attachments, _count_reach)
