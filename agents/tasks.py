"""Jobs of the clusters: merge the spool into the tables, watch the leases."""

from __future__ import annotations

import logging

import msgspec
from django.db import DataError, IntegrityError, connection, transaction

from accelerators import commands, conductor, ticks
from accelerators.diff import HostReport
from accelerators.merge import apply
from accelerators.models import Host
from accelerators.states import Source
from agents import leases, wire

log = logging.getLogger(__name__)

BATCH_BYTES = 8 * 1024 * 1024
BATCH_ROWS = 500
TAKE = """
WITH oldest AS (SELECT id, octet_length(payload) AS size FROM spool ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED),
     batch AS (SELECT id, sum(size) OVER (ORDER BY id) - size AS before FROM oldest)
DELETE FROM spool s USING batch b WHERE s.id = b.id AND b.before < %s
RETURNING s.host_id, s.epoch, s.seq, s.payload
"""

_decode = msgspec.json.Decoder(wire.Report).decode
Batch = dict[int, list[HostReport]]


def merge() -> None:
    """The job `merge`: spooled reports become rows, batch by batch, each in one commit."""
    ticks.run("merge", merge_batch)


def watch_leases() -> None:
    """The job `leases`."""
    leases.run()


def merge_batch() -> bool:
    """Merge one batch inside the caller's transaction; True when there may be more.

    A batch that the database refuses is applied host by host, so that one hostile report never costs another's.
    """
    with connection.cursor() as cursor:
        cursor.execute(TAKE, [BATCH_ROWS, BATCH_BYTES])
        rows = cursor.fetchall()
    if not rows:
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
    transaction.on_commit(commands.wake, robust=True)
    return True


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
