"""Find the reports that show a new fault of a held device: they are merged before others.

An agent may call every report urgent, and an older one may call none urgent. So the conductor decides this itself, from
what a report says and what the database knows. Reports that show any faulty device are stored before others, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from django.db import connection

from drivers.inventory import DriverReport

FAULTY_HEALTH = ("failed", "degraded")
"""The health of a faulty device, the worst first. A device of unknown health is not known to be faulty."""
MAX_FAULTY_DEVICES = 256
"""Of one report, this many faulty devices are looked up at most, so that a report costs the writer a bounded time."""
SELECT_HOSTS_WITH_NEW_FAULTS = """
SELECT DISTINCT d.host_id
FROM unnest(%s::bigint[], %s::text[], %s::text[]) AS x(host_id, key, status)
JOIN accelerators_device d ON d.host_id = x.host_id AND d.key = x.key AND d.status <> x.status
WHERE EXISTS (
  SELECT FROM accelerators_deployable p JOIN accelerators_attachhandle t ON t.deployable_id = p.id
  WHERE p.device_id = d.id AND (
    EXISTS (SELECT FROM accelerators_acceleratorrequest r WHERE r.attach_handle_id = t.id)
    OR EXISTS (SELECT FROM accelerators_releasedhandle w WHERE w.handle_id = t.id)))
"""
"""The hosts of which a held device is recorded with another health. It reads no row that others may have locked."""

FaultyDevice = tuple[str, str]
"""Key and health of a device that is failed or degraded."""


def list_faulty_devices(drivers: Iterable[DriverReport]) -> Sequence[FaultyDevice]:
    """Return the faulty devices in a report, the failed ones first, at most MAX_FAULTY_DEVICES."""
    faulty = [
        (device.key, device.status) for report in drivers for device in report.devices if device.status in FAULTY_HEALTH
    ]
    if len(faulty) > 1:
        faulty.sort(key=lambda device: FAULTY_HEALTH.index(device[1]))
    return faulty[:MAX_FAULTY_DEVICES]


def find_hosts_with_new_faults(reported: Iterable[tuple[int, Iterable[FaultyDevice]]]) -> set[int]:
    """Return those of these hosts that report a held device as faulty whose recorded health is another one.

    `reported` has pairs of the id of a host and its faulty devices. It costs one statement, none if there is no faulty
    device, and waits for no lock.
    """
    rows = [(host_id, key, health) for host_id, devices in reported for key, health in devices]
    if not rows:
        return set()
    with connection.cursor() as cursor:
        cursor.execute(SELECT_HOSTS_WITH_NEW_FAULTS, [list(column) for column in zip(*rows, strict=True)])
        return {host_id for (host_id,) in cursor.fetchall()}
