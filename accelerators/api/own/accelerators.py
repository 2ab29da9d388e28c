"""Accelerators: the units that instances can get, who holds them, and how their number is changed.

A project sees and labels only the units that are attached to its own instances (contract section 3.2). Administrators
see all units, and on request also the free ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import django_filters as filters
from django.db.models import Q, QuerySet
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from accelerators import conductor
from accelerators.api.own import instances
from accelerators.api.own.bulk_previews import MAX_PREVIEW_DEVICES, BulkPreviewSerializer, preview_or_start
from accelerators.api.own.fields import (
    ChangeSerializer,
    ClosedSerializer,
    DeviceReference,
    GenerationField,
    HandleReference,
    HostReference,
    ProfileReference,
    ReasonField,
    RowSerializer,
    StrictIntegerField,
    StrictTextField,
    StrictUuidField,
    UrlField,
)
from accelerators.api.own.filters import SavedViewFilter, UuidPrefixFilter, choice_filter, host_filter
from accelerators.api.own.inventory import LayoutSerializer
from accelerators.api.own.previews import (
    TOKEN_EXCLUDES_DRY_RUN,
    ConfirmationSerializer,
    DraftConfirmationSerializer,
    PreviewSerializer,
    respond_with_preview,
)
from accelerators.api.own.selectors import DEVICES, MAX_NAMED_OBJECTS, SelectorField, check_selector, select_rows
from accelerators.api.own.views import CollectionView
from accelerators.devices import partitioning
from accelerators.devices.partitioning import PartitionChange, PartitionTarget
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.generations import require_generation
from accelerators.domain.states import DeviceOutcome, DrainTarget, RequestState
from accelerators.models import AcceleratorRequest, AttachHandle, Bulk, Device
from accelerators.models.devices import HANDLE_USES
from accelerators.requests import labels
from accelerators.workflows import bulk_actions, bulk_commands, bulk_labels, confirmations

MAX_LISTED_RESULTS = 256
"""A change of units of more devices is answered without the result of each device."""
FREE, RELEASED = "free", "released"
"""States of units without a request. A `released` unit is not free yet: a guest may still use it."""


class InstanceSerializer(serializers.Serializer[Any]):
    """An instance and its state in Nova. The state is `unknown` while Nova does not answer, `gone` if Nova has no such
    instance, and empty for a unit that no instance has."""

    uuid = serializers.UUIDField(read_only=True, allow_null=True)
    state = serializers.CharField(read_only=True)
    name = serializers.CharField(read_only=True)


class AcceleratorFilter(SavedViewFilter):
    """Filter by driver, backend, instance, device, host, project, state or the beginning of the uuid."""

    uuid_prefix = UuidPrefixFilter("request__uuid")
    attached = filters.BooleanFilter(method="ignore_attached", help_text="With false, free units are listed as well.")
    driver = filters.CharFilter(field_name="deployable__device__driver")
    backend = filters.CharFilter(field_name="deployable__device__backend")
    instance = filters.UUIDFilter(field_name="request__instance_uuid")
    device = filters.UUIDFilter(field_name="deployable__device__uuid")
    host = host_filter("deployable__device__host__name")
    project = filters.CharFilter(field_name="request__project_id")
    state = choice_filter((*RequestState, FREE, RELEASED), method="filter_by_state")

    def ignore_attached(self, rows: QuerySet[AttachHandle], name: str, wanted: bool) -> QuerySet[AttachHandle]:
        """Return `rows` unchanged. `AcceleratorView.get_queryset` includes or excludes free units, because that depends
        on the caller."""
        return rows

    def filter_by_state(self, rows: QuerySet[AttachHandle], name: str, wanted: list[str]) -> QuerySet[AttachHandle]:
        """Keep units in any of the `wanted` states; `free` and `released` stand for units without a request."""
        if not wanted:
            return rows
        condition = Q(request__state__in=wanted)
        for state in (FREE, RELEASED):
            if state in wanted:
                condition |= HANDLE_USES[state]
        return rows.filter(condition)


class LabelField(StrictTextField):
    """The project's own name for an attached unit; empty for a free unit."""

    def get_attribute(self, instance: AttachHandle) -> Any:
        """Return the label, or an empty text instead of None."""
        return super().get_attribute(instance) or ""


class AcceleratorSerializer(RowSerializer):
    """One unit, the device it belongs to and the instance that holds it. For a free unit the fields about its holder
    are null."""

    uuid = serializers.UUIDField(
        source="request.uuid", read_only=True, allow_null=True, help_text="The uuid of its request."
    )
    url = UrlField("accelerators", source="request.uuid", allow_null=True)
    request = UrlField("requests", source="request.uuid", allow_null=True)
    # Any, because `Field.label` is a text: the metaclass takes declared fields off the class, so nothing is hidden.
    label: Any = LabelField(
        source="request.label",
        max_length=255,
        allow_blank=True,
        required=False,
        help_text="Your own name for it; up to 255 characters.",
    )
    generation: Any = serializers.IntegerField(
        source="request.generation",
        read_only=True,
        allow_null=True,
        help_text="It grows by 1 with each change of the label. Send it with a change.",
    )
    project = serializers.CharField(source="request.project_id", read_only=True, allow_null=True)
    instance = serializers.SerializerMethodField()
    state = serializers.SerializerMethodField()
    driver = serializers.CharField(source="deployable.device.driver", read_only=True)
    backend = serializers.CharField(source="deployable.device.backend", read_only=True)
    device = DeviceReference(source="deployable.device", read_only=True)
    host = HostReference(source="deployable.device.host", read_only=True)
    handle = HandleReference(source="*", read_only=True)
    profile = ProfileReference(source="request.profile", read_only=True, allow_null=True)
    since = serializers.DateTimeField(source="request.updated_at", read_only=True, allow_null=True)

    class Meta:
        model = AttachHandle
        fields: tuple[str, ...] = (
            "uuid",
            "url",
            "request",
            "label",
            "generation",
            "project",
            "instance",
            "state",
            "driver",
            "backend",
            "device",
            "host",
            "handle",
            "profile",
            "since",
        )

    def get_state(self, unit: AttachHandle) -> str:
        """Return the state of the request that holds the unit; `free`, or `released` while a guest may still use it."""
        request = get_holding_request(unit)
        return request.state if request else RELEASED if getattr(unit, "release", None) else FREE

    def get_instance(self, unit: AttachHandle) -> InstanceSerializer:
        """Return the instance that holds the unit, with its state and name from Nova."""
        request = get_holding_request(unit)
        if request is None:
            return {"uuid": None, "state": "", "name": ""}  # type: ignore[return-value]
        instance_state = self.context["instances"].get(str(request.instance_uuid), instances.InstanceState())
        return {"uuid": request.instance_uuid and str(request.instance_uuid), **instance_state._asdict()}  # type: ignore[return-value]


class AcceleratorChangeSerializer(ChangeSerializer, AcceleratorSerializer):
    """A change of the label of an accelerator."""

    reason = ReasonField("Shown in its event.")

    class Meta(AcceleratorSerializer.Meta):
        fields = (*AcceleratorSerializer.Meta.fields, "reason")


def get_holding_request(unit: AttachHandle) -> AcceleratorRequest | None:
    """Return the request that holds `unit`, or None if it is free."""
    return getattr(unit, "request", None)


class TargetSerializer(ClosedSerializer):
    """Names one device, or a host and a backend. A host and a backend stand for all devices of that backend whose
    number of units can be chosen."""

    device = StrictUuidField(required=False)
    host = StrictTextField(max_length=255, required=False)
    backend = StrictTextField(max_length=64, required=False)

    def validate(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values; raise ValidationError (400) unless they are `device` alone, or `host` and `backend`
        together."""
        if values.keys() not in ({"device"}, {"host", "backend"}):
            raise serializers.ValidationError("Say a device, or a host and a backend.")
        return values


class AddUnitsSerializer(DraftConfirmationSerializer, LayoutSerializer):
    """An order to add units to each of the named devices. Send `targets` or `selector`."""

    targets = serializers.ListField(
        child=TargetSerializer(),
        required=False,
        max_length=MAX_NAMED_OBJECTS,
        help_text="The devices, at least one.",
    )
    selector = SelectorField(
        required=False,
        help_text='`{"all": true}`, or filters of `/api/devices/` with a text, a boolean or a list of texts. Devices'
        " whose number of units cannot be chosen are left out.",
    )
    count = StrictIntegerField(
        min_value=1, max_value=partitioning.MAX_UNITS, help_text="How many units to add to each device."
    )
    layout = serializers.DictField(
        child=StrictTextField(max_length=255),
        required=False,
        help_text="Other layout keys that its driver accepts, besides the number of units.",
    )
    generation = GenerationField(
        help_text="Only for a single device: the generation as you read it. If it has changed since, the answer is 409."
    )

    field_conditions = {
        "oneOf": [
            {"required": ["targets"], "properties": {"targets": {"minItems": 1}}, "not": {"required": ["selector"]}},
            {"required": ["selector"], "not": {"required": ["targets"]}},
        ],
        **TOKEN_EXCLUDES_DRY_RUN,
    }

    def validate(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values. Raises ValidationError (400) unless exactly one of `targets` and `selector` is given."""
        values = super().validate(values)
        if bool(values.get("targets")) == bool(values.get("selector")):
            raise serializers.ValidationError("Say either targets, at least one, or a selector.")
        if selector := values.get("selector"):
            check_selector(DEVICES, selector)
        return values


class RemoveUnitsSerializer(AddUnitsSerializer):
    """An order to remove units from each of the named devices."""

    count = StrictIntegerField(
        min_value=1,
        max_value=partitioning.MAX_UNITS,
        required=False,
        help_text="How many units to remove from each device; all of them if left out.",
    )


class ResultSerializer(serializers.Serializer[Any]):
    """The outcome for one device: its command, or why it was refused; neither while its turn has not come. A refusal
    does not stop the commands of other devices."""

    target = TargetSerializer(read_only=True)
    device = serializers.UUIDField(read_only=True, allow_null=True)
    command = serializers.UUIDField(
        read_only=True, allow_null=True, help_text="The command, see /api/commands/; null if there is none yet."
    )
    refused = serializers.CharField(read_only=True, help_text="Why it was refused; empty if there is a command.")
    reason = serializers.CharField(
        read_only=True, help_text="The stable code of the refusal, as in the body of an error; empty if not refused."
    )


class ResultsSerializer(serializers.Serializer[Any]):
    """The results, one per device."""

    results = ResultSerializer(
        many=True,
        read_only=True,
        help_text=f"If there are more than {MAX_LISTED_RESULTS} devices, only the targets that match no device; the"
        " result of each device is in `/api/bulk_results/`.",
    )
    bulk_action = serializers.UUIDField(
        read_only=True,
        allow_null=True,
        help_text="The bulk action of several devices, see /api/bulk_actions/; null for a single device.",
    )


class LabelsSerializer(ConfirmationSerializer):
    """The body that labels several accelerators: their uuids, and the label; an empty label removes theirs."""

    accelerators = serializers.ListField(
        child=StrictUuidField(),
        allow_empty=False,
        min_length=1,
        max_length=labels.MAX_LABELLED,
        help_text="The uuids of the accelerators.",
    )
    # Any, because `Field.label` is a text: the metaclass takes declared fields off the class, so nothing is hidden.
    label: Any = StrictTextField(max_length=255, allow_blank=True, help_text="The label; up to 255 characters.")

    field_conditions = TOKEN_EXCLUDES_DRY_RUN


class LabelResultSerializer(serializers.Serializer[Any]):
    """The outcome for one accelerator, or its forecast."""

    accelerator = serializers.UUIDField(source="request", read_only=True)
    host = serializers.CharField(read_only=True)
    outcome = serializers.ChoiceField(DeviceOutcome.choices(), read_only=True)
    before = serializers.CharField(source="label", read_only=True, help_text="The label before.")
    reason = serializers.CharField(
        read_only=True, help_text="The stable code of the refusal; empty if it was not refused."
    )
    text = serializers.CharField(read_only=True)


class LabelResultsSerializer(serializers.Serializer[Any]):
    """The results, one per accelerator."""

    results = LabelResultSerializer(many=True, read_only=True)


class LabelsPreviewSerializer(PreviewSerializer):
    """The forecast of a label. It has to be confirmed if it reaches several hosts."""

    accelerators = LabelResultSerializer(many=True, read_only=True)


class AcceleratorView(CollectionView):
    """Attached accelerators, by driver and instance, with the state of their instance in Nova; `attached=false` lists
    free units as well. A project may label its own units. Units are added and removed by partitioning devices that
    nobody holds."""

    policy = "accelerator"
    elevated_rule = "cyborg:accelerator:elevated"
    elevated_write_rule = "cyborg:accelerator:update_elevated"
    lookup_field = "request__uuid"
    lookup_url_kwarg = "uuid"
    serializer_class = AcceleratorSerializer
    filterset_class = AcceleratorFilter
    body_serializers = {
        "create": AddUnitsSerializer,
        "remove_units": RemoveUnitsSerializer,
        "set_labels": LabelsSerializer,
        "partial_update": AcceleratorChangeSerializer,
    }
    response_serializers = {
        "create": (202, ResultsSerializer),
        "remove_units": (202, ResultsSerializer),
        "set_labels": (200, LabelResultsSerializer),
        "partial_update": (200, AcceleratorSerializer),
    }
    preview_serializers = {
        "create": BulkPreviewSerializer,
        "remove_units": BulkPreviewSerializer,
        "set_labels": LabelsPreviewSerializer,
    }
    collection_actions = {"delete": "remove_units", "label": "set_labels"}
    queryset = AttachHandle.objects.select_related("request__profile", "release", "deployable__device__host")

    def get_collection_rule(self, name: str) -> str:
        """Return the rule of an action on several units; labelling needs that of labelling one."""
        return super().get_collection_rule("update" if name == "label" else name)

    def get_queryset(self) -> QuerySet[AttachHandle]:
        """Return the units that the caller may see.

        A project sees only units that its own requests hold. Free units are included only in lists with
        `attached=false`, and only if neither the unit nor its deployable is missing.
        """
        rows = super().get_queryset()
        if not self.can_see_all_projects():
            return rows.filter(request__project_id=self.caller.project_id)
        if self.detail or self.request.query_params.get("attached") != "false":
            return rows.filter(HANDLE_USES["held"])
        return rows.filter(HANDLE_USES["held"] | Q(missing_since__isnull=True, deployable__missing_since__isnull=True))

    def load_row_details(self, rows: list[AttachHandle]) -> list[AttachHandle]:
        """Load the state of all instances of the page, with one call of the registered source, and return `rows`
        unchanged. `manage.py` must work without a network, so nothing is loaded for it."""
        if self.caller.is_local:
            return rows
        holding_requests = [request for request in map(get_holding_request, rows) if request and request.instance_uuid]
        self.instance_states = instances.fetch_instance_states(
            {instances.InstanceKey(str(one.instance_uuid), one.project_id) for one in holding_requests}
        )
        return rows

    def get_object(self) -> AttachHandle:
        """Return one unit, after loading the state of its instance; 404 if the caller may not see the unit."""
        return self.load_row_details([super().get_object()])[0]

    def get_serializer_context(self) -> dict[str, Any]:
        """Add the loaded states of instances to the serializer context."""
        return super().get_serializer_context() | {"instances": getattr(self, "instance_states", {})}

    def partial_update(self, request: Request, **kwargs: str) -> Response:
        """Set the label of the request that holds the unit, and answer with the unit.

        A label that differs from the stored one is recorded as the event `request.labelled`. 404 if the caller may not
        see the unit, or if its request has given it back meanwhile, 403 if the caller may see it and may not change
        what its project has, 400 for an invalid body, 409 if it has another generation.
        """
        unit = self.get_object()
        self.require_project(unit.request.project_id)
        values = self.validate_body(unit)
        holding_request = unit.request
        subject, present = f"The accelerator {holding_request.uuid}", holding_request.generation
        generation = require_generation(subject, present, values.get("generation"))
        label = values.get("request", {}).get("label", holding_request.label)
        same_project = bulk_labels.query_held_accelerators().filter(project_id=holding_request.project_id)
        with conductor.writing():  # the request stays locked until it is read again
            (result,) = labels.set_labels(
                *(same_project, [holding_request.uuid], label, lambda project: True),
                *(self.caller, self.caller.event_source),
                reason=values.get("reason", ""),
                generation=generation,
            )
            if result.outcome == DeviceOutcome.REFUSED:
                raise RefusedError(RefusalReason(result.reason), result.text)
            holding_request.refresh_from_db(fields=["label", "generation"])
        return Response(self.get_serializer(unit).data)

    def set_labels(self, request: Request) -> Response:
        """Set the label of several accelerators; the answer has one result for each. An accelerator that the caller may
        not see or not change is refused, and stops no other.

        With `dry_run` the answer is the preview: 200. Without a token the answer is 409, with the preview, if the
        accelerators are on several hosts.
        """
        values = self.validate_body()
        uuids, label = values["accelerators"], values["label"]
        visible = bulk_labels.query_held_accelerators()
        if not self.can_see_all_projects():
            visible = visible.filter(project_id=self.caller.project_id)
        may_change_all = self.can_change_all_projects()

        def may_change(project: str) -> bool:
            """Return whether the caller may change what this project has."""
            return may_change_all or bool(project and project == self.caller.project_id)

        forecast = labels.forecast_labels(visible, uuids, label, may_change)
        seen = {one.request: one.label for one in forecast}
        described = {"kind": "labels", "label": label, "seen": sorted((str(uuid), was) for uuid, was in seen.items())}
        hosts = {one.host for one in forecast if one.outcome == DeviceOutcome.MOVED}
        if token := values.get("token"):
            if confirmations.read_token(token, self.caller, described) != min(seen):
                raise confirmations.stale_preview_error()
        elif values.get("dry_run") or len(hosts) > 1:
            issued = confirmations.issue_token(min(seen), self.caller, described)
            return respond_with_preview(_describe_labels(forecast, len(hosts)), issued, values.get("dry_run", False))
        results = labels.set_labels(visible, uuids, label, may_change, self.caller, self.caller.event_source, seen)
        return Response(LabelResultsSerializer({"results": results}).data)

    def create(self, request: Request) -> Response:
        """Add units to each of the named devices. The answer has one result per device. A device is refused while
        anybody holds one of its units.

        With `dry_run` the answer is the preview: 200. Without a token the answer is 409, with the preview, if the
        devices are on several hosts. Several devices are one bulk action: `/api/bulk_actions/` shows its progress,
        cancels it, and retries the devices that failed.
        """
        return self._change_unit_count(1)

    def remove_units(self, request: Request) -> Response:
        """Remove units from each of the named devices: `count` of them, or all. A device is refused while anybody holds
        one of its units. `dry_run`, `token` and the answers are those of adding units."""
        return self._change_unit_count(-1)

    def _change_unit_count(self, sign: int) -> Response:
        """Place the commands that add units (`sign` 1) or remove them (-1), as the body says; 202 with one result per
        device.

        A single device gets its command at once, several are a bulk action. If the body names a generation, it must
        name a single device, and a refusal of that device is raised as RefusedError. Raises NotConfirmedError without
        a token if the devices are on several hosts.
        """
        values = self.validate_body()
        difference = sign * values["count"] if "count" in values else None
        change = PartitionChange(difference, values.get("layout", {}), values.get("generation"))
        targets = self._resolve_targets(values, change)
        reason, source = values.get("reason", ""), self.caller.event_source
        devices = Device.objects.filter(uuid__in=[uuid for uuid, _ in targets if uuid])
        known_uuids = set(devices.values_list("uuid", flat=True))
        if not (values.get("dry_run") or values.get("token")) and len(known_uuids) <= 1:
            results = [self._change_device(uuid, target, change, reason) for uuid, target in targets]
            return Response({"results": results, "bulk_action": None}, 202)
        partitioning.check_change(change, reason)
        missing = [_not_found_error(uuid, target) for uuid, target in targets if uuid not in known_uuids]
        if not known_uuids:
            raise missing[0]
        chosen = {name: values.get(name) for name in ("targets", "selector")}
        described = {"kind": "units", **chosen, "change": change.to_arguments()}
        started = preview_or_start(
            self.caller,
            values,
            described,
            lambda: bulk_actions.create_draft(
                bulk_commands.PARTITION,
                DrainTarget.MAINTENANCE,
                devices,
                self.caller,
                source=source,
                arguments=change.to_arguments(),
            ),
            [error.text for error in missing],
        )
        if isinstance(started, Response):
            return started
        listed = targets
        if len(targets) > MAX_LISTED_RESULTS:
            listed = [(uuid, target) for uuid, target in targets if uuid not in known_uuids]
        return Response({"results": _describe_bulk_results(started, listed), "bulk_action": started.uuid}, 202)

    def _resolve_targets(
        self, values: dict[str, Any], change: PartitionChange
    ) -> list[tuple[UUID | None, PartitionTarget]]:
        """Return the devices that a body names or selects, as `partitioning.resolve_targets` does, whose errors it
        raises."""
        if selector := values.get("selector"):
            divisible = (
                select_rows(DEVICES, selector).exclude(sized_by="").order_by("id").values_list("uuid", flat=True)
            )
            targets = [PartitionTarget(uuid) for uuid in divisible[: partitioning.MAX_DEVICES + 1]]
            if not targets:
                text = "The selector matches no device whose number of units can be chosen."
                raise RefusedError(RefusalReason.NOT_FOUND, text)
        else:
            targets = [
                PartitionTarget(one.get("device"), one.get("host", ""), one.get("backend", ""))
                for one in values["targets"]
            ]
        return partitioning.resolve_targets(targets, change)

    def _change_device(
        self, uuid: UUID | None, target: PartitionTarget, change: PartitionChange, reason: str
    ) -> dict[str, Any]:
        """Place the command for one device, None if the target matches no device; return its result.

        Raises RefusedError if the change is refused and has a generation.
        """
        try:
            if uuid is None:
                raise _not_found_error(None, target)
            command = partitioning.partition_device(uuid, change, self.caller, reason, self.caller.event_source)
        except RefusedError as refused:
            if change.generation is not None:
                raise
            return _describe_result(target, uuid, None, refused.reason.value, refused.text)
        return _describe_result(target, uuid, command.uuid)


def _describe_labels(forecast: Sequence[labels.LabelResult], host_count: int) -> dict[str, Any]:
    """Return a preview as `LabelsPreviewSerializer` shows it, without the token."""
    counts = Counter((one.outcome, one.text) for one in forecast)
    return {
        "total": len(forecast),
        "hosts": host_count,
        "held": 0,
        "forecast": [
            {"outcome": outcome.value, "number": number, "held": False, "text": text}
            for (outcome, text), number in counts.most_common()
        ],
        "accelerators": LabelResultSerializer(forecast[:MAX_PREVIEW_DEVICES], many=True).data,
        "confirm": host_count > 1,
    }


def _describe_bulk_results(bulk: Bulk, targets: Sequence[tuple[UUID | None, PartitionTarget]]) -> list[dict[str, Any]]:
    """Return the results of a change of units so far, in the order of the targets."""
    named = bulk.items.filter(target_uuid__in=[uuid for uuid, _ in targets if uuid])
    items = {item.target_uuid: item for item in bulk_actions.annotate_with_commands(named)}
    results = []
    for uuid, target in targets:
        item = items.get(uuid) if uuid else None
        if item is None:
            error = _not_found_error(uuid, target)
            results.append(_describe_result(target, uuid, None, error.reason.value, error.text))
        elif item.outcome == DeviceOutcome.MOVED:
            command = item.ordered_command  # type: ignore[attr-defined]  # annotated
            results.append(_describe_result(target, uuid, command and UUID(command["uuid"])))
        else:
            results.append(_describe_result(target, uuid, None, item.why, item.text))
    return results


def _describe_result(
    target: PartitionTarget, device: UUID | None, command: UUID | None, reason: str = "", refused: str = ""
) -> dict[str, Any]:
    """Return the result for one device as `ResultSerializer` shows it."""
    target_fields = {"device": target.device} if target.device else {"host": target.host, "backend": target.backend}
    return {"target": target_fields, "device": device, "command": command, "refused": refused, "reason": reason}


def _not_found_error(uuid: UUID | None, target: PartitionTarget) -> RefusedError:
    """Return the error for a uuid that no device has, or for a target that matches no device."""
    if uuid:
        return partitioning.device_not_found_error(uuid)
    text = f"Host {target.host} has no device of backend {target.backend} whose number of units can be chosen."
    return RefusedError(RefusalReason.NOT_FOUND, text)
