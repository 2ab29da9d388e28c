"""What Placement and Nova testify before a destructive act: who has an allocation of the device. See `safety`.

Registered by `placement_sync.apps` where a cloud is configured. Who cannot be asked within 2 s counts against the act.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from django.conf import settings

from accelerators.models import Deployable, Device
from accelerators.safety import DEADLINE_S, Testimony
from placement_sync.client import Away, Conflict, Placement, Rejected
from placement_sync.cloud import session

SHOWN = 5
AWAY_S = 10.0
"""Found away, Placement is not asked again for so long: a sweep asks about hundreds of devices."""
_away: tuple[float, str] = (0.0, "")


def allocations(device: Device) -> Testimony:
    """Whoever has anything allocated of the device's providers."""
    known = Deployable.objects.filter(device=device, rp_uuid__isnull=False).values_list("rp_uuid", flat=True)
    providers = [str(uuid) for uuid in known]
    if not providers or (cloud := session(settings.KEYS.placement_endpoint)) is None:
        return Testimony()
    global _away
    until, why = _away
    if time.monotonic() < until:
        return Testimony(unknown=why)
    found = testimony(cloud, settings.KEYS.placement_endpoint, providers)
    if found.unknown:
        _away = (time.monotonic() + AWAY_S, found.unknown)
    return found


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
