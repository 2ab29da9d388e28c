"""Background jobs: merge the spool into the tables, and look for expired leases."""

from __future__ import annotations

import itertools
import logging

import msgspec
from django.db import DataError, IntegrityError, connection, transaction

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.domain.diff import HostReport
from accelerators.domain.states import EventSource
from accelerators.inventory.merge import merge_reports
from accelerators.models import Host
from accelerators.runtime import jobs
from accelerators.runtime.after_commit import call_after_commit
from agents import wire
from agents.gateway import leases

log = logging.getLogger(__name__)

BATCH_BYTES = 8 * 1024 * 1024
"""A batch takes no further report once its payloads have reached this size."""
BATCH_ROWS = 500
"""Maximum number of reports in a batch."""
OLDEST_FIRST_EVERY = 4
"""Every OLDEST_FIRST_EVERY-th batch takes the oldest reports without regard to faults, so that hosts with faults cannot
block the others for ever."""
TAKE_BATCH = """
WITH oldest AS (
       SELECT id, octet_length(payload) AS size FROM spool {which} ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED),
     batch AS (SELECT id, sum(size) OVER (ORDER BY id) - size AS before FROM oldest)
DELETE FROM spool s USING batch b WHERE s.id = b.id AND b.before < %s
RETURNING s.host_id, s.epoch, s.seq, s.payload
"""
"""Remove the oldest reports from the spool and return them, up to a number of reports and of bytes. Rows that another
process has locked are skipped. Plain SQL, because it locks, measures and deletes in one statement."""
TAKE_OLDEST = TAKE_BATCH.format(which="")
TAKE_URGENT = TAKE_BATCH.format(which="WHERE host_id IN (SELECT host_id FROM spool WHERE urgent)")
"""The same for hosts with a report that shows a fault. It takes all their reports: a driver's good answer in an earlier
report must not be lost because of the error in the later one."""

_batches = itertools.count(1)
_decode_report = msgspec.json.Decoder(wire.Report).decode
ReportBatch = dict[int, list[HostReport]]


def merge() -> None:
    """Run the job `merge`: merge spooled reports into the tables batch by batch, with one commit per batch."""
    jobs.run_steps("merge", merge_batch)


def watch_leases() -> None:
    """Run the job `leases`: mark hosts with silent agents as stale, and unmark hosts whose agents were heard again."""
    leases.run_lease_job()


def merge_batch() -> bool:
    """Merge one batch of spooled reports; return False if no report could be taken, True if there may be more.

    Hosts with faults come first, except in every OLDEST_FIRST_EVERY-th batch. It must run inside a transaction of the
    caller. If the database rejects the batch, it is applied host by host. The reports of a host that the database
    rejects even then are dropped, and so is a report that this release cannot decode; each time an event is recorded.
    """
    rows = [] if next(_batches) % OLDEST_FIRST_EVERY == 0 else _take_batch(TAKE_URGENT)
    if not (rows := rows or _take_batch(TAKE_OLDEST)):
        return False
    batch: ReportBatch = {}
    for host_id, epoch, seq, payload in rows:
        try:
            report = _decode_report(payload)
        except msgspec.DecodeError as error:  # it was spooled by another release
            _record_dropped_report(host_id, error)
        else:
            batch.setdefault(host_id, []).append(
                HostReport(epoch, seq, report.hash, report.all_drivers, report.boot_id)
            )
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


def _take_batch(statement: str) -> list[tuple[int, int, int, str]]:
    """Delete a batch from the spool with TAKE_URGENT or TAKE_OLDEST, and return its rows: host id, epoch, seq, payload.

    Rows that another process has locked are skipped; [] if there are no others. The caller must merge the rows in the
    same transaction: with its commit they are gone from the spool.
    """
    with connection.cursor() as cursor:
        cursor.execute(statement, [BATCH_ROWS, BATCH_BYTES])
        rows: list[tuple[int, int, int, str]] = cursor.fetchall()
    return rows


def _apply_host_by_host(batch: ReportBatch) -> None:
    """Apply a batch host by host, each in its own savepoint; drop the reports of hosts that the database rejects."""
    for host_id, reports in batch.items():
        try:
            with transaction.atomic():
                merge_reports({host_id: reports})
        except (DataError, IntegrityError) as error:
            _record_dropped_report(host_id, error)


def _record_dropped_report(host_id: int, error: Exception) -> None:
    """Record the event `report.refused` for reports of a host that cannot be stored, with the first line of the
    error."""
    host = Host.objects.filter(id=host_id).first()
    reason = f"the host's report cannot be stored: {str(error).splitlines()[0]}"
    conductor.record_event("report.refused", EventSource.SYSTEM, "merge", host=host, reason=reason)
