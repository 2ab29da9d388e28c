"""Drivers on hosts: the wanted configuration of each, and its state as the host's agent reports it. Rollouts change
them."""

from __future__ import annotations

from typing import Any

import django_filters as filters
from django.db.models import OuterRef
from rest_framework import serializers

from accelerators.api.own.fields import HostReference, RowSerializer, UrlField
from accelerators.api.own.filters import SavedViewFilter, choice_filter, host_filter
from accelerators.api.own.inventory import count_related_rows
from accelerators.api.own.views import CollectionView
from accelerators.domain.states import DriverState
from accelerators.models import AcceleratorRequest, HostDriver

POLICY_RULE_BY_METHOD = {"GET": "cyborg:driver:get", "HEAD": "cyborg:driver:get", "POST": "cyborg:driver:rollout"}
"""The policy rule for each HTTP method, shared by drivers and rollouts."""


class DriverFilter(SavedViewFilter):
    """Filter by host, driver, state, or whether the driver drifts (runs with another configuration than the wanted
    one)."""

    host = host_filter("host__name")
    driver = filters.CharFilter(help_text="Exactly this driver.")
    state = choice_filter(DriverState)
    drifts = filters.BooleanFilter(help_text="Whether the reported configuration differs from the wanted one.")


class WantedSerializer(serializers.Serializer[Any]):
    """The wanted configuration. If `settings` is null, the settings in the host's own file apply."""

    enabled = serializers.BooleanField(read_only=True)
    settings = serializers.JSONField(read_only=True)
    generation = serializers.IntegerField(read_only=True)
    by = serializers.CharField(source="actor", read_only=True)
    reason = serializers.CharField(read_only=True)
    command = UrlField(
        "commands", source="command.uuid", default=None, help_text="The command that sent it to the host's agent last."
    )


class SeenSerializer(serializers.Serializer[Any]):
    """The driver as the agent of the host reports it."""

    generation = serializers.IntegerField(
        read_only=True, help_text="The wanted generation that it runs with; 0 if the host's own file applies."
    )
    version = serializers.CharField(read_only=True)
    state = serializers.ChoiceField(DriverState.choices(), read_only=True)
    error = serializers.CharField(read_only=True)
    since = serializers.DateTimeField(read_only=True, allow_null=True)
    declares = serializers.DictField(
        read_only=True,
        help_text="What the driver declares: `matches`, `resource_classes`, `handle_types`, `min_kernel`, `affects` "
        "(command → `card`, `bus` or `host`, if it affects more than its device). Empty entries are left out.",
    )


class DriverSerializer(RowSerializer):
    """A driver on a host. If `wanted` is null, the host's own configuration decides whether the driver runs."""

    url = UrlField("drivers", source="key")
    host = HostReference(read_only=True)
    installed = serializers.SerializerMethodField()
    version = serializers.SerializerMethodField()
    wanted = WantedSerializer(read_only=True, allow_null=True)
    seen = SeenSerializer(source="reported", read_only=True, allow_null=True)
    generation = serializers.IntegerField(
        read_only=True,
        source="wish.generation",
        default=0,
        help_text="The generation of the wanted configuration, 0 if there never was one. Send it with a change.",
    )
    devices = serializers.IntegerField(read_only=True, help_text="How many devices it found.")
    held = serializers.IntegerField(read_only=True, help_text="How many requests hold a unit of these devices.")

    class Meta:
        model = HostDriver
        fields = (
            "key",
            "url",
            "host",
            "driver",
            "installed",
            "version",
            "drifts",
            "generation",
            "wanted",
            "seen",
            "devices",
            "held",
        )

    def get_installed(self, row: HostDriver) -> bool:
        """Whether the driver's package is on the host, according to the host's agent."""
        return row.seen is not None

    def get_version(self, row: HostDriver) -> str:
        """The version that the agent reported for the driver; empty if it is not known."""
        return str((row.seen or {}).get("version", ""))


class DriverView(CollectionView):
    """Drivers on hosts, by host and name. Drivers that are installed but do not run are listed too."""

    policy = "driver"
    policy_rules = POLICY_RULE_BY_METHOD
    sort_fields = {"host": "place"}
    default_ordering = "host"
    lookup_field = "key"
    lookup_value_regex = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}:[A-Za-z0-9_.:-]{1,64}"
    serializer_class = DriverSerializer
    filterset_class = DriverFilter
    queryset = HostDriver.objects.select_related("host", "wish__command").annotate(
        held=count_related_rows(
            AcceleratorRequest.objects.filter(attach_handle__deployable__device__host=OuterRef("host")),
            "attach_handle__deployable__device__driver",
            "driver",
        )
    )
