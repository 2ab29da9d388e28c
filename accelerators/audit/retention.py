"""The job `seals`, and how long events are kept: by whole months, each a partition (CYBORG_EVENT_RETENTION_MONTHS).

A month goes with an event that says so, and with a seal of no events that names it: the seals of the month stay, so
that what remains can still be proved. What is not sealed is not dropped, nor a month with more events or fewer than
were sealed; whether they are the same ones, `manage.py verify_events` says before.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from django.conf import settings
from django.db import OperationalError, connection, transaction
from django.db.models import Sum

from accelerators import conductor
from accelerators.audit import sealing
from accelerators.domain import hash_chain
from accelerators.domain.states import Source
from accelerators.models import Seal
from accelerators.runtime import jobs

log = logging.getLogger(__name__)

PATIENCE = "200ms"
"""Making a month and dropping one wait so long for who writes or reads events, and everybody who comes after to write
waits for them; then the next pass tries again."""
BRIEFLY = "SELECT set_config('lock_timeout', %s, true)"
OLDEST = """
SELECT min(right(inhrelid::regclass::text, 7)) FROM pg_inherits
WHERE inhparent = 'accelerators_event'::regclass AND inhrelid::regclass::text ~ '_\\d{4}_\\d\\d$'
"""


def run() -> None:
    """The job `seals`: seal what there is, then drop months that are kept no longer."""
    jobs.run(sealing.JOB, lambda: sealing.seal() or drop_oldest())


def make_months() -> None:
    """The months to come, from job `sweep`. They are made long before they are needed, so this need not wait for who
    reads for long, as a backup does."""
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(BRIEFLY, [PATIENCE])
            cursor.execute("SELECT accelerators_event_months(2)")
    except OperationalError as error:
        log.warning("partitions for the months to come are made later: %s", error)


def drop_oldest(now: datetime | None = None) -> bool:
    """Drop the oldest month if it is kept no longer; True when there may be another one."""
    months = settings.KEYS.event_retention_months
    if not months:
        return False
    oldest = conductor.cursor().execute(OLDEST).fetchone()[0]
    if oldest is None or oldest >= _before(now or datetime.now(UTC), months):
        return False
    try:
        with conductor.writing():
            return _drop(oldest, months)
    except OperationalError as error:
        log.warning("events of %s are dropped later: %s", oldest, error)
        return False


def _before(now: datetime, months: int) -> str:
    """The first month that is kept, as partitions are named."""
    year, month = divmod(now.year * 12 + now.month - 1 - months, 12)
    return f"{year:04d}_{month + 1:02d}"


def _drop(name: str, months: int) -> bool:
    month, table, write = name.replace("_", "-"), f"accelerators_event_{name}", conductor.cursor()
    write.execute(BRIEFLY, [PATIENCE])
    (there,) = write.execute(f"SELECT count(*) FROM {table}").fetchone()
    seals = Seal.objects.filter(month=month, events__gt=0)
    sealed = seals.aggregate(events=Sum("events", default=0))["events"]
    if there != sealed:
        log.error("events of %s are kept: %d are there, %d sealed; see manage.py verify_events", month, there, sealed)
        return False
    last = sealing.newest()
    conductor.record(
        "events.dropped",
        Source.SYSTEM,
        sealing.JOB,
        subject=(None, month),
        changes={"events": [there, 0], "last seal": [seals.values_list("number", flat=True).first(), None]},
        reason=f"older than {months} months (CYBORG_EVENT_RETENTION_MONTHS)",
    )
    seals.update(marks=b"")
    sealing.add(last, last.month, tx=last.tx, event=last.event, events=0, digest=hash_chain.digest(()), drops=month)
    write.execute(f"DROP TABLE {table}")
    log.info("dropped the %d events of %s", there, month)
    return True
