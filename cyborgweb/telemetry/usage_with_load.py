"""Groups of units, and hosts, joined with what their devices said last. Called by the API, the overview, the page of
usage and the census."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from accelerators.requests import capacity
from accelerators.requests.capacity import Asked, Group, Load, Said
from agents.telemetry import HostLoad, Loads

FRESH_S = 180.0
"""What was said longer ago says nothing of now: agents that nobody watches speak once a minute."""
MOST: Mapping[str, float] = {
    "utilization_percent": 100.0,
    "memory_used_bytes": 2.0**44,
    "memory_total_bytes": 2.0**44,
    "power_watts": 1e6,
}
"""What is counted together, and the largest value of each that any device could mean; the sum of those stays a number,
whatever hosts send."""


def groups(loads: Loads | None, *asked: Asked) -> list[list[Group]]:
    """The groups of each question, in one statement; without `loads` nothing is said of how busy devices are."""
    return capacity.groups(asked, [*said(loads)] if loads else ())


def of_hosts(loads: Loads) -> dict[int, Load]:
    """How busy each host of `loads` is that has devices; one statement, none where nobody spoke."""
    return capacity.of_hosts(loads.hosts, [*said(loads)]) if loads.hosts else {}


def said(loads: Loads) -> Iterator[Said]:
    """What counts of it: fresh, and possible."""
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
