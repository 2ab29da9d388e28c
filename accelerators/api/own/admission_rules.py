"""Admission rules: they decide the first state of a device when it is found. Administrators create, edit and delete
them."""

from __future__ import annotations

from typing import Any

import django_filters as filters
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.own.fields import RowSerializer, StrictBooleanField, StrictIntegerField, StrictTextField, UrlField
from accelerators.api.own.views import CollectionView
from accelerators.devices import admission_rules
from accelerators.domain.states import AdmittedState, DeviceType
from accelerators.models import AdmissionRule
from accelerators.models.rules import MAX_RULE_ORDER, RULE_NAME


class RuleFilter(filters.FilterSet):
    """Filter by name, action, or whether the rule is enabled."""

    name = filters.CharFilter(help_text="Exactly this name.")
    action = filters.ChoiceFilter(choices=[(word, word) for word in AdmittedState])
    enabled = filters.BooleanFilter()


def make_pattern_field(max_length: int, help_text: str) -> StrictTextField:
    """Return an optional pattern field of at most `max_length` characters; an empty pattern matches everything."""
    return StrictTextField(max_length=max_length, allow_blank=True, required=False, help_text=help_text)


class RuleSerializer(RowSerializer):
    """An admission rule. The first enabled rule that matches a device decides its first state; an empty field matches
    everything."""

    url = UrlField("rules", source="uuid")
    name = StrictTextField(
        validators=[RULE_NAME],
        max_length=64,
        help_text="Letters, digits, ., - and _. Events mention the rule by this name.",
    )
    order = StrictIntegerField(
        min_value=0,
        max_value=MAX_RULE_ORDER,
        required=False,
        help_text="The rule with the lowest number is tried first; 100 if left out.",
    )
    host = make_pattern_field(255, "Name of the host; * stands for any text, ? for one character.")
    driver = make_pattern_field(64, "Name of the driver; * and ? as for the host.")
    vendor = make_pattern_field(255, "The vendor, as devices show it; * and ? as for the host.")
    model = make_pattern_field(255, "The model or product, as devices show it; * and ? as for the host.")
    type = serializers.ChoiceField(["", *(word.value for word in DeviceType)], required=False)
    action = serializers.ChoiceField(
        [word.value for word in AdmittedState], help_text="The state of a device that matches."
    )
    enabled = StrictBooleanField(required=False)

    class Meta:
        model = AdmissionRule
        fields = ("uuid", "url", *admission_rules.RULE_FIELDS, "created_at", "updated_at")
        read_only_fields = ("uuid", "created_at", "updated_at")


class RuleView(CollectionView):
    """Admission rules, in the order in which they are tried."""

    policy = "rule"
    sort_fields = {"order": "order", "name": "name", "created": "id"}
    default_ordering = "order"
    serializer_class = RuleSerializer
    filterset_class = RuleFilter
    queryset = AdmissionRule.objects.all()

    def create(self, request: Request) -> Response:
        """Create a rule."""
        data = self.get_serializer(admission_rules.create_rule(self._validate_values(request), self.caller)).data
        return Response(data, 201, headers={"Location": data["url"]})

    def partial_update(self, request: Request, **kwargs: str) -> Response:
        """Edit a rule. Devices that it has admitted keep their state."""
        rule = self.get_object()
        return Response(
            self.get_serializer(
                admission_rules.edit_rule(rule.uuid, self._validate_values(request, rule), self.caller)
            ).data
        )

    def destroy(self, request: Request, **kwargs: str) -> Response:
        """Delete a rule. Devices that it has admitted keep their state."""
        admission_rules.delete_rule(self.get_object().uuid, self.caller)
        return Response(status=204)

    def _validate_values(self, request: Request, rule: AdmissionRule | None = None) -> dict[str, Any]:
        serializer = self.get_serializer(rule, data=request.data, partial=rule is not None)
        serializer.is_valid(raise_exception=True)
        return dict(serializer.validated_data)
