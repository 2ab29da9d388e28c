"""`/v2/devices` (contract section 2.4), and which devices and deployables are shown at all."""

from __future__ import annotations

from accelerators.api.v2.resource import Resource, links, moment, plain
from accelerators.api.v2.views import DetailView, ListView


def held(part: str) -> str:
    """SQL: whether a request names the deployable aliased `part`, or holds one of its handles."""
    return f"""(
        EXISTS (SELECT FROM accelerators_acceleratorrequest q WHERE q.deployable_id = {part}.id)
        OR EXISTS (SELECT FROM accelerators_attachhandle t
                   JOIN accelerators_acceleratorrequest q ON q.attach_handle_id = t.id
                   WHERE t.deployable_id = {part}.id))"""


SHOWN = f"""d.state <> 'retired' AND (d.state <> 'missing' OR EXISTS (
    SELECT FROM accelerators_deployable part WHERE part.device_id = d.id AND {held("part")}))"""
"""SQL: every device but the retired ones, and those that are missing and free."""

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
    """`GET /v2/devices/{uuid}`; anything that is no uuid is a device that is not there."""

    resource = DEVICES
    checks_uuid = False
    policy_rules = {"GET": "cyborg:device:get_one"}
