"""Hosts, devices, deployables and attach handles: infrastructure, read by who runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from uuid import UUID

import django_filters as filters
from django.contrib.postgres.expressions import ArraySubquery
from django.db.models import Count, IntegerField, OuterRef, Q, QuerySet, Subquery, Value
from django.db.models.functions import Coalesce, JSONObject
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.own.accelerators import LayoutSerializer
from accelerators.api.own.commands import CommandSerializer
from accelerators.api.own.fields import (
    Chosen,
    DeployableReference,
    DeviceReference,
    HostReference,
    Url,
    Why,
    attach_info,
)
from accelerators.api.own.views import Collection
from accelerators.devices import lifecycle, partitioning
from accelerators.domain import actions
from accelerators.domain.actions import Action
from accelerators.domain.states import DeviceState, DeviceType, Drain, HandleType, Health
from accelerators.models import AcceleratorRequest, AttachHandle, Attribute, Deployable, Device, Host
from accelerators.models.devices import driver_error


def number_of(rows: QuerySet[Any], column: str) -> Coalesce:
    """How many `rows` have the outer row in `column`, in the same statement."""
    counted = rows.filter(**{column: OuterRef("pk")}).order_by().values(column).annotate(n=Count("*")).values("n")
    return Coalesce(Subquery(counted), Value(0), output_field=IntegerField())


class HostFilter(filters.FilterSet):
    """By name, or whether its agent is heard."""

    name = filters.CharFilter(help_text="Exactly this name.")
    stale = filters.BooleanFilter(
        field_name="stale_since", lookup_expr="isnull", exclude=True, help_text="Whether nothing is heard of its agent."
    )


class HostSerializer(Chosen):
    """A compute host: what its drivers last said, and since when nothing is heard of its agent."""

    url = Url("hosts", source="uuid")
    drivers = serializers.JSONField(
        read_only=True, help_text="Per driver: error (empty when it answered), since when, its devices, its faults."
    )
    devices = serializers.IntegerField(read_only=True, source="number_of_devices", help_text="How many it has.")

    class Meta:
        model = Host
        fields = (
            "uuid",
            "url",
            "name",
            "node",
            "stale_since",
            "reported_at",
            "devices",
            "drivers",
            "created_at",
            "updated_at",
        )
        read_only_fields = fields


class HostView(Collection):
    """Compute hosts, by name."""

    policy = "host"
    orders = {"name": "name", "created": "id"}
    default_order = "name"
    shows = ("hosts", "devices")
    serializer_class = HostSerializer
    filterset_class = HostFilter
    queryset = Host.objects.annotate(number_of_devices=number_of(Device.objects.all(), "host"))


class DeviceFilter(filters.FilterSet):
    """By what it is, where it is, how it is."""

    host = filters.CharFilter(field_name="host__name", help_text="Exactly this host name.")
    state = filters.MultipleChoiceFilter(choices=[(word, word) for word in DeviceState], distinct=False)
    status = filters.MultipleChoiceFilter(choices=[(word, word) for word in Health], distinct=False)
    type = filters.MultipleChoiceFilter(choices=[(word, word) for word in DeviceType], distinct=False)
    vendor = filters.CharFilter()
    driver = filters.CharFilter()
    backend = filters.CharFilter()
    draining = filters.BooleanFilter(
        field_name="drain_to", lookup_expr="isnull", exclude=True, help_text="Whether it waits for its last request."
    )
    stale = filters.BooleanFilter(method="by_freshness", help_text="Whether what is shown may be out of date.")

    def by_freshness(self, devices: QuerySet[Device], name: str, wanted: bool) -> QuerySet[Device]:
        """Stale: its host's agent is not heard, or its driver failed."""
        stale = Q(host__stale_since__isnull=False) | (Q(_error__isnull=False) & ~Q(_error=""))
        matching = devices.alias(_error=driver_error())
        return matching.filter(stale) if wanted else matching.exclude(stale)


class DeviceSerializer(Chosen):
    """A card: its state with why, since when and by whom; what can be asked of it next; its health."""

    url = Url("devices", source="uuid")
    host = HostReference(read_only=True)
    next_actions = serializers.SerializerMethodField()
    draining = serializers.SerializerMethodField()
    held = serializers.IntegerField(read_only=True, help_text="How many requests hold one of its attach handles.")
    stale = serializers.SerializerMethodField()
    to_install = serializers.SerializerMethodField()
    acts = serializers.SerializerMethodField()
    changeable = serializers.SerializerMethodField()
    busy_with = Url("commands", allow_null=True, help_text="The command it does alone; nothing is bound meanwhile.")
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
            "std_board_info",
            "vendor_board_info",
            "created_at",
            "updated_at",
        )
        read_only_fields = fields

    def get_next_actions(self, device: Device) -> list[str]:
        """What can be asked of it now: each is a POST to its address and the word."""
        return [action.value for action in actions.possible(lifecycle.standing(device, device.held))]

    def get_draining(self, device: Device) -> dict[str, Any] | None:
        """What it becomes (`to`) when its last request is gone, and how many are left; null: it does not drain."""
        return {"to": device.drain_to, "left": device.held} if device.drain_to else None

    def get_to_install(self, device: Device) -> list[str]:
        """What its driver would do to the host to make it ready, step by step; none: it is as it should be."""
        return device.to_install.splitlines()

    def get_acts(self, device: Device) -> list[str]:
        """What its driver can be asked for; people order what `/api/commands/` takes."""
        return device.acts.split()

    def get_changeable(self, device: Device) -> list[str]:
        """The words of a layout that its driver takes; `sized_by` is the one that says how many units it has."""
        return device.changeable.split()

    def get_commands(self, device: Device) -> str:
        """The address of its commands."""
        return f"{self.context.get('base', '')}/api/commands/?device={device.uuid}"

    def get_stale(self, device: Device) -> str:
        """Why what is shown may be out of date; empty when it is not."""
        return device.host.why_stale(device.driver, device.backend)


class WhyAndThen(Why):
    """What may be said of a drain."""

    then = serializers.ChoiceField(
        [word.value for word in Drain], default=Drain.MAINTENANCE.value, help_text="What it becomes when it is free."
    )


def _asks(action: Action) -> Callable[..., Response]:
    def answer(view: Collection, request: Request, **kwargs: str) -> Response:
        said = view.said(request)
        then = Drain(said.get("then", Drain.MAINTENANCE))
        lifecycle.ask(action, UUID(kwargs["uuid"]), view.caller, said.get("reason", ""), then)
        return Response(view.get_serializer(view.get_object()).data)

    answer.__doc__ = actions.MEANING[action]
    return answer


class DeviceView(Collection):
    """Devices, oldest first."""

    policy = "inventory"
    orders = {"created": "id", "state": "state", "type": "type"}
    verbs = dict.fromkeys([action.value for action in Action], Why) | {"drain": WhyAndThen}
    dangerous = (Action.RETIRE.value,)
    bodies = {"partial_update": LayoutSerializer}
    answers = {"partial_update": (202, CommandSerializer)}
    enable, disable, drain = _asks(Action.ENABLE), _asks(Action.DISABLE), _asks(Action.DRAIN)
    quarantine, release = _asks(Action.QUARANTINE), _asks(Action.RELEASE)
    retire, reinstate = _asks(Action.RETIRE), _asks(Action.REINSTATE)
    shows = ("devices", "hosts", "requests")
    serializer_class = DeviceSerializer
    filterset_class = DeviceFilter
    queryset = Device.objects.select_related("host").annotate(
        held=number_of(AcceleratorRequest.objects.all(), "attach_handle__deployable__device")
    )

    @property
    def policy_rules(self) -> dict[str, str]:
        """Looking is one thing, deciding another."""
        return super().policy_rules | dict.fromkeys(("POST", "PATCH"), "cyborg:device:update")

    def partial_update(self, request: Request, **kwargs: str) -> Response:
        """Divide it otherwise, as words of its driver say. The answer is the command that does it; refused while
        anybody holds it."""
        made = partitioning.update(self.get_object().uuid, caller=self.caller, **self.body())
        shown = CommandSerializer(made, context=super().get_serializer_context() | {"fields": ()}).data
        return Response(shown, 202, headers={"Location": shown["url"]})

    def offered(self, data: Mapping[str, Any]) -> Iterable[str]:
        """What is possible now."""
        return data.get("next_actions", ())


class DeployableFilter(filters.FilterSet):
    """By the device or host that has it, or its provider."""

    host = filters.CharFilter(field_name="device__host__name", help_text="Exactly this host name.")
    device = filters.UUIDFilter(field_name="device__uuid")
    rp_uuid = filters.UUIDFilter(help_text="Its resource provider in Placement.")
    missing = filters.BooleanFilter(field_name="missing_since", lookup_expr="isnull", exclude=True)


class AttributeSerializer(serializers.Serializer):
    """A key and a value; `origin` operator survives reports."""

    key = serializers.CharField(read_only=True)
    value = serializers.CharField(read_only=True)
    origin = serializers.CharField(read_only=True)


class DeployableSerializer(Chosen):
    """The part of a device that is a resource provider, and how much of it is held."""

    url = Url("deployables", source="uuid")
    device = DeviceReference(read_only=True)
    host = HostReference(source="device.host", read_only=True)
    attributes = AttributeSerializer(source="attribute_objects", many=True, read_only=True)
    held = serializers.IntegerField(read_only=True, help_text="How many of its attach handles requests hold.")

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
        read_only_fields = fields


class DeployableView(Collection):
    """Deployables, oldest first."""

    policy = "inventory"
    shows = ("devices", "requests")
    serializer_class = DeployableSerializer
    filterset_class = DeployableFilter
    queryset = Deployable.objects.select_related("device__host").annotate(
        held=number_of(AcceleratorRequest.objects.filter(attach_handle__isnull=False), "attach_handle__deployable"),
        attribute_objects=ArraySubquery(
            Attribute.objects.filter(deployable=OuterRef("pk"))
            .order_by("id")
            .values(it=JSONObject(key="key", value="value", origin="origin"))
        ),
    )


class AttachHandleFilter(filters.FilterSet):
    """By where it is, or who holds it."""

    host = filters.CharFilter(field_name="deployable__device__host__name", help_text="Exactly this host name.")
    device = filters.UUIDFilter(field_name="deployable__device__uuid")
    deployable = filters.UUIDFilter(field_name="deployable__uuid")
    instance = filters.UUIDFilter(field_name="request__instance_uuid")
    project = filters.CharFilter(field_name="request__project_id")
    type = filters.MultipleChoiceFilter(
        field_name="attach_type", choices=[(word, word) for word in HandleType], distinct=False
    )
    held = filters.BooleanFilter(field_name="request", lookup_expr="isnull", exclude=True)
    missing = filters.BooleanFilter(field_name="missing_since", lookup_expr="isnull", exclude=True)


class Holder(serializers.Serializer):
    """Who holds it."""

    request = serializers.UUIDField(source="uuid", read_only=True)
    state = serializers.CharField(read_only=True)
    instance = serializers.UUIDField(source="instance_uuid", read_only=True, allow_null=True)
    project = serializers.CharField(source="project_id", read_only=True)
    label = serializers.CharField(read_only=True)
    url = Url("requests", source="uuid")


class AttachHandleSerializer(Chosen):
    """One assignable unit, and who holds it."""

    url = Url("attach_handles", source="uuid")
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
        read_only_fields = fields

    def get_info(self, handle: AttachHandle) -> dict[str, str]:
        """How it reaches an instance."""
        return attach_info(handle.attach_info)

    def get_not_offered(self, handle: AttachHandle) -> str:
        """Why Nova is never offered it; empty when it is."""
        return handle.not_offered

    def get_holder(self, handle: AttachHandle) -> dict[str, Any] | None:
        """The request that holds it; null when it is free."""
        request = getattr(handle, "request", None)
        return Holder(request, context=self.context).data if request else None


class AttachHandleView(Collection):
    """Assignable units, oldest first."""

    policy = "attach_handle"
    shows = ("devices", "requests")
    serializer_class = AttachHandleSerializer
    filterset_class = AttachHandleFilter
    queryset = AttachHandle.objects.select_related("request", "deployable__device__host")
