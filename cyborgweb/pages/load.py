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

from accelerators.admin.hosts import MAX_DEVICE_ROWS
from accelerators.models import Device, Host
from accelerators.ui import badges
from agents import telemetry
from agents.liveness import explain_absence
from agents.telemetry import HostLoad, LoadSnapshot
from cyborgweb.pages.capacity import format_bytes, render_level_bar

SAMPLE_INTERVAL_S, SAMPLE_REQUEST_S = 1.0, 10.0
"""While somebody looks at a host, its agent sends samples at this interval, in seconds; it stops this many seconds
after the last look.
"""
METRIC_NAME = re.compile(r"(.*?)_(percent|bytes|celsius|watts|total)(?:_(\d+))?")
UNIT_SUFFIXES = {"percent": " %", "celsius": " °C", "watts": " W"}


def build_device_load(device: Device) -> dict[str, Any]:
    """Return what the device's page shows of its load: the last values as label and text, their time, the address of
    the usage resource, and the text to show if there are no values. No agent is asked.
    """
    loads = telemetry.get_last_loads({device.host_id})
    host_load = loads.hosts.get(device.host_id)
    values = host_load.devices.get(device.key, {}) if host_load else {}
    host = Host.objects.select_related("agent", "lease").defer("drivers").filter(pk=device.host_id).first()
    return {
        "address": f"/api/devices/{device.uuid}/usage/",
        "at": badges.render_relative_time(datetime.fromtimestamp(host_load.at, UTC)) if host_load and values else "",
        "values": [(metric_label(metric), format_metric(metric, value)) for metric, value in sorted(values.items())],
        "none": explain_missing_samples(host, loads, host_load, device.driver)
        if host
        else "no samples: its host was removed",
    }


def build_host_load(host: Host) -> dict[str, Any]:
    """Return the template variables of the load on a host's page: a row for each device that is not retired, at most
    MAX_DEVICE_ROWS, the time of the last sample, and the text to show if there are no samples.

    Asks the host's agent to send samples every SAMPLE_INTERVAL_S seconds for the next SAMPLE_REQUEST_S seconds. There
    are no rows if no sample of the host is known.
    """
    loads = telemetry.request_periodic_loads({host.pk}, SAMPLE_INTERVAL_S, SAMPLE_REQUEST_S)
    host_load = loads.hosts.get(host.pk)
    devices = host.devices.exclude(state="retired").order_by("numa_node", "address", "key")[:MAX_DEVICE_ROWS]
    return {
        "address": reverse("admin:accelerators_host_load", args=[host.pk]),
        "at": badges.render_relative_time(datetime.fromtimestamp(host_load.at, UTC)) if host_load else "",
        "rows": [_build_device_row(device, host_load.devices.get(device.key, {})) for device in devices]
        if host_load
        else [],
        "none": explain_missing_samples(host, loads, host_load, ""),
    }


def explain_missing_samples(host: Host, loads: LoadSnapshot, host_load: HostLoad | None, driver: str) -> str:
    """Return a text with the reason why there are no samples, as far as it is known.

    It is not checked here whether there are samples. `host_load` is the last sample of the host; unless it is None, the
    reason is that the driver reports no load. `driver` is the device's driver, '' if all devices of the host are meant.
    """
    if absence := explain_absence(host, getattr(host, "agent", None)):
        return f"no samples: {absence.text}"
    if host_load is not None:
        return f"no samples: {driver or 'its driver'} reports no load"
    if loads.silent:
        return f"no samples: {', '.join(loads.silent)} may have them, and does not answer"
    return "no samples yet: its agent has just connected, or its release sends none"


def metric_label(metric: str) -> str:
    """Return the metric's name without its unit, as words: `memory used` for `memory_used_bytes`, and `temperature 2`
    for `temperature_celsius_2`.
    """
    match = METRIC_NAME.fullmatch(metric)
    parts = (match[1].replace("_", " "), match[3]) if match else (metric.replace("_", " "), None)
    return " ".join(filter(None, parts))


def format_metric(metric: str, value: float) -> str:
    """Return the value as text, with the unit that the metric's name ends with, such as `41 °C`.

    Bytes are in a readable unit; a metric that ends with `total` has no decimals; a metric without a known unit has no
    unit.
    """
    match = METRIC_NAME.fullmatch(metric)
    unit = match[2] if match else ""
    if unit == "bytes":
        return format_bytes(value)
    return f"{value:,.0f}" if unit == "total" else f"{value:,.4g}{UNIT_SUFFIXES.get(unit, '')}"


def _build_device_row(device: Device, values: Mapping[str, float]) -> dict[str, Any]:
    """Return the row of one device: bars with texts for utilisation, memory and temperature (None if not reported), and
    the power as text ('' if not reported). The bar of the temperature is full at 110 °C.
    """
    utilization, used, size = (
        values.get(name) for name in ("utilization_percent", "memory_used_bytes", "memory_total_bytes")
    )
    temperature, power = values.get("temperature_celsius"), values.get("power_watts")
    return {
        "device": device,
        "busy": _render_bar(utilization, 100.0, f"{utilization:.0f} %" if utilization is not None else ""),
        "memory": _render_bar(
            used, size, f"{format_bytes(used)} of {format_bytes(size)}" if used is not None and size else ""
        ),
        "heat": _render_bar(temperature, 110.0, f"{temperature:.0f} °C" if temperature is not None else ""),
        "power": f"{power:,.0f} W" if power is not None else "",
    }


def _render_bar(value: float | None, maximum: float | None, text: str) -> tuple[SafeString, str] | None:
    """Return a bar of `value` as a part of `maximum`, and its text; None if the value or the maximum is unknown. A
    value outside 0 to `maximum` gives an empty or full bar.
    """
    return (
        (render_level_bar(min(100.0, max(0.0, 100 * value / maximum))), text) if value is not None and maximum else None
    )
