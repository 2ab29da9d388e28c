"""Join groups of units, and hosts, with the last samples of their devices."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from accelerators.requests import capacity
from accelerators.requests.capacity import Asked, Group, Load, Said
from agents.telemetry import HostLoad, Loads

FRESH_S = 180.0
"""Seconds after which a sample is too old to count: agents that nobody watches send one a minute."""
MOST: Mapping[str, float] = {
    "utilization_percent": 100.0,
    "memory_used_bytes": 2.0**44,
    "memory_total_bytes": 2.0**44,
    "power_watts": 1e6,
}
"""Metrics that are added up, and the largest plausible value of each. Larger values are ignored, so that sums stay
finite whatever hosts send.
"""


def groups(loads: Loads | None, *asked: Asked) -> list[list[Group]]:
    """Return the groups of each question; one statement for all. Without `loads` the groups have no load."""
    return capacity.groups(asked, [*said(loads)] if loads else ())


def of_hosts(loads: Loads) -> dict[int, Load]:
    """Return the load of each host in `loads` that has devices. One statement, or none if `loads` has no hosts."""
    return capacity.of_hosts(loads.hosts, [*said(loads)]) if loads.hosts else {}


def said(loads: Loads) -> Iterator[Said]:
    """Yield the samples that count: fresh ones, without implausible values."""
    oldest = time.time() - FRESH_S
    for host in loads.hosts.values():
        if host.at >= oldest:
            yield from _devices(host)


def _devices(host: HostLoad) -> Iterator[Said]:
    for key, values in host.devices.items():
        if "\0" not in key:
            yield Said(host.host_id, key, *(_possible(values.get(name), most) for name, most in MOST.items()))


def _possible(value: float | None, most: float) -> float | None:
    return value if value is not None and 0 <= value <= most else None
