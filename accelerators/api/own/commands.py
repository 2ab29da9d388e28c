"""Commands to agents: what was ordered for which device or host, by whom and why, the progress and the result."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from uuid import UUID

import django_filters as filters
from django.db.models import QuerySet
from rest_framework import serializers
from rest_framework.exceptions import APIException, ParseError, PermissionDenied
from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.own.fields import Chosen, DeviceReference, HostReference, Text, Url, Uuid
from accelerators.api.own.views import Collection
from accelerators.commands import placing, programming
from accelerators.commands.catalogue import ACTS, OF_DEVICE, OF_HOST
from accelerators.devices.lifecycle import MAX_REASON
from accelerators.domain.errors import Reason, RefusedError
from accelerators.domain.states import CommandState
from accelerators.models import Command
from accelerators.models.commands import OPEN

LONGEST_S = 30
WAITERS = 2
"""How many requests per process may wait for a command at the same time. Any further request is answered at once, and
the client has to poll."""
_turns = threading.BoundedSemaphore(WAITERS)
OPS = ("install", *OF_DEVICE, "attach", "detach", *OF_HOST, "placement", "configure")
"""Every operation that a command can have. This API orders only those of OF_DEVICE and OF_HOST. `install` is ordered by
enabling a device, `attach` and `detach` by binding a request, `placement` by the conductor for agents that write to
Placement, and `configure` by rollouts."""


class CommandFilter(filters.FilterSet):
    """Filter by host, device, request, operation, state, or whether the command has ended."""

    host = filters.CharFilter(field_name="host__name", help_text="Exactly this host name.")
    device = filters.UUIDFilter(field_name="device__uuid")
    request = filters.UUIDFilter(help_text="The accelerator request that waits for it.")
    op = filters.MultipleChoiceFilter(choices=[(word, word) for word in OPS], distinct=False)
    state = filters.MultipleChoiceFilter(choices=[(word, word) for word in CommandState], distinct=False)
    ended = filters.BooleanFilter(method="by_end", help_text="Whether nothing more is to be expected of it.")

    def by_end(self, rows: QuerySet[Command], name: str, wanted: bool) -> QuerySet[Command]:
        """Keep ended commands if `wanted`, open ones otherwise. Open commands have an index of their own."""
        return rows.exclude(OPEN) if wanted else rows.filter(OPEN)


class Named(Uuid):
    """A reference that is written as a uuid and shown as an object."""

    def __init__(self, reference: type[serializers.Serializer], **options: Any) -> None:
        self.reference = reference
        super().__init__(required=False, allow_null=True, **options)

    def to_representation(self, value: Any) -> Any:
        """Return the referenced row as its reference serializer shows it, address included."""
        return self.reference(value, context=self.context).data


class ImageField(Uuid):
    """The uuid of a command's image. It may be known before the image itself has been loaded."""

    def get_attribute(self, instance: Command) -> Any:
        """Return the image's uuid from the command's arguments, or None if the command has no image."""
        said = instance.arguments
        return (said.get("image") or {}).get("id") or (said.get("wanted") or {}).get("bitstream_id")

    def to_representation(self, value: Any) -> str:
        """Return the uuid as text."""
        return str(value)


EMPTY: Mapping[str, Mapping[str, Any]] = {
    "device": {"type": "null"},
    "host": {"type": "null"},
    "layout": {"maxProperties": 0},
    "image": {"type": "null"},
    "deployable": {"type": "null"},
    "driver": {"maxLength": 0},
}
"""Schema of each optional field in the commands that do not accept it: empty or null."""


NEEDED: Mapping[str, Mapping[str, Any]] = {"layout": {"minProperties": 1}, "image": {"type": "string"}}
"""Schema of each field in the commands that require it."""


def _form(ops: Sequence[str], about: str, *takes: str) -> dict[str, Any]:
    """Return the JSON Schema of a body that orders one of `ops` for a `device` or a `host` (`subject`).

    `accepted` names the further fields that these commands accept. Empty values count as left out.
    """
    others = {name: empty for name, empty in EMPTY.items() if name not in (about, *takes)}
    named = {"op": {"enum": list(ops)}, about: {"type": "string"}}
    needed = {name: schema for name, schema in NEEDED.items() if name in takes}
    return {"properties": named | needed | others, "required": ["op", about, *needed]}


class CommandSerializer(Chosen):
    """An operation that the agent of one host performs once. To order one, send `op` with either `device` or `host`."""

    url = Url("commands", source="uuid")
    op = serializers.ChoiceField(
        OPS,
        help_text=f"For a device: {', '.join(OF_DEVICE)}; for a host: {', '.join(OF_HOST)}. A device is installed by"
        " enabling it. Units are attached and detached by binding requests.",
    )
    device = Named(
        DeviceReference, help_text="Its uuid. Null if the device no longer exists, or if the command is for a host."
    )
    host = Named(HostReference, help_text="Its uuid. A command for a device shows the host of the device.")
    reason = Text(max_length=MAX_REASON, allow_blank=True, required=False, help_text="Shown with it and in its events.")
    layout = serializers.DictField(
        child=Text(max_length=255),
        source="arguments.layout",
        default=dict,
        help_text='Only for partition: layout keys that the driver accepts, for example {"vfs": "4"}.',
    )
    image = ImageField(
        required=False, allow_null=True, help_text="Only for program: the uuid of an image, here or in Glance."
    )
    deployable = Uuid(
        required=False,
        write_only=True,
        allow_null=True,
        help_text="Only for program: which deployable, if the device has several.",
    )
    driver = Text(
        max_length=64,
        source="arguments.driver",
        default="",
        allow_blank=True,
        help_text="Only for rescan: the driver to rescan; it is released if it is quarantined.",
    )
    by = serializers.CharField(source="actor", read_only=True, help_text="Who ordered it.")
    detail = serializers.JSONField(
        read_only=True, help_text="The data that was asked for: signals of health, or the log."
    )

    class Meta:
        model = Command
        fields = (
            "uuid",
            "url",
            "op",
            "state",
            "device",
            "host",
            "percent",
            "progress",
            "text",
            "by",
            "reason",
            "device_name",
            "layout",
            "image",
            "deployable",
            "driver",
            "request",
            "detail",
            "start_by",
            "end_by",
            "taken_at",
            "started_at",
            "answered_at",
            "ended_at",
            "created_at",
        )
        read_only_fields = tuple(
            {*fields} - {"op", "device", "host", "reason", "layout", "image", "deployable", "driver"}
        )

    combinations: ClassVar[Mapping[str, Any]] = {
        "oneOf": [
            _form([op for op in OF_DEVICE if op not in ("partition", "program")], "device"),
            _form(["partition"], "device", "layout"),
            _form(["program"], "device", "image", "deployable"),
            _form([op for op in OF_HOST if ACTS[op].takes == "driver"], "host", "driver"),
            _form([op for op in OF_HOST if not ACTS[op].takes], "host"),
        ]
    }

    def validate(self, said: dict[str, Any]) -> dict[str, Any]:
        """Check that `op` fits the device or host it is for, and that no field is sent that `op` does not accept. Empty
        values are dropped."""
        said = {name: value for name, value in (said | said.pop("arguments", {})).items() if value}
        allowed = {"device": OF_DEVICE, "host": OF_HOST}
        about = [name for name in allowed if name in said]
        if len(about) != 1 or said["op"] not in allowed[about[0]]:
            raise serializers.ValidationError(
                {"op": f"Say one of {', '.join(OF_DEVICE)} with a device, or one of {', '.join(OF_HOST)} with a host."}
            )
        takes = {"partition": {"layout"}, "program": {"image", "deployable"}}.get(said["op"], set())
        takes = takes or {ACTS[said["op"]].takes}
        if extra := {"layout", "image", "deployable", "driver"} & {*said} - takes:
            raise serializers.ValidationError({min(extra): f"the command {said['op']} does not accept it."})
        return said


class CommandView(Collection):
    """Commands to agents, newest first. A command is deleted 30 days after it ended."""

    policy = "command"
    default_order = "-created"
    parameters = {
        "wait": {
            "type": {"type": "integer", "minimum": 0, "maximum": LONGEST_S},
            "description": "Answer when the command has ended, or after this number of seconds. If too many clients"
            " wait already, the answer comes at once.",
        }
    }
    shows = ("commands", "devices", "hosts")
    serializer_class = CommandSerializer
    filterset_class = CommandFilter
    queryset = Command.objects.select_related("device", "host")

    def check_permissions(self, request: Request) -> None:
        """Check the permissions. A caller who may not create commands may still order `rescan`, if
        `cyborg:service:discover` allows it."""
        try:
            super().check_permissions(request)
        except PermissionDenied:
            if request.method != "POST" or _op(request) != "rescan":
                raise
            self.require("cyborg:service:discover")

    def retrieve(self, request: Request, **kwargs: str) -> Response:
        """Return one command; with `wait`, only when it has ended or after `wait` seconds."""
        text = request.query_params.get("wait", "0")
        if not (text.isascii() and text.isdecimal() and len(text) <= 2 and int(text) <= LONGEST_S):
            raise ParseError(f"wait: say a number of seconds from 0 to {LONGEST_S}.")
        if int(text) and _turns.acquire(blocking=False):
            try:
                programming.until_ended(UUID(kwargs["uuid"]), int(text))
            finally:
                _turns.release()
        return super().retrieve(request, **kwargs)

    def create(self, request: Request) -> Response:
        """Place a command. The answer shows the command itself; read it again later for its progress and its result."""
        serializer = self.get_serializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        said = dict(serializer.validated_data)
        op, device, host = said.pop("op"), said.pop("device", None), said.pop("host", None)
        try:
            made = (
                placing.ask(op, device, self.caller, **said)
                if device
                else placing.ask_host(op, host, self.caller, **said)
            )
        except RefusedError as refused:
            if refused.reason is Reason.UNKNOWN:
                raise serializers.ValidationError({"device" if device else "host": refused.text}) from refused
            raise
        shown = self.get_serializer(self.get_queryset().get(pk=made.pk)).data
        return Response(shown, 201, headers={"Location": shown["url"]})


def _op(request: Request) -> Any:
    """Return the `op` of the body, or None if the body cannot be read; such a request is denied anyway."""
    try:
        return request.data.get("op") if isinstance(request.data, Mapping) else None
    except APIException:
        return None
