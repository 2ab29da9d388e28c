"""Delete the providers of a host that is being removed from Placement."""

from __future__ import annotations

from django.conf import settings

from accelerators.models import Deployable, Host
from accelerators.runtime import jobs
from placement_sync.client import (
    PlacementClient,
    PlacementConflictError,
    PlacementRejectedError,
    PlacementUnavailableError,
)
from placement_sync.cloud import get_cloud_session
from placement_sync.jobs.writer_election import JOB
from placement_sync.models import WrittenProvider


def delete_providers(host: Host) -> str:
    """Delete the providers of the host's deployables from Placement; return '' when none is left, otherwise the reason.

    A provider with allocations is kept. The lock of the job `placement` is held meanwhile: that job could have begun
    before the host was marked, and would make the providers again. Repeated calls do what is left.
    """
    cloud = get_cloud_session(settings.KEYS.placement_endpoint)
    if cloud is None:
        return ""
    with jobs.try_connection_lock(JOB) as acquired:
        if not acquired:
            return "the job that writes to Placement is at work"
        recorded = Deployable.objects.filter(device__host=host, rp_uuid__isnull=False).values_list("rp_uuid", flat=True)
        written = WrittenProvider.objects.filter(host=host).values_list("uuid", flat=True)
        placement = PlacementClient(cloud, settings.KEYS.placement_endpoint)
        try:
            for uuid in sorted({*map(str, recorded), *map(str, written)}):
                if consumers := placement.read_allocations(uuid):
                    named = ", ".join(sorted(consumers)[:5])
                    return f"provider {uuid} stays in Placement, because it is allocated to {named}"
                placement.delete_provider(uuid)
        except (PlacementUnavailableError, PlacementConflictError, PlacementRejectedError) as error:
            return str(error)
        WrittenProvider.objects.filter(host=host).delete()
    return ""
