"""Requests that start a bulk action: its preview, or its start with the token of the preview."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rest_framework import serializers
from rest_framework.response import Response

from accelerators.api.own.previews import PreviewSerializer, describe_forecast, respond_with_preview, storing_draft
from accelerators.commands import command_queue
from accelerators.domain.caller import Caller
from accelerators.domain.device_actions import Action
from accelerators.domain.states import BulkTarget, DeviceOutcome, DrainTarget
from accelerators.models import Bulk
from accelerators.workflows import bulk_actions, bulk_admission, bulk_commands, confirmations

MAX_PREVIEW_DEVICES = 20
DEVICE_ACTIONS = (*(action.value for action in Action), bulk_admission.ADMIT, *bulk_commands.LISTED_OPS)
"""The actions on devices that have no arguments."""
ALL_ACTIONS = (*DEVICE_ACTIONS, bulk_commands.PARTITION, *bulk_actions.TARGET_ACTIONS)
"""The actions that a request to `/api/bulk_actions/` can start, and that a stored bulk action can have. A change of the
number of units is started below `/api/accelerators/`. A conductor of a newer release may have stored other actions."""


class PreviewedDeviceSerializer(serializers.Serializer[Any]):
    """A device of a preview, or another object, with its predicted outcome."""

    target = serializers.UUIDField(read_only=True, help_text="The uuid of the device, attachment or accelerator.")
    device = serializers.UUIDField(read_only=True, allow_null=True, help_text="The device; null for another object.")
    name = serializers.CharField(read_only=True)
    host = serializers.CharField(read_only=True)
    state = serializers.CharField(read_only=True)
    outcome = serializers.ChoiceField(DeviceOutcome.choices(), read_only=True)
    held = serializers.BooleanField(read_only=True)
    text = serializers.CharField(read_only=True)


class BulkPreviewSerializer(PreviewSerializer):
    """The forecast of a bulk action, and the first objects of its set."""

    target = serializers.ChoiceField(BulkTarget.choices(), read_only=True, help_text="The kind of the objects.")
    action = serializers.ChoiceField([(word, word) for word in ALL_ACTIONS], read_only=True)
    then = serializers.ChoiceField(DrainTarget.choices(), read_only=True)
    counts = serializers.DictField(child=serializers.IntegerField(), read_only=True)
    instances = serializers.IntegerField(
        read_only=True, allow_null=True, help_text="How many instances have the objects; null for devices."
    )
    units = serializers.IntegerField(
        read_only=True, allow_null=True, help_text="How many held units would be given back; null for devices."
    )
    devices = PreviewedDeviceSerializer(many=True, read_only=True)


def preview_or_start(
    caller: Caller,
    values: Mapping[str, Any],
    described: Mapping[str, Any],
    make_draft: Callable[[], Bulk],
    refusals: Sequence[str] = (),
) -> Bulk | Response:
    """Start the draft that `make_draft` stores and return it, or return the answer with its preview.

    With a token, the draft of that preview is started. `values` are those of the body, and `described` is what the
    token is bound to. `refusals` are the reasons of further refusals, which the preview shows. Raises
    NotConfirmedError, and RefusedError: STALE_PREVIEW, or CONFLICT if another request takes the draft first.
    """
    reason = command_queue.check_reason(values.get("reason", ""))
    if token := values.get("token"):
        draft = Bulk.objects.filter(uuid=confirmations.read_token(token, caller, described)).first()
        if draft is None or not bulk_actions.confirm_draft(draft, reason, held_too=True):
            raise confirmations.stale_preview_error()
        return draft
    with storing_draft(values) as storage:
        draft = make_draft()
        preview = bulk_actions.preview_bulk(draft)
        if values.get("dry_run") or preview.needs_confirmation:
            issued = storage.issue_token(preview.needs_confirmation, draft.uuid, caller, described)
            shown = _describe_preview(draft, preview)
            shown["forecast"] += [
                {"outcome": DeviceOutcome.REFUSED.value, "number": 1, "held": False, "text": text} for text in refusals
            ]
            return respond_with_preview(shown, issued, values.get("dry_run", False))
    if not bulk_actions.confirm_draft(draft, reason, held_too=False):
        raise confirmations.lost_draft_error()
    return draft


def _describe_preview(draft: Bulk, preview: bulk_actions.BulkPreview) -> dict[str, Any]:
    """Return a preview as `BulkPreviewSerializer` shows it, without the token."""
    return {
        "action": draft.action,
        "target": draft.target,
        "then": draft.then,
        "total": draft.total,
        "hosts": preview.host_count,
        "held": preview.held_count,
        "counts": {outcome.value: preview.count_objects(outcome) for outcome in DeviceOutcome},
        "forecast": [describe_forecast(one) for one in preview.forecasts],
        "instances": preview.reach and preview.reach.instances,
        "units": preview.reach and preview.reach.units,
        "devices": [
            {
                "target": item.target_uuid,
                "device": item.target_uuid if draft.target == BulkTarget.DEVICE else None,
                "name": item.target_name,
                "host": item.host,
                "state": item.stood,
                "outcome": one.outcome.value,
                "held": one.held,
                "text": one.text,
            }
            for item, one in bulk_actions.forecast_first_items(
                draft, MAX_PREVIEW_DEVICES, unreachable_agents=preview.unreachable_agents
            )
        ],
        "confirm": preview.needs_confirmation,
    }
