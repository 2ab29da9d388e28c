"""Jobs of the clusters: merge the spool into the tables, watch the leases."""

from __future__ import annotations

import itertools
import logging

import msgspec
from django.db import DataError, IntegrityError, connection, transaction

from accelerators import conductor
from accelerators.commands import placing
from accelerators.domain.diff import HostReport
from accelerators.domain.states import Source
from accelerators.inventory.merge import apply
from accelerators.models import Host
from accelerators.runtime import jobs
from agents import wire
from agents.gateway import leases

log = logging.getLogger(__name__)

BATCH_BYTES = 8 * 1024 * 1024
BATCH_ROWS = 500
BY_AGE = 4
"""Of the batches every so many-th goes by age alone, so that hosts with faults hold up nobody for ever."""
TAKE = """
WITH oldest AS (
       SELECT id, octet_length(payload) AS size FROM spool {which} ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED),
     batch AS (SELECT id, sum(size) OVER (ORDER BY id) - size AS before FROM oldest)
DELETE FROM spool s USING batch b WHERE s.id = b.id AND b.before < %s
RETURNING s.host_id, s.epoch, s.seq, s.payload
"""
OLDEST = TAKE.format(which="")
URGENT = TAKE.format(which="WHERE host_id IN (SELECT host_id FROM spool WHERE urgent)")
"""Of a host with a fault everything that waits: an answer from before must not be lost to the error after it."""

_batches = itertools.count(1)
_decode = msgspec.json.Decoder(wire.Report).decode
Batch = dict[int, list[HostReport]]


def merge() -> None:
    """The job `merge`: spooled reports become rows, batch by batch, each in one commit."""
    jobs.run("merge", merge_batch)


def watch_leases() -> None:
    """The job `leases`."""
    leases.run()


def merge_batch() -> bool:
    """Merge one batch inside the caller's transaction; True when there may be more. Hosts with faults first.

    A batch that the database refuses is applied host by host, so that one hostile report never costs another's.
    """
    rows = [] if next(_batches) % BY_AGE == 0 else _taken(URGENT)
    if not (rows := rows or _taken(OLDEST)):
        return False
    batch: Batch = {}
    for host_id, epoch, seq, payload in rows:
        try:
            report = _decode(payload)
        except msgspec.DecodeError as error:  # spooled by another release
            _drop(host_id, error)
        else:
            batch.setdefault(host_id, []).append(HostReport(epoch, seq, report.hash, report.told))
    try:
        with transaction.atomic():
            apply(batch)
    except (DataError, IntegrityError) as error:
        log.warning("a batch of %d hosts was refused, going host by host: %s", len(batch), error)
        _one_by_one(batch)
    transaction.on_commit(placing.wake, robust=True)
    return True


def _taken(statement: str) -> list[tuple[int, int, int, str]]:
    with connection.cursor() as cursor:
        cursor.execute(statement, [BATCH_ROWS, BATCH_BYTES])
        return cursor.fetchall()


def _one_by_one(batch: Batch) -> None:
    for host_id, reports in batch.items():
        try:
            with transaction.atomic():
                apply({host_id: reports})
        except (DataError, IntegrityError) as error:
            _drop(host_id, error)


def _drop(host_id: int, error: Exception) -> None:
    host = Host.objects.filter(id=host_id).first()
    reason = f"its report cannot be stored: {str(error).splitlines()[0]}"
    conductor.record("report.refused", Source.SYSTEM, "merge", host=host, reason=reason)
