"""Bulk actions: one action on many devices, with a preview, and the result of each device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import django_filters as filters
from django.db.models import Q, QuerySet
from django.http import QueryDict
from rest_framework import serializers
from rest_framework.exceptions import APIException, PermissionDenied
from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.own.bulk_previews import (
    ALL_ACTIONS,
    LISTED_ACTIONS,
    BulkPreviewSerializer,
    preview_or_start,
)
from accelerators.api.own.fields import ClosedSerializer, ReasonField, RowSerializer, StrictUuidField, UrlField
from accelerators.api.own.filters import SavedViewFilter, choice_filter, host_filter
from accelerators.api.own.inventory import DeviceFilter, DeviceView
from accelerators.api.own.previews import ConfirmationSerializer
from accelerators.api.own.views import CollectionView
from accelerators.devices import partitioning
from accelerators.domain.device_actions import Action
from accelerators.domain.states import BulkState, DeviceOutcome, DrainTarget
from accelerators.models import Bulk, BulkItem, Device
from accelerators.workflows import bulk_actions, bulk_commands

MAX_NAMED_DEVICES = 20_000
"""Maximum number of devices in the field `devices`; their uuids fit into a body. A selector may match more."""
WAITING = "waiting"
"""The word for the outcome of a device that was not processed yet."""
SELECTOR_FILTERS = {name: one for name, one in DeviceFilter.base_filters.items() if name != "saved_view"}
"""The filters that a selector may have: those of the list of devices, except that by a saved view."""
STATE_RULE, COMMAND_RULE = "cyborg:device:update", "cyborg:command:create"
ADD_UNITS_RULE, REMOVE_UNITS_RULE = "cyborg:accelerator:create", "cyborg:accelerator:delete"


def get_rule(action: Any, arguments: Mapping[str, Any] | None = None) -> str:
    """Return the policy rule that an action with these arguments needs, on one device or on many."""
    if action == bulk_commands.PARTITION and arguments:
        adds_units = partitioning.PartitionChange.from_arguments(arguments or {}).adds_units
        return ADD_UNITS_RULE if adds_units else REMOVE_UNITS_RULE
    return COMMAND_RULE if action in bulk_commands.LISTED_OPS else STATE_RULE


class BulkFilter(SavedViewFilter):
    """Filter by action or state. Drafts are previews that nobody has confirmed."""

    action = choice_filter(ALL_ACTIONS)
    state = choice_filter(BulkState)


class DeviceSelectorField(serializers.JSONField):
    """A selector of devices: `{"all": true}`, or the filters of the list of devices with their values."""

    def to_internal_value(self, data: Any) -> dict[str, Any]:
        """Return the selector; raise ValidationError if it is empty, or if a filter or its value does not exist."""
        if data == {"all": True}:
            return {"all": True}
        if not isinstance(data, dict) or not data:
            raise serializers.ValidationError('Say {"all": true}, or filters such as {"state": "inactive"}.')
        if unknown := sorted(set(data) - SELECTOR_FILTERS.keys()):
            known = ", ".join(SELECTOR_FILTERS)
            raise serializers.ValidationError(f"{', '.join(unknown)[:200]}: unknown filter; known are {known}.")
        form = DeviceFilter(_build_query(data), DeviceView.queryset.all()).form
        if not form.is_valid():
            name, texts = next(iter(form.errors.items()))
            raise serializers.ValidationError(f"{name}: {texts[0]}")
        return data


def _build_query(selector: Mapping[str, Any]) -> QueryDict:
    """Return the query of a list that means the same as a selector. Raises ValidationError for a value of another type
    than text, boolean or list of texts, and for empty text."""
    query = QueryDict(mutable=True)
    for name, value in selector.items():
        words = value if isinstance(value, list) and value else [value]
        texts = [str(word).lower() if isinstance(word, bool) else word for word in words]
        if not all(isinstance(text, str) and text for text in texts):
            raise serializers.ValidationError(f"{name}: say a text, true or false, or a list of texts.")
        query.setlist(name, texts)
    return query


class StartBulkActionSerializer(ConfirmationSerializer):
    """The body that starts an action on many devices. Send `devices` or `selector`. The set of devices is fixed by the
    preview."""

    action = serializers.ChoiceField(
        [(word, word) for word in LISTED_ACTIONS],
        help_text="`admit` applies the admission rules to inactive devices.",
    )
    then = serializers.ChoiceField(
        DrainTarget.choices(), required=False, help_text="Only for drain: the state after the last request."
    )
    devices = serializers.ListField(
        child=StrictUuidField(),
        required=False,
        max_length=MAX_NAMED_DEVICES,
        help_text="The uuids of the devices.",
    )
    selector = DeviceSelectorField(
        required=False,
        help_text='`{"all": true}`, or filters of `/api/devices/` with a text, a boolean or a list of texts.',
    )
    reason = ReasonField("Shown with each device and in its events.")

    field_conditions = {
        "oneOf": [
            {"required": ["devices"], "properties": {"devices": {"minItems": 1}}, "not": {"required": ["selector"]}},
            {"required": ["selector"], "not": {"required": ["devices"]}},
        ],
        "not": {"properties": {"dry_run": {"enum": [True]}}, "required": ["dry_run", "token"]},
        "anyOf": [{"properties": {"action": {"enum": ["drain"]}}}, {"not": {"required": ["then"]}}],
    }

    def validate(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values. Raises ValidationError (400) unless exactly one of `devices` and `selector` is given, and
        for `then` with another action than drain."""
        values = super().validate(values)
        if bool(values.get("devices")) == bool(values.get("selector")):
            raise serializers.ValidationError("Say either devices, at least one, or a selector.")
        if "then" in values and values["action"] != Action.DRAIN:
            raise serializers.ValidationError({"then": "only drain accepts it."})
        return values


class BulkActionSerializer(RowSerializer):
    """One action on many devices."""

    url = UrlField("bulk_actions", source="uuid")
    action = serializers.ChoiceField([(word, word) for word in ALL_ACTIONS], read_only=True)
    arguments = serializers.JSONField(
        read_only=True,
        help_text="Only for partition: `units` to add (negative: to remove, null: all), and `layout`; only for admit:"
        " the `rules` at the time of the preview.",
    )
    by = serializers.CharField(source="actor", read_only=True)
    counts = serializers.SerializerMethodField()
    results = serializers.SerializerMethodField()

    class Meta:
        model = Bulk
        fields = (
            "uuid",
            "url",
            "action",
            "then",
            "arguments",
            "state",
            "total",
            "counts",
            "by",
            "reason",
            "results",
            "created_at",
            "started_at",
            "ended_at",
        )

    def get_counts(self, bulk: Bulk) -> dict[str, int]:
        """The number of devices with each outcome."""
        counts = {outcome.value: getattr(bulk, outcome) for outcome in DeviceOutcome}
        return counts | {WAITING: bulk.total - bulk.finished_count}

    def get_results(self, bulk: Bulk) -> str:
        """The address of the list of its devices with the outcome of each."""
        return f"{self.context.get('base', '')}/api/bulk_results/?bulk_action={bulk.uuid}"


class RetrySerializer(ConfirmationSerializer):
    """The body of a retry: an optional reason, and the confirmation."""

    reason = ReasonField("Shown with each device and in its events.")


class CancelBulkSerializer(ClosedSerializer):
    """An empty body."""


class BulkActionView(CollectionView):
    """Actions on many devices, newest first."""

    policy = "device"
    read_policy = "inventory"
    default_ordering = "-created"
    filterset_class = BulkFilter
    member_actions = {"cancel": CancelBulkSerializer, "retry": RetrySerializer}
    body_serializers = {"create": StartBulkActionSerializer}
    response_serializers = dict.fromkeys(("create", "cancel", "retry"), (202, BulkActionSerializer))
    preview_serializers = dict.fromkeys(("create", "retry"), BulkPreviewSerializer)
    serializer_class = BulkActionSerializer
    queryset = Bulk.objects.all()

    @property
    def policy_rules(self) -> dict[str, str]:
        """Reading needs the rules of `inventory`. Every change needs STATE_RULE; if it orders commands, COMMAND_RULE
        instead."""
        return super().policy_rules | {"POST": STATE_RULE}

    def check_permissions(self, request: Request) -> None:
        """Raise 403 unless the caller may do this. For a change, the action of the body or of the row decides which
        rule is needed."""
        try:
            super().check_permissions(request)
        except PermissionDenied:
            rule = self._find_rule(request)
            if request.method != "POST" or rule == STATE_RULE:
                raise
            self.require_rule(rule)

    def _find_rule(self, request: Request) -> str:
        """Return the rule for the action that the body or the row in the address names; STATE_RULE if there is none."""
        if self.detail:
            bulk = Bulk.objects.filter(uuid=self.kwargs["uuid"]).first()
            return get_rule(bulk.action, bulk.arguments) if bulk else STATE_RULE
        try:
            return get_rule(request.data.get("action")) if isinstance(request.data, Mapping) else STATE_RULE
        except APIException:
            return STATE_RULE

    def get_offered_actions(self, data: Mapping[str, Any]) -> Iterable[str]:
        """Offer `cancel` while it runs, and `retry` when it has ended."""
        return {"running": ("cancel",), "done": ("retry",), "cancelled": ("retry",)}.get(str(data.get("state")), ())

    def create(self, request: Request) -> Response:
        """Start an action on many devices: 202. With `dry_run` answer with its preview: 200. Without a token the
        answer is 409, with the preview, if the devices are on several hosts or a held one would be changed."""
        values = self.validate_body()
        self.require_rule(get_rule(values["action"]))
        action, then = values["action"], DrainTarget(values.get("then", DrainTarget.MAINTENANCE))
        uuids, selector = sorted(set(map(str, values.get("devices", ())))), values.get("selector")
        described = {"kind": "bulk action", "action": action, "then": then, "devices": uuids, "selector": selector}
        return self._preview_or_start(
            values,
            described,
            lambda: bulk_actions.create_draft(
                action, then, select_devices(uuids, selector), self.caller, source=self.caller.event_source
            ),
        )

    def cancel(self, request: Request, **kwargs: str) -> Response:
        """Begin no further device. Devices that were changed stay as they are, and ordered commands go on."""
        self.validate_body()
        bulk = self.get_object()
        self.require_rule(get_rule(bulk.action, bulk.arguments))
        bulk_actions.cancel_bulk(bulk, self.caller, self.caller.event_source)
        return self.respond_with_stored_row(bulk.uuid, 202)

    def retry(self, request: Request, **kwargs: str) -> Response:
        """Start the same action again for the devices that were refused, or whose command or installation has failed:
        a new bulk action, 202. `dry_run` and `token` are used as for the first one."""
        values = self.validate_body()
        bulk = self.get_object()
        self.require_rule(get_rule(bulk.action, bulk.arguments))
        return self._preview_or_start(
            values,
            {"kind": "bulk retry", "bulk": str(bulk.uuid)},
            lambda: bulk_actions.create_retry_draft(bulk, self.caller, self.caller.event_source),
        )

    def _preview_or_start(
        self, values: Mapping[str, Any], described: Mapping[str, Any], make_draft: Callable[[], Bulk]
    ) -> Response:
        """Answer as `preview_or_start` does: with the bulk action if it was started, otherwise with its preview."""
        answer = preview_or_start(self.caller, values, described, make_draft)
        return answer if isinstance(answer, Response) else self.respond_with_stored_row(answer.uuid, 202)


def select_devices(uuids: list[str], selector: Mapping[str, Any] | None) -> QuerySet[Device]:
    """Return the devices with these uuids or, if there are none, those that a valid selector selects.

    Raises ValidationError (400) for a uuid that no device has.
    """
    if uuids:
        chosen = Device.objects.filter(uuid__in=uuids)
        known = {str(uuid) for uuid in chosen.values_list("uuid", flat=True)}
        if unknown := [uuid for uuid in uuids if uuid not in known]:
            raise serializers.ValidationError({"devices": f"There is no device {', '.join(unknown[:5])}."})
        return chosen
    devices: QuerySet[Device] = DeviceView.queryset.all()
    assert selector, "a body has either uuids or a selector"
    if "all" in selector:
        return devices
    selected: QuerySet[Device] = DeviceFilter(_build_query(selector), devices).qs
    return selected


class BulkResultFilter(SavedViewFilter):
    """Filter by bulk action, outcome, device or host."""

    bulk_action = filters.UUIDFilter(field_name="bulk__uuid")
    outcome = filters.MultipleChoiceFilter(
        method="filter_by_outcome", choices=[(word, word) for word in (*DeviceOutcome, WAITING)]
    )
    device = filters.UUIDFilter(field_name="device_uuid")
    host = host_filter()

    def filter_by_outcome(self, items: QuerySet[BulkItem], name: str, words: list[str]) -> QuerySet[BulkItem]:
        """Keep the devices with one of these outcomes; `waiting` is the word for none."""
        return items.filter(Q(outcome__in=["" if word == WAITING else word for word in words])) if words else items


class BulkResultSerializer(RowSerializer):
    """One device of a bulk action. `outcome` is empty until the device was processed."""

    url = UrlField("bulk_results", source="id")
    bulk_action = UrlField("bulk_actions", source="bulk.uuid")
    device = serializers.UUIDField(source="device_uuid", read_only=True)
    name = serializers.CharField(source="device_name", read_only=True)
    was = serializers.CharField(source="stood", read_only=True)
    reason = serializers.CharField(
        source="why", read_only=True, help_text="The stable code of the refusal; empty if it was not refused."
    )
    command = serializers.UUIDField(
        read_only=True, allow_null=True, help_text="The command that was ordered, see /api/commands/; null if none was."
    )

    class Meta:
        model = BulkItem
        fields = (
            "id",
            "url",
            "bulk_action",
            "device",
            "name",
            "host",
            "was",
            "outcome",
            "reason",
            "state",
            "text",
            "command",
        )


class BulkResultView(CollectionView):
    """The devices of bulk actions with the outcome of each, oldest first."""

    policy = "inventory"
    lookup_field = "id"
    lookup_value_regex = "[0-9]{1,18}"
    serializer_class = BulkResultSerializer
    filterset_class = BulkResultFilter
    queryset = bulk_actions.annotate_with_commands(BulkItem.objects.select_related("bulk"))
