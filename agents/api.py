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
from accelerators.api.own.fields import (
    ClosedSerializer,
    DeviceReference,
    HostReference,
    ReasonSerializer,
    RowSerializer,
    StrictTextField,
    UrlField,
)
from accelerators.api.own.filters import SavedViewFilter, host_filter, presence_filter, single_choice_filter
from accelerators.api.own.views import CollectionView
from accelerators.domain.states import AgentState, EventSource
from accelerators.models import Device
from agents import join_tokens, key_revocation, telemetry
from agents.liveness import build_state_condition, get_agent_state, get_last_heard
from agents.models import Agent, JoinToken


class AgentFilter(SavedViewFilter):
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


class NoFieldsSerializer(ClosedSerializer):
    """The empty body of an action."""


class AgentView(CollectionView):
    """Agents, ordered by the name of their host. They can be revoked, admitted and asked for new keys."""

    policy = "agent"
    member_actions = {"revoke": ReasonSerializer, "admit": NoFieldsSerializer, "rotate": NoFieldsSerializer}
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

    def admit(self, request: Request, **kwargs: str) -> Response:
        """Let an agent connect again that was barred as a clone; 409 if it was revoked."""
        self.validate_body()
        key_revocation.lift_clone_bar(self.get_object(), self.caller.name, EventSource.API)
        return Response(self.get_serializer(self.get_object()).data)

    def rotate(self, request: Request, **kwargs: str) -> Response:
        """Ask an agent for a new key, now or when it connects next; 409 while it is barred."""
        self.validate_body()
        key_revocation.request_key_rotation(self.get_object(), self.caller.name, EventSource.API)
        return Response(self.get_serializer(self.get_object()).data)


class JoinTokenFilter(SavedViewFilter):
    """Filters join tokens by host name and by whether they were used."""

    host = filters.CharFilter(field_name="host_name", help_text="Exactly this host.")
    used = presence_filter("used_at", "Whether an agent has used it.")


class JoinTokenSerializer(RowSerializer):
    """A join token without its secret, which only the answer to its creation contains."""

    url = UrlField("join_tokens", source="id")
    host = serializers.CharField(source="host_name", read_only=True)

    class Meta:
        model = JoinToken
        fields = ("id", "url", "host", "public_key", "created_by", "created_at", "expires_at", "used_at")


class NewJoinTokenSerializer(ClosedSerializer):
    """The join token to be made."""

    host = StrictTextField(max_length=join_tokens.MAX_HOST_NAME, help_text="The name of the host; it need not exist.")
    hours = serializers.IntegerField(
        min_value=1, max_value=join_tokens.MAX_HOURS, required=False, help_text="How long it is valid; 24 by default."
    )
    address = StrictTextField(
        max_length=255, required=False, allow_blank=True, help_text="Where the agent reaches the conductor."
    )
    unpinned = serializers.BooleanField(required=False, help_text="Whether the agent pins no certificate.")


class IssuedTokenSerializer(serializers.Serializer[Any]):
    """A new join token. It can be read only here."""

    id = serializers.IntegerField(read_only=True)
    host = serializers.CharField(read_only=True)
    expires_at = serializers.DateTimeField(read_only=True)
    address = serializers.CharField(read_only=True, help_text="Where the agent connects to.")
    fingerprint = serializers.CharField(read_only=True, help_text="SHA-256 of the pinned certificate; empty if none.")
    token = serializers.CharField(read_only=True, help_text="The value of CYBORG_JOIN_TOKEN on the host.")


class JoinTokenView(CollectionView):
    """Join tokens, newest first. Deleting one withdraws it."""

    policy = "join_token"
    default_ordering = "-created"
    lookup_field = "id"
    lookup_value_regex = "[0-9]{1,18}"
    serializer_class = JoinTokenSerializer
    filterset_class = JoinTokenFilter
    queryset = JoinToken.objects.defer("secret_hash")
    body_serializers = {"create": NewJoinTokenSerializer}
    response_serializers = {"create": (201, IssuedTokenSerializer)}

    def create(self, request: Request) -> Response:
        """Make a join token; 201. Only this answer contains its secret."""
        values = self.validate_body()
        hours, address = values.get("hours", join_tokens.DEFAULT_HOURS), values.get("address", "")
        issued = join_tokens.issue_join_token(
            values["host"], address, values.get("unpinned", False), hours, self.caller.name, EventSource.API
        )
        shown = {"id": issued.row.pk, "host": issued.row.host_name, "expires_at": issued.row.expires_at}
        shown |= {"address": issued.address, "fingerprint": issued.fingerprint, "token": issued.join_string}
        response = Response(IssuedTokenSerializer(shown).data, 201)
        response["Cache-Control"] = "no-store"
        return response

    def destroy(self, request: Request, **kwargs: str) -> Response:
        """Withdraw a join token; 204. An agent that has joined with it stays enrolled."""
        join_tokens.withdraw_join_token(self.get_object(), self.caller.name, EventSource.API)
        return Response(status=204)


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
