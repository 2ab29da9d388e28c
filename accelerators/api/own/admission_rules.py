"""Admission rules: they decide the first state of a device when it is found. Administrators create, edit and delete
them."""

from __future__ import annotations

from typing import Any

import django_filters as filters
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.own.fields import Chosen, Flag, Number, Text, Url
from accelerators.api.own.views import Collection
from accelerators.devices import admission_rules
from accelerators.domain.states import Admission, DeviceType
from accelerators.models import AdmissionRule
from accelerators.models.rules import MAX_ORDER, NAME


class RuleFilter(filters.FilterSet):
    """Filter by name, action, or whether the rule is enabled."""

    name = filters.CharFilter(help_text="Exactly this name.")
    action = filters.ChoiceFilter(choices=[(word, word) for word in Admission])
    enabled = filters.BooleanFilter()


def pattern(length: int, about: str) -> Text:
    """Return an optional pattern field of at most `max_length` characters; an empty pattern matches everything."""
    return Text(max_length=length, allow_blank=True, required=False, help_text=about)


class RuleSerializer(Chosen):
    """An admission rule. The first enabled rule that matches a device decides its first state; an empty field matches
    everything."""

    url = Url("rules", source="uuid")
    name = Text(
        validators=[NAME],
        max_length=64,
        help_text="Letters, digits, ., - and _. Events mention the rule by this name.",
    )
    order = Number(
        min_value=0,
        max_value=MAX_ORDER,
        required=False,
        help_text="The rule with the lowest number is tried first; 100 if left out.",
    )
    host = pattern(255, "Name of the host; * stands for any text, ? for one character.")
    driver = pattern(64, "Name of the driver; * and ? as for the host.")
    vendor = pattern(255, "The vendor, as devices show it; * and ? as for the host.")
    model = pattern(255, "The model or product, as devices show it; * and ? as for the host.")
    type = serializers.ChoiceField(["", *(word.value for word in DeviceType)], required=False)
    action = serializers.ChoiceField(
        [word.value for word in Admission], help_text="The state of a device that matches."
    )
    enabled = Flag(required=False)

    class Meta:
        model = AdmissionRule
        fields = ("uuid", "url", *admission_rules.FIELDS, "created_at", "updated_at")
        read_only_fields = ("uuid", "created_at", "updated_at")


class RuleView(Collection):
    """Admission rules, in the order in which they are tried."""

    policy = "rule"
    orders = {"order": "order", "name": "name", "created": "id"}
    default_order = "order"
    serializer_class = RuleSerializer
    filterset_class = RuleFilter
    queryset = AdmissionRule.objects.all()

    def create(self, request: Request) -> Response:
        """Create a rule."""
        shown = self.get_serializer(admission_rules.create(self._values(request), self.caller)).data
        return Response(shown, 201, headers={"Location": shown["url"]})

    def partial_update(self, request: Request, **kwargs: str) -> Response:
        """Edit a rule. Devices that it has admitted keep their state."""
        found = self.get_object()
        return Response(
            self.get_serializer(admission_rules.edit(found.uuid, self._values(request, found), self.caller)).data
        )

    def destroy(self, request: Request, **kwargs: str) -> Response:
        """Delete a rule. Devices that it has admitted keep their state."""
        admission_rules.delete(self.get_object().uuid, self.caller)
        return Response(status=204)

    def _values(self, request: Request, found: AdmissionRule | None = None) -> dict[str, Any]:
        serializer = self.get_serializer(found, data=request.data, partial=found is not None)
        serializer.is_valid(raise_exception=True)
        return dict(serializer.validated_data)
