"""Discrepancies in our own API. `cyborgweb.api` mounts this view together with the other views."""

from __future__ import annotations

import django_filters as filters

from accelerators.api.own.fields import DeviceReference, HostReference, RowSerializer, UrlField
from accelerators.api.own.filters import choice_filter, host_filter
from accelerators.api.own.views import CollectionView
from placement_sync.models import Discrepancy, DiscrepancyKind


class DiscrepancyFilter(filters.FilterSet):
    """Filter by kind, and by host, device, provider or instance."""

    kind = choice_filter(DiscrepancyKind)
    host = host_filter("host__name")
    device = filters.UUIDFilter(field_name="device__uuid")
    provider = filters.UUIDFilter(help_text="The resource provider in Placement.")
    instance = filters.UUIDFilter()


class DiscrepancySerializer(RowSerializer):
    """A contradiction between a bound request and Placement, Nova or the hardware.

    `said` tells what is wrong and what to do.
    """

    url = UrlField("discrepancies", source="uuid")
    host = HostReference(read_only=True)
    device = DeviceReference(read_only=True, allow_null=True, help_text="Null after the device was removed.")

    class Meta:
        model = Discrepancy
        fields = (
            "uuid",
            "url",
            "kind",
            "said",
            "instance",
            "provider",
            "provider_name",
            "host",
            "device",
            "since",
            "seen_at",
        )


class DiscrepancyView(CollectionView):
    """Discrepancies, oldest first. They are found after a look at a host and deleted when they are resolved."""

    policy = "inventory"
    sort_fields = {"created": "id"}
    serializer_class = DiscrepancySerializer
    filterset_class = DiscrepancyFilter
    queryset = Discrepancy.objects.select_related("host", "device")
