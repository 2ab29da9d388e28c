"""`/v2/devices` (contract section 2.4), and the condition that decides which devices and deployables are visible."""

from __future__ import annotations

from uuid import UUID

from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.v2 import arguments
from accelerators.api.v2.faults import V2Error, missing_argument
from accelerators.api.v2.resource import Resource, links, moment, plain
from accelerators.api.v2.views import DetailView, ListView, View
from accelerators.devices import lifecycle


def held(part: str) -> str:
    """Return SQL that tests whether a request names the deployable with this SQL alias, or holds one of its handles."""
    return f"""(
        EXISTS (SELECT FROM accelerators_acceleratorrequest q WHERE q.deployable_id = {part}.id)
        OR EXISTS (SELECT FROM accelerators_attachhandle t
                   JOIN accelerators_acceleratorrequest q ON q.attach_handle_id = t.id
                   WHERE t.deployable_id = {part}.id))"""


SHOWN = f"""d.state <> 'retired' AND (d.state <> 'missing' OR EXISTS (
    SELECT FROM accelerators_deployable part WHERE part.device_id = d.id AND {held("part")}))"""
"""SQL condition for visible devices: all except retired ones, and missing ones that nobody holds."""

DEVICES = Resource(
    name="devices",
    noun="Device",
    alias="d",
    tables="accelerators_device d JOIN accelerators_host h ON h.id = d.host_id",
    shown=SHOWN,
    columns=(
        plain("uuid", "d.uuid"),
        plain("type", "d.type"),
        plain("vendor", "d.vendor"),
        plain("model", "d.model"),
        plain("std_board_info", "d.std_board_info"),
        plain("vendor_board_info", "d.vendor_board_info"),
        plain("hostname", "h.name"),
        plain("status", "CASE d.state WHEN 'ready' THEN 'enabled' ELSE 'maintaining' END", since=(2, 3)),
        links("d.uuid", self="/accelerator/v2/devices/"),
        moment("created_at", "d.created_at"),
        moment("updated_at", "d.updated_at"),
    ),
)


class DeviceList(ListView):
    """`GET /v2/devices?type=&vendor=&hostname=`."""

    resource = DEVICES
    exact = ("type", "vendor", "hostname")
    policy_rules = {"GET": "cyborg:device:get_all"}


class DeviceDetail(DetailView):
    """`GET /v2/devices/{uuid}`. Text that is not a uuid is answered with 404, not with 400."""

    resource = DEVICES
    checks_uuid = False
    policy_rules = {"GET": "cyborg:device:get_one"}


class DeviceAction(View):
    """`POST /v2/devices/{uuid}/enable` and `…/disable`. The body is ignored (contract section 2.4)."""

    def post(self, request: Request, uuid: str) -> Response:
        """Perform the action; 204, also if nothing changes."""
        arguments.only(request.query_params.lists())
        if not arguments.stored(uuid):
            raise V2Error(404, f"Device not found with uuid={uuid}")
        self.act(UUID(uuid), request.user)
        return Response(None, 204)


class DeviceEnable(DeviceAction):
    """Enable a device: request the state `ready`."""

    policy_rules = {"POST": "cyborg:device:enable"}
    act = staticmethod(lifecycle.enable)


class DeviceDisable(DeviceAction):
    """Disable a device: take it out of offer."""

    policy_rules = {"POST": "cyborg:device:disable"}
    act = staticmethod(lifecycle.disable)


class ActionWithoutDevice(DeviceDetail):
    """`POST /v2/devices/enable` without a uuid, which upstream answers with 400. A GET treats the word as a uuid and
    gives 404."""

    policy_rules = DeviceDetail.policy_rules | {"POST": "cyborg:device:enable"}

    def post(self, request: Request, uuid: str) -> Response:
        """Raise 400 for the missing uuid."""
        raise missing_argument("uuid")
