"""Discrepancies and addresses of Nova in our own API. `cyborgweb.api` mounts these views together with the others."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

import django_filters as filters
from django.http import Http404
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.own.fields import DeviceReference, HostReference, ReasonSerializer, RowSerializer, UrlField
from accelerators.api.own.filters import SavedViewFilter, choice_filter, host_filter
from accelerators.api.own.views import CollectionView
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import EventSource
from placement_sync.models import Discrepancy, DiscrepancyKind, NovaEndpoint
from placement_sync.nova import endpoints


class DiscrepancyFilter(SavedViewFilter):
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


class NovaEndpointSerializer(RowSerializer):
    """An address at which Nova was asked about instances, and whether its answer 404 is believed."""

    url = UrlField("nova_endpoints", source="uuid")
    address = serializers.CharField(source="url", read_only=True, help_text="The address of Nova.")
    trusted = serializers.BooleanField(
        source="is_trusted",
        read_only=True,
        help_text="Whether 404 means that an instance does not exist: the address is proven or confirmed.",
    )

    class Meta:
        model = NovaEndpoint
        fields = (
            "uuid",
            "url",
            "address",
            "trusted",
            "unknown_instances",
            "proven_at",
            "confirmed_at",
            "confirmed_by",
            "reason",
        )


class NovaEndpointView(CollectionView):
    """Addresses of Nova, oldest first. The job `instances` adds each address that it uses."""

    policy = "nova_endpoint"
    member_actions = {"confirm": ReasonSerializer, "withdraw": ReasonSerializer}
    actions_to_confirm = ("confirm", "withdraw")
    sort_fields = {"created": "id"}
    serializer_class = NovaEndpointSerializer
    filterset_class = SavedViewFilter
    queryset = NovaEndpoint.objects.all()

    def confirm(self, request: Request, **kwargs: str) -> Response:
        """Confirm that an address is the Nova of this cloud, so that its answer 404 for an instance is believed.

        Requests of instances that it does not know are then deleted, and their devices are given to others.
        """
        return self._decide(endpoints.confirm_endpoint)

    def withdraw(self, request: Request, **kwargs: str) -> Response:
        """Withdraw the confirmation of an address, so that its answer 404 for an instance is not believed any more.

        Requests that were deleted meanwhile stay deleted. An address that is proven stays trusted.
        """
        return self._decide(endpoints.withdraw_confirmation)

    def _decide(self, decide: Callable[[UUID, str, str, EventSource], bool]) -> Response:
        """Call `decide` for the address, with the caller and the reason in the body; answer with the address."""
        reason = self.validate_body().get("reason", "")
        decide(self.get_object().uuid, self.caller.name, reason, EventSource.API)
        return Response(self.get_serializer(self.get_object()).data)

    def get_object(self) -> NovaEndpoint:
        """Return the address; raise RefusedError NOT_FOUND, which says where addresses are listed, if there is none."""
        try:
            endpoint: NovaEndpoint = super().get_object()
        except Http404:
            raise RefusedError(
                RefusalReason.NOT_FOUND, "There is no such address: manage.py nova list shows them."
            ) from None
        return endpoint
