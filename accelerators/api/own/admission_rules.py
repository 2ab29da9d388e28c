"""Admission rules: they decide the first state of a device when it is found. Administrators create, edit and delete
them."""

from __future__ import annotations

import django_filters as filters
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.own.fields import (
    ChangeSerializer,
    RowSerializer,
    StrictBooleanField,
    StrictIntegerField,
    StrictTextField,
    UrlField,
)
from accelerators.api.own.filters import RowFilter, single_choice_filter
from accelerators.api.own.views import CollectionView
from accelerators.devices import admission_rules
from accelerators.domain.states import AdmittedState, DeviceType
from accelerators.models import AdmissionRule
from accelerators.models.rules import MAX_RULE_ORDER, RULE_NAME


class RuleFilter(RowFilter):
    """Filter by name, action, or whether the rule is enabled."""

    name = filters.CharFilter(help_text="Exactly this name.")
    action = single_choice_filter(AdmittedState)
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
    type = serializers.ChoiceField(["", *DeviceType.choices()], required=False)
    action = serializers.ChoiceField(AdmittedState.choices(), help_text="The state of a device that matches.")
    enabled = StrictBooleanField(required=False)

    class Meta:
        model = AdmissionRule
        fields = ("uuid", "url", *admission_rules.RULE_FIELDS, "generation", "created_at", "updated_at")


class RuleChangeSerializer(ChangeSerializer, RuleSerializer):
    """A change of an admission rule."""


class RuleView(CollectionView):
    """Admission rules, in the order in which they are tried."""

    policy = "rule"
    sort_fields = {"order": "order", "name": "name", "created": "id"}
    default_ordering = "order"
    serializer_class = RuleSerializer
    filterset_class = RuleFilter
    body_serializers = {"partial_update": RuleChangeSerializer}
    delete_parameters = ("generation",)
    queryset = AdmissionRule.objects.all()

    def create(self, request: Request) -> Response:
        """Create a rule; 201. 409 if its name is in use or there are too many rules."""
        return self.respond_with_row(admission_rules.create_rule(self.validate_body(), self.caller))

    def partial_update(self, request: Request, **kwargs: str) -> Response:
        """Edit a rule; 409 if its new name is in use, or if it has another generation. Devices that it has admitted
        keep their state."""
        rule = self.get_object()
        values, generation = self.validate_change(rule)
        edited_rule = admission_rules.edit_rule(rule.uuid, values, self.caller, generation=generation)
        return Response(self.get_serializer(edited_rule).data)

    def destroy(self, request: Request, **kwargs: str) -> Response:
        """Delete a rule; 204. Devices that it has admitted keep their state."""
        generation = self.get_generation_to_delete()
        admission_rules.delete_rule(self.get_object().uuid, self.caller, generation=generation)
        return Response(status=204)
