"""Fill the database with hosts, devices and events, to try lists, searches and exports at a large size."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from django.db import connection

from accelerators import conductor
from accelerators.domain.errors import AcceleratorsError
from accelerators.domain.states import EventSource
from accelerators.inventory import seed_sql

BATCH_SIZE = 10_000
"""Rows that one statement inserts."""
MAX_DEVICES_PER_HOST = 4096


class SeedError(AcceleratorsError):
    """The wanted numbers of rows do not fit each other."""


class RealHostsError(SeedError):
    """The database has hosts that were not seeded."""


def insert_rows(
    hosts: int,
    devices: int,
    events: int,
    report_progress: Callable[[int], None],
    *,
    actor: str = "seed",
    beside_real_hosts: bool = False,
    with_providers: bool = True,
) -> str:
    """Insert hosts `seed-NUMBER.example`, their devices, and events about these devices; return the first host's name.

    Each device has a deployable with a resource class and two traits, and an attach handle. Unless `with_providers` is
    false, the deployables of all but inactive devices have the ids of their resource providers, as on a running site,
    so that ready devices fit device profiles. The numbers of the hosts follow those of hosts that were seeded before.
    `report_progress` is called with the number of devices and events that were inserted since its last call. Two
    further events record the insertion by `actor`. Everything is inserted in one transaction, so an interrupted call
    leaves nothing behind.

    Raises SeedError if `hosts` or `devices` is below 1, `events` is negative, or a host would get more than
    MAX_DEVICES_PER_HOST devices. Raises RealHostsError if the database has hosts that were not seeded and
    `beside_real_hosts` is false.
    """
    if hosts < 1 or devices < 1 or events < 0:
        raise SeedError("Give at least one host and one device, and no negative number of events.")
    if devices > hosts * MAX_DEVICES_PER_HOST:
        raise SeedError(f"A host gets at most {MAX_DEVICES_PER_HOST} devices: give more hosts or fewer devices.")
    with conductor.writing(), connection.cursor() as cursor:
        cursor.execute(seed_sql.COUNT_HOSTS)
        real_hosts, highest = cursor.fetchone()
        if real_hosts and not beside_real_hosts:
            raise RealHostsError(
                f"This database has {real_hosts} real host{'' if real_hosts == 1 else 's'}. Seeded devices would appear"
                " beside their devices in every list and in Placement."
            )
        numbers = {"first": highest + 1, "last": highest + hosts}
        cursor.execute(seed_sql.INSERT_HOSTS, numbers)
        cursor.execute(seed_sql.CREATE_SEEDED_HOSTS, numbers)
        for start, end in _iterate_batches(devices):
            batch = {"start": start, "end": end, "hosts": hosts, "with_providers": with_providers}
            cursor.execute(seed_sql.INSERT_DEVICES, batch)
            report_progress(end - start)
        cursor.execute(seed_sql.COUNT_DEVICES_OF_HOSTS)
        cursor.execute(seed_sql.CREATE_SEEDED_DEVICES)
        for start, end in _iterate_batches(events):
            batch = {"start": start, "end": end, "devices": devices, "events": events}
            cursor.execute(seed_sql.INSERT_EVENTS, batch)
            report_progress(end - start)
        for kind, count in (("host", hosts), ("device", devices)):
            conductor.record_event(f"{kind}.seeded", EventSource.PERSON, actor, changes={"number": [0, count]})
        cursor.execute(seed_sql.ANALYZE)
    return f"seed-{highest + 1:05}.example"


def _iterate_batches(count: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds (start, end) of consecutive batches of at most BATCH_SIZE rows; `end` is exclusive."""
    for start in range(0, count, BATCH_SIZE):
        yield start, min(start + BATCH_SIZE, count)
