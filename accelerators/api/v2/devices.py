"""`/v2/devices` (contract section 2.4), and the condition that decides which devices and deployables are visible."""

from __future__ import annotations

from uuid import UUID

from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.v2 import arguments
from accelerators.api.v2.faults import V2Error, missing_argument_error
from accelerators.api.v2.resource import V2Resource, make_links_column, make_plain_column, make_time_column
from accelerators.api.v2.views import V2DetailView, V2ListView, V2View
from accelerators.devices import lifecycle
from accelerators.domain.caller import Caller


def build_held_condition(deployable_alias: str) -> str:
    """Return an SQL condition: a request refers to the deployable, or holds one of its handles.

    `deployable_alias` is the deployable's alias in the query.
    """
    return f"""(
        EXISTS (SELECT FROM accelerators_acceleratorrequest q WHERE q.deployable_id = {deployable_alias}.id)
        OR EXISTS (SELECT FROM accelerators_attachhandle t
                   JOIN accelerators_acceleratorrequest q ON q.attach_handle_id = t.id
                   WHERE t.deployable_id = {deployable_alias}.id))"""


VISIBLE_DEVICES = f"""d.state <> 'retired' AND (d.state <> 'missing' OR EXISTS (
    SELECT FROM accelerators_deployable part WHERE part.device_id = d.id AND {build_held_condition("part")}))"""
"""SQL condition for visible devices: all except retired ones, and missing ones that nobody holds."""

DEVICES = V2Resource(
    name="devices",
    noun="Device",
    alias="d",
    tables="accelerators_device d JOIN accelerators_host h ON h.id = d.host_id",
    visible_condition=VISIBLE_DEVICES,
    columns=(
        make_plain_column("uuid", "d.uuid"),
        make_plain_column("type", "d.type"),
        make_plain_column("vendor", "d.vendor"),
        make_plain_column("model", "d.model"),
        make_plain_column("std_board_info", "d.std_board_info"),
        make_plain_column("vendor_board_info", "d.vendor_board_info"),
        make_plain_column("hostname", "h.name"),
        make_plain_column("status", "CASE d.state WHEN 'ready' THEN 'enabled' ELSE 'maintaining' END", since=(2, 3)),
        make_links_column("d.uuid", self="/accelerator/v2/devices/"),
        make_time_column("created_at", "d.created_at"),
        make_time_column("updated_at", "d.updated_at"),
    ),
)


class DeviceList(V2ListView):
    """`GET /v2/devices?type=&vendor=&hostname=`."""

    resource = DEVICES
    column_filters = ("type", "vendor", "hostname")
    policy_rules = {"GET": "cyborg:device:get_all"}


class DeviceDetail(V2DetailView):
    """`GET /v2/devices/{uuid}`. Text that is not a uuid is answered with 404, not with 400."""

    resource = DEVICES
    checks_uuid = False
    policy_rules = {"GET": "cyborg:device:get_one"}


class DeviceAction(V2View):
    """`POST /v2/devices/{uuid}/enable` and `…/disable`. The body is ignored (contract section 2.4)."""

    def post(self, request: Request, uuid: str) -> Response:
        """Perform the action; 204, also if nothing changes. 404 if there is no such device; 409 or 503 if it is
        refused."""
        arguments.parse_known_arguments(request.query_params.lists())
        if not arguments.is_canonical_uuid(uuid):
            raise V2Error(404, f"Device not found with uuid={uuid}")
        self.change_state(UUID(uuid), self.caller)
        return Response(None, 204)

    def change_state(self, uuid: UUID, caller: Caller) -> None:
        """Change the state of the device as the view's URL says. Each subclass implements it.

        It may raise RefusedError, for example NOT_FOUND.
        """
        raise NotImplementedError


class DeviceEnable(DeviceAction):
    """Enable a device: request the state `ready`."""

    policy_rules = {"POST": "cyborg:device:enable"}

    def change_state(self, uuid: UUID, caller: Caller) -> None:
        """Request the state `ready`; raises RefusedError in the same cases as `lifecycle.enable_device`."""
        lifecycle.enable_device(uuid, caller)


class DeviceDisable(DeviceAction):
    """Disable a device: take it out of offer."""

    policy_rules = {"POST": "cyborg:device:disable"}

    def change_state(self, uuid: UUID, caller: Caller) -> None:
        """Take the device out of offer; bound requests stay bound. Raises RefusedError NOT_FOUND."""
        lifecycle.disable_device(uuid, caller)


class ActionWithoutDevice(DeviceDetail):
    """`POST /v2/devices/enable` without a uuid, which upstream answers with 400. A GET treats the word as a uuid and
    gives 404."""

    policy_rules = DeviceDetail.policy_rules | {"POST": "cyborg:device:enable"}

    def post(self, request: Request, uuid: str) -> Response:
        """Raise 400 for the missing uuid."""
        raise missing_argument_error("uuid")
