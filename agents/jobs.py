"""Background jobs: merge the spool into the tables, and look for expired leases."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

from django.db import DataError, IntegrityError, transaction

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.domain.diff import HostReport
from accelerators.domain.states import EventSource
from accelerators.inventory.merge import merge_reports
from accelerators.models import Host
from accelerators.runtime import jobs
from accelerators.runtime.after_commit import call_after_commit
from agents import spool
from agents.gateway import leases

log = logging.getLogger(__name__)

BATCH_BYTES = 8 * 1024 * 1024
"""A batch takes no further report once their payloads have reached this size."""
BATCH_HOSTS = 500
"""Maximum number of hosts in a batch."""
OLDEST_FIRST_EVERY = 4
"""Every OLDEST_FIRST_EVERY-th batch takes the hosts that have waited longest without regard to faults, so that hosts
with faults cannot block the others for ever."""

_batches = itertools.count(1)
_unfinished_hosts: set[int] = set()
"""Hosts of the last batch of which later reports wait. The next batch takes others first."""
ReportBatch = dict[int, Sequence[HostReport]]


def merge() -> None:
    """Run the job `merge`: merge spooled reports into the tables batch by batch, with one commit per batch."""
    jobs.run_steps("merge", merge_batch)


def watch_leases() -> None:
    """Run the job `leases`: mark hosts with silent agents as stale, and unmark hosts whose agents were heard again."""
    leases.run_lease_job()


def merge_batch() -> bool:
    """Merge one batch of spooled reports; return False if there was none, True if there may be more.

    Each host has one turn in a batch (`spool.take_turns`). Hosts with faults come first, except in every
    OLDEST_FIRST_EVERY-th batch. It must run inside a transaction of the caller, under the lock of the job. If the
    database rejects the batch, it is applied host by host. The reports of a host that the database rejects even then
    are dropped, and so is a report that this release cannot decode; each time an event is recorded.
    """
    turns = _take_turns(ignore_urgency=next(_batches) % OLDEST_FIRST_EVERY == 0)
    if not turns:
        return False
    spool.delete_reports(turns)
    for turn in turns:
        if turn.error:
            _record_dropped_report(turn.host_id, turn.error)
    batch: ReportBatch = {turn.host_id: turn.reports for turn in turns if turn.reports}
    try:
        with transaction.atomic():
            merge_reports(batch)
    except (DataError, IntegrityError) as error:
        log.warning(
            "the database rejected a batch of reports (hosts: %d); applying it host by host: %s", len(batch), error
        )
        _apply_host_by_host(batch)
    call_after_commit(command_queue.wake_job_for_answers)
    return True


def _take_turns(*, ignore_urgency: bool) -> list[spool.Turn]:
    """Return the turns of the next batch: of hosts with an urgent report, if there are any, otherwise of all.

    A host of which the last batch has left reports is taken only if no other host waits.
    """
    excluded = set(_unfinished_hosts)
    _unfinished_hosts.clear()
    attempts = [(False, excluded)] if ignore_urgency else [(True, excluded), (False, excluded)]
    if excluded:
        attempts.append((False, set()))
    for urgent_only, left_out in attempts:
        turns = spool.take_turns(
            max_hosts=BATCH_HOSTS, max_bytes=BATCH_BYTES, urgent_only=urgent_only, excluded=left_out
        )
        if turns:
            _unfinished_hosts.update(turn.host_id for turn in turns if not turn.is_complete)
            return turns
    return []


def _apply_host_by_host(batch: ReportBatch) -> None:
    """Apply a batch host by host, each in its own savepoint; drop the reports of hosts that the database rejects."""
    for host_id, reports in batch.items():
        try:
            with transaction.atomic():
                merge_reports({host_id: reports})
        except (DataError, IntegrityError) as error:
            _record_dropped_report(host_id, str(error))


def _record_dropped_report(host_id: int, error: str) -> None:
    """Record the event `report.refused` for reports of a host that cannot be stored, with the first line of the
    error."""
    host = Host.objects.filter(id=host_id).first()
    reason = f"the host's report cannot be stored: {error.splitlines()[0]}"
    conductor.record_event("report.refused", EventSource.SYSTEM, "merge", host=host, reason=reason)
