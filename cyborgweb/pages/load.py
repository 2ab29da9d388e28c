"""The load of a device, or of each device of a host, as their pages show it.

A device's chart listens to `/api/devices/{uuid}/usage/`; a host's table is fetched again each second. Names and units
of the values: `drivers.inventory.Sample`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from django.urls import reverse
from django.utils.safestring import SafeString

from accelerators.admin.hosts import DEVICE_ROWS
from accelerators.models import Device, Host
from accelerators.ui import badges
from agents import telemetry
from agents.liveness import word_of
from agents.models import Agent
from agents.telemetry import HostLoad, Loads
from cyborgweb.pages.capacity import amount, level

EVERY_S, FOR_S = 1.0, 10.0
"""While somebody looks at a host, its agent sends samples at this interval, in seconds; it stops this many seconds
after the last look.
"""
NAME = re.compile(r"(.*?)_(percent|bytes|celsius|watts|total)(?:_(\d+))?")
UNITS = {"percent": " %", "celsius": " °C", "watts": " W"}


def of_device(device: Device) -> dict[str, Any]:
    """Return the device's last values for its page, and the text to show if there are none."""
    loads = telemetry.last({device.host_id})
    said = loads.hosts.get(device.host_id)
    values = said.devices.get(device.key, {}) if said else {}
    agent = Agent.objects.filter(host=device.host_id).select_related("host__lease").first()
    return {
        "address": f"/api/devices/{device.uuid}/usage/",
        "at": badges.ago(datetime.fromtimestamp(said.at, UTC)) if said and values else "",
        "values": [(name_of(metric), shown(metric, value)) for metric, value in sorted(values.items())],
        "none": none(agent, loads, said, device.driver),
    }


def of_host(host: Host) -> dict[str, Any]:
    """Return a row for each device of the host with its last sample, at most `DEVICE_ROWS`, and ask its agent to
    send samples every `EVERY_S` for the next `FOR_S` seconds.
    """
    loads = telemetry.watch({host.pk}, EVERY_S, FOR_S)
    said = loads.hosts.get(host.pk)
    devices = host.devices.exclude(state="retired").order_by("numa_node", "address", "key")[:DEVICE_ROWS]
    return {
        "address": reverse("admin:accelerators_host_load", args=[host.pk]),
        "at": badges.ago(datetime.fromtimestamp(said.at, UTC)) if said else "",
        "rows": [_row(device, said.devices.get(device.key, {})) for device in devices] if said else [],
        "none": none(getattr(host, "agent", None), loads, said, ""),
    }


def none(agent: Agent | None, loads: Loads, said: HostLoad | None, driver: str) -> str:
    """Return the reason why there are no samples, as far as it is known."""
    if agent is None:
        return "no samples: no agent has joined for this host"
    if agent.barred:
        return f"no samples: its agent may not connect ({agent.barred})"
    if word_of(agent) == "down":
        return "no samples: its agent is down"
    if said is not None:
        return f"no samples: {driver or 'its driver'} reports no load"
    if loads.silent:
        return f"no samples: {', '.join(loads.silent)} may have them, and does not answer"
    return "no samples yet: its agent has just connected, or its release sends none"


def name_of(metric: str) -> str:
    """Return the metric's name without its unit, in words."""
    found = NAME.fullmatch(metric)
    parts = (found[1].replace("_", " "), found[3]) if found else (metric.replace("_", " "), None)
    return " ".join(filter(None, parts))


def shown(metric: str, value: float) -> str:
    """Return the value with the unit that the metric's name has."""
    found = NAME.fullmatch(metric)
    unit = found[2] if found else ""
    if unit == "bytes":
        return amount(value)
    return f"{value:,.0f}" if unit == "total" else f"{value:,.4g}{UNITS.get(unit, '')}"


def _row(device: Device, values: Mapping[str, float]) -> dict[str, Any]:
    busy, used, size = (values.get(name) for name in ("utilization_percent", "memory_used_bytes", "memory_total_bytes"))
    heat, power = values.get("temperature_celsius"), values.get("power_watts")
    return {
        "device": device,
        "busy": _bar(busy, 100.0, f"{busy:.0f} %" if busy is not None else ""),
        "memory": _bar(used, size, f"{amount(used)} of {amount(size)}" if used is not None and size else ""),
        "heat": _bar(heat, 110.0, f"{heat:.0f} °C" if heat is not None else ""),
        "power": f"{power:,.0f} W" if power is not None else "",
    }


def _bar(value: float | None, whole: float | None, text: str) -> tuple[SafeString, str] | None:
    """Return a bar and its text; None if the value or the maximum is unknown."""
    return (level(min(100.0, max(0.0, 100 * value / whole))), text) if value is not None and whole else None
