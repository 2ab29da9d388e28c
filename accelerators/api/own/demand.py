"""Accelerator requests with their timeline, and accelerators: what is attached to whose instance.

Called by `routes`. Others' requests are not there at all: 404 (contract section 3.2).
"""

from __future__ import annotations

from typing import Any

import django_filters as filters
from django.db.models import QuerySet
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from accelerators import conductor
from accelerators.api.own import instances
from accelerators.api.own.records import EventSerializer
from accelerators.api.own.representation import (
    Chosen,
    DeviceReference,
    HandleReference,
    HostReference,
    ProfileReference,
    Text,
    Url,
)
from accelerators.api.own.views import Collection
from accelerators.models import AcceleratorRequest, Event
from accelerators.states import RequestState, Source

TIMELINE = 100
"""So many of a request's newest events; `/api/events/?subject=` has them all."""
STATES = [(word, word) for word in RequestState]


class RequestFilter(filters.FilterSet):
    """By state, instance, host, profile; project counts for who sees more than one."""

    state = filters.MultipleChoiceFilter(choices=STATES, distinct=False)
    instance = filters.UUIDFilter(field_name="instance_uuid")
    project = filters.CharFilter(field_name="project_id")
    host = filters.CharFilter(field_name="hostname", help_text="Exactly this host name.")
    profile = filters.CharFilter(field_name="profile__name", help_text="Exactly this profile name.")


class RequestSerializer(Chosen):
    """A request: what was asked for, where it stands, why it failed, what it holds."""

    url = Url("requests", source="uuid")
    project = serializers.CharField(source="project_id", read_only=True)
    instance = serializers.UUIDField(source="instance_uuid", read_only=True, allow_null=True)
    profile = ProfileReference(read_only=True)
    group = serializers.JSONField(read_only=True, help_text="The profile's group as it was when this was made.")
    handle = HandleReference(source="attach_handle", read_only=True, allow_null=True)

    class Meta:
        model = AcceleratorRequest
        fields: tuple[str, ...] = (
            "uuid",
            "url",
            "project",
            "state",
            "fault",
            "instance",
            "hostname",
            "device_rp_uuid",
            "profile",
            "group_id",
            "group",
            "handle",
            "label",
            "deadline",
            "created_at",
            "updated_at",
        )
        read_only_fields = fields


class RequestWithTimelineSerializer(RequestSerializer):
    """A request, and what happened to it, newest first."""

    timeline = serializers.SerializerMethodField()

    class Meta(RequestSerializer.Meta):
        fields = (*RequestSerializer.Meta.fields, "timeline")
        read_only_fields = fields

    def get_timeline(self, request: AcceleratorRequest) -> list[dict[str, Any]]:
        """Its events."""
        events = Event.objects.filter(subject=request.uuid).order_by("-at", "-id")[:TIMELINE]
        return EventSerializer(events, many=True, context={"base": self.context["base"]}).data


class Owned(Collection):
    """Rows of projects: each sees its own."""

    def get_queryset(self) -> QuerySet[Any]:
        """What the caller may see."""
        rows = super().get_queryset()
        return rows if self.sees_all() else rows.filter(project_id=self.caller.project_id)


class RequestView(Owned):
    """Accelerator requests, oldest first. Nova makes and binds them through `/v2/accelerator_requests`."""

    policy = "arq"
    shows = ("requests", "events")
    filterset_class = RequestFilter
    queryset = AcceleratorRequest.objects.select_related("profile", "attach_handle")

    def get_serializer_class(self) -> type[RequestSerializer]:
        """The timeline belongs to one request, not to a list."""
        return RequestWithTimelineSerializer if self.detail else RequestSerializer


class InstanceSerializer(serializers.Serializer):
    """An instance and its state in Nova; `unknown` while Nova cannot be asked, `gone` when it has no such instance."""

    uuid = serializers.UUIDField(read_only=True, allow_null=True)
    state = serializers.CharField(read_only=True)
    name = serializers.CharField(read_only=True)


class AcceleratorFilter(filters.FilterSet):
    """By driver, instance, device, host, project."""

    driver = filters.CharFilter(field_name="attach_handle__deployable__device__driver")
    instance = filters.UUIDFilter(field_name="instance_uuid")
    device = filters.UUIDFilter(field_name="attach_handle__deployable__device__uuid")
    host = filters.CharFilter(
        field_name="attach_handle__deployable__device__host__name", help_text="Exactly this host name."
    )
    project = filters.CharFilter(field_name="project_id")
    state = filters.MultipleChoiceFilter(choices=STATES, distinct=False)


class AcceleratorSerializer(Chosen):
    """One held attach handle: which device it is part of, whose instance has it, in which state that is."""

    url = Url("accelerators", source="uuid")
    request = Url("requests", source="uuid")
    project = serializers.CharField(source="project_id", read_only=True)
    instance = serializers.SerializerMethodField()
    driver = serializers.CharField(source="attach_handle.deployable.device.driver", read_only=True)
    device = DeviceReference(source="attach_handle.deployable.device", read_only=True)
    host = HostReference(source="attach_handle.deployable.device.host", read_only=True)
    handle = HandleReference(source="attach_handle", read_only=True)
    profile = ProfileReference(read_only=True)
    since = serializers.DateTimeField(source="updated_at", read_only=True, allow_null=True)
    label = Text(
        max_length=255, allow_blank=True, required=False, help_text="Your own words for it; up to 255 characters."
    )

    class Meta:
        model = AcceleratorRequest
        fields = (
            "uuid",
            "url",
            "request",
            "label",
            "project",
            "instance",
            "state",
            "driver",
            "device",
            "host",
            "handle",
            "profile",
            "since",
        )
        read_only_fields = ("uuid", "state")

    def get_instance(self, held: AcceleratorRequest) -> InstanceSerializer:
        """Joined with what Nova knows."""
        known = self.context["instances"].get(str(held.instance_uuid), instances.Known())
        return {"uuid": held.instance_uuid and str(held.instance_uuid), **known._asdict()}  # type: ignore[return-value]


class AcceleratorView(Owned):
    """What is attached, by driver and instance, joined with the instance's state. A project labels its own."""

    policy = "accelerator"
    serializer_class = AcceleratorSerializer
    filterset_class = AcceleratorFilter
    queryset = AcceleratorRequest.objects.filter(attach_handle__isnull=False).select_related(
        "profile", "attach_handle__deployable__device__host"
    )

    def sees_all(self) -> bool:
        """Admins, and whom the policy elevates."""
        return self.caller.is_admin or self.allowed("cyborg:accelerator:elevated")

    def prepare(self, rows: list[AcceleratorRequest]) -> list[AcceleratorRequest]:
        """Ask Nova once for the whole page."""
        asked = {instances.Instance(str(row.instance_uuid), row.project_id) for row in rows if row.instance_uuid}
        self.known = instances.states(asked)
        return rows

    def get_object(self) -> AcceleratorRequest:
        """One, with its instance's state."""
        return self.prepare([super().get_object()])[0]

    def get_serializer_context(self) -> dict[str, Any]:
        """With what Nova knows."""
        return super().get_serializer_context() | {"instances": getattr(self, "known", {})}

    def partial_update(self, request: Request, **kwargs: str) -> Response:
        """Label it."""
        held = self.get_object()
        serializer = self.get_serializer(held, data=request.data, partial=True)
        serializer.is_valid(raise_exception=True)
        was, label = held.label, serializer.validated_data.get("label", held.label)
        with conductor.writing():
            if AcceleratorRequest.objects.filter(pk=held.pk).exclude(label=label).update(label=label):
                about, changes = (held.uuid, str(held.uuid)), {"label": [was, label]}
                conductor.record("request.labelled", Source.API, self.caller.name, subject=about, changes=changes)
        held.label = label
        return Response(serializer.data)
