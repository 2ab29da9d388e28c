"""Accelerator requests with their timeline.

A request of another project is answered with 404, as if it did not exist (contract section 3.2).
"""

from __future__ import annotations

from typing import Any, cast

import django_filters as filters
from django.db.models import QuerySet
from rest_framework import serializers

from accelerators.api.own.events import EventSerializer
from accelerators.api.own.fields import HandleReference, ProfileReference, RowSerializer, UrlField
from accelerators.api.own.filters import ListFilter, choice_filter, host_filter
from accelerators.api.own.views import CollectionView
from accelerators.domain.states import RequestState
from accelerators.models import AcceleratorRequest, Event

TIMELINE_EVENTS = 100
"""The number of newest events that a timeline shows; `/api/events/?subject=` lists all of them."""


class RequestFilter(ListFilter):
    """Filter by state, instance, project, host or profile. The project filter is useful only to callers who see several
    projects."""

    state = choice_filter(RequestState)
    instance = filters.UUIDFilter(field_name="instance_uuid")
    project = filters.CharFilter(field_name="project_id")
    host = host_filter("hostname")
    profile = filters.CharFilter(field_name="profile__name", help_text="Exactly this profile name.")


class RequestSerializer(RowSerializer):
    """An accelerator request: what was asked for, its state, the reason of a failure, and the attach handle it
    holds."""

    url = UrlField("requests", source="uuid")
    project = serializers.CharField(source="project_id", read_only=True)
    instance = serializers.UUIDField(source="instance_uuid", read_only=True, allow_null=True)
    profile = ProfileReference(read_only=True)
    group = serializers.JSONField(
        read_only=True, help_text="The group of the profile, as it was when the request was made."
    )
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


class RequestWithTimelineSerializer(RequestSerializer):
    """An accelerator request with its newest events, newest first."""

    timeline = serializers.SerializerMethodField()

    class Meta(RequestSerializer.Meta):
        fields = (*RequestSerializer.Meta.fields, "timeline")

    def get_timeline(self, request: AcceleratorRequest) -> list[dict[str, Any]]:
        """The newest events of the request."""
        events = Event.objects.filter(subject=request.uuid).order_by("-at", "-id")[:TIMELINE_EVENTS]
        serializer = EventSerializer(events, many=True, context={"base": self.context["base"]})
        return cast("list[dict[str, Any]]", serializer.data)  # The stub does not know what `many` changes.


class ProjectOwnedView(CollectionView):
    """Rows that belong to projects. A project sees only its own rows."""

    def get_queryset(self) -> QuerySet[Any]:
        """Return the rows that `can_see_all_projects` allows: those of every project, or only those of the caller's
        project."""
        rows = super().get_queryset()
        return rows if self.can_see_all_projects() else rows.filter(project_id=self.caller.project_id)


class RequestView(ProjectOwnedView):
    """Accelerator requests, oldest first. Nova creates and binds them through `/v2/accelerator_requests`."""

    policy, read_policy = "arq", "request"
    elevated_rule = "cyborg:request:elevated"
    etag_collections = ("requests", "events")
    filterset_class = RequestFilter
    queryset = AcceleratorRequest.objects.select_related("profile", "attach_handle")

    def get_serializer_class(self) -> type[RequestSerializer]:
        """Return the serializer with the timeline for a single request, and the one without it for lists."""
        return RequestWithTimelineSerializer if self.detail else RequestSerializer
