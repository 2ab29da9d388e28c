"""The backends of drivers on hosts, and the services of each, as the last reports describe them."""

from __future__ import annotations

from typing import Any, get_args

import django_filters as filters
from django.db.models import QuerySet
from rest_framework import serializers

from accelerators.api.own.fields import RowSerializer, UrlField
from accelerators.api.own.filters import choice_filter, host_filter
from accelerators.api.own.views import CollectionView
from accelerators.models import Backend, Service
from drivers.inventory import BackendKind, ServiceName

BACKEND_KEY_PATTERN = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}:[A-Za-z0-9_.:-]{1,64}:[A-Za-z0-9_.-]{1,64}"
"""The form of a backend's key, HOST:DRIVER:NAME, with the host's uuid."""


class BackendFilter(filters.FilterSet):
    """Filter by host, driver, name, kind, or whether the backend fails."""

    host = host_filter()
    driver = filters.CharFilter()
    name = filters.CharFilter()
    kind = choice_filter(get_args(BackendKind))
    failing = filters.BooleanFilter(method="filter_by_error", help_text="Whether it has an error.")

    def filter_by_error(self, backends: QuerySet[Backend], name: str, wanted: bool) -> QuerySet[Backend]:
        """Keep the backends that have an error if `wanted`, else those that have none."""
        return backends.exclude(error="") if wanted else backends.filter(error="")


class BackendServiceSerializer(serializers.Serializer[Any]):
    """A service of a backend: `ready`, or unavailable with the reason."""

    name = serializers.CharField(read_only=True)
    version = serializers.CharField(read_only=True)
    state = serializers.CharField(read_only=True, help_text="ready or unavailable.")
    reason = serializers.CharField(read_only=True)
    limits = serializers.DictField(child=serializers.CharField(), read_only=True)


class BackendSerializer(RowSerializer):
    """A part of a driver that reports by itself. While it has an error, its devices are shown as they were last
    reported."""

    id = serializers.CharField(source="key", read_only=True)
    url = UrlField("backends", source="key")
    labels = serializers.DictField(child=serializers.CharField(), read_only=True)
    since = serializers.DateTimeField(read_only=True, help_text="Since when it answers, or since when it does not.")
    services = BackendServiceSerializer(many=True, read_only=True)
    devices = serializers.IntegerField(read_only=True, help_text="How many devices it has.")

    class Meta:
        model = Backend
        fields = ("id", "url", "host", "driver", "name", "kind", "labels", "error", "since", "services", "devices")


class ReadOnlyCollectionView(CollectionView):
    """A collection that can only be read. Its lists and its members need the same policy rule."""

    sort_fields = {"host": "place"}
    default_ordering = "host"
    etag_collections = ("hosts", "devices")
    http_method_names = ["get", "head"]
    lookup_field = "key"
    lookup_url_kwarg = "id"

    @property
    def policy_rules(self) -> dict[str, str]:
        """Map reading to the rule `cyborg:<policy>:get`."""
        return dict.fromkeys(("GET", "HEAD"), f"cyborg:{self.policy}:get")


class BackendView(ReadOnlyCollectionView):
    """Backends of drivers, by host. To make a host's driver look for its services again, order the command `rescan`."""

    policy = "backend"
    lookup_value_regex = BACKEND_KEY_PATTERN
    serializer_class = BackendSerializer
    filterset_class = BackendFilter
    queryset = Backend.objects.all()


class ServiceFilter(filters.FilterSet):
    """Filter by host, driver, backend, name or state."""

    host = host_filter()
    driver = filters.CharFilter()
    backend = filters.CharFilter()
    name = choice_filter(get_args(ServiceName))
    state = choice_filter(("ready", "unavailable"))


class ServiceSerializer(RowSerializer):
    """A service of a backend: ready, or unavailable with the reason."""

    id = serializers.CharField(source="key", read_only=True)
    url = UrlField("services", source="key")
    limits = serializers.DictField(child=serializers.CharField(), read_only=True)

    class Meta:
        model = Service
        fields = ("id", "url", "host", "driver", "backend", "name", "version", "state", "reason", "limits")


class ServiceView(ReadOnlyCollectionView):
    """The services of drivers' backends, as found at run time, by host."""

    policy = "service"
    lookup_value_regex = f"{BACKEND_KEY_PATTERN}:[a-z]{{1,16}}"
    serializer_class = ServiceSerializer
    filterset_class = ServiceFilter
    queryset = Service.objects.all()
