"""Commands to agents: what was ordered for which device or host, by whom and why, the progress and the result."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import django_filters as filters
from django.db.models import QuerySet
from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.exceptions import APIException, ParseError, PermissionDenied
from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.own.fields import (
    DeviceReference,
    HostReference,
    ReasonField,
    RowSerializer,
    StrictTextField,
    StrictUuidField,
    UrlField,
)
from accelerators.api.own.filters import ListFilter, choice_filter, host_filter
from accelerators.api.own.views import CollectionView
from accelerators.commands import command_queue, programming
from accelerators.commands.catalogue import ORDERABLE_COMMANDS, ORDERABLE_DEVICE_OPS, ORDERABLE_HOST_OPS
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import CommandState
from accelerators.models import Command
from accelerators.models.commands import COMMAND_IS_OPEN

MAX_WAIT_S = 30
MAX_WAITERS = 2
"""How many requests per process may wait for a command at the same time. Any further request is answered at once, and
the client has to poll."""
_waiter_slots = threading.BoundedSemaphore(MAX_WAITERS)
ALL_OPERATIONS = ("install", *ORDERABLE_DEVICE_OPS, "attach", "detach", *ORDERABLE_HOST_OPS, "placement", "configure")
"""Every operation that a command can have. This API orders only those of ORDERABLE_DEVICE_OPS and ORDERABLE_HOST_OPS.
`install` is ordered by enabling a device, `attach` and `detach` by binding a request, `placement` by the conductor for
agents that write to Placement, and `configure` by rollouts."""


class CommandFilter(ListFilter):
    """Filter by host, device, request, operation, state, or whether the command has ended."""

    host = host_filter("host__name")
    device = filters.UUIDFilter(field_name="device__uuid")
    request = filters.UUIDFilter(help_text="The accelerator request that waits for it.")
    op = choice_filter(ALL_OPERATIONS)
    state = choice_filter(CommandState)
    ended = filters.BooleanFilter(method="filter_by_ended", help_text="Whether the command has ended.")

    def filter_by_ended(self, rows: QuerySet[Command], name: str, wanted: bool) -> QuerySet[Command]:
        """Keep ended commands if `wanted`, open ones (`COMMAND_IS_OPEN`) otherwise."""
        return rows.exclude(COMMAND_IS_OPEN) if wanted else rows.filter(COMMAND_IS_OPEN)


class UuidReferenceField(StrictUuidField):
    """A reference that is written as a uuid and shown as an object."""

    def __init__(self, reference: type[serializers.Serializer[Any]], **options: Any) -> None:
        self.reference = reference
        super().__init__(required=False, allow_null=True, **options)

    def to_representation(self, value: Any) -> Any:
        """Return the referenced row as its reference serializer shows it, address included."""
        return self.reference(value, context=self.context).data


class CommandImageField(StrictUuidField):
    """The uuid of a command's image. It may be known before the image itself has been loaded."""

    def get_attribute(self, instance: Command) -> Any:
        """Return the image's uuid from the command's arguments, or None if the command has no image."""
        arguments = instance.arguments
        return (arguments.get("image") or {}).get("id") or (arguments.get("wanted") or {}).get("bitstream_id")

    def to_representation(self, value: Any) -> str:
        """Return the uuid as text."""
        return str(value)


EMPTY_SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "device": {"type": "null"},
    "host": {"type": "null"},
    "layout": {"maxProperties": 0},
    "image": {"type": "null"},
    "deployable": {"type": "null"},
    "driver": {"maxLength": 0},
}
"""Schema of each optional field in the commands that do not accept it: empty or null."""


REQUIRED_SCHEMAS: Mapping[str, Mapping[str, Any]] = {"layout": {"minProperties": 1}, "image": {"type": "string"}}
"""Schema of each field in the commands that require it."""


def _build_body_schema(ops: Sequence[str], subject: str, *accepted: str) -> dict[str, Any]:
    """Return the JSON Schema of a body that orders one of `ops` for a `device` or a `host` (`subject`).

    `accepted` names the further fields that these commands accept. Empty values count as left out.
    """
    empty_fields = {name: empty for name, empty in EMPTY_SCHEMAS.items() if name not in (subject, *accepted)}
    subject_fields = {"op": {"enum": list(ops)}, subject: {"type": "string"}}
    required_fields = {name: schema for name, schema in REQUIRED_SCHEMAS.items() if name in accepted}
    return {
        "properties": subject_fields | required_fields | empty_fields,
        "required": ["op", subject, *required_fields],
    }


class CommandSerializer(RowSerializer):
    """An operation that the agent of one host performs once. To order one, send `op` with either `device` or `host`."""

    url = UrlField("commands", source="uuid")
    op = serializers.ChoiceField(
        ALL_OPERATIONS,
        help_text=f"For a device: {', '.join(ORDERABLE_DEVICE_OPS)}; for a host: {', '.join(ORDERABLE_HOST_OPS)}."
        " A device is installed by enabling it. Units are attached and detached by binding requests.",
    )
    device = UuidReferenceField(
        DeviceReference, help_text="Its uuid. Null if the device no longer exists, or if the command is for a host."
    )
    host = UuidReferenceField(HostReference, help_text="Its uuid. A command for a device shows the host of the device.")
    reason = ReasonField("Shown with it and in its events.")
    layout = serializers.DictField(
        child=StrictTextField(max_length=255),
        source="arguments.layout",
        default=dict,
        help_text='Only for partition: layout keys that the driver accepts, for example {"vfs": "4"}.',
    )
    image = CommandImageField(
        required=False, allow_null=True, help_text="Only for program: the uuid of an image, here or in Glance."
    )
    deployable = StrictUuidField(
        required=False,
        write_only=True,
        allow_null=True,
        help_text="Only for program: which deployable, if the device has several.",
    )
    driver = StrictTextField(
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

    field_conditions = {
        "oneOf": [
            _build_body_schema([op for op in ORDERABLE_DEVICE_OPS if op not in ("partition", "program")], "device"),
            _build_body_schema(["partition"], "device", "layout"),
            _build_body_schema(["program"], "device", "image", "deployable"),
            _build_body_schema(
                [op for op in ORDERABLE_HOST_OPS if ORDERABLE_COMMANDS[op].takes == "driver"], "host", "driver"
            ),
            _build_body_schema([op for op in ORDERABLE_HOST_OPS if not ORDERABLE_COMMANDS[op].takes], "host"),
        ]
    }

    def validate(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values without empty ones; `layout` and `driver` are no longer below `arguments`.

        Raises ValidationError (400) unless `op` is one for the device or host that is named, and if a field is sent
        that `op` does not accept. Required fields of an `op` are not checked here.
        """
        values = {name: value for name, value in (values | values.pop("arguments", {})).items() if value}
        allowed = {"device": ORDERABLE_DEVICE_OPS, "host": ORDERABLE_HOST_OPS}
        subjects = [name for name in allowed if name in values]
        if len(subjects) != 1 or values["op"] not in allowed[subjects[0]]:
            raise serializers.ValidationError(
                {
                    "op": f"Say one of {', '.join(ORDERABLE_DEVICE_OPS)} with a device, "
                    f"or one of {', '.join(ORDERABLE_HOST_OPS)} with a host."
                }
            )
        accepted = {"partition": {"layout"}, "program": {"image", "deployable"}}.get(values["op"], set())
        accepted = accepted or {ORDERABLE_COMMANDS[values["op"]].takes}
        if unexpected := {"layout", "image", "deployable", "driver"} & {*values} - accepted:
            raise serializers.ValidationError({min(unexpected): f"the command {values['op']} does not accept it."})
        return values


class CommandView(CollectionView):
    """Commands to agents, newest first. A command is deleted 30 days after it ended."""

    policy = "command"
    default_ordering = "-created"
    detail_parameters = {
        "wait": {
            "type": {"type": "integer", "minimum": 0, "maximum": MAX_WAIT_S},
            "description": "Answer when the command has ended, or after this number of seconds. If too many clients"
            " wait already, the answer comes at once.",
        }
    }
    etag_collections = ("commands", "devices", "hosts")
    serializer_class = CommandSerializer
    filterset_class = CommandFilter
    queryset = Command.objects.select_related("device", "host")

    def check_permissions(self, request: Request) -> None:
        """Raise 403 unless the caller may do this. A caller who may not create commands may still order `rescan`, if
        `cyborg:service:discover` allows it."""
        try:
            super().check_permissions(request)
        except PermissionDenied:
            if request.method != "POST" or _get_requested_op(request) != "rescan":
                raise
            self.require_rule("cyborg:service:discover")

    def retrieve(self, request: Request, **kwargs: str) -> HttpResponse:
        """Return one command; with `wait`, only when it has ended or after `wait` seconds.

        Answers at once if MAX_WAITERS requests wait already in this process. 400 unless `wait` is 0 to MAX_WAIT_S.
        """
        wait = request.query_params.get("wait", "0")
        if not (wait.isascii() and wait.isdecimal() and len(wait) <= 2 and int(wait) <= MAX_WAIT_S):
            raise ParseError(f"wait: say a number of seconds from 0 to {MAX_WAIT_S}.")
        if int(wait) and _waiter_slots.acquire(blocking=False):
            try:
                programming.wait_until_ended(UUID(kwargs["uuid"]), int(wait))
            finally:
                _waiter_slots.release()
        return super().retrieve(request, **kwargs)

    def create(self, request: Request) -> Response:
        """Place a command; 201. The answer shows the command itself; read it again later for its progress and its
        result.

        400 if the device or host does not exist or the arguments are wrong; 409 or 503 if the command is refused.
        """
        values = self.validate_body()
        op, device, host = values.pop("op"), values.pop("device", None), values.pop("host", None)
        values["source"] = self.caller.event_source
        try:
            command = (
                command_queue.order_device_command(op, device, self.caller, **values)
                if device
                else command_queue.order_host_command(op, host, self.caller, **values)
            )
        except RefusedError as refused:
            if refused.reason is RefusalReason.NOT_FOUND:
                raise serializers.ValidationError({"device" if device else "host": refused.text}) from refused
            raise
        return self.respond_with_stored_row(command.uuid)


def _get_requested_op(request: Request) -> Any:
    """Return the `op` of the request's body; None if it has none, or if the body cannot be read as a JSON object."""
    try:
        return request.data.get("op") if isinstance(request.data, Mapping) else None
    except APIException:
        return None
