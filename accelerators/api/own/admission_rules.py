"""Admission rules: they decide the first state of a device when it is found. Administrators create, edit and delete
them."""

from __future__ import annotations

from typing import Any

import django_filters as filters
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.own.fields import (
    NEEDS_GENERATION,
    ChangeSerializer,
    RowSerializer,
    StrictBooleanField,
    StrictIntegerField,
    StrictTextField,
    UrlField,
)
from accelerators.api.own.filters import ListFilter, single_choice_filter
from accelerators.api.own.previews import (
    TOKEN_EXCLUDES_DRY_RUN,
    ConfirmationSerializer,
    PreviewSerializer,
    respond_with_preview,
)
from accelerators.api.own.views import CollectionView
from accelerators.devices import admission_rules
from accelerators.domain.states import AdmittedState, DeviceType
from accelerators.models import AdmissionRule
from accelerators.models.rules import MAX_RULE_ORDER, RULE_NAME
from accelerators.workflows import rule_previews


class RuleFilter(ListFilter):
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
        fields: tuple[str, ...] = (
            "uuid",
            "url",
            *admission_rules.RULE_FIELDS,
            "generation",
            "created_at",
            "updated_at",
        )


class NewRuleSerializer(ConfirmationSerializer, RuleSerializer):
    """A new admission rule, and the confirmation."""

    field_conditions = TOKEN_EXCLUDES_DRY_RUN

    class Meta(RuleSerializer.Meta):
        fields = (*RuleSerializer.Meta.fields, "dry_run", "token")


class RuleChangeSerializer(ChangeSerializer, ConfirmationSerializer, RuleSerializer):
    """A change of an admission rule, and the confirmation."""

    field_conditions = {**TOKEN_EXCLUDES_DRY_RUN, **NEEDS_GENERATION}

    class Meta(RuleSerializer.Meta):
        fields = (*RuleSerializer.Meta.fields, "dry_run", "token")


class HostReachSerializer(serializers.Serializer[Any]):
    """A host, and how many of its inactive devices the rule would move."""

    host = serializers.CharField(read_only=True)
    devices = serializers.IntegerField(read_only=True, help_text="How many inactive devices the rule would move.")


class RulePreviewSerializer(PreviewSerializer):
    """The forecast of a rule: the inactive devices that it would move when the rules are applied.

    It has to be confirmed if there are any. Devices that are found later are moved by it, too.
    """

    first_hosts = HostReachSerializer(many=True, read_only=True, help_text="The first hosts, with the most devices.")


class RuleView(CollectionView):
    """Admission rules, in the order in which they are tried."""

    policy = "rule"
    sort_fields = {"order": "order", "name": "name", "created": "id"}
    default_ordering = "order"
    serializer_class = RuleSerializer
    filterset_class = RuleFilter
    body_serializers = {"create": NewRuleSerializer, "partial_update": RuleChangeSerializer}
    response_serializers = {"create": (201, RuleSerializer)}
    preview_serializers = dict.fromkeys(body_serializers, RulePreviewSerializer)
    delete_parameters = ("generation",)
    queryset = AdmissionRule.objects.all()

    def create(self, request: Request) -> Response:
        """Create a rule; 201. 409 if its name is in use or there are too many rules.

        With `dry_run` the answer is the preview: 200. Without a token the answer is 409, with the preview, if the rule
        would move inactive devices.
        """
        values = self.validate_body()
        if preview := self._preview_unless_confirmed(values):
            return preview
        return self.respond_with_row(admission_rules.create_rule(values, self.caller))

    def partial_update(self, request: Request, **kwargs: str) -> Response:
        """Edit a rule; 409 if its new name is in use, or if it has another generation. Devices that it has admitted
        keep their state. `dry_run` and `token` are used as for a new rule."""
        rule = self.get_object()
        values, generation = self.validate_change(rule)
        if preview := self._preview_unless_confirmed(values, rule):
            return preview
        edited_rule = admission_rules.edit_rule(rule.uuid, values, self.caller, generation=generation)
        return Response(self.get_serializer(edited_rule).data)

    def _preview_unless_confirmed(self, values: dict[str, Any], rule: AdmissionRule | None = None) -> Response | None:
        """Return the answer with the preview if the body asks for it; None if the rule may be stored. Takes `dry_run`
        and `token` out of the values.

        Raises NotConfirmedError if the rule would move devices and there is no token, and RefusedError STALE_PREVIEW
        for a token of another preview, or if other devices would be moved by now.
        """
        is_dry_run, token = values.pop("dry_run", False), values.pop("token", "")
        forecast_of_rule = rule_previews.preview_rule(values, rule)
        reach = forecast_of_rule.reach
        if token:
            forecast_of_rule.refuse_unless_confirmed(token, self.caller)
            return None
        if not (is_dry_run or reach.needs_confirmation):
            return None
        text = f"becomes {forecast_of_rule.action}"
        forecast = {"outcome": "moved", "number": reach.total, "held": False, "text": text}
        preview = {
            "total": reach.total,
            "hosts": len(reach.by_host),
            "held": 0,
            "forecast": [forecast] if reach.total else [],
            "first_hosts": [
                {"host": host, "devices": number}
                for host, number in reach.by_host.most_common(rule_previews.MAX_PREVIEW_HOSTS)
            ],
            "confirm": reach.needs_confirmation,
        }
        return respond_with_preview(preview, forecast_of_rule.issue_token(self.caller), is_dry_run)

    def destroy(self, request: Request, **kwargs: str) -> Response:
        """Delete a rule; 204. Devices that it has admitted keep their state."""
        rule = self.get_object()
        generation = self.get_generation_to_delete(rule)
        admission_rules.delete_rule(rule.uuid, self.caller, generation=generation)
        return Response(status=204)
