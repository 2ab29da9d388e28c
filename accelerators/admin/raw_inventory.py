"""What is stored of one device, besides its states: the hardware's last signals, and the inventory as JSON.

Called by `admin.devices`. Reports themselves are not kept: the inventory is what the last one came to.
"""

from __future__ import annotations

import json
from typing import Any

from django.http import HttpRequest

from accelerators.domain.states import CommandState
from accelerators.models import Command, Device
from accelerators.ui import badges

SHOWN = (
    "key",
    "type",
    "vendor",
    "model",
    "address",
    "bridges",
    "numa_node",
    "kernel_driver",
    "status",
    "status_reason",
)
BOARD = ("std_board_info", "vendor_board_info", "to_install", "acts")


def signals(request: HttpRequest, device: Device) -> dict[str, Any] | None:
    """What its driver last answered when it was asked how the device is; None if it never was. One statement."""
    if not request.user.has_perm("accelerators.view_command"):
        return None
    asked = Command.objects.filter(device=device, op="health", state=CommandState.SUCCEEDED.value)
    last = asked.order_by("-id").first()
    if last is None:
        return None
    return {
        "at": badges.ago(last.ended_at),
        "url": badges.page("command", last.pk),
        "health": last.text,
        "rows": _rows(last.detail.get("signals")),
        "samples": _rows(last.detail.get("samples")),
    }


def _rows(said: Any) -> list[dict[str, Any]]:
    """A list of objects, as drivers say signals and samples; what is none is nothing."""
    try:
        found = json.loads(said or "[]")
    except (TypeError, ValueError):
        return []
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def inventory(device: Device, deployables: list[dict[str, Any]]) -> str:
    """A device with its deployables and the handles that are shown, in a report's words."""
    return json.dumps(
        {"driver": device.driver}
        | {name: getattr(device, name) for name in (*SHOWN, *BOARD)}
        | {"deployables": [_deployable(part) for part in deployables]},
        indent=2,
        ensure_ascii=False,
    )


def _deployable(part: dict[str, Any]) -> dict[str, Any]:
    deployable = part["deployable"]
    return {
        "name": deployable.name,
        "num_accelerators": deployable.num_accelerators,
        "attributes": [{"key": one.key, "value": one.value} for one in part["attributes"] if one.origin == "agent"],
        "handles": [{"attach_type": one["unit"].type, "info": one["unit"].info} for one in part["units"]],
        "driver_name": deployable.driver_name,
    }
