"""The job `seals`, and the deletion of old events in whole months (CYBORG_EVENT_RETENTION_MONTHS); each month is a
partition of the table.

When a month is dropped, an event and a signed seal without events record it, with the retention that justified it. The
seals of the dropped month are kept, so that the remaining events can still be verified. A month is dropped only if it
has exactly as many events as were sealed. Whether they are the same events is not checked here: run `manage.py
verify_events` before.
"""

from __future__ import annotations

import logging
from datetime import datetime

from django.conf import settings
from django.db import OperationalError, connection, transaction
from django.db.models import Sum

from accelerators import conductor
from accelerators.audit import sealing, status
from accelerators.audit.signing import AuditKeyError
from accelerators.domain import hash_chain
from accelerators.domain.hash_chain import SealKind
from accelerators.domain.states import EventSource
from accelerators.models import Seal
from accelerators.runtime import jobs

log = logging.getLogger(__name__)

LOCK_TIMEOUT = "200ms"
"""Lock timeout for creating or dropping a month's partition. All new writers of events have to wait behind a statement
that waits for this lock, so the statement gives up soon, and the next run of the job tries again."""
SET_LOCK_TIMEOUT = "SELECT set_config('lock_timeout', %s, true)"
"""This module has raw SQL because the ORM knows neither settings of a transaction nor partitions of a table."""
SELECT_OLDEST_MONTH = """
SELECT min(right(inhrelid::regclass::text, 7)) FROM pg_inherits
WHERE inhparent = 'accelerators_event'::regclass AND inhrelid::regclass::text ~ '_\\d{4}_\\d\\d$'
"""
"""The oldest month that has a partition, as YYYY_MM."""


def run() -> None:
    """Run the job `seals`: seal all events that can be sealed, then drop the months past their retention.

    If this process may not seal, log and store why, for the console and the metrics, and do nothing; if
    CYBORG_AUDIT_KEY_FILE is off, only do nothing. Any other error is stored, too, and raised.
    """
    if settings.KEYS.audit_key_path is None:
        jobs.clear_tick(sealing.SEALS_JOB)
        return
    try:
        jobs.run_steps(sealing.SEALS_JOB, seal_or_drop)
    except AuditKeyError as error:
        log.error("nothing is sealed: %s", error)
        status.store_refusal(str(error))
    except Exception as error:
        status.store_refusal(f"the job failed: {error}")
        raise
    else:
        status.store_refusal("")


def seal_or_drop() -> bool:
    """Seal the oldest events; if there are none to seal, drop the oldest month if it is past its retention. Return True
    if there may be more to do. Raises AuditKeyError."""
    return sealing.seal_oldest_events() or drop_oldest_month()


def create_month_partitions() -> None:
    """Create the missing partitions for this month and the next two.

    If the lock is not free within LOCK_TIMEOUT (a backup reads for long), this logs a warning and creates nothing: the
    partitions are made long before they are needed, so the next run is early enough.
    """
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(SET_LOCK_TIMEOUT, [LOCK_TIMEOUT])
            cursor.execute("SELECT accelerators_event_months(2)")
    except OperationalError as error:
        log.warning("the partitions of the coming months cannot be created now, the next run tries again: %s", error)


def drop_oldest_month(now: datetime | None = None) -> bool:
    """Drop the oldest month of events if it is past its retention; return True if there may be another one to drop.

    Returns False if no month is past its retention, or if CYBORG_EVENT_RETENTION_MONTHS is 0. Also returns False, and
    logs why, if the month is not dropped because of a lock or because events and seals do not agree.
    """
    months = settings.KEYS.event_retention_months
    if not months:
        return False
    oldest = conductor.open_cursor().execute(SELECT_OLDEST_MONTH).fetchone()[0]
    kept = hash_chain.get_oldest_month_to_keep(now or sealing.read_earlier_clock(), months)
    if oldest is None or oldest.replace("_", "-") >= kept:
        return False
    try:
        with conductor.writing():
            return _drop_month(oldest, months)
    except OperationalError as error:
        log.warning("the events of %s cannot be dropped now, the next run tries again: %s", oldest, error)
        return False


def _drop_month(partition_month: str, months: int) -> bool:
    """Drop the partition of one month (YYYY_MM) and record it by an event and a seal; in the caller's transaction.

    Clears the column `marks` of the month's seals, too. `months` is the retention, which the event and the seal record.
    Returns False, and logs an error, if the month has more or fewer events than were sealed. Raises OperationalError if
    a lock is not free within LOCK_TIMEOUT, AuditKeyError if this process cannot sign the seal.
    """
    month, table, cursor = (
        partition_month.replace("_", "-"),
        f"accelerators_event_{partition_month}",
        conductor.open_cursor(),
    )
    cursor.execute(SET_LOCK_TIMEOUT, [LOCK_TIMEOUT])
    (event_count,) = cursor.execute(f"SELECT count(*) FROM {table}").fetchone()
    seals = Seal.objects.filter(month=month, events__gt=0)
    sealed_count = seals.aggregate(events=Sum("events", default=0))["events"]
    if event_count != sealed_count:
        text = "the events of %s are not dropped: %d are stored, but %d were sealed; run manage.py verify_events"
        log.error(text, month, event_count, sealed_count)
        return False
    chain = sealing.open_chain(sealing.get_newest_seal())
    conductor.record_event(
        "events.dropped",
        EventSource.SYSTEM,
        sealing.SEALS_JOB,
        subject=(None, month),
        changes={"events": [event_count, 0], "last seal": [seals.values_list("number", flat=True).first(), None]},
        reason=f"older than {months} months (CYBORG_EVENT_RETENTION_MONTHS)",
    )
    seals.update(marks=b"")
    justified = {"retention_months": months, "events": event_count}
    sealing.append_mark(chain, SealKind.DROP, justified, drops=month)
    cursor.execute(f"DROP TABLE {table}")
    log.info("dropped the %d events of %s", event_count, month)
    return True
