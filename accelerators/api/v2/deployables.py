"""`/v2/deployables` (contract section 2.5): list, show and program."""

from __future__ import annotations

import re
import threading
from uuid import UUID

from django.conf import settings
from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.v2 import arguments, bodies
from accelerators.api.v2.devices import SHOWN, held
from accelerators.api.v2.faults import V2Error, bad_input
from accelerators.api.v2.resource import Column, Resource, links, moment, plain
from accelerators.api.v2.views import DetailView, ListView, View
from accelerators.commands import placing, programming
from accelerators.domain.states import CommandState
from accelerators.models import Command, Device

_PATH = re.compile(r"(?:/[\w-]+)+")
_OPS = ("add", "replace", "remove")
_INTERNAL = ("created_at", "id", "links", "updated_at", "uuid", "name", "num_accelerators")

WAITERS = 4
"""How many requests per process may wait for the end of a programming at the same time."""
_turns = threading.BoundedSemaphore(WAITERS)

# A JSON text inside a string, spaced as Python's json module does it.
ATTRIBUTES = """(SELECT '[' || coalesce(
    string_agg('{' || to_json(a.key) || ': ' || to_json(a.value) || '}', ', ' ORDER BY a.id), '') || ']'
    FROM accelerators_attribute a WHERE a.deployable_id = p.id)"""

DEPLOYABLES = Resource(
    name="deployables",
    noun="Deployable",
    alias="p",
    tables="accelerators_deployable p JOIN accelerators_device d ON d.id = p.device_id",
    shown=f"{SHOWN} AND (p.missing_since IS NULL OR {held('p')})",
    columns=(
        plain("uuid", "p.uuid"),
        plain("parent_id", "p.parent_id"),
        plain("root_id", "p.root_id"),
        plain("name", "p.name"),
        plain("num_accelerators", "p.num_accelerators"),
        plain("device_id", "p.device_id"),
        Column("attributes_list", ATTRIBUTES, None),
        plain("rp_uuid", "p.rp_uuid"),
        plain("driver_name", "p.driver_name"),
        plain("bitstream_id", "p.bitstream_id"),
        links("p.uuid", self="/accelerator/v2/deployables/", bookmark="/accelerator/deployables/"),
        moment("created_at", "p.created_at"),
        moment("updated_at", "p.updated_at"),
    ),
)


class DeployableList(ListView):
    """`GET /v2/deployables`."""

    resource = DEPLOYABLES
    policy_rules = {"GET": "cyborg:deployable:get_all"}


class DeployableDetail(DetailView):
    """`GET /v2/deployables/{uuid}`."""

    resource = DEPLOYABLES
    policy_rules = {"GET": "cyborg:deployable:get_one"}


class DeployableProgram(View):
    """`PATCH /v2/deployables/{uuid}/program`. openstacksdk appends the uuid to this path once more (contract section
    7.2)."""

    policy_rules = {"PATCH": "cyborg:deployable:program"}

    def patch(self, request: Request, uuid: str) -> Response:
        """Program a free device with an image, wait for the end, and return the deployable with its new `bitstream_id`.

        Raises V2Error 503 without starting anything if MAX_WAITERS requests are waiting already in this process.
        """
        arguments.only(request.query_params.lists())
        image = _image(bodies.read(request, "program_info"))
        arguments.check_uuid(uuid)
        there = arguments.stored(uuid) and DEPLOYABLES.exists("p.uuid = %(uuid)s", uuid=uuid)
        device = Device.objects.filter(deployables__uuid=uuid).first() if there else None
        if device is None:
            raise V2Error(404, f"Deployable not found with uuid={uuid}")
        if not _turns.acquire(blocking=False):
            raise V2Error(503, f"{WAITERS} devices are being programmed and waited for: try again in a moment.")
        try:
            command = placing.ask("program", device.uuid, request.user, image=image, deployable=UUID(uuid))
            ended = programming.until_ended(command.uuid, settings.KEYS.program_wait_s)
        finally:
            _turns.release()
        _refuse_unless_done(ended or command)
        return Response(DEPLOYABLES.find(uuid, self.version, self.base))


def _refuse_unless_done(command: Command) -> None:
    """Raise V2Error unless the command succeeded, with upstream's text where it has one (contract section 2.5) and the
    driver's reason."""
    if command.state == CommandState.SUCCEEDED:
        return
    if command.ended_at is None:
        seconds = settings.KEYS.program_wait_s
        raise V2Error(
            500, f"FPGA programming is not over after {seconds} s: command {command.uuid} goes on ({_so(command)})."
        )
    if command.state == CommandState.REFUSED and "image" not in command.arguments:
        raise V2Error(400, f"The image cannot be programmed: {command.text}")
    raise V2Error(500, f"FPGA programming failed with return False. {command.text} (command {command.uuid})")


def _so(command: Command) -> str:
    return f"{command.state}; {command.progress}" if command.progress else command.state


def _image(operations: object) -> UUID:
    """Return the image's uuid from the operations; raise V2Error 400. Only the first operation is read, and its path is
    not compared with /program (contract section 2.5)."""
    shaped = isinstance(operations, list) and bool(operations) and isinstance(operations[0], dict)
    if not shaped:
        raise bad_input("program_info", str(operations)[:64], "It must be a list of operations.")
    assert isinstance(operations, list)
    first = operations[0]
    path, op, value = first.get("path"), first.get("op"), first.get("value")
    if not isinstance(path, str) or not _PATH.fullmatch(path):
        raise bad_input("path", str(path)[:64], "It must be of the form /program.")
    if op not in _OPS:
        raise bad_input("op", str(op)[:64], f"Value should be one of: {', '.join(_OPS)}")
    if path.split("/")[1] in _INTERNAL:
        raise V2Error(400, f"'{path[:64]}' is an internal attribute and can not be updated")
    image = value[0].get("image_uuid") if isinstance(value, list) and value and isinstance(value[0], dict) else None
    if not isinstance(image, str):
        raise bad_input("value", str(value)[:64], "It must be a list with an object that has an image_uuid.")
    if (found := arguments.canonical(image)) is None:
        raise V2Error(400, f"Expected a uuid but received {image[:64]}.")
    return UUID(found)
