"""Stored data of one device for its console page: the last signals of its hardware, and its inventory as JSON.

Reports are not stored; the inventory is the result of the last one.
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
    """Return the result of the last successful health check of a device: time, link, text, signals and samples.

    Returns None if there is none, or if the user may not view commands. Costs one statement.
    """
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
    """Parse a JSON list of objects, the form in which drivers return signals and samples.

    Returns [] for text that is not a JSON list; elements that are not objects are dropped.
    """
    try:
        found = json.loads(said or "[]")
    except (TypeError, ValueError):
        return []
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def inventory(device: Device, deployables: list[dict[str, Any]]) -> str:
    """Return a device with its deployables and the handles that its page shows, as JSON with a report's field names."""
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
