"""What Placement and Nova testify before a destructive act: who has an allocation of the device, and who had the device
from us and lives on with it. See `safety`.

Registered by `placement_sync.apps` where a cloud is configured. Who cannot be asked within 2 s counts against the act.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from django.conf import settings
from django.db import connection

from accelerators.models import Deployable, Device
from accelerators.safety import DEADLINE_S, Testimony
from placement_sync.client import Away, Conflict, Placement, Rejected
from placement_sync.cloud import session
from placement_sync.nova import client

SHOWN = 5
AWAY_S = 10.0
"""Found away, nobody is asked again for so long: a sweep asks about hundreds of devices."""
DAYS, LATELY = 30, 64
"""Whoever gave a handle of the device back in so many days is asked for, so many of the last."""
NOBODY = Testimony()
GONE = 10_000
"""So many instances that Nova does not know are remembered: their ids never come back."""

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
"""Instances that gave a handle of the device back. Events are the record: an unbind, a deletion write what was held.

What was attached to a running instance Nova did not plug; who had it detached has taken it out of the guest. Not so
where its requests were taken away by somebody else: then it is detached with a fault. The host itself looks once more
before anything is touched.
"""

_away: dict[str, tuple[float, str]] = {}
_gone: set[str] = set()


def allocations(device: Device) -> Testimony:
    """Whoever has anything allocated of the device's providers."""
    known = Deployable.objects.filter(device=device, rp_uuid__isnull=False).values_list("rp_uuid", flat=True)
    providers = [str(uuid) for uuid in known]
    endpoint = settings.KEYS.placement_endpoint
    return _asked("placement", endpoint, lambda cloud: testimony(cloud, endpoint, providers)) if providers else NOBODY


def testimony(cloud: Any, endpoint: str, providers: Iterable[str]) -> Testimony:
    """The same of these providers."""
    placement = Placement(cloud, endpoint, timeout_s=DEADLINE_S)
    consumers: set[str] = set()
    try:
        for uuid in providers:
            consumers |= placement.allocations(uuid).keys()
    except (Away, Conflict, Rejected) as error:
        return Testimony(unknown=str(error))
    return Testimony(tuple(f"Placement's consumer {consumer}" for consumer in sorted(consumers)[:SHOWN]))


def instances(device: Device) -> Testimony:
    """Whoever had the device from us, gave its request back, and is on its host still: its guest may use the device.

    An instance that has ended, is shelved, or lives elsewhere has let go.
    """
    host = device.host
    with connection.cursor() as cursor:
        cursor.execute(RELEASED, {"host": host.name, "days": DAYS, "device": device.pk, "count": LATELY})
        had = [uuid for (uuid,) in cursor.fetchall() if uuid not in _gone]
    endpoint = settings.KEYS.nova_endpoint
    return (
        _asked("nova", endpoint, lambda cloud: _living(cloud, endpoint, had, host.name, host.node)) if had else NOBODY
    )


def _living(cloud: Any, endpoint: str, had: Iterable[str], *names: str) -> Testimony:
    found = client.servers(cloud, endpoint, list(had))
    if len(_gone) > GONE:
        _gone.clear()
    _gone.update(uuid for uuid, answer in found.items() if answer is None)
    holders = [
        f"instance {uuid} ({answer.status} on {names[0]}), which still has it, by Nova"
        for uuid, answer in found.items()
        if isinstance(answer, client.Server) and answer.on(*names)
    ]
    unknown = next((str(answer) for answer in found.values() if isinstance(answer, client.Unusable)), "")
    return Testimony(tuple(holders[:SHOWN]), unknown)


def _asked(name: str, endpoint: str, ask: Callable[[Any], Testimony]) -> Testimony:
    """What it says; while it is away, why nobody knows. Where there is no cloud there is nobody to hold anything."""
    if (cloud := session(endpoint)) is None:
        return NOBODY
    until, why = _away.get(name, (0.0, ""))
    if time.monotonic() < until:
        return Testimony(unknown=why)
    found = ask(cloud)
    if found.unknown and not found.holders:
        _away[name] = (time.monotonic() + AWAY_S, found.unknown)
    return found
