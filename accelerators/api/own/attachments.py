"""Attachments: accelerators for instances that run already, their progress, and the manual steps that remain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar
from uuid import UUID

import django_filters as filters
from django.db.models import OuterRef, QuerySet, Subquery
from django.db.models.functions import Now
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.own.fields import ReasonSerializer, RowSerializer, StrictTextField, StrictUuidField, UrlField
from accelerators.api.own.requests import ProjectOwnedView
from accelerators.devices.lifecycle import MAX_REASON
from accelerators.domain import libvirt_xml
from accelerators.models import Attachment, Intent
from accelerators.models.attachments import AttachmentState
from accelerators.workflows import attachments

WAIT_REASON = Intent.objects.filter(kind=attachments.ATTACHMENT_INTENT, key=OuterRef("key"), next_at__gt=Now()).values(
    "last_error"
)[:1]


class AttachmentFilter(filters.FilterSet):
    """Filter by instance, state, host or project. The project filter is useful only to callers who see several
    projects."""

    instance = filters.UUIDFilter()
    state = filters.MultipleChoiceFilter(choices=[(word, word) for word in AttachmentState], distinct=False)
    host = filters.CharFilter(help_text="Exactly this host name.")
    project = filters.CharFilter(field_name="project_id")


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
    reason = StrictTextField(
        max_length=MAX_REASON, allow_blank=True, required=False, help_text="Shown with it and in its events."
    )
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

    field_conditions: ClassVar[Mapping[str, Any]] = {
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
        read_only_fields = tuple({*fields} - {"instance", "profile", "device", "reason"})

    def get_hotplug(self, row: Attachment) -> str:
        """Return what an operator must do so that the guest sees the device; empty before it is attached."""
        return libvirt_xml.describe_plugging(attachments.get_handles(row), row.host)

    def get_libvirt(self, row: Attachment) -> list[str]:
        """Return the libvirt hostdev elements to add to the guest."""
        return libvirt_xml.render_hostdev_elements(attachments.get_handles(row))


class AttachmentView(ProjectOwnedView):
    """Accelerators attached to instances that were already running, newest first. Requests that Nova itself made are
    not listed."""

    policy = "attachment"
    default_ordering = "-created"
    member_actions = {"detach": ReasonSerializer}
    actions_to_confirm = ("detach",)
    response_serializers = dict.fromkeys(("create", "detach"), (202, AttachmentSerializer))
    serializer_class = AttachmentSerializer
    filterset_class = AttachmentFilter
    queryset = Attachment.objects.annotate(key=attachments.build_intent_key_expression()).annotate(
        waits=Subquery(WAIT_REASON)
    )

    @property
    def policy_rules(self) -> dict[str, str]:
        """Map reading to `get`, creating to `create` and detaching to `delete`."""
        rule = f"cyborg:{self.policy}"
        post = "delete" if self.detail else "create"
        return {"GET": f"{rule}:get", "HEAD": f"{rule}:get", "POST": f"{rule}:{post}"}

    def can_see_all_projects(self) -> bool:
        """Return whether the caller is an administrator or satisfies `cyborg:attachment:elevated`. Other callers see
        only their own project."""
        return self.caller.is_admin or self.is_rule_satisfied("cyborg:attachment:elevated")

    def load_row_details(self, rows: list[Attachment]) -> list[Attachment]:
        """Load the attach handles of all rows in one statement, and return the rows."""
        attachments.load_handles(rows)
        return rows

    def get_object(self) -> Attachment:
        """Return one attachment, after loading its attach handles."""
        return self.load_row_details([super().get_object()])[0]

    def create(self, request: Request) -> Response:
        """Start an attachment: 202. The address in Location shows its progress."""
        serializer = self.get_serializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        values = dict(serializer.validated_data)
        attachment = attachments.order_attachment(
            values.pop("instance"),
            self.caller,
            **values,
            source=self.caller.event_source,
            all_projects=self.can_see_all_projects(),
        )
        return self._accepted_response(attachment)

    def detach(self, request: Request, **kwargs: str) -> Response:
        """Detach, in whatever state the attachment is: 202. Detaching twice has the same effect as detaching once."""
        reason = self.validate_member_action_body(request).get("reason", "")
        return self._accepted_response(
            attachments.order_detachment(
                UUID(kwargs["uuid"]),
                self.caller,
                reason,
                self.caller.event_source,
                all_projects=self.can_see_all_projects(),
            )
        )

    def get_offered_actions(self, data: Mapping[str, Any]) -> tuple[str, ...]:
        """Offer `detach`, unless the attachment is already being detached or has been detached."""
        return () if data.get("state") in attachments.REVERTING_OR_ENDED else ("detach",)

    def _accepted_response(self, row: Attachment) -> Response:
        rows: QuerySet[Attachment] = self.get_queryset().filter(pk=row.pk)
        data = self.get_serializer(self.load_row_details([rows.get()])[0]).data
        return Response(data, 202, headers={"Location": data["url"]})
