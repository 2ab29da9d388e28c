"""Agents in our own API: who was heard, when, and in which version. `cyborgweb.api` mounts it beside the others."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, cast

import django_filters as filters
from django.db.models import QuerySet
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.own.representation import Chosen, HostReference, Url, Why
from accelerators.api.own.views import Collection
from accelerators.states import Source
from agents import trust
from agents.models import Agent
from agents.standing import WORDS, seen_at, standing, word_of


class AgentFilter(filters.FilterSet):
    """By host, liveness, version."""

    host = filters.CharFilter(field_name="host__name", help_text="Exactly this host name.")
    state = filters.ChoiceFilter(method="by_state", choices=[(word, word) for word in WORDS])
    version = filters.CharFilter()

    def by_state(self, agents: QuerySet[Agent], name: str, word: str) -> QuerySet[Agent]:
        """By the age of its lease, or by what was decided."""
        return agents.filter(standing(word))


class AgentSerializer(Chosen):
    """The agent of a host: up, late or down by when it was last heard, revoked, or clone: two used its key at once."""

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
            "key_since",
            "barred_reason",
            "address",
            "connected_at",
            "enrolled_at",
        )
        read_only_fields = fields

    def get_state(self, agent: Agent) -> Literal["up", "late", "down", "revoked", "clone"]:
        """How it stands."""
        return cast(Literal["up", "late", "down", "revoked", "clone"], word_of(agent))

    def get_seen_at(self, agent: Agent) -> datetime | None:
        """When it was last heard; null: never."""
        return seen_at(agent)


class AgentView(Collection):
    """Agents, by the name of their host."""

    policy = "agent"
    verbs = {"revoke": Why}
    dangerous = ("revoke",)
    orders = {"host": "host__name", "enrolled": "id"}
    default_order = "host"
    lookup_field = "host__uuid"
    lookup_url_kwarg = "uuid"
    serializer_class = AgentSerializer
    filterset_class = AgentFilter
    queryset = Agent.objects.select_related("host__lease")

    def revoke(self, request: Request, **kwargs: str) -> Response:
        """Close its connections, let its key in no more. A new join token, and a new key, bring the host back."""
        reason = self.said(request).get("reason", "")
        trust.revoke(self.get_object(), self.caller.name, reason, Source.API)
        return Response(self.get_serializer(self.get_object()).data)
