"""Set the label of many accelerators that instances hold: a bulk action.

`accelerators.requests.labels` decides about each accelerator. One whose label is not the one that it had when it was
chosen is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any
from uuid import UUID

from django.db.models import Q, QuerySet

from accelerators.devices.lifecycle import ActionResult
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason
from accelerators.domain.states import BulkTarget, EventSource
from accelerators.models import AcceleratorRequest, Bulk, BulkItem
from accelerators.requests import labels
from accelerators.workflows.bulk_targets import BulkForecast, InstanceReach, TargetAction

LABEL = "label"
"""The bulk action that labels accelerators. Its argument `label` is the new label; an empty one removes the labels."""


def build_arguments(label: str) -> dict[str, Any]:
    """Return the arguments of a bulk action that sets this label."""
    return {"label": label}


def query_held_accelerators() -> QuerySet[AcceleratorRequest]:
    """Return the requests that hold an accelerator."""
    return AcceleratorRequest.objects.filter(attach_handle__isnull=False)


def _build_items(bulk: Bulk, chosen: QuerySet[AcceleratorRequest]) -> Iterator[BulkItem]:
    """Yield an item for each request, in the order of their ids. Costs one statement."""
    columns = ("uuid", "hostname", "label", "attach_handle__deployable__device__model", "instance_uuid")
    for uuid, host, label, model, instance in chosen.order_by("id").values_list(*columns):
        name = f"{model or 'unit'} of instance {instance or 'none'}"
        yield BulkItem(bulk=bulk, target_uuid=uuid, target_name=name[:255], host=host or "", stood=label)


def _predict(bulk: Bulk, items: Sequence[BulkItem]) -> list[BulkForecast]:
    """Return a forecast for each item. Costs one statement."""
    seen = {item.target_uuid: item.stood for item in items}
    visible, label = _query_accelerators(bulk, seen), _get_label(bulk)
    results = labels.forecast_labels(visible, list(seen), label, lambda project: True, seen)
    return [BulkForecast(result.outcome, result.text, held=False) for result in results]


def _apply(bulk: Bulk, items: Sequence[BulkItem], caller: Caller, source: EventSource) -> list[ActionResult]:
    """Set the label of each item's accelerator; return a result for each. Locks the requests."""
    seen = {item.target_uuid: item.stood for item in items}
    results = labels.set_labels(
        _query_accelerators(bulk, seen),
        list(seen),
        _get_label(bulk),
        lambda project: True,
        caller,
        source,
        seen,
        bulk.reason,
    )
    return [
        ActionResult(
            one.request,
            one.outcome.value,  # type: ignore[arg-type]  # the values of DeviceOutcome
            host=one.host,
            text=one.text,
            reason=RefusalReason(one.reason) if one.reason else None,
        )
        for one in results
    ]


def _get_label(bulk: Bulk) -> str:
    """Return the label that a bulk action sets."""
    return str((bulk.arguments or {}).get("label", ""))


def _query_accelerators(bulk: Bulk, uuids: Collection[UUID]) -> QuerySet[AcceleratorRequest]:
    """Return the accelerators with these uuids that are held and that the bulk action may reach."""
    of_project = Q(project_id=bulk.project_id) if bulk.project_id else Q()
    return query_held_accelerators().filter(of_project, uuid__in=list(uuids))


def _count_reach(bulk: Bulk) -> InstanceReach:
    """Return the number of instances; a label changes no unit. Costs two statements."""
    chosen = _query_accelerators(bulk, list(bulk.items.values_list("target_uuid", flat=True)))
    return InstanceReach(chosen.order_by().values("instance_uuid").distinct().count(), 0)


LABEL_ACTION = TargetAction(BulkTarget.ACCELERATOR, _build_items, _predict, _apply, _query_accelerators, _count_reach)
