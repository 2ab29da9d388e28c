"""Delete the providers of a host that is being removed from Placement."""

from __future__ import annotations

import random
import time

from django.conf import settings

from accelerators import conductor
from accelerators.domain.states import EventSource
from accelerators.models import Deployable, Host
from accelerators.runtime import jobs
from placement_sync.client import (
    IN_USE_CODES,
    PlacementClient,
    PlacementConflictError,
    PlacementRejectedError,
    PlacementUnavailableError,
)
from placement_sync.cloud import get_cloud_session
from placement_sync.jobs.writer_election import JOB
from placement_sync.models import WrittenProvider

CALL_DEADLINE_S = 15.0
"""Seconds after which no further call is made for the host. A call may take 10 s, a run of the job `removals` begins no
host after 20 s, and the cluster kills a job after 60 s."""
CHUNK = 8
"""Providers that are deleted before the lock is given back for a moment."""
LOCK_PAUSE_S = 3 * jobs.JOB_LOCK_PAUSE_S
"""Seconds between two attempts to take the lock: long enough for the job `placement`, if it waits, to take it."""
MAX_OBSTACLES_NAMED = 5


def delete_providers(host: Host) -> str:
    """Delete the providers of the host's deployables from Placement; return '' when none is left, otherwise the reason.

    A provider with allocations is kept, and the others are deleted. After `CALL_DEADLINE_S` no further call is made.
    Each deletion is stored at once, so that repeated calls do only what is left. The lock of the job `placement` is
    held during each chunk: that job could have begun before the host was marked, and would make the providers again.
    """
    cloud = get_cloud_session(settings.KEYS.placement_endpoint)
    if cloud is None:
        return ""
    began = time.monotonic()

    def refuse_late_call() -> None:
        """Raise PlacementUnavailableError if the time for calls is over."""
        if time.monotonic() - began > CALL_DEADLINE_S:
            raise PlacementUnavailableError(
                f"Placement is slow: not all providers were deleted within {CALL_DEADLINE_S:g} s"
            )

    placement = PlacementClient(cloud, settings.KEYS.placement_endpoint, before_call=refuse_late_call)
    left = _load_providers(host)
    random.shuffle(left)  # providers that cannot be deleted must not use up the time of the others at each call
    obstacles: list[str] = []
    while left:
        with jobs.try_connection_lock(JOB) as acquired:
            if acquired:
                chunk, left = left[:CHUNK], left[CHUNK:]
                try:
                    obstacles += _delete_chunk(placement, host, chunk)
                except PlacementUnavailableError as error:
                    return _join_obstacles([str(error), *obstacles])
            elif time.monotonic() - began > CALL_DEADLINE_S:
                return _join_obstacles(["the job that writes to Placement is at work", *obstacles])
        if left:
            time.sleep(LOCK_PAUSE_S)
    return _join_obstacles(obstacles)


def _load_providers(host: Host) -> list[str]:
    """Return the uuids of the host's providers that may still be in Placement."""
    recorded = Deployable.objects.filter(device__host=host, rp_uuid__isnull=False).values_list("rp_uuid", flat=True)
    written = WrittenProvider.objects.filter(host=host).values_list("uuid", flat=True)
    return sorted({*map(str, recorded), *map(str, written)})


def _delete_chunk(placement: PlacementClient, host: Host, uuids: list[str]) -> list[str]:
    """Delete these providers, and store each deletion; return why the others stay.

    Raises PlacementUnavailableError.
    """
    obstacles = []
    for uuid in uuids:
        try:
            placement.delete_provider(uuid)
        except PlacementConflictError as conflict:
            obstacles.append(
                _describe_allocations(placement, uuid) if conflict.code in IN_USE_CODES else f"{uuid}: {conflict}"
            )
        except PlacementRejectedError as error:
            obstacles.append(f"{uuid}: {error}")
        else:
            _forget_provider(host, uuid)
    return obstacles


def _describe_allocations(placement: PlacementClient, uuid: str) -> str:
    """Return the sentence for a provider that Placement keeps because of its allocations."""
    try:
        named = ", ".join(sorted(placement.read_allocations(uuid))[:5])
    except (PlacementConflictError, PlacementRejectedError) as error:
        return f"provider {uuid} stays in Placement, because it is allocated; the consumers are unknown: {error}"
    return f"provider {uuid} stays in Placement, because it is allocated to {named}"


def _forget_provider(host: Host, uuid: str) -> None:
    """Store that a provider is not in Placement any more, with an event of its device."""
    with conductor.writing():
        deployables = Deployable.objects.filter(device__host=host, rp_uuid=uuid).select_related("device")
        reason = f"provider {uuid} was deleted from Placement, because host {host.name} is being removed"
        for device in {one.device for one in deployables}:
            subject = device.uuid, str(device)
            conductor.record_event(
                "device.unpublished", EventSource.SYSTEM, JOB, host=host, subject=subject, reason=reason
            )
        deployables.update(rp_uuid=None)
        WrittenProvider.objects.filter(host=host, uuid=uuid).delete()


def _join_obstacles(obstacles: list[str]) -> str:
    """Return one text for these obstacles; at most MAX_OBSTACLES_NAMED are named."""
    more = len(obstacles) - MAX_OBSTACLES_NAMED
    return "; ".join(obstacles[:MAX_OBSTACLES_NAMED] + ([f"and {more} more"] if more > 0 else []))
