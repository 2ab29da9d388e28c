"""Hosts, devices, deployables and attach handles: the infrastructure, for its operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

import django_filters as filters
from django.contrib.postgres.expressions import ArraySubquery
from django.core.validators import MinLengthValidator
from django.db.models import Count, IntegerField, OuterRef, Q, QuerySet, Subquery, Value
from django.db.models.functions import Coalesce, JSONObject
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from accelerators import safety
from accelerators.api.own.commands import CommandSerializer
from accelerators.api.own.fields import (
    NEEDS_GENERATION,
    ClosedSerializer,
    DeployableReference,
    DeviceReference,
    GenerationField,
    HostReference,
    ReasonField,
    ReasonSerializer,
    RowSerializer,
    StrictBooleanField,
    StrictTextField,
    UrlField,
    parse_attach_info,
)
from accelerators.api.own.filters import BulkActionFilter, ListFilter, choice_filter, host_filter, presence_filter
from accelerators.api.own.previews import (
    TOKEN_EXCLUDES_DRY_RUN,
    ConfirmationSerializer,
    PreviewSerializer,
    describe_forecast,
    respond_with_preview,
)
from accelerators.api.own.views import CollectionView
from accelerators.devices import lifecycle, partitioning
from accelerators.devices.lifecycle import MAX_REASON, SeenStates
from accelerators.domain import device_actions, generations
from accelerators.domain.caller import Caller
from accelerators.domain.device_actions import Action
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.identity import SERIAL_PREFIX
from accelerators.domain.states import (
    DeviceOutcome,
    DeviceState,
    DeviceType,
    DrainTarget,
    EventSource,
    HandleType,
    Health,
)
from accelerators.models import AcceleratorRequest, AttachHandle, Attribute, Deployable, Device, Host
from accelerators.models.devices import build_driver_error_expression, build_name_condition
from accelerators.workflows import bulk_actions, confirmations, host_removal
from accelerators.workflows.bulk_targets import BulkForecast


def count_related_rows(rows: QuerySet[Any], column: str, outer_column: str = "pk") -> Coalesce:
    """Return an expression that counts the `rows` whose `column` equals `outer_column` of the outer row; 0 if there are
    none.

    It is a subquery of the same statement.
    """
    counts = (
        rows.filter(**{column: OuterRef(outer_column)}).order_by().values(column).annotate(n=Count("*")).values("n")
    )
    return Coalesce(Subquery(counts), Value(0), output_field=IntegerField())


class HostFilter(ListFilter):
    """Filter by name, or by whether the host is stale: its agent has not been heard from."""

    name = filters.CharFilter(help_text="Exactly this name.")
    name_prefix = filters.CharFilter(field_name="name", lookup_expr="startswith", help_text="Names that begin so.")
    stale = presence_filter("stale_since", "Whether its agent is not heard from.")


class HostSerializer(RowSerializer):
    """A compute host: the last report of each driver, and since when its agent has not been heard from."""

    url = UrlField("hosts", source="uuid")
    drivers = serializers.JSONField(
        read_only=True,
        help_text="For each driver: its error (empty if it answered), since when, its devices and its faults.",
    )
    devices = serializers.IntegerField(read_only=True, source="number_of_devices", help_text="How many devices it has.")

    class Meta:
        model = Host
        fields = (
            "uuid",
            "url",
            "name",
            "node",
            "stale_since",
            "reported_at",
            "removing_since",
            "deleting_since",
            "devices",
            "drivers",
            "created_at",
            "updated_at",
        )


class RemovalSerializer(ClosedSerializer):
    """Body of the removal of a host."""

    confirm = StrictTextField(
        max_length=255, required=False, allow_blank=True, help_text="The host's name; needed unless `dry_run` is true."
    )
    reason = StrictTextField(max_length=MAX_REASON, required=False, allow_blank=True)
    dry_run = StrictBooleanField(required=False, help_text="Only return what would be deleted.")


class CancelRemovalSerializer(ClosedSerializer):
    """Body of the cancellation of a host's removal."""

    reason = StrictTextField(max_length=MAX_REASON, required=False, allow_blank=True)


class RemovalPreviewSerializer(serializers.Serializer[Any]):
    """The numbers of rows that are deleted with a host, and why the removal is refused now ('' if it is not)."""

    host = serializers.CharField(read_only=True)
    devices = serializers.IntegerField(read_only=True)
    handles = serializers.IntegerField(read_only=True)
    providers = serializers.IntegerField(read_only=True, help_text="Resource providers, which Placement may have.")
    wanted_drivers = serializers.IntegerField(read_only=True)
    commands = serializers.IntegerField(read_only=True)
    guests_unconfirmed = serializers.IntegerField(
        read_only=True, help_text="Handles of which the host has not confirmed that no guest uses them."
    )
    refused = serializers.CharField(read_only=True)


class HostView(CollectionView):
    """Compute hosts, ordered by name. A decommissioned host can be removed."""

    policy = "host"
    sort_fields = {"name": "name", "created": "id"}
    default_ordering = "name"
    etag_collections = ("hosts", "devices")
    serializer_class = HostSerializer
    filterset_class = HostFilter
    queryset = Host.objects.annotate(number_of_devices=count_related_rows(Device.objects.all(), "host"))
    member_actions = {"remove": RemovalSerializer, "cancel_removal": CancelRemovalSerializer}
    actions_to_confirm = ("remove",)
    response_serializers = {"remove": (202, RemovalPreviewSerializer)}
    preview_serializers = {"remove": RemovalPreviewSerializer}

    @property
    def policy_rules(self) -> dict[str, str]:
        """Add the rule `cyborg:host:delete` for POST: the actions remove a host, or cancel its removal."""
        return super().policy_rules | {"POST": "cyborg:host:delete"}

    def remove(self, request: Request, **kwargs: str) -> Response:
        """Remove a decommissioned host: revoke its agent, and delete its devices and providers; 202.

        The deletion begins after CYBORG_HOST_REMOVAL_DELAY_S seconds; until then the removal can be cancelled. 409
        unless `confirm` is the host's name, and while requests or allocations exist. With `dry_run` nothing is changed
        (200). Events are kept, and the name may join again.
        """
        values, host = self.validate_body(), self.get_object()
        if values.get("dry_run"):
            return Response(RemovalPreviewSerializer(host_removal.preview_removal(host)).data)
        removed = host_removal.count_removed_rows(host)
        confirmed, reason = values.get("confirm", ""), values.get("reason", "")
        host_removal.order_removal(host.uuid, confirmed, self.caller, reason, EventSource.API)
        return Response(RemovalPreviewSerializer(removed).data, 202)

    def cancel_removal(self, request: Request, **kwargs: str) -> Response:
        """Cancel the removal of a host: its devices get their former states back.

        409 if the host is not being removed, or if the deletion has begun (`deleting_since`).
        """
        reason, host = self.validate_body().get("reason", ""), self.get_object()
        host_removal.cancel_removal(host.uuid, self.caller, reason, EventSource.API)
        return self.respond_with_stored_row(host.uuid, 200)


class DeviceFilter(ListFilter):
    """Filter by host, address, serial number, kind, driver, state, health, bulk action, or whether the shown data is
    stale."""

    host = host_filter("host__name")
    address = filters.CharFilter(help_text="Exactly this PCI address.")
    serial = filters.CharFilter(method="filter_by_serial", help_text="Exactly this serial number.")
    state = choice_filter(DeviceState)
    status = choice_filter(Health, help_text="Its health.")
    type = choice_filter(DeviceType)
    vendor = filters.CharFilter()
    name = filters.CharFilter(
        method="filter_by_name", help_text="All words occur in the name of the hardware, such as `nvidia a100`."
    )
    driver = filters.CharFilter()
    backend = filters.CharFilter()
    bulk_action = BulkActionFilter()
    draining = presence_filter("drain_to", "Whether it is draining: it waits until its last request ends.")
    stale = filters.BooleanFilter(method="filter_by_staleness", help_text="Whether the shown data may be out of date.")

    def filter_by_serial(self, devices: QuerySet[Device], name: str, serial: str) -> QuerySet[Device]:
        """Keep the devices with this serial number, by the index of the keys."""
        return devices.filter(key=f"{SERIAL_PREFIX}{serial}")

    def filter_by_name(self, devices: QuerySet[Device], name: str, term: str) -> QuerySet[Device]:
        """Keep the devices whose hardware has this name, by the ids that belong to it."""
        return devices.filter(build_name_condition(term))

    def filter_by_staleness(self, devices: QuerySet[Device], name: str, wanted: bool) -> QuerySet[Device]:
        """Keep stale devices if `wanted`, others if not.

        A device is stale if its host's agent has not been heard from, or if its driver or backend failed.
        """
        stale = Q(host__stale_since__isnull=False) | (Q(_error__isnull=False) & ~Q(_error=""))
        matching = devices.alias(_error=build_driver_error_expression())
        return matching.filter(stale) if wanted else matching.exclude(stale)


class _CountedDevice(Protocol):
    """Type of a Device that was loaded by `DeviceView`: its query adds the column `held`."""

    held: int


class DeviceSerializer(RowSerializer):
    """A device (card): its state with reason, time and author; the actions possible now; its health."""

    url = UrlField("devices", source="uuid")
    host = HostReference(read_only=True)
    next_actions = serializers.SerializerMethodField()
    draining = serializers.SerializerMethodField()
    held = serializers.IntegerField(read_only=True, help_text="How many requests hold one of its attach handles.")
    name = serializers.CharField(
        source="hardware_name.full", read_only=True, help_text="What people call the hardware: NVIDIA A100 PCIe 80GB."
    )
    vendor_name = serializers.CharField(
        source="hardware_name.vendor", read_only=True, help_text="The vendor in the PCI ID database; empty if unknown."
    )
    model_name = serializers.CharField(
        source="hardware_name.model", read_only=True, help_text="The model in the PCI ID database; empty if unknown."
    )
    subsystem_name = serializers.CharField(
        source="hardware_name.subsystem",
        read_only=True,
        help_text="The maker and the name of the board in the PCI ID database; empty if unknown.",
    )
    stale = serializers.SerializerMethodField()
    to_install = serializers.SerializerMethodField()
    acts = serializers.SerializerMethodField()
    changeable = serializers.SerializerMethodField()
    busy_with = UrlField(
        "commands", allow_null=True, help_text="The exclusive command that it executes; no request is bound meanwhile."
    )
    commands = serializers.SerializerMethodField()

    class Meta:
        model = Device
        fields = (
            "uuid",
            "url",
            "host",
            "type",
            "vendor",
            "model",
            "name",
            "vendor_name",
            "model_name",
            "address",
            "state",
            "status",
            "driver",
            "backend",
            "stale",
            "state_reason",
            "state_since",
            "state_by",
            "returns_to",
            "draining",
            "held",
            "next_actions",
            "to_install",
            "acts",
            "changeable",
            "sized_by",
            "generation",
            "busy_with",
            "commands",
            "status_reason",
            "status_since",
            "key",
            "numa_node",
            "kernel_driver",
            "subsystem",
            "subsystem_name",
            "std_board_info",
            "vendor_board_info",
            "created_at",
            "updated_at",
        )

    def get_next_actions(self, device: Device) -> list[str]:
        """The actions that are possible now. Each is a POST to the device's address followed by the action's name."""
        held = cast(_CountedDevice, device).held
        return [
            action.value for action in device_actions.possible_actions(lifecycle.build_lifecycle_state(device, held))
        ]

    def get_draining(self, device: Device) -> dict[str, Any] | None:
        """The state the device enters (`to`) when its last request ends, and how many requests are left; null if it is
        not draining."""
        return {"to": device.drain_to, "left": cast(_CountedDevice, device).held} if device.drain_to else None

    def get_to_install(self, device: Device) -> list[str]:
        """The steps by which its driver would make the device ready on the host; empty if nothing needs to be done."""
        return device.to_install.splitlines()

    def get_acts(self, device: Device) -> list[str]:
        """The operations that its driver supports. `/api/commands/` can order those of them that it accepts."""
        return device.acts.split()

    def get_changeable(self, device: Device) -> list[str]:
        """The layout keys that its driver accepts. The key named in `sized_by` sets the number of units."""
        return device.changeable.split()

    def get_commands(self, device: Device) -> str:
        """The address of the list of its commands."""
        return f"{self.context.get('base', '')}/api/commands/?device={device.uuid}"

    def get_stale(self, device: Device) -> str:
        """Why the shown data may be out of date; empty if it is current."""
        return device.host.stale_reason(device.driver, device.backend)


class DeviceActionSerializer(ConfirmationSerializer, ReasonSerializer):
    """The body of an action on a device: an optional reason, and the confirmation."""

    field_conditions = TOKEN_EXCLUDES_DRY_RUN


class DeviceActionPreviewSerializer(PreviewSerializer):
    """The forecast of an action on one device. It has to be confirmed if it would change a held device."""

    action = serializers.ChoiceField([(one.value, one.value) for one in Action], read_only=True)
    then = serializers.ChoiceField(DrainTarget.choices(), read_only=True)
    device = serializers.UUIDField(read_only=True)
    state = serializers.CharField(read_only=True)
    holders = serializers.ListField(
        child=serializers.CharField(), read_only=True, help_text="The requests that hold it, with their instances."
    )


class DrainSerializer(DeviceActionSerializer):
    """The body of a drain: an optional reason, the confirmation, and the state after it."""

    then = serializers.ChoiceField(
        DrainTarget.choices(),
        default=DrainTarget.MAINTENANCE.value,
        help_text="The state that it enters after its last request has ended.",
    )


@dataclass(frozen=True)
class _ForecastAction:
    """An action on one device with its forecast. `final_state` is the state after a drain."""

    action: Action
    final_state: DrainTarget
    device: Device
    forecast: BulkForecast

    @property
    def is_change(self) -> bool:
        """Return whether the action would change the device."""
        return self.forecast.outcome == DeviceOutcome.MOVED

    @property
    def needs_token(self) -> bool:
        """Return whether the action must be confirmed: it would change a held device."""
        return self.forecast.held and self.is_change

    @property
    def state(self) -> str:
        """Return the device's state as a text."""
        return lifecycle.build_lifecycle_state(self.device).as_text

    @property
    def described(self) -> dict[str, Any]:
        """Return the values that the token is bound to, beside the caller and the device."""
        return {"kind": "device action", "action": self.action, "then": self.final_state, "state": self.state}

    def respond_with_preview(self, caller: Caller, is_dry_run: bool) -> Response:
        """Return the answer with the preview. Raises NotConfirmedError (409) unless it is a dry run."""
        preview = {
            "action": self.action.value,
            "then": self.final_state.value,
            "device": self.device.uuid,
            "state": self.state,
            "holders": safety.find_requests_of_device(self.device),
            "total": 1,
            "hosts": 1,
            "held": int(self.needs_token),
            "forecast": [describe_forecast(self.forecast)],
            "confirm": self.needs_token,
        }
        issued = confirmations.issue_token(self.device.uuid, caller, self.described)
        return respond_with_preview(preview, issued, is_dry_run)


def _forecast_action(action: Action, final_state: DrainTarget, device: Device) -> _ForecastAction:
    """Return the action with its forecast for this device. Costs the statements of `bulk_actions.forecast_device`."""
    return _ForecastAction(action, final_state, device, bulk_actions.forecast_device(action, final_state, device))


def _make_action_handler(action: Action) -> Callable[..., Response]:
    """Return a handler for POST that performs `action` on one device and answers with the device.

    The handler's docstring is the action's description. If the action would change a held device, it raises
    NotConfirmedError unless the body has the token of its preview; also if a request takes the device between the
    forecast and the change. It raises RefusedError if the action is refused, and if the token is not valid any more.
    """

    def perform_action(view: CollectionView, request: Request, **kwargs: str) -> Response:
        values, device = view.validate_body(), view.get_object()
        final_state, token = DrainTarget(values.get("then", DrainTarget.MAINTENANCE)), values.get("token")
        forecast = _forecast_action(action, final_state, device)
        seen = SeenStates({}, held_too=False) if forecast.is_change else None
        if token:
            if confirmations.read_token(token, view.caller, forecast.described) != device.uuid:
                raise confirmations.stale_preview_error()
            seen = SeenStates({device.uuid: forecast.state}, held_too=True)
        elif values.get("dry_run") or forecast.needs_token:
            return forecast.respond_with_preview(view.caller, values.get("dry_run", False))
        reason, source = values.get("reason", ""), view.caller.event_source
        try:
            lifecycle.apply_action_to_device(action, device.uuid, view.caller, reason, final_state, source, seen)
        except RefusedError as refused:
            present = _forecast_action(action, final_state, view.get_object())
            if token or refused.reason is not RefusalReason.IN_USE or not present.needs_token:
                raise
            return present.respond_with_preview(view.caller, is_dry_run=False)
        return Response(view.get_serializer(view.get_object()).data)

    perform_action.__doc__ = device_actions.ACTION_DESCRIPTIONS[action]
    return perform_action


class LayoutPreviewSerializer(PreviewSerializer):
    """The forecast of a change of one device's layout. It never has to be confirmed: a held device is refused."""

    device = serializers.UUIDField(read_only=True)
    state = serializers.CharField(read_only=True, help_text="The device's state, and its number of units.")


class LayoutSerializer(ConfirmationSerializer):
    """Changes of the layout that divides a device into units."""

    layout = serializers.DictField(
        child=StrictTextField(max_length=255),
        allow_empty=False,
        validators=[MinLengthValidator(1)],  # so that the OpenAPI document shows minLength
        help_text='Layout keys that its driver accepts, with their values, for example {"vfs": "4"}.',
    )
    generation = GenerationField()
    reason = ReasonField("Shown with the commands and their events.")

    # The OpenAPI generator treats every PATCH body as partial; this one requires `layout`.
    field_conditions = {
        "required": ["layout", *NEEDS_GENERATION["required"]],
        **TOKEN_EXCLUDES_DRY_RUN,
    }


class DeviceView(CollectionView):
    """Devices, oldest first."""

    policy = "inventory"
    sort_fields = {"created": "id", "state": "state", "type": "type"}
    member_actions = dict.fromkeys(map(str, Action), DeviceActionSerializer) | {"drain": DrainSerializer}
    actions_to_confirm = (Action.RETIRE.value,)
    body_serializers = {"partial_update": LayoutSerializer}
    response_serializers = {"partial_update": (202, CommandSerializer)}
    preview_serializers: ClassVar[Mapping[str, type[PreviewSerializer]]] = {
        "partial_update": LayoutPreviewSerializer,
        **dict.fromkeys([action.value for action in Action], DeviceActionPreviewSerializer),
    }
    enable, disable, drain = (
        _make_action_handler(Action.ENABLE),
        _make_action_handler(Action.DISABLE),
        _make_action_handler(Action.DRAIN),
    )
    quarantine, release = _make_action_handler(Action.QUARANTINE), _make_action_handler(Action.RELEASE)
    retire, reinstate = _make_action_handler(Action.RETIRE), _make_action_handler(Action.REINSTATE)
    etag_collections = ("devices", "hosts", "requests")
    serializer_class = DeviceSerializer
    filterset_class = DeviceFilter
    queryset = Device.objects.select_related("host").annotate(
        held=count_related_rows(AcceleratorRequest.objects.all(), "attach_handle__deployable__device")
    )

    @property
    def policy_rules(self) -> dict[str, str]:
        """Reading needs the rules of `inventory`; every change needs `cyborg:device:update`."""
        return super().policy_rules | dict.fromkeys(("POST", "PATCH"), "cyborg:device:update")

    def partial_update(self, request: Request, **kwargs: str) -> Response:
        """Change keys of the device's layout that its driver accepts, and partition the device accordingly. The answer
        is the command that does it. Refused while anybody holds the device. 409: it has another generation.

        With `dry_run` the answer is the preview: 200. With its token, a device whose state or number of units has
        changed since the preview is refused.
        """
        values, device = self.validate_body(), self.get_object()
        generations.require_generation(f"Device {device.uuid}", device.generation, values.get("generation"))
        change = partitioning.PartitionChange(0, values["layout"], values.get("generation"))
        reason, seen = values.get("reason", ""), ""
        partitioning.check_change(change, reason)
        if values.get("dry_run") or values.get("token"):
            forecast, seen = bulk_actions.forecast_unit_change(change, device)
            described = {"kind": "layout", "change": change.to_arguments(), "seen": seen}
            if values.get("dry_run"):
                issued = confirmations.issue_token(device.uuid, self.caller, described)
                return respond_with_preview(_describe_layout_change(device, forecast, seen), issued, is_dry_run=True)
            if confirmations.read_token(values["token"], self.caller, described) != device.uuid:
                raise confirmations.stale_preview_error()
        command = partitioning.partition_device(
            device.uuid, change, self.caller, reason, self.caller.event_source, seen=seen
        )
        data = CommandSerializer(command, context=super().get_serializer_context() | {"fields": ()}).data
        return Response(data, 202, headers={"Location": data["url"]})

    def get_offered_actions(self, data: Mapping[str, Any]) -> Iterable[str]:
        """Return the actions that are possible now."""
        possible: Iterable[str] = data.get("next_actions", ())
        return possible


def _describe_layout_change(device: Device, forecast: BulkForecast, seen: str) -> dict[str, Any]:
    """Return a preview as `LayoutPreviewSerializer` shows it, without the token."""
    return {
        "device": device.uuid,
        "state": seen,
        "total": 1,
        "hosts": 1,
        "held": 0,
        "forecast": [describe_forecast(forecast)],
        "confirm": False,
    }


class DeployableFilter(ListFilter):
    """Filter by host, device, resource provider, or whether the deployable is missing."""

    host = host_filter("device__host__name")
    device = filters.UUIDFilter(field_name="device__uuid")
    rp_uuid = filters.UUIDFilter(help_text="Its resource provider in Placement.")
    missing = presence_filter("missing_since")


class AttributeSerializer(serializers.Serializer[Any]):
    """A key and a value. An attribute with the origin `operator` is not changed by reports."""

    key = serializers.CharField(read_only=True)
    value = serializers.CharField(read_only=True)
    origin = serializers.CharField(read_only=True)


class DeployableSerializer(RowSerializer):
    """The part of a device that is a resource provider, and how many of its attach handles are held."""

    url = UrlField("deployables", source="uuid")
    device = DeviceReference(read_only=True)
    host = HostReference(source="device.host", read_only=True)
    attributes = AttributeSerializer(source="attribute_objects", many=True, read_only=True)
    held = serializers.IntegerField(read_only=True, help_text="How many of its attach handles are held by requests.")

    class Meta:
        model = Deployable
        fields = (
            "uuid",
            "url",
            "name",
            "device",
            "host",
            "num_accelerators",
            "held",
            "driver_name",
            "rp_uuid",
            "bitstream_id",
            "attributes",
            "missing_since",
            "created_at",
            "updated_at",
        )


class DeployableView(CollectionView):
    """Deployables, oldest first."""

    policy = "inventory"
    etag_collections = ("devices", "requests")
    serializer_class = DeployableSerializer
    filterset_class = DeployableFilter
    queryset = Deployable.objects.select_related("device__host").annotate(
        held=count_related_rows(
            AcceleratorRequest.objects.filter(attach_handle__isnull=False), "attach_handle__deployable"
        ),
        attribute_objects=ArraySubquery(
            Attribute.objects.filter(deployable=OuterRef("pk"))
            .order_by("id")
            .values(it=JSONObject(key="key", value="value", origin="origin"))
        ),
    )


class AttachHandleFilter(ListFilter):
    """Filter by host, device, deployable, type, the instance or project that holds it, or whether it is held or
    missing."""

    host = host_filter("deployable__device__host__name")
    device = filters.UUIDFilter(field_name="deployable__device__uuid")
    deployable = filters.UUIDFilter(field_name="deployable__uuid")
    instance = filters.UUIDFilter(field_name="request__instance_uuid")
    project = filters.CharFilter(field_name="request__project_id")
    type = choice_filter(HandleType, "attach_type")
    held = presence_filter("request")
    missing = presence_filter("missing_since")


class HandleHolderSerializer(serializers.Serializer[Any]):
    """The request that holds an attach handle."""

    request = serializers.UUIDField(source="uuid", read_only=True)
    state = serializers.CharField(read_only=True)
    instance = serializers.UUIDField(source="instance_uuid", read_only=True, allow_null=True)
    project = serializers.CharField(source="project_id", read_only=True)
    # Any, because `Field.label` is a text: the metaclass takes declared fields off the class, so nothing is hidden.
    label: Any = serializers.CharField(read_only=True)
    url = UrlField("requests", source="uuid")


class AttachHandleSerializer(RowSerializer):
    """One assignable unit, and the request that holds it."""

    url = UrlField("attach_handles", source="uuid")
    type = serializers.CharField(source="attach_type", read_only=True)
    info = serializers.SerializerMethodField()
    not_offered = serializers.SerializerMethodField()
    deployable = DeployableReference(read_only=True)
    device = DeviceReference(source="deployable.device", read_only=True)
    host = HostReference(source="deployable.device.host", read_only=True)
    holder = serializers.SerializerMethodField()

    class Meta:
        model = AttachHandle
        fields = (
            "uuid",
            "url",
            "type",
            "info",
            "not_offered",
            "holder",
            "deployable",
            "device",
            "host",
            "missing_since",
            "created_at",
            "updated_at",
        )

    def get_info(self, handle: AttachHandle) -> dict[str, str]:
        """How the unit is passed to an instance, for example its PCI address."""
        return parse_attach_info(handle.attach_info)

    def get_not_offered(self, handle: AttachHandle) -> str:
        """Why the unit is not offered to Nova; empty if it can be."""
        return handle.reason_not_offered

    def get_holder(self, handle: AttachHandle) -> dict[str, Any] | None:
        """The request that holds the unit; null if it is free."""
        request = getattr(handle, "request", None)
        return HandleHolderSerializer(request, context=self.context).data if request else None


class AttachHandleView(CollectionView):
    """Assignable units, oldest first."""

    policy = "attach_handle"
    etag_collections = ("devices", "requests")
    serializer_class = AttachHandleSerializer
    filterset_class = AttachHandleFilter
    queryset = AttachHandle.objects.select_related("request", "release", "deployable__device__host")
