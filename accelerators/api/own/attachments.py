"""Attachments: accelerators for instances that run already, their progress, and the manual steps that remain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

import django_filters as filters
from django.db.models import OuterRef, Subquery
from django.db.models.functions import Now
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.own.fields import (
    ReasonField,
    ReasonSerializer,
    RowSerializer,
    StrictTextField,
    StrictUuidField,
    UrlField,
)
from accelerators.api.own.filters import BulkActionFilter, ListFilter, choice_filter, host_filter
from accelerators.api.own.previews import (
    TOKEN_EXCLUDES_DRY_RUN,
    ConfirmationSerializer,
    PreviewSerializer,
    respond_with_preview,
)
from accelerators.api.own.requests import ProjectOwnedView
from accelerators.domain import libvirt_xml
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import DeviceOutcome
from accelerators.models import Attachment, Intent
from accelerators.models.attachments import AttachmentState
from accelerators.workflows import attachment_orders, confirmations
from accelerators.workflows.attachment_orders import DetachmentForecast

WAIT_REASON = Intent.objects.filter(
    kind=attachment_orders.ATTACHMENT_INTENT, key=OuterRef("key"), next_at__gt=Now()
).values("last_error")[:1]


class AttachmentFilter(ListFilter):
    """Filter by instance, state, host, bulk action or project. The project filter is useful only to callers who see
    several projects."""

    instance = filters.UUIDFilter()
    state = choice_filter(AttachmentState)
    host = host_filter()
    project = filters.CharFilter(field_name="project_id")
    bulk_action = BulkActionFilter()


class StepSerializer(serializers.Serializer[Any]):
    """One step of the attachment that was done."""

    step = serializers.CharField(read_only=True)
    at = serializers.DateTimeField(read_only=True)
    text = serializers.CharField(read_only=True)


class AttachmentSerializer(RowSerializer):
    """Accelerators that are attached to one running instance. To attach some, send `instance`, and either `profile` or
    `device`."""

    url = UrlField("attachments", source="uuid")
    instance = StrictUuidField(help_text="The instance in Nova.")
    profile = StrictTextField(
        max_length=255,
        required=False,
        allow_blank=True,
        help_text="A device profile, by name or uuid.",
    )
    device = StrictUuidField(
        required=False, allow_null=True, help_text="A device, one unit of which is attached; instead of a profile."
    )
    reason = ReasonField("Shown with it and in its events.")
    project = serializers.CharField(source="project_id", read_only=True)
    by = serializers.CharField(source="actor", read_only=True, help_text="Who asked for it.")
    steps = StepSerializer(many=True, read_only=True)
    requests = serializers.ListField(
        child=serializers.UUIDField(), read_only=True, help_text="The accelerator requests made for it."
    )
    waits = serializers.CharField(
        read_only=True, allow_null=True, help_text="What it is waiting for now; it is retried automatically."
    )
    hotplug = serializers.SerializerMethodField()
    libvirt = serializers.SerializerMethodField()

    field_conditions = {
        "oneOf": [
            {"required": ["profile"], "properties": {"profile": {"pattern": r"\S"}, "device": {"type": "null"}}},
            {"required": ["device"], "properties": {"device": {"type": "string"}, "profile": {"maxLength": 0}}},
        ]
    }

    class Meta:
        model = Attachment
        fields = (
            "uuid",
            "url",
            "instance",
            "project",
            "host",
            "profile",
            "device",
            "state",
            "fault",
            "waits",
            "hotplug",
            "libvirt",
            "steps",
            "requests",
            "by",
            "reason",
            "attached_at",
            "ended_at",
            "created_at",
            "updated_at",
        )

    def get_hotplug(self, row: Attachment) -> str:
        """Return what an operator must do so that the guest sees the device; empty before it is attached."""
        return libvirt_xml.describe_plugging(attachment_orders.get_handles(row), row.host)

    def get_libvirt(self, row: Attachment) -> list[str]:
        """Return the libvirt hostdev elements to add to the guest."""
        return libvirt_xml.render_hostdev_elements(attachment_orders.get_handles(row))


class DetachSerializer(ConfirmationSerializer, ReasonSerializer):
    """The body of a detachment: an optional reason, and the confirmation."""

    field_conditions = TOKEN_EXCLUDES_DRY_RUN


class DetachPreviewSerializer(PreviewSerializer):
    """The forecast of a detachment. It has to be confirmed if requests hold units for the attachment."""

    attachment = serializers.UUIDField(read_only=True)
    instance = serializers.UUIDField(read_only=True)
    state = serializers.CharField(read_only=True)
    requests = serializers.ListField(
        child=serializers.UUIDField(), read_only=True, help_text="The requests that hold units for it."
    )


class AttachmentView(ProjectOwnedView):
    """Accelerators attached to instances that were already running, newest first. Requests that Nova itself made are
    not listed."""

    policy = "attachment"
    elevated_rule = "cyborg:attachment:get_elevated"
    elevated_write_rule = "cyborg:attachment:elevated"
    default_ordering = "-created"
    member_actions = {"detach": DetachSerializer}
    actions_to_confirm = ("detach",)
    preview_serializers = {"detach": DetachPreviewSerializer}
    response_serializers = dict.fromkeys(("create", "detach"), (202, AttachmentSerializer))
    serializer_class = AttachmentSerializer
    filterset_class = AttachmentFilter
    queryset = Attachment.objects.annotate(key=attachment_orders.build_intent_key_expression()).annotate(
        waits=Subquery(WAIT_REASON)
    )

    @property
    def policy_rules(self) -> dict[str, str]:
        """Map reading to `cyborg:attachment:get`, creating to `…:create` and detaching to `…:delete`."""
        rule = f"cyborg:{self.policy}"
        post = "delete" if self.detail else "create"
        return {"GET": f"{rule}:get", "HEAD": f"{rule}:get", "POST": f"{rule}:{post}"}

    def load_row_details(self, rows: list[Attachment]) -> list[Attachment]:
        """Load the attach handles of all rows in one statement, and return the rows."""
        attachment_orders.load_handles(rows)
        return rows

    def get_object(self) -> Attachment:
        """Return one attachment, after loading its attach handles; 404 if the caller may not see it."""
        return self.load_row_details([super().get_object()])[0]

    def create(self, request: Request) -> Response:
        """Start an attachment: 202. The address in Location shows its progress."""
        values = self.validate_body()
        attachment = attachment_orders.order_attachment(
            values.pop("instance"),
            self.caller,
            **values,
            source=self.caller.event_source,
            all_projects=self.can_change_all_projects(),
        )
        return self.respond_with_stored_row(attachment.uuid, 202)

    def detach(self, request: Request, **kwargs: str) -> Response:
        """Detach, in whatever state the attachment is: 202. Detaching twice has the same effect as detaching once.

        With `dry_run` the answer is the preview: 200. While requests hold units for the attachment, the answer without
        a token is 409, with the preview.
        """
        values, uuid = self.validate_body(), UUID(kwargs["uuid"])
        row, seen, token = self.get_queryset().filter(uuid=uuid).first(), "", values.get("token")
        if row is not None:  # otherwise the order is refused, with the reason
            self.require_project(row.project_id)
            forecast = attachment_orders.forecast_detachment(row)
            seen = forecast.as_text
            if token:
                if confirmations.read_token(token, self.caller, _describe_detachment(forecast)) != uuid:
                    raise confirmations.stale_preview_error()
            elif values.get("dry_run") or forecast.held_device_count:
                return self._respond_with_preview(row, forecast, values.get("dry_run", False))
        reason, source = values.get("reason", ""), self.caller.event_source
        try:
            attachment_orders.order_detachment(
                uuid, self.caller, reason, source, all_projects=self.can_change_all_projects(), seen=seen
            )
        except RefusedError as refused:
            if row is None or token or refused.reason is not RefusalReason.IN_USE:
                raise
            present = self.get_object()
            return self._respond_with_preview(present, attachment_orders.forecast_detachment(present), False)
        return self.respond_with_stored_row(uuid, 202)

    def _respond_with_preview(self, row: Attachment, forecast: DetachmentForecast, is_dry_run: bool) -> Response:
        """Return the answer with the preview of a detachment. Raises NotConfirmedError (409) unless it is a dry run."""
        issued = confirmations.issue_token(row.uuid, self.caller, _describe_detachment(forecast))
        return respond_with_preview(_describe_preview(row, forecast), issued, is_dry_run)

    def get_offered_actions(self, data: Mapping[str, Any]) -> tuple[str, ...]:
        """Offer `detach`, unless the attachment is already being detached or has been detached."""
        return () if data.get("state") in attachment_orders.REVERTING_OR_ENDED else ("detach",)


def _describe_detachment(forecast: DetachmentForecast) -> dict[str, Any]:
    """Return the values that the token of a detachment is bound to, beside the caller and the attachment."""
    return {"kind": "detachment", "seen": forecast.as_text}


def _describe_preview(row: Attachment, forecast: DetachmentForecast) -> dict[str, Any]:
    """Return a preview as `DetachPreviewSerializer` shows it, without the token."""
    if not forecast.changes_something:
        outcome, text = DeviceOutcome.UNCHANGED, f"is {row.state} already"
    else:
        outcome = DeviceOutcome.MOVED
        text = "is detached" if row.state == AttachmentState.ATTACHED else "is undone before it is attached"
    held = forecast.held_device_count
    return {
        "attachment": row.uuid,
        "instance": row.instance,
        "state": row.state,
        "requests": [request for request, _ in forecast.held_units],
        "total": 1,
        "hosts": 1,
        "held": held,
        "forecast": [{"outcome": outcome.value, "number": 1, "held": bool(held), "text": text}],
        "confirm": bool(held),
    }
