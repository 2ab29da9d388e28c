"""Seals over events: each binds those committed since the one before it by a hash, and that seal's hash with them.

Made by the job `seals` (`retention.run`), once a minute, in one process, so that who writes events does nothing for it.
Which events can be sealed is known for certain: those of transactions below the oldest one that is still running
(`accelerators_event_final`, migration 0014). They are ordered by transaction and id, and none can come in between any
more. A seal has events of one month only, so that a month that is dropped takes whole seals with it (`retention`).
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from itertools import takewhile
from typing import Any

from accelerators import conductor
from accelerators.domain import hash_chain
from accelerators.domain.hash_chain import Link
from accelerators.models import Event, Seal

log = logging.getLogger(__name__)

JOB = "seals"
MOST = 10_000
"""Events of one seal."""

LINE = """json_build_array(e.id, to_char(e.at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), e.source, e.actor,
  e.request_id, e.action, e.subject_type, e.subject, e.subject_name, e.host, e.changes::text, e.reason)::text"""
"""The canonical text of an event (docs/audit.md): a JSON array with `, ` between its values."""
DIGEST = f"sha256(convert_to({LINE}, 'UTF8'))"
FINAL = "SELECT accelerators_event_final()"
FRESH = f"""
SELECT e.tx, e.id, to_char(e.at AT TIME ZONE 'UTC', 'YYYY-MM'), {DIGEST} FROM accelerators_event e
WHERE (e.tx, e.id) > (%s, %s) AND e.tx < %s ORDER BY e.tx, e.id LIMIT %s
"""


def seal(most: int = MOST) -> bool:
    """Seal the oldest events that are not; True when there may be more. Under the lock of the job."""
    with conductor.writing():
        last = newest()
        write = conductor.cursor()
        (final,) = write.execute(FINAL).fetchone()
        if final < last.tx:
            log.error("transactions are numbered from lower on than the last seal's: this database was restored")
            write.execute("SELECT accelerators_event_renumber()")
            return False
        found = write.execute(FRESH, [last.tx, last.event, final, most]).fetchall()
        rows = list(takewhile(lambda row: row[2] == found[0][2], found))
        if not rows:
            return False
        (tx, event, month, _), digests = rows[-1], [row[3] for row in rows]
        made = add(last, month, tx=tx, event=event, events=len(rows), digest=hash_chain.digest(digests))
        Seal.objects.filter(pk=made.pk).update(marks=hash_chain.marks(digests))
    log.info("sealed %d events: №%d %s", made.events, made.number, made.hash)
    return len(found) == most or len(rows) < len(found)


def newest() -> Seal:
    """The last seal; before there is any, one with the number 0 to build upon, which is not stored."""
    nothing = Seal(number=0, month="", tx=-1, event=0, events=0, digest="", hash=hash_chain.START)
    return Seal.objects.order_by("-number").first() or nothing


def add(last: Seal, month: str, **columns: Any) -> Seal:
    """The next link of the chain, stored."""
    made = Seal(number=last.number + 1, month=month, sealed_at=datetime.now(UTC), **columns)
    made.hash = link(made, last.hash).hash
    made.save(force_insert=True)
    return made


def link(seal: Seal, before: str) -> Link:
    """A stored seal as it is hashed after the one whose hash is `before`."""
    at = seal.sealed_at.astimezone(UTC).isoformat(timespec="microseconds")
    return Link(seal.number, before, seal.month, seal.tx, seal.event, seal.events, seal.digest, seal.drops, at)


def seal_of(event: Event) -> Seal | None:
    """The seal that an event is under; None while it is under none."""
    later = Seal.objects.filter(tx=event.tx, event__gte=event.pk) | Seal.objects.filter(tx__gt=event.tx)
    return later.filter(events__gt=0).order_by("number").first()
