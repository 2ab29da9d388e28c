"""Stored data of one device for its console page: the readings of its last health check, and its inventory as JSON.

Reports are not stored; the inventory is the result of the last report.
"""

from __future__ import annotations

import json
from typing import Any

from django.http import HttpRequest

from accelerators.domain.states import CommandState
from accelerators.models import Command, Device
from accelerators.ui import badges

DEVICE_FIELDS = (
    "key",
    "type",
    "vendor",
    "model",
    "subsystem",
    "address",
    "bridges",
    "numa_node",
    "kernel_driver",
    "status",
    "status_reason",
)
BOARD_FIELDS = ("std_board_info", "vendor_board_info", "to_install", "acts")


def load_last_signals(request: HttpRequest, device: Device) -> dict[str, Any] | None:
    """Return the result of the last successful health check of a device: time, link, text, readings and load samples.

    Returns None if no health check has succeeded, or if the user may not view commands. Costs one statement.
    """
    if not request.user.has_perm("accelerators.view_command"):
        return None
    health_checks = Command.objects.filter(device=device, op="health", state=CommandState.SUCCEEDED.value)
    last_check = health_checks.order_by("-id").first()
    if last_check is None:
        return None
    return {
        "at": badges.render_relative_time(last_check.ended_at),
        "url": badges.page_url("command", last_check.pk),
        "health": last_check.text,
        "rows": _parse_rows(last_check.detail.get("signals")),
        "samples": _parse_rows(last_check.detail.get("samples")),
    }


def _parse_rows(text: Any) -> list[dict[str, Any]]:
    """Parse a JSON list of objects, the form in which drivers return signals and samples.

    Returns [] for anything that is not such a list; elements that are not objects are dropped.
    """
    try:
        parsed = json.loads(text or "[]")
    except (TypeError, ValueError):
        return []
    return [row for row in parsed if isinstance(row, dict)] if isinstance(parsed, list) else []


def dump_inventory(device: Device, deployables: list[dict[str, Any]]) -> str:
    """Return a device with its deployables and the handles that its page shows, as JSON with a report's field names."""
    return json.dumps(
        {"driver": device.driver}
        | {name: getattr(device, name) for name in (*DEVICE_FIELDS, *BOARD_FIELDS)}
        | {"deployables": [_build_deployable_fields(part) for part in deployables]},
        indent=2,
        ensure_ascii=False,
    )


def _build_deployable_fields(row: dict[str, Any]) -> dict[str, Any]:
    """Return a deployable as a report would contain it: only the attributes that the agent reported are included.

    `row` comes from `devices._build_deployable_rows`, and so the handles are those that the page shows.
    """
    deployable = row["deployable"]
    return {
        "name": deployable.name,
        "num_accelerators": deployable.num_accelerators,
        "attributes": [{"key": one.key, "value": one.value} for one in row["attributes"] if one.origin == "agent"],
        "handles": [{"attach_type": one["unit"].type, "info": one["unit"].info} for one in row["units"]],
        "driver_name": deployable.driver_name,
    }
