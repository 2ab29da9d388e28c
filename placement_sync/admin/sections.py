"""Discrepancies with Placement and Nova, as the pages of hosts, devices and requests show them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accelerators.models import AcceleratorRequest, Device, Host
from accelerators.ui import badges
from placement_sync.jobs.discrepancies import (
    DiscrepancySummary,
    list_discrepancies_of_devices,
    list_discrepancies_of_host,
)


def build_host_section(host: Host) -> list[dict[str, Any]]:
    """Return the discrepancies of a host for the template `accelerators/admin/discrepancies.html`. Costs one
    statement."""
    return _render_discrepancies(list_discrepancies_of_host(host.pk))


def build_device_section(device: Device) -> list[dict[str, Any]]:
    """Return the discrepancies of a device in the same form as `build_host_section`. Costs one statement."""
    return _render_discrepancies(list_discrepancies_of_devices([device.pk]))


def build_request_section(request: AcceleratorRequest) -> list[dict[str, Any]]:
    """Return the discrepancies that concern a request: those of its device about its instance.

    They have the same form as in `build_host_section`. Empty if the request has no instance or is not bound to a
    deployable.
    """
    if request.instance_uuid is None or request.deployable is None:
        return []
    discrepancies = list_discrepancies_of_devices([request.deployable.device_id])
    return _render_discrepancies(one for one in discrepancies if one.instance == str(request.instance_uuid))


def _render_discrepancies(discrepancies: Iterable[DiscrepancySummary]) -> list[dict[str, Any]]:
    """Return one dict for each discrepancy: its kind as a badge, since when, and what is wrong."""
    return [
        {
            "kind": badges.render_choice(one.kind),
            "since": badges.render_relative_time(one.since),
            "explanation": one.explanation,
        }
        for one in discrepancies
    ]
