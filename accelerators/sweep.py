"""Removes what has been missing for long and is free. The only deletion of inventory there is.

A missing device goes `CYBORG_MISSING_RETENTION_S` later, only while its agent is up and its driver answers; what is
held by a request, or recorded as a provider, stays.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from django.conf import settings
from django.db import connection
from django.db.models import Exists, OuterRef, Q, QuerySet

from accelerators import conductor, ticks
from accelerators.models import AcceleratorRequest, AttachHandle, Attribute, Deployable, Device, Host
from accelerators.models.devices import driver_error
from accelerators.states import Source

BATCH = 200


def run() -> None:
    """The job `sweep`: partitions for the months to come, then what is missing for long."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT accelerators_event_months(2)")
    ticks.run("sweep", remove_missing)


def remove_missing(now: datetime | None = None) -> bool:
    """Remove one batch; True when there may be more."""
    before = (now or datetime.now(UTC)) - timedelta(seconds=settings.KEYS.missing_retention_s)
    with conductor.writing():
        devices = list(_removable(before)[:BATCH])
        hosts = {host.id: host for host in Host.objects.filter(id__in={d.host_id for d in devices})}
        for device in devices:
            conductor.record(
                "device.removed",
                Source.SYSTEM,
                "sweep",
                host=hosts[device.host_id],
                changes={"device": [str(device.uuid), None], "model": [device.model, None], "key": [device.key, None]},
                reason=f"missing since {device.state_since:%Y-%m-%d %H:%M}, and free",
            )
        inside = Deployable.objects.filter(device__in=devices)
        Attribute.objects.filter(deployable__in=inside).delete()
        AttachHandle.objects.filter(deployable__in=inside).delete()
        inside.delete()
        Device.objects.filter(id__in=[d.id for d in devices]).delete()
    return len(devices) == BATCH


def _removable(before: datetime) -> QuerySet[Device]:
    held = AcceleratorRequest.objects.filter(
        Q(attach_handle__deployable__device=OuterRef("pk")) | Q(deployable__device=OuterRef("pk"))
    )
    offered = Deployable.objects.filter(device=OuterRef("pk"), rp_uuid__isnull=False)
    missing = Device.objects.annotate(driver_error=driver_error()).filter(
        state="missing", state_since__lt=before, host__stale_since__isnull=True, driver_error=""
    )
    return missing.filter(~Exists(held), ~Exists(offered)).select_for_update(of=("self",))
