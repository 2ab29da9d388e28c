"""Resources of our own API for agents (state, version, revocation) and for the current load of devices."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import django_filters as filters
from django.db.models import QuerySet
from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.browsable import BrowsableRenderer
from accelerators.api.json import JsonRenderer
from accelerators.api.own import errors
from accelerators.api.own.fields import DeviceReference, HostReference, ReasonSerializer, RowSerializer, UrlField
from accelerators.api.own.filters import host_filter, single_choice_filter
from accelerators.api.own.views import CollectionView
from accelerators.domain.states import AgentState, EventSource
from accelerators.models import Device
from agents import key_revocation, telemetry
from agents.liveness import build_state_condition, get_agent_state, get_last_heard
from agents.models import Agent


class AgentFilter(filters.FilterSet):
    """Filters agents by host name, state and version."""

    host = host_filter("host__name")
    state = single_choice_filter(AgentState, method="filter_by_state")
    version = filters.CharFilter()

    def filter_by_state(self, agents: QuerySet[Agent], name: str, state: str) -> QuerySet[Agent]:
        """Filter by state: up, late or down by the age of the lease, or revoked or clone."""
        return agents.filter(build_state_condition(state))


class AgentSerializer(RowSerializer):
    """The agent of a host.

    `state` is up, late or down by the time it was last heard; revoked; or clone, if two processes used its key at once.
    """

    uuid = serializers.UUIDField(
        source="host.uuid", read_only=True, help_text="UUID of its host, which has only one agent."
    )
    url = UrlField("agents", source="host.uuid")
    host = HostReference(read_only=True)
    state = serializers.SerializerMethodField()
    seen_at = serializers.SerializerMethodField()

    class Meta:
        model = Agent
        fields = (
            "uuid",
            "url",
            "host",
            "state",
            "seen_at",
            "version",
            "wire",
            "boot_id",
            "public_key",
            "key_since",
            "barred_reason",
            "address",
            "fingerprint",
            "newest_certificate",
            "connected_at",
            "enrolled_at",
        )

    def get_state(self, agent: Agent) -> AgentState:
        """State of the agent: up, late, down, revoked or clone."""
        return get_agent_state(agent)

    def get_seen_at(self, agent: Agent) -> datetime | None:
        """When the agent was last heard; null if never."""
        return get_last_heard(agent)


class AgentView(CollectionView):
    """Agents, ordered by the name of their host. They can be listed, shown and revoked."""

    policy = "agent"
    member_actions = {"revoke": ReasonSerializer}
    actions_to_confirm = ("revoke",)
    sort_fields = {"host": "host__name", "enrolled": "id"}
    default_ordering = "host"
    lookup_field = "host__uuid"
    lookup_url_kwarg = "uuid"
    serializer_class = AgentSerializer
    filterset_class = AgentFilter
    queryset = Agent.objects.select_related("host__lease")

    def revoke(self, request: Request, **kwargs: str) -> Response:
        """Revoke an agent: end its connections and bar its key.

        The host can come back only with a new join token and a new key.
        """
        reason = self.validate_body().get("reason", "")
        key_revocation.revoke_agent(self.get_object(), self.caller.name, reason, EventSource.API)
        return Response(self.get_serializer(self.get_object()).data)


STREAM_SERVED_ELSEWHERE = (
    "This server has no event stream. Ask the server to which agents connect, or accept application/json."
)


class EventStreamRenderer(BaseRenderer):
    """Makes `text/event-stream` a known media type. The stream itself is served by `cyborgweb.live.usage`, before a
    request reaches a view."""

    media_type, format, charset = "text/event-stream", "events", None


class DeviceUsageSerializer(RowSerializer):
    """The load of a device, as its host's agent last reported it: once a minute, or every second while a client listens
    to the stream."""

    device = DeviceReference(read_only=True)
    at = serializers.DateTimeField(
        read_only=True, allow_null=True, help_text="When the values were received; null if there are none."
    )
    age_s = serializers.FloatField(read_only=True, allow_null=True, help_text="Seconds since then.")
    values = serializers.DictField(
        child=serializers.FloatField(), read_only=True, help_text="Values by name; each name ends in its unit."
    )
    silent = serializers.ListField(
        child=serializers.CharField(), read_only=True, help_text="Gateways that did not answer and may have values."
    )

    class Meta:
        model = Device
        fields = ("device", "at", "age_s", "values", "silent")


class DeviceUsageView(CollectionView):
    """The current load of a device; it is not stored.

    As `text/event-stream` the process to which agents connect sends it every second, one `data` line each, until the
    token or the session ends.
    """

    policy = "device"
    http_method_names = ["get", "head"]
    renderer_classes = [JsonRenderer, BrowsableRenderer, EventStreamRenderer]
    serializer_class = DeviceUsageSerializer
    queryset = Device.objects.all()

    @property
    def policy_rules(self) -> dict[str, str]:
        """Return the rule `cyborg:device:get_usage` for GET and HEAD, the only methods of this view."""
        return dict.fromkeys(("GET", "HEAD"), "cyborg:device:get_usage")

    def perform_content_negotiation(self, request: Request, force: bool = False) -> tuple[BaseRenderer, str]:
        """Choose the renderer. Raise ApiError 406 if the client wants the event stream, which this view does not serve.

        With `force`, which is used to render an error, JSON takes the place of the event stream.
        """
        renderer, media = super().perform_content_negotiation(request, force)
        if renderer.format != EventStreamRenderer.format:
            return renderer, media
        if not force:
            raise errors.ApiError(406, STREAM_SERVED_ELSEWHERE)
        return JsonRenderer(), JsonRenderer.media_type

    def retrieve(self, request: Request, **kwargs: str) -> HttpResponse:
        """Return the last known load of the device; no agent is asked."""
        device = self.get_object()
        loads = telemetry.get_last_loads({device.host_id})
        usage: dict[str, Any] = {"device": device} | telemetry.describe_device_load(loads, device.host_id, device.key)
        return self._respond_with_etag(request, lambda: self.get_serializer(usage).data)
