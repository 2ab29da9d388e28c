"""Set the labels of accelerators that are held: a project's own names for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from django.db.models import F, QuerySet

from accelerators import conductor
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason
from accelerators.domain.generations import refuse_if_changed
from accelerators.domain.states import DeviceOutcome, EventSource
from accelerators.models import AcceleratorRequest

MAX_LABELLED = 1000
"""Maximum number of accelerators that are labelled in one transaction."""
NOT_ALLOWED = "not_allowed"
"""Reason of a refusal: the caller may see the accelerator, and may not change what its project has."""


@dataclass(frozen=True)
class LabelResult:
    """Outcome for one accelerator, or its forecast. `label` is the label before; `reason` is the code of a refusal."""

    request: UUID
    outcome: DeviceOutcome
    host: str = ""
    label: str = ""
    reason: str = ""
    text: str = ""


def forecast_labels(
    visible: QuerySet[AcceleratorRequest],
    uuids: Sequence[UUID],
    label: str,
    may_change: Callable[[str], bool],
    seen: Mapping[UUID, str] | None = None,
) -> list[LabelResult]:
    """Predict the outcome of `set_labels` for each of these accelerators. Costs one statement."""
    requests = {request.uuid: request for request in visible.filter(uuid__in=uuids)}
    return [_decide(requests.get(uuid), uuid, label, may_change, seen) for uuid in dict.fromkeys(uuids)]


def set_labels(
    visible: QuerySet[AcceleratorRequest],
    uuids: Sequence[UUID],
    label: str,
    may_change: Callable[[str], bool],
    caller: Caller,
    source: EventSource,
    seen: Mapping[UUID, str] | None = None,
    reason: str = "",
    generation: int | None = None,
) -> list[LabelResult]:
    """Set the label of each of these accelerators in one transaction, with an event for each; return the outcomes.

    `visible` are the requests that the caller may see, and `may_change` says whether the caller may change those of a
    project. `reason` is stored with the events. An accelerator whose label is not the one that was `seen` is refused. A
    refusal stops no other. Locks the requests.

    Raises ChangedMeanwhileError, and changes nothing, if the label of one would change and its generation is not
    `generation`, which is for a single accelerator.
    """
    with conductor.writing():
        locked = visible.filter(uuid__in=uuids).order_by("id").select_for_update(of=("self",))
        requests = {request.uuid: request for request in locked}
        results = [_decide(requests.get(uuid), uuid, label, may_change, seen) for uuid in dict.fromkeys(uuids)]
        moved = [result for result in results if result.outcome == DeviceOutcome.MOVED]
        for result in moved:
            refuse_if_changed(f"The accelerator {result.request}", requests[result.request].generation, generation)
        AcceleratorRequest.objects.filter(uuid__in=[result.request for result in moved]).update(
            label=label, generation=F("generation") + 1
        )
        events = [
            conductor.build_event(
                "request.labelled",
                source,
                caller.name,
                subject=(result.request, str(result.request)),
                changes={"label": [result.label, label]},
                reason=reason,
            )
            for result in moved
        ]
        if events:
            conductor.record_events(events)
    return results


def _decide(
    request: AcceleratorRequest | None,
    uuid: UUID,
    label: str,
    may_change: Callable[[str], bool],
    seen: Mapping[UUID, str] | None,
) -> LabelResult:
    """Return the outcome of a label for one request; None if there is no such request."""
    refused = DeviceOutcome.REFUSED
    if request is None:
        return LabelResult(uuid, refused, reason=RefusalReason.NOT_FOUND, text=f"There is no held accelerator {uuid}.")
    host, present = request.hostname or "", request.label
    if not may_change(request.project_id):
        text = "Only its project, or a caller who may change all projects, can label it."
        return LabelResult(uuid, refused, host, present, NOT_ALLOWED, text)
    if present == label:
        return LabelResult(uuid, DeviceOutcome.UNCHANGED, host, present, text="has this label already")
    if seen is not None and seen.get(uuid) != present:
        text = f"Its label was {seen.get(uuid)!r} when this was decided; it is {present!r} now. Look at it again."
        return LabelResult(uuid, refused, host, present, RefusalReason.CONFLICT, text)
    text = f"{present!r} becomes {label!r}" if present else f"gets the label {label!r}"
    return LabelResult(uuid, DeviceOutcome.MOVED, host, present, text=text)
