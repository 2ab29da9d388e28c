"""The holder checks of Placement and Nova before a destructive act (`accelerators.safety`).

Placement tells which consumers have an allocation of the device. Nova tells which instances that gave their request
back still live on the host. `placement_sync.apps` registers both where a cloud is configured. A service that does not
answer within 2 s counts against the act.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from django.conf import settings
from django.db import connection

from accelerators.models import Deployable, Device
from accelerators.safety import DEADLINE_S, HolderCheck
from placement_sync.client import Placement, PlacementConflictError, PlacementRejectedError, PlacementUnavailableError
from placement_sync.cloud import session
from placement_sync.nova import client

SHOWN = 5
AWAY_S = 10.0
"""A service that was away is not asked again for this many seconds, because a sweep asks about hundreds of devices."""
DAYS, LATELY = 30, 64
"""The check of Nova covers the instances that gave back a handle of the device within these days, the latest first, and
at most this number of them.
"""
NOBODY = HolderCheck()
GONE = 10_000
"""Largest number of instances that are remembered as unknown to Nova. Their ids never come back."""

RELEASED = """
SELECT e.changes #>> '{instance_uuid,0}' FROM accelerators_event e
WHERE e.host = %(host)s AND e.at > statement_timestamp() - make_interval(days => %(days)s)
  AND e.action IN ('request.unbound', 'request.deleted') AND e.changes #>> '{instance_uuid,0}' IS NOT NULL
  AND e.changes #>> '{attach_handle,0}' IN (SELECT t.id::text FROM accelerators_attachhandle t
    JOIN accelerators_deployable p ON p.id = t.deployable_id WHERE p.device_id = %(device)s)
  AND NOT EXISTS (SELECT FROM accelerators_attachment a WHERE a.ended_at IS NOT NULL
    AND (a.fault = '' OR a.attached_at IS NULL)
    AND a.instance = (e.changes #>> '{instance_uuid,0}')::uuid AND e.subject = ANY(a.requests))
GROUP BY 1 ORDER BY max(e.at) DESC LIMIT %(count)s
"""
"""The instances that gave back a handle of the device. Events are the record: each unbind and each deletion writes
which handle was held.

Attachments that ended without a fault, or were never attached, are left out: Nova did not plug the device into the
running instance, and whoever detached it has removed it from the guest. If somebody else deleted the requests, the
attachment ends with a fault and is not left out. The host itself checks once more before anything is touched.
"""

_away: dict[str, tuple[float, str]] = {}
_gone: set[str] = set()


def allocations(device: Device) -> HolderCheck:
    """Return the consumers with an allocation of any of the device's providers, or why that is unknown."""
    known = Deployable.objects.filter(device=device, rp_uuid__isnull=False).values_list("rp_uuid", flat=True)
    providers = [str(uuid) for uuid in known]
    endpoint = settings.KEYS.placement_endpoint
    return _asked("placement", endpoint, lambda cloud: testimony(cloud, endpoint, providers)) if providers else NOBODY


def testimony(cloud: Any, endpoint: str, providers: Iterable[str]) -> HolderCheck:
    """Return the consumers with an allocation of any of these providers (at most MAX_SHOWN), or why that is unknown.

    Costs one call per provider, each with a deadline of 2 s.
    """
    placement = Placement(cloud, endpoint, timeout_s=DEADLINE_S)
    consumers: set[str] = set()
    try:
        for uuid in providers:
            consumers |= placement.allocations(uuid).keys()
    except (PlacementUnavailableError, PlacementConflictError, PlacementRejectedError) as error:
        return HolderCheck(unknown=str(error))
    return HolderCheck(tuple(f"Placement's consumer {consumer}" for consumer in sorted(consumers)[:SHOWN]))


def instances(device: Device) -> HolderCheck:
    """Return the instances that gave back their request of this device and are still on its host.

    Their guests may still use the device. An instance that was deleted, is shelved, or is on another host does not hold
    it any more.
    """
    host = device.host
    with connection.cursor() as cursor:
        cursor.execute(RELEASED, {"host": host.name, "days": DAYS, "device": device.pk, "count": LATELY})
        had = [uuid for (uuid,) in cursor.fetchall() if uuid not in _gone]
    endpoint = settings.KEYS.nova_endpoint
    return (
        _asked("nova", endpoint, lambda cloud: _living(cloud, endpoint, had, host.name, host.node)) if had else NOBODY
    )


def _living(cloud: Any, endpoint: str, had: Iterable[str], *names: str) -> HolderCheck:
    """Ask Nova for these instances and return those that are on the host with one of `host_names`."""
    found = client.servers(cloud, endpoint, list(had))
    if len(_gone) > GONE:
        _gone.clear()
    _gone.update(uuid for uuid, answer in found.items() if answer is None)
    holders = [
        f"instance {uuid} ({answer.status} on {names[0]}), which may still use it, according to Nova"
        for uuid, answer in found.items()
        if isinstance(answer, client.Server) and answer.on(*names)
    ]
    unknown = next((str(answer) for answer in found.values() if isinstance(answer, client.NovaUnavailableError)), "")
    return HolderCheck(tuple(holders[:SHOWN]), unknown)


def _asked(name: str, endpoint: str, ask: Callable[[Any], HolderCheck]) -> HolderCheck:
    """Call `ask` with the cloud session and return its answer; without a cloud, nobody holds anything.

    If the service was away less than BACK_OFF_S ago, return its last error without a call.
    """
    if (cloud := session(endpoint)) is None:
        return NOBODY
    until, why = _away.get(name, (0.0, ""))
    if time.monotonic() < until:
        return HolderCheck(unknown=why)
    found = ask(cloud)
    if found.unknown and not found.holders:
        _away[name] = (time.monotonic() + AWAY_S, found.unknown)
    return found
