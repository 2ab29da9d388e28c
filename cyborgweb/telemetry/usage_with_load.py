"""Join groups of units, and hosts, with the last samples of their devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from accelerators.requests import capacity
from accelerators.requests.capacity import CapacityGroup, CapacityQuery, LastSample, LoadSummary
from accelerators.runtime import database_clock
from agents.telemetry import HostLoad, LoadSnapshot

MAX_SAMPLE_AGE_S = 180.0
"""Seconds after which a sample is too old to count: agents that nobody watches send one a minute."""
MAX_VALUES: Mapping[str, float] = {
    "utilization_percent": 100.0,
    "memory_used_bytes": 2.0**44,
    "memory_total_bytes": 2.0**44,
    "power_watts": 1e6,
}
"""Metrics that are added up, and the largest plausible value of each. Larger values are ignored, so that sums stay
finite whatever hosts send.
"""


def count_groups_with_load(loads: LoadSnapshot | None, *queries: CapacityQuery) -> list[list[CapacityGroup]]:
    """Return the groups of each query, in the order of the queries; one statement for all.

    The load of the devices comes from the samples in `loads` that are not too old; without `loads` it is empty.
    """
    return capacity.query_groups(queries, [*iterate_fresh_samples(loads)] if loads else ())


def compute_host_loads(loads: LoadSnapshot) -> dict[int, LoadSummary]:
    """Return the load of each host in `loads` that has devices, by host id, from samples that are not too old. Costs
    one statement, or none if `loads` has no hosts.
    """
    return capacity.query_load_by_host(loads.hosts, [*iterate_fresh_samples(loads)]) if loads.hosts else {}


def iterate_fresh_samples(loads: LoadSnapshot) -> Iterator[LastSample]:
    """Yield the last sample of each device whose host sent samples in the last `MAX_SAMPLE_AGE_S` seconds.

    Implausible values are None.
    """
    oldest = database_clock.timestamp() - MAX_SAMPLE_AGE_S
    for host in loads.hosts.values():
        if host.at >= oldest:
            yield from _iterate_device_samples(host)


def _iterate_device_samples(host: HostLoad) -> Iterator[LastSample]:
    """Yield the last sample of each of the host's devices, with None for values that are missing or implausible. Keys
    that PostgreSQL cannot store are left out.
    """
    for key, values in host.devices.items():
        if "\0" not in key:
            yield LastSample(
                host.host_id,
                key,
                *(_drop_implausible(values.get(name), max_value) for name, max_value in MAX_VALUES.items()),
            )


def _drop_implausible(value: float | None, max_value: float) -> float | None:
    """Return the value if it is between 0 and `max_value`; otherwise None."""
    return value if value is not None and 0 <= value <= max_value else None
