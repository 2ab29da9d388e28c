"""Delete devices that have been missing for long, and old commands, bulk actions and rollouts.

Other inventory is deleted only with its host (`host_removal`). A missing device is removed after
`CYBORG_MISSING_RETENTION_S`, and only while its agent is up and its driver answers. It stays if a request names it, if
a command for it is open, if a holder check says that it is held or cannot answer (`safety`), or if it is missing
because its driver was disabled.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

from django.conf import settings
from django.db.models import Exists, F, Func, OuterRef, Q, QuerySet, TextField, Value
from django.db.models.functions import Coalesce

from accelerators import conductor, safety
from accelerators.audit import retention
from accelerators.devices import deletion
from accelerators.domain.diff import INCOMPLETE_HASH
from accelerators.domain.errors import RefusedError
from accelerators.domain.states import DriverState
from accelerators.models import AcceleratorRequest, Command, Device
from accelerators.models.commands import COMMAND_IS_OPEN
from accelerators.models.devices import build_driver_error_expression
from accelerators.runtime import database_clock, jobs
from accelerators.workflows import bulk_actions, driver_rollouts

log = logging.getLogger(__name__)

BATCH_SIZE = 200
COMMAND_RETENTION = timedelta(days=30)
"""Ended commands are deleted after this time; their events stay."""


def run() -> None:
    """Run the job `sweep`: create the coming months' partitions of events, then delete missing devices and old rows."""
    retention.create_month_partitions()
    jobs.run_steps_outside_transaction(
        "sweep",
        lambda: (
            remove_missing_devices()
            | delete_old_commands()
            | bulk_actions.delete_oldest_expired_bulk()
            | driver_rollouts.delete_oldest_ended_rollout()
        ),
    )


def delete_old_commands(now: datetime | None = None) -> bool:
    """Delete old commands among the BATCH_SIZE oldest; True if there may be more.

    Commands are taken in the order of their ids, which is the order of their age. One is old if it ended more than
    COMMAND_RETENTION ago.
    """
    oldest = Command.objects.order_by("id").values_list("id", "ended_at")[:BATCH_SIZE]
    before = (now or database_clock.now()) - COMMAND_RETENTION
    old = [id for id, ended_at in oldest if ended_at and ended_at < before]
    if old:
        with conductor.writing():
            Command.objects.filter(id__in=old).delete()
            conductor.record_purge("command", len(old), COMMAND_RETENTION)
    return len(old) == BATCH_SIZE


def remove_missing_devices(now: datetime | None = None) -> bool:
    """Remove one batch of devices that have been missing for CYBORG_MISSING_RETENTION_S and are free.

    Returns True if there may be more; False also if none of a full batch was free. A device's deployables, attributes
    and attach handles are deleted with it. Makes the holder checks for all devices of the batch (those that they do not
    answer for in time stay for a later call). Then locks the devices and their hosts, and writes an event for each that
    is removed; raises a `provider` intent for each of their hosts. A host whose last report was not stored completely
    is asked for it again.
    """
    before = (now or database_clock.now()) - timedelta(seconds=settings.KEYS.missing_retention_s)
    # In random order: otherwise held devices, or slow holder checks, would keep all others from being looked at.
    candidates = list(_query_removable_devices(before).order_by("?").select_related("host")[:BATCH_SIZE])
    answers = safety.ask_holders(candidates)
    with conductor.writing():
        removable = _query_removable_devices(before).filter(id__in=[device.pk for device in candidates])
        locked = conductor.lock_devices(removable, to_delete=True)
        holders = safety.find_holders(locked, answers)
        devices = [device for device in locked if _is_free(device, holders)]
        reasons = {device: f"missing since {device.state_since:%Y-%m-%d %H:%M}, and free" for device in devices}
        deletion.delete_devices(reasons, "sweep")
        hosts = {device.host_id: device.host for device in devices}.values()
        for host in hosts:
            if host.applied_hash == INCOMPLETE_HASH:  # there is room again for devices that were not stored
                conductor.forget_applied_report(host)
        conductor.raise_provider_intents(hosts)
    return len(candidates) == BATCH_SIZE and bool(devices)


def _is_free(device: Device, holders: safety.DeviceHolders) -> bool:
    """Return True if every holder check says that nobody holds the device; if not, the reason is logged."""
    try:
        holders.refuse_unless_free(device, "removed")
    except RefusedError as refused:
        log.info("%s", refused.text)
        return False
    return True


def _query_removable_devices(before: datetime) -> QuerySet[Device]:
    """Return the devices that may be removed, as far as our own tables tell.

    They are missing since before this time, their agent is up, their driver answers and is not disabled, no request
    names them, and no command for them is open.
    """
    naming_requests = AcceleratorRequest.objects.filter(
        Q(attach_handle__deployable__device=OuterRef("pk")) | Q(deployable__device=OuterRef("pk"))
    )
    missing = Device.objects.annotate(driver_error=build_driver_error_expression()).filter(
        state="missing", state_since__lt=before, host__stale_since__isnull=True, driver_error=""
    )
    reported_state = Func(F("host__drivers"), F("driver"), Value("state"), function="jsonb_extract_path_text")
    state = Coalesce(reported_state, Value(""), output_field=TextField())  # older agents do not report the state
    missing = missing.annotate(driver_state=state).exclude(driver_state=DriverState.DISABLED.value)
    open_commands = Command.objects.filter(COMMAND_IS_OPEN, device=OuterRef("pk"))
    return missing.filter(~Exists(naming_requests), ~Exists(open_commands))
