"""Seal events: each seal is a hash over the events since the previous seal, and over that seal's hash.

The job `seals` (`retention.run`) makes seals once a minute, in one process, so that writers of events have no extra
work. It seals only events of transactions that are older than every running one (SQL function
`accelerators_event_final`). Events are ordered by transaction and id, so no event can be added between sealed ones
later. A seal has events of one month only: when a month is dropped (`retention`), all events of its seals are dropped,
and none of other seals.
"""

from __future__ import annotations

import logging
from datetime import UTC
from itertools import takewhile
from typing import Any

from accelerators import conductor
from accelerators.domain import hash_chain
from accelerators.domain.hash_chain import SealContent
from accelerators.models import Event, Seal
from accelerators.runtime import database_clock

log = logging.getLogger(__name__)

SEALS_JOB = "seals"
MAX_EVENTS_PER_SEAL = 10_000
"""Maximum number of events per seal."""

EVENT_TEXT = """json_build_array(e.id, to_char(e.at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), e.source,
  e.actor, e.request_id, e.action, e.subject_type, e.subject, e.subject_name, e.host, e.changes::text,
  e.reason)::text"""
"""SQL expression of an event's canonical text (docs/audit.md): a JSON array with `, ` between its values."""
EVENT_DIGEST = f"sha256(convert_to({EVENT_TEXT}, 'UTF8'))"
SELECT_FINAL_TX = "SELECT accelerators_event_final()"
"""The transaction number below which all transactions have ended, so that nobody can add events to them any more. It is
raw SQL because the ORM has no call of an SQL function without a table."""
SELECT_UNSEALED = f"""
SELECT e.tx, e.id, to_char(e.at AT TIME ZONE 'UTC', 'YYYY-MM'), {EVENT_DIGEST} FROM accelerators_event e
WHERE (e.tx, e.id) > (%s, %s) AND e.tx < %s ORDER BY e.tx, e.id LIMIT %s
"""
"""Events that can be sealed: those after the last seal, of transactions below that of SELECT_FINAL_TX. It is raw SQL
for the reasons of `verification.SELECT_SEALED_EVENTS`."""


def seal_oldest_events(max_events: int = MAX_EVENTS_PER_SEAL) -> bool:
    """Seal the oldest events that are not sealed, at most `max_events` and of one month; return True if there may be
    more.

    The caller must hold the lock of the job. If the database was restored, so that its transaction numbers are lower
    than those of the last seal, this logs an error, continues the numbering of events above the old ones, and returns
    False.
    """
    with conductor.writing():
        last = get_newest_seal()
        cursor = conductor.open_cursor()
        (final,) = cursor.execute(SELECT_FINAL_TX).fetchone()
        if final < last.tx:
            log.error("transaction numbers are lower than those of the last seal: this database was restored")
            cursor.execute("SELECT accelerators_event_renumber()")
            return False
        unsealed = cursor.execute(SELECT_UNSEALED, [last.tx, last.event, final, max_events]).fetchall()
        rows = list(takewhile(lambda row: row[2] == unsealed[0][2], unsealed))
        if not rows:
            return False
        (tx, event, month, _), digests = rows[-1], [row[3] for row in rows]
        made = append_seal(last, month, tx=tx, event=event, events=len(rows), digest=hash_chain.digest_events(digests))
        Seal.objects.filter(pk=made.pk).update(marks=hash_chain.join_marks(digests))
    log.info("sealed %d events: №%d %s", made.events, made.number, made.hash)
    return len(unsealed) == max_events or len(rows) < len(unsealed)


def get_newest_seal() -> Seal:
    """Return the last seal. If there is none, return a seal with number 0 that is not stored; the first seal follows
    it."""
    before_first = Seal(number=0, month="", tx=-1, event=0, events=0, digest="", hash=hash_chain.FIRST_PREVIOUS_HASH)
    return Seal.objects.order_by("-number").first() or before_first


def append_seal(last: Seal, month: str, **columns: Any) -> Seal:
    """Store the seal that follows `last`, with the next number, the present time and its hash, and return it.

    `columns` are the other columns: `tx`, `event`, `events`, `digest`, `drops`.
    """
    seal = Seal(number=last.number + 1, month=month, sealed_at=database_clock.now(), **columns)
    seal.hash = build_link(seal, last.hash).hash
    seal.save(force_insert=True)
    return seal


def build_link(seal: Seal, previous_hash: str) -> SealContent:
    """Return the values that the hash of a seal covers; `previous_hash` is the hash of the previous seal.

    `hash` of the result is the hash that the seal must have.
    """
    sealed_at = seal.sealed_at.astimezone(UTC).isoformat(timespec="microseconds")
    return SealContent(
        seal.number, previous_hash, seal.month, seal.tx, seal.event, seal.events, seal.digest, seal.drops, sealed_at
    )


def find_seal_of_event(event: Event) -> Seal | None:
    """Return the seal that covers an event, None if the event is not sealed yet."""
    later = Seal.objects.filter(tx=event.tx, event__gte=event.pk) | Seal.objects.filter(tx__gt=event.tx)
    return later.filter(events__gt=0).order_by("number").first()
