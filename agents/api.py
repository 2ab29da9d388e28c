"""Agents in our own API: who was heard, when, and in which version. `cyborgweb.api` mounts it beside the others."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import django_filters as filters
from django.db.models import QuerySet
from rest_framework import serializers

from accelerators.api.own.representation import Chosen, HostReference, Url
from accelerators.api.own.views import Collection
from agents.admin import TONES, limits, seen_at, where
from agents.models import Agent


class AgentFilter(filters.FilterSet):
    """By host, liveness, version."""

    host = filters.CharFilter(field_name="host__name", help_text="Exactly this host name.")
    state = filters.ChoiceFilter(method="by_state", choices=[(word, word) for word in TONES])
    version = filters.CharFilter()

    def by_state(self, agents: QuerySet[Agent], name: str, word: str) -> QuerySet[Agent]:
        """By the age of its lease."""
        return agents.filter(where(word))


class AgentSerializer(Chosen):
    """The agent of a host: up, late or down by when it was last heard; its versions; its key."""

    uuid = serializers.UUIDField(source="host.uuid", read_only=True, help_text="Its host's: a host has one agent.")
    url = Url("agents", source="host.uuid")
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
            "connected_at",
            "enrolled_at",
        )
        read_only_fields = fields

    def get_state(self, agent: Agent) -> Literal["up", "late", "down"]:
        """Up, late or down."""
        seen = seen_at(agent)
        up, down = limits()
        return "down" if seen is None or seen < down else "late" if seen < up else "up"

    def get_seen_at(self, agent: Agent) -> datetime | None:
        """When it was last heard; null: never."""
        return seen_at(agent)


class AgentView(Collection):
    """Agents, by the name of their host."""

    policy = "agent"
    orders = {"host": "host__name", "enrolled": "id"}
    default_order = "host"
    lookup_field = "host__uuid"
    lookup_url_kwarg = "uuid"
    serializer_class = AgentSerializer
    filterset_class = AgentFilter
    queryset = Agent.objects.select_related("host__lease")
