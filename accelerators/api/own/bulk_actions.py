"""Bulk actions: one action on many devices, attachments or accelerators, with a preview, and the result of each.

Bulk actions on attachments and accelerators are shown only to callers who may see these objects; they need not be
allowed to see devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from uuid import UUID

import django_filters as filters
from django.core.validators import MinLengthValidator
from django.db.models import Q, QuerySet
from rest_framework import serializers
from rest_framework.exceptions import APIException, PermissionDenied
from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.own.accelerators import AcceleratorFilter
from accelerators.api.own.attachments import AttachmentFilter
from accelerators.api.own.bulk_previews import (
    ALL_ACTIONS,
    DEVICE_ACTIONS,
    BulkPreviewSerializer,
    preview_or_start,
)
from accelerators.api.own.fields import (
    ClosedSerializer,
    ReasonField,
    RowSerializer,
    StrictTextField,
    StrictUuidField,
    UrlField,
)
from accelerators.api.own.filters import SavedViewFilter, choice_filter, host_filter
from accelerators.api.own.previews import TOKEN_EXCLUDES_DRY_RUN, DraftConfirmationSerializer
from accelerators.api.own.selectors import (
    DEVICES,
    MAX_NAMED_OBJECTS,
    Selectable,
    SelectorField,
    check_selector,
    select_rows,
)
from accelerators.api.own.views import CollectionView
from accelerators.devices import admission_rules, partitioning
from accelerators.domain.device_actions import Action
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import (
    OPEN_COMMAND_STATES,
    BulkState,
    BulkTarget,
    CommandState,
    DeviceOutcome,
    DrainTarget,
)
from accelerators.models import AttachHandle, Attachment, Bulk, BulkItem, Device
from accelerators.models.devices import HANDLE_USES
from accelerators.workflows import attachment_orders, bulk_actions, bulk_admission, bulk_commands, bulk_labels
from accelerators.workflows.bulk_detachments import DETACH
from accelerators.workflows.bulk_labels import LABEL

WAITING = "waiting"
"""The word for the outcome of an object that was not processed yet."""
STATE_RULE, COMMAND_RULE = "cyborg:device:update", "cyborg:command:create"
ADD_UNITS_RULE, REMOVE_UNITS_RULE = "cyborg:accelerator:create", "cyborg:accelerator:delete"


SELECTABLES = {
    BulkTarget.DEVICE: DEVICES,
    BulkTarget.ATTACHMENT: Selectable(
        "attachments",
        AttachmentFilter,
        Attachment.objects.exclude(state__in=attachment_orders.REVERTING_OR_ENDED),
        (),
        "cyborg:attachment:get",
        "cyborg:attachment:get_elevated",
        "cyborg:attachment:elevated",
    ),
    BulkTarget.ACCELERATOR: Selectable(
        "accelerators",
        AcceleratorFilter,
        AttachHandle.objects.filter(HANDLE_USES["held"]),
        ("attached",),
        "cyborg:accelerator:get_all",
        "cyborg:accelerator:elevated",
        "cyborg:accelerator:update_elevated",
    ),
}
"""How a body selects the objects of each kind. A selector of attachments leaves out those that have ended or are being
taken back."""
TARGET_RULES = {DETACH: "cyborg:attachment:delete", LABEL: "cyborg:accelerator:update"}


def get_rule(action: Any, arguments: Mapping[str, Any] | None = None) -> str:
    """Return the policy rule that an action with these arguments needs, on one object or on many."""
    if action == bulk_commands.PARTITION and arguments:
        change = partitioning.PartitionChange.from_arguments(arguments)
        if not change.sets_layout_only:
            return ADD_UNITS_RULE if change.adds_units else REMOVE_UNITS_RULE
    if isinstance(action, str) and action in TARGET_RULES:
        return TARGET_RULES[action]
    return COMMAND_RULE if action in bulk_commands.LISTED_OPS else STATE_RULE


def get_target(action: str) -> BulkTarget:
    """Return the kind of the objects of an action."""
    target_action = bulk_actions.TARGET_ACTIONS.get(action)
    return target_action.target if target_action else BulkTarget.DEVICE


class BulkReadingView(CollectionView):
    """Rows of bulk actions. Callers who may see the objects of one kind may read the bulk actions on them."""

    def check_permissions(self, request: Request) -> None:
        """Raise 403 unless the caller may do this. Reading needs the rule of this URL, or the rule for reading
        attachments or accelerators."""
        try:
            super().check_permissions(request)
        except PermissionDenied:
            read_rules = [selectable.read_rule for selectable in SELECTABLES.values() if selectable.read_rule]
            if request.method not in ("GET", "HEAD") or not any(map(self.is_rule_satisfied, read_rules)):
                raise


def build_visible_condition(view: CollectionView, prefix: str = "") -> Q:
    """Return the condition that selects the bulk actions which the caller of a view may see. `prefix` leads from the
    rows of the view to their bulk action.

    For a change, bulk actions on devices are included: the rule of their action decides about it.
    """
    if view.caller.is_admin:
        return Q()
    may_see_devices = view.request.method == "POST" or view.is_rule_satisfied(view.policy_rules["GET"])
    visible = Q(**{f"{prefix}target": BulkTarget.DEVICE}) if may_see_devices else Q(pk__in=())
    for target, selectable in SELECTABLES.items():
        if selectable.read_rule and view.is_rule_satisfied(selectable.read_rule):
            of_target = Q(**{f"{prefix}target": target})
            own = Q() if view.is_rule_satisfied(selectable.read_all_rule) else _of_own_project(view, prefix)
            visible |= of_target & own
    return visible


def _of_own_project(view: CollectionView, prefix: str) -> Q:
    """Return the condition that selects bulk actions on objects of the caller's project only."""
    return Q(**{f"{prefix}project_id": view.caller.project_id}) & ~Q(**{f"{prefix}project_id": ""})


class BulkFilter(SavedViewFilter):
    """Filter by action or state. Drafts are previews that nobody has confirmed."""

    action = choice_filter(ALL_ACTIONS)
    state = choice_filter(BulkState)


def _list_field(noun: str) -> serializers.ListField:
    """Return a field with the uuids of objects."""
    return serializers.ListField(
        child=StrictUuidField(), required=False, max_length=MAX_NAMED_OBJECTS, help_text=f"The uuids of the {noun}."
    )


def _condition_of_field(name: str) -> dict[str, Any]:
    """Return the condition that only this field of those that select objects is in a body."""
    others = [one.field for one in SELECTABLES.values() if one.field != name] + ["selector"]
    return {
        "required": [name],
        "properties": {name: {"minItems": 1}},
        "not": {"anyOf": [{"required": [other]} for other in others if other != name]},
    }


ACTION_BY_ARGUMENT = {"label": LABEL, "layout": bulk_commands.PARTITION}
"""The only action that needs this field of a body; no other action accepts it."""


def _condition_of_actions(actions: Iterable[str], name: str, argument: str = "") -> dict[str, Any]:
    """Return the condition of bodies with one of these actions: the field `name` or a selector selects the objects, and
    there is no field of ACTION_BY_ARGUMENT except `argument`, which must be there."""
    others = [one for one in ACTION_BY_ARGUMENT if one != argument]
    return {
        "properties": {"action": {"enum": [*actions]}},
        **({"required": [argument]} if argument else {}),
        "not": {"anyOf": [{"required": [other]} for other in others]},
        "oneOf": [_condition_of_field(name), _condition_of_field("selector")],
    }


class StartBulkActionSerializer(DraftConfirmationSerializer):
    """The body that starts an action on many objects. Send `devices`, or a `selector`; for detach and label send
    `attachments` or `accelerators` instead of `devices`. Without any of them, admit chooses the inactive devices that
    a rule would move. The set is fixed by the preview."""

    action = serializers.ChoiceField(
        [(word, word) for word in ALL_ACTIONS],
        help_text="`admit` applies the admission rules to inactive devices, `partition` changes the layout of devices,"
        " `detach` detaches attachments, and `label` labels accelerators.",
    )
    then = serializers.ChoiceField(
        DrainTarget.choices(), required=False, help_text="Only for drain: the state after the last request."
    )
    # Any, because `Field.label` is a text: the metaclass takes declared fields off the class, so nothing is hidden.
    label: Any = StrictTextField(
        max_length=255,
        allow_blank=True,
        required=False,
        help_text="Only for label: the label; an empty one removes the labels.",
    )
    layout = serializers.DictField(
        child=StrictTextField(max_length=255),
        required=False,
        allow_empty=False,
        validators=[MinLengthValidator(1)],  # so that the OpenAPI document shows minLength
        help_text="Only for partition: layout keys that the drivers of the devices accept, with their values, for"
        ' example {"vfs": "4"}.',
    )
    devices = _list_field("devices")
    attachments = _list_field("attachments; only for detach")
    accelerators = _list_field("accelerators, which are those of their requests; only for label")
    selector = SelectorField(
        required=False,
        help_text='`{"all": true}`, or filters of `/api/devices/` with a text, a boolean or a list of texts; for detach'
        " those of `/api/attachments/`, for label those of `/api/accelerators/`. For partition, devices whose layout"
        " cannot be changed are left out.",
    )
    reason = ReasonField("Shown with each object and in its events.")

    field_conditions = {
        **TOKEN_EXCLUDES_DRY_RUN,
        "allOf": [
            {"anyOf": [{"properties": {"action": {"enum": ["drain"]}}}, {"not": {"required": ["then"]}}]},
            {
                "oneOf": [
                    _condition_of_actions(DEVICE_ACTIONS, "devices"),
                    _condition_of_actions([bulk_commands.PARTITION], "devices", "layout"),
                    _condition_of_actions([DETACH], "attachments"),
                    _condition_of_actions([LABEL], "accelerators", "label"),
                    {
                        "properties": {"action": {"enum": [bulk_admission.ADMIT]}},
                        "not": {
                            "anyOf": [
                                {"required": [name]}
                                for name in (*ACTION_BY_ARGUMENT, "selector", "devices", "attachments", "accelerators")
                            ]
                        },
                    },
                ]
            },
        ],
    }

    def validate(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values. Raises ValidationError (400) unless the objects are selected in exactly one way, which the
        action allows, and for `then`, `label` and `layout` with another action than drain, label and partition."""
        values = super().validate(values)
        action = values["action"]
        selectable = SELECTABLES[get_target(action)]
        others = [one.field for one in SELECTABLES.values() if one is not selectable and one.field in values]
        if others:
            raise serializers.ValidationError({others[0]: f"{action} needs {selectable.field}."})
        is_selected = bool(values.get(selectable.field)), bool(values.get("selector"))
        is_left_to_rules = action == bulk_admission.ADMIT and not {selectable.field, "selector"} & values.keys()
        if is_selected[0] == is_selected[1] and not is_left_to_rules:
            raise serializers.ValidationError(f"Say either {selectable.field}, at least one, or a selector.")
        if "selector" in values:
            check_selector(selectable, values["selector"])
        if "then" in values and action != Action.DRAIN:
            raise serializers.ValidationError({"then": "only drain accepts it."})
        for argument, its_action in ACTION_BY_ARGUMENT.items():
            if (argument in values) != (action == its_action):
                text = f"{its_action} needs it." if action == its_action else f"only {its_action} accepts it."
                raise serializers.ValidationError({argument: text})
        return values


class BulkActionSerializer(RowSerializer):
    """One action on many devices, attachments or accelerators."""

    url = UrlField("bulk_actions", source="uuid")
    action = serializers.CharField(
        read_only=True,
        help_text=f"One of {', '.join(ALL_ACTIONS)}; a conductor of a newer release may have started another one.",
    )
    target = serializers.CharField(
        read_only=True, help_text="The kind of its objects: device, attachment or accelerator."
    )
    arguments = serializers.JSONField(
        read_only=True,
        help_text="Only for partition: `units` to add (negative: to remove, null: all, 0: only the layout is changed),"
        " and `layout`; only for admit:"
        " the `rules` at the time of the preview; only for label: the `label`.",
    )
    by = serializers.CharField(source="actor", read_only=True)
    counts = serializers.SerializerMethodField()
    commands = serializers.SerializerMethodField()
    results = serializers.SerializerMethodField()

    class Meta:
        model = Bulk
        fields = (
            "uuid",
            "url",
            "action",
            "target",
            "then",
            "arguments",
            "state",
            "total",
            "counts",
            "commands",
            "by",
            "reason",
            "results",
            "created_at",
            "started_at",
            "ended_at",
        )

    def get_counts(self, bulk: Bulk) -> dict[str, int]:
        """The number of objects with each outcome."""
        counts = {outcome.value: getattr(bulk, outcome) for outcome in DeviceOutcome}
        return counts | {WAITING: bulk.total - bulk.finished_count}

    def get_commands(self, bulk: Bulk) -> dict[str, int] | None:
        """The number of commands that the action has ordered: of those that are `open`, and of those that have ended
        with each state. It is null in lists, and for actions without commands (all but health, reset and partition)."""
        if isinstance(self.parent, serializers.ListSerializer) or not bulk_actions.orders_commands(bulk):
            return None
        numbers = bulk_actions.count_commands(bulk)
        ended = {state.value: numbers[state] for state in CommandState if state not in OPEN_COMMAND_STATES}
        return {"open": numbers.total() - sum(ended.values())} | ended

    def get_results(self, bulk: Bulk) -> str:
        """The address of the list of its objects with the outcome of each."""
        return f"{self.context.get('base', '')}/api/bulk_results/?bulk_action={bulk.uuid}"


class RetrySerializer(DraftConfirmationSerializer):
    """The body of a retry: an optional reason, and the confirmation."""

    reason = ReasonField("Shown with each object and in its events.")


class CancelBulkSerializer(ClosedSerializer):
    """An empty body."""


class BulkActionView(BulkReadingView):
    """Actions on many objects, newest first."""

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
        """Reading needs the rules of `inventory`. Every change needs STATE_RULE, or the rule of its action instead
        (`get_rule`)."""
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

    def get_queryset(self) -> QuerySet[Any]:
        """Return the bulk actions that the caller may see."""
        return super().get_queryset().filter(build_visible_condition(self))

    def get_offered_actions(self, data: Mapping[str, Any]) -> Iterable[str]:
        """Offer `cancel` while it runs, and `retry` when it has ended and this release knows its action."""
        if data.get("state") != "running" and data.get("action") not in bulk_actions.KNOWN_ACTIONS:
            return ()
        return {"running": ("cancel",), "done": ("retry",), "cancelled": ("retry",)}.get(str(data.get("state")), ())

    def create(self, request: Request) -> Response:
        """Start an action on many objects: 202. With `dry_run` answer with its preview: 200. Without a token the
        answer is 409, with the preview, if the objects are on several hosts or a held one would be changed. A label
        changes nothing that is held.

        A caller who detaches attachments or labels accelerators must be allowed to see these objects, and reaches only
        those of its own project, unless the rules for all projects allow more.
        """
        values = self.validate_body()
        action, then = values["action"], DrainTarget(values.get("then", DrainTarget.MAINTENANCE))
        self.require_rule(get_rule(action))
        target = get_target(action)
        is_restricted = target is not BulkTarget.DEVICE and not self._may_change_all_projects(target)
        if target is not BulkTarget.DEVICE:
            self.require_rule(SELECTABLES[target].read_rule)
        project_id = self.caller.project_id if is_restricted else None
        uuids, selector = sorted(set(map(str, values.get(SELECTABLES[target].field, ())))), values.get("selector")
        described = {"kind": "bulk action", "action": action, "then": then, "devices": uuids, "selector": selector}
        described |= {name: values[name] for name in ACTION_BY_ARGUMENT if name in values}
        arguments = _build_arguments(values)
        return self._preview_or_start(
            values,
            described,
            lambda: bulk_actions.create_draft(
                action,
                then,
                _leave_out_fixed_devices(action, selector, select_objects(target, uuids, selector, project_id)),
                self.caller,
                source=self.caller.event_source,
                arguments=arguments,
                project_id=project_id or "",
            ),
        )

    def cancel(self, request: Request, **kwargs: str) -> Response:
        """Begin no further object. Objects that were changed stay as they are, and ordered commands go on."""
        self.validate_body()
        bulk = self.get_object()
        self._require_right(bulk)
        bulk_actions.cancel_bulk(bulk, self.caller, self.caller.event_source)
        return self.respond_with_stored_row(bulk.uuid, 202)

    def retry(self, request: Request, **kwargs: str) -> Response:
        """Start the same action again for the objects that were refused, or whose command or installation has failed:
        a new bulk action, 202. `dry_run` and `token` are used as for the first one."""
        values = self.validate_body()
        bulk = self.get_object()
        self._require_right(bulk)
        return self._preview_or_start(
            values,
            {"kind": "bulk retry", "bulk": str(bulk.uuid)},
            lambda: bulk_actions.create_retry_draft(bulk, self.caller, self.caller.event_source),
        )

    def _may_change_all_projects(self, target: BulkTarget) -> bool:
        """Return whether the caller may see and change the objects of all projects."""
        selectable = SELECTABLES[target]
        rules = (selectable.read_all_rule, selectable.change_all_rule)
        return self.caller.is_admin or all(self.is_rule_satisfied(rule) for rule in rules)

    def _require_right(self, bulk: Bulk) -> None:
        """Raise PermissionDenied (403) unless the caller may change this bulk action: has the rule of its action, and
        may change objects of all projects, or all objects belong to the caller's project."""
        self.require_rule(get_rule(bulk.action, bulk.arguments))
        if bulk.target == BulkTarget.DEVICE or self.caller.is_admin:
            return
        is_own = bool(bulk.project_id) and bulk.project_id == self.caller.project_id
        if not is_own and not (bulk.target in SELECTABLES and self._may_change_all_projects(BulkTarget(bulk.target))):
            text = f"Some of its {bulk.target}s belong to other projects. Ask an administrator to do this."
            raise PermissionDenied(text)

    def _preview_or_start(
        self, values: Mapping[str, Any], described: Mapping[str, Any], make_draft: Callable[[], Bulk]
    ) -> Response:
        """Answer as `preview_or_start` does: with the bulk action if it was started, otherwise with its preview."""
        answer = preview_or_start(self.caller, values, described, make_draft)
        return answer if isinstance(answer, Response) else self.respond_with_stored_row(answer.uuid, 202)


def _build_arguments(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of the bulk action that a body starts; None if it has none. Raises RefusedError INVALID for
    a layout that cannot be stored."""
    if values["action"] == LABEL:
        return bulk_labels.build_arguments(values["label"])
    if values["action"] == bulk_commands.PARTITION:
        change = partitioning.PartitionChange(0, values["layout"])
        partitioning.check_change(change, values.get("reason", ""))
        return change.to_arguments()
    return None


def _leave_out_fixed_devices(action: str, selector: Any, chosen: QuerySet[Any]) -> QuerySet[Any]:
    """Return the chosen objects; of devices that a selector selects for a change of the layout, those whose layout can
    be changed. Raises RefusedError NOT_FOUND if there are none."""
    if action != bulk_commands.PARTITION or not selector:
        return chosen
    changeable = chosen.exclude(changeable="")
    if not changeable.exists():
        text = "The selector matches no device whose layout can be changed."
        raise RefusedError(RefusalReason.NOT_FOUND, text)
    return changeable


def select_objects(
    target: BulkTarget, uuids: list[str], selector: Mapping[str, Any] | None, project_id: str | None = None
) -> QuerySet[Any]:
    """Return the objects with these uuids or, if there are none, those that a valid selector selects; without a
    selector the devices that the admission rules would move.

    With a `project_id` only the objects of this project are selected. Raises ValidationError (400) for a uuid that no
    object has, and RefusedError INVALID if the admission rules would move no device.
    """
    if not uuids and not selector:
        devices = admission_rules.query_devices_to_move()
        if not devices.exists():
            raise RefusedError(RefusalReason.INVALID, "No admission rule would move an inactive device.")
        return devices
    selectable = SELECTABLES[target]
    in_project = Q() if project_id is None else Q(project_id=project_id)
    objects: QuerySet[Any] = {
        BulkTarget.DEVICE: Device.objects.all(),
        BulkTarget.ATTACHMENT: Attachment.objects.filter(in_project),
        BulkTarget.ACCELERATOR: bulk_labels.query_held_accelerators().filter(in_project),
    }[target]
    if uuids:
        chosen = objects.filter(uuid__in=uuids)
        known = {str(uuid) for uuid in chosen.values_list("uuid", flat=True)}
        if unknown := [uuid for uuid in uuids if uuid not in known]:
            text = f"There is no {target} {', '.join(unknown[:5])}."
            raise serializers.ValidationError({selectable.field: text})
        return chosen
    assert selector, "a body has either uuids or a selector"
    selected = select_rows(selectable, selector)
    if target is BulkTarget.DEVICE:
        return selected
    if target is BulkTarget.ACCELERATOR:
        return objects.filter(attach_handle__in=selected.order_by().values("pk"))
    return objects.filter(pk__in=selected.order_by().values("pk"))


class BulkResultFilter(SavedViewFilter):
    """Filter by bulk action, outcome, object (`device` or `target`) or host, or by whether the object has failed."""

    bulk_action = filters.UUIDFilter(field_name="bulk__uuid")
    outcome = filters.MultipleChoiceFilter(
        method="filter_by_outcome", choices=[(word, word) for word in (*DeviceOutcome, WAITING)]
    )
    device = filters.UUIDFilter(field_name="target_uuid")
    target = filters.UUIDFilter(field_name="target_uuid")
    host = host_filter()
    failed = filters.BooleanFilter(method="filter_by_failure")

    def filter_by_failure(self, items: QuerySet[BulkItem], name: str, has_failed: bool) -> QuerySet[BulkItem]:
        """Keep the objects that were refused or whose command or installation has failed since, or only the others."""
        condition = bulk_actions.ITEM_HAS_FAILED
        return items.filter(condition) if has_failed else items.exclude(condition)

    def filter_by_outcome(self, items: QuerySet[BulkItem], name: str, words: list[str]) -> QuerySet[BulkItem]:
        """Keep the objects with one of these outcomes; `waiting` is the word for none."""
        return items.filter(Q(outcome__in=["" if word == WAITING else word for word in words])) if words else items


class BulkResultSerializer(RowSerializer):
    """One object of a bulk action. `outcome` is empty until the object was processed."""

    url = UrlField("bulk_results", source="id")
    bulk_action = UrlField("bulk_actions", source="bulk.uuid")
    target = serializers.UUIDField(
        source="target_uuid", read_only=True, help_text="The uuid of the device, attachment or accelerator."
    )
    device = serializers.SerializerMethodField()
    name = serializers.CharField(source="target_name", read_only=True)
    was = serializers.CharField(source="stood", read_only=True)
    reason = serializers.CharField(
        source="why", read_only=True, help_text="The stable code of the refusal; empty if it was not refused."
    )
    command = serializers.UUIDField(
        source="ordered_command.uuid",
        read_only=True,
        allow_null=True,
        help_text="The command that was ordered, see /api/commands/; null if none was.",
    )
    command_state = serializers.CharField(
        source="ordered_command.state",
        read_only=True,
        allow_null=True,
        help_text="The present state of that command, as in /api/commands/.",
    )
    command_text = serializers.CharField(
        source="ordered_command.text",
        read_only=True,
        allow_null=True,
        help_text="The result of that command as a sentence; empty until it has ended.",
    )

    class Meta:
        model = BulkItem
        fields = (
            "id",
            "url",
            "bulk_action",
            "target",
            "device",
            "name",
            "host",
            "was",
            "outcome",
            "reason",
            "state",
            "text",
            "command",
            "command_state",
            "command_text",
        )

    def get_device(self, item: BulkItem) -> UUID | None:
        """The uuid of the device; null if the object is not a device."""
        return item.target_uuid if item.bulk.target == BulkTarget.DEVICE else None


class BulkResultView(BulkReadingView):
    """The objects of bulk actions with the outcome of each, oldest first."""

    policy = "inventory"
    lookup_field = "id"
    lookup_value_regex = "[0-9]{1,18}"
    serializer_class = BulkResultSerializer
    filterset_class = BulkResultFilter
    queryset = bulk_actions.annotate_with_commands(BulkItem.objects.select_related("bulk"))

    def get_queryset(self) -> QuerySet[Any]:
        """Return the objects of the bulk actions that the caller may see."""
        return super().get_queryset().filter(build_visible_condition(self, "bulk__"))
