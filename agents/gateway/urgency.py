"""Find the reports that show a changed health of a held device: they are merged before others.

An agent may call every report urgent, and an older one may call none urgent. So the conductor decides this itself, from
the health that a report shows and the health that is recorded. A change counts if the device is faulty now, or was
faulty in the last report of the connection. Reports with such devices are stored before others, too, held or not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from django.db import connection

from drivers.inventory import DriverReport

FAULTY_HEALTH = ("failed", "degraded")
"""The health of a faulty device. A device of unknown health is not known to be faulty."""
MAX_CHECKED_DEVICES = 256
"""The maximum number of devices of one report that are looked up, so that a report costs the writer a bounded time."""
MAX_CHECKED_OF_BATCH = 4096
"""The same for all reports of a batch. Each report has an equal part of it, but at least one device."""
SELECT_HOSTS_WITH_CHANGED_HEALTH = """
SELECT DISTINCT d.host_id
FROM unnest(%s::bigint[], %s::text[], %s::text[]) AS x(host_id, key, status)
JOIN accelerators_device d ON d.host_id = x.host_id AND d.key = x.key AND d.status <> x.status
WHERE EXISTS (
  SELECT FROM accelerators_deployable p JOIN accelerators_attachhandle t ON t.deployable_id = p.id
  WHERE p.device_id = d.id AND (
    EXISTS (SELECT FROM accelerators_acceleratorrequest r WHERE r.attach_handle_id = t.id)
    OR EXISTS (SELECT FROM accelerators_releasedhandle w WHERE w.handle_id = t.id)))
"""
"""The hosts of which a held device is recorded with another health. It locks no row, so it waits for none."""

DeviceHealth = tuple[str, str]
"""Key and health of a device."""


def list_health_to_check(
    drivers: Iterable[DriverReport], formerly_faulty: Collection[str] = ()
) -> Sequence[DeviceHealth]:
    """Return the devices in a report that are faulty, or whose key is in `formerly_faulty`.

    The failed ones come first; at most MAX_CHECKED_DEVICES are returned.
    """
    found = [
        (device.key, device.status)
        for report in drivers
        for device in report.devices
        if device.status in FAULTY_HEALTH or device.key in formerly_faulty
    ]
    if len(found) > 1:
        found.sort(key=lambda device: device[1] != "failed")
    return found[:MAX_CHECKED_DEVICES]


def list_faulty_keys(devices: Iterable[DeviceHealth]) -> frozenset[str]:
    """Return the keys of those of these devices that are faulty."""
    return frozenset(key for key, health in devices if health in FAULTY_HEALTH)


def find_hosts_with_changed_health(reported: Iterable[tuple[int, Sequence[DeviceHealth]]]) -> set[int]:
    """Return those of these hosts that report a held device whose recorded health is another one.

    `reported` has pairs of the id of a host and its devices to check, the most important ones first. At most
    MAX_CHECKED_OF_BATCH devices are looked up, or one of each report. It costs one statement, none if there is no such
    device, and waits only for locks of whole tables.
    """
    with_devices = [(host_id, devices) for host_id, devices in reported if devices]
    part = max(1, MAX_CHECKED_OF_BATCH // max(1, len(with_devices)))
    rows = [(host_id, key, health) for host_id, devices in with_devices for key, health in devices[:part]]
    if not rows:
        return set()
    with connection.cursor() as cursor:
        cursor.execute(SELECT_HOSTS_WITH_CHANGED_HEALTH, [list(column) for column in zip(*rows, strict=True)])
        return {host_id for (host_id,) in cursor.fetchall()}
