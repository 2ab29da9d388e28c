"""`/v2/deployables` (contract section 2.5): list, show and program."""

from __future__ import annotations

import re
import threading
from uuid import UUID

from django.conf import settings
from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.v2 import arguments, bodies
from accelerators.api.v2.devices import VISIBLE_DEVICES, build_held_condition
from accelerators.api.v2.faults import V2Error, bad_input_error
from accelerators.api.v2.resource import JsonColumn, V2Resource, make_links_column, make_plain_column, make_time_column
from accelerators.api.v2.views import V2DetailView, V2ListView, V2View
from accelerators.commands import command_queue, programming
from accelerators.domain.states import CommandState
from accelerators.models import Command, Device

_PATCH_PATH = re.compile(r"(?:/[\w-]+)+")
_PATCH_OPS = ("add", "replace", "remove")
_INTERNAL_FIELDS = ("created_at", "id", "links", "updated_at", "uuid", "name", "num_accelerators")

MAX_WAITERS = 4
"""How many requests per process may wait for the end of a programming at the same time."""
_waiter_slots = threading.BoundedSemaphore(MAX_WAITERS)

# A JSON text inside a string, spaced as Python's json module does it.
ATTRIBUTES_SQL = """(SELECT '[' || coalesce(
    string_agg('{' || to_json(a.key) || ': ' || to_json(a.value) || '}', ', ' ORDER BY a.id), '') || ']'
    FROM accelerators_attribute a WHERE a.deployable_id = p.id)"""

DEPLOYABLES = V2Resource(
    name="deployables",
    noun="Deployable",
    alias="p",
    tables="accelerators_deployable p JOIN accelerators_device d ON d.id = p.device_id",
    visible_condition=f"{VISIBLE_DEVICES} AND (p.missing_since IS NULL OR {build_held_condition('p')})",
    columns=(
        make_plain_column("uuid", "p.uuid"),
        make_plain_column("parent_id", "p.parent_id"),
        make_plain_column("root_id", "p.root_id"),
        make_plain_column("name", "p.name"),
        make_plain_column("num_accelerators", "p.num_accelerators"),
        make_plain_column("device_id", "p.device_id"),
        JsonColumn("attributes_list", ATTRIBUTES_SQL, None),
        make_plain_column("rp_uuid", "p.rp_uuid"),
        make_plain_column("driver_name", "p.driver_name"),
        make_plain_column("bitstream_id", "p.bitstream_id"),
        make_links_column("p.uuid", self="/accelerator/v2/deployables/", bookmark="/accelerator/deployables/"),
        make_time_column("created_at", "p.created_at"),
        make_time_column("updated_at", "p.updated_at"),
    ),
)


class DeployableList(V2ListView):
    """`GET /v2/deployables`."""

    resource = DEPLOYABLES
    policy_rules = {"GET": "cyborg:deployable:get_all"}


class DeployableDetail(V2DetailView):
    """`GET /v2/deployables/{uuid}`."""

    resource = DEPLOYABLES
    policy_rules = {"GET": "cyborg:deployable:get_one"}


class DeployableProgram(V2View):
    """`PATCH /v2/deployables/{uuid}/program`. openstacksdk appends the uuid to this path once more (contract section
    7.2)."""

    policy_rules = {"PATCH": "cyborg:deployable:program"}

    def patch(self, request: Request, uuid: str) -> Response:
        """Program a free device with an image, wait for the end, and return the deployable with its new `bitstream_id`.

        Waits for at most `program_wait_s` seconds. Raises V2Error: 404 for an unknown deployable; 400 if the image
        cannot be used; 500 if programming fails or has not ended in time (it goes on); 503 without starting anything if
        MAX_WAITERS requests are waiting already in this process. Raises RefusedError if the device is held or does not
        allow the command.
        """
        arguments.parse_known_arguments(request.query_params.lists())
        image = _parse_image_uuid(bodies.read_json_body(request, "program_info"))
        arguments.check_uuid(uuid, "uuid")
        is_visible = arguments.is_canonical_uuid(uuid) and DEPLOYABLES.has_element("p.uuid = %(uuid)s", uuid=uuid)
        device = Device.objects.filter(deployables__uuid=uuid).first() if is_visible else None
        if device is None:
            raise V2Error(404, f"Deployable not found with uuid={uuid}")
        if not _waiter_slots.acquire(blocking=False):
            raise V2Error(503, f"{MAX_WAITERS} devices are being programmed and waited for: try again in a moment.")
        try:
            command = command_queue.order_device_command(
                "program", device.uuid, self.caller, image=image, deployable=UUID(uuid)
            )
            ended_command = programming.wait_until_ended(command.uuid, settings.KEYS.program_wait_s)
        finally:
            _waiter_slots.release()
        _check_succeeded(ended_command or command)
        return Response(DEPLOYABLES.fetch_one(uuid, self.version, self.base_url))


def _check_succeeded(command: Command) -> None:
    """Raise V2Error unless the command succeeded: 400 if it was refused before it had an image, otherwise 500.

    500 is also raised for a command that has not ended yet. The text is upstream's where upstream has one (contract
    section 2.5), with the driver's reason.
    """
    if command.state == CommandState.SUCCEEDED:
        return
    if command.ended_at is None:
        seconds = settings.KEYS.program_wait_s
        raise V2Error(
            500,
            f"FPGA programming is not over after {seconds} s: command {command.uuid} goes on"
            f" ({_describe_progress(command)}).",
        )
    if command.state == CommandState.REFUSED and "image" not in command.arguments:
        raise V2Error(400, f"The image cannot be programmed: {command.text}")
    raise V2Error(500, f"FPGA programming failed with return False. {command.text} (command {command.uuid})")


def _describe_progress(command: Command) -> str:
    """Return the state of a command, followed by its progress if it has any."""
    return f"{command.state}; {command.progress}" if command.progress else command.state


def _parse_image_uuid(operations: object) -> UUID:
    """Return the image's uuid from the operations of the body; raise V2Error 400 if they are invalid.

    Only the first operation is read, and its path need not be /program (contract section 2.5).
    """
    is_list_of_objects = isinstance(operations, list) and bool(operations) and isinstance(operations[0], dict)
    if not is_list_of_objects:
        raise bad_input_error("program_info", str(operations)[:64], "It must be a list of operations.")
    assert isinstance(operations, list)
    first = operations[0]
    path, op, value = first.get("path"), first.get("op"), first.get("value")
    if not isinstance(path, str) or not _PATCH_PATH.fullmatch(path):
        raise bad_input_error("path", str(path)[:64], "It must be of the form /program.")
    if op not in _PATCH_OPS:
        raise bad_input_error("op", str(op)[:64], f"Value should be one of: {', '.join(_PATCH_OPS)}")
    if path.split("/")[1] in _INTERNAL_FIELDS:
        raise V2Error(400, f"'{path[:64]}' is an internal attribute and can not be updated")
    image = value[0].get("image_uuid") if isinstance(value, list) and value and isinstance(value[0], dict) else None
    if not isinstance(image, str):
        raise bad_input_error("value", str(value)[:64], "It must be a list with an object that has an image_uuid.")
    if (canonical := arguments.to_canonical_uuid(image)) is None:
        raise V2Error(400, f"Expected a uuid but received {image[:64]}.")
    return UUID(canonical)
