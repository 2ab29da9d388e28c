"""Outbox: read due intents and store the result of each attempt.

An intent is work to be done outside the database because of a change in it. `conductor.intend` raises intents.
The job that was registered for the kind (`jobs.register(..., intent=kind)`) loads the due ones, does the work,
and reports each as done, waiting or failed. No intent is dropped: a failed one is retried with exponential back-off. No
row is locked while the job calls other services, so raising an intent never waits for them. An intent that was raised
again meanwhile is not deleted as done; the job handles it again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import connection
from psycopg.types.json import Jsonb

from accelerators import conductor
from accelerators.runtime import jobs

FIRST_S, LONGEST_S = 1.0, 60.0
STUCK = 10
"""Number of failures after which an intent is shown as stuck."""

DUE = """
SELECT id, key, payload::json, attempts, coalesce(updated_at, created_at) FROM accelerators_intent
WHERE kind = %s AND next_at <= statement_timestamp() ORDER BY next_at, id LIMIT %s
"""
DONE = """
DELETE FROM accelerators_intent t USING unnest(%s::bigint[], %s::timestamptz[]) AS x(id, at)
WHERE t.id = x.id AND coalesce(t.updated_at, t.created_at) = x.at
"""
WAITING = """
UPDATE accelerators_intent t SET payload = t.payload || %s::jsonb, last_error = %s,
  next_at = statement_timestamp() + make_interval(secs => %s)
WHERE t.id = %s AND coalesce(t.updated_at, t.created_at) = %s
"""
AGAIN = "UPDATE accelerators_intent SET next_at = statement_timestamp() WHERE kind = %s AND key = ANY(%s)"
FAILED = """
UPDATE accelerators_intent SET attempts = attempts + 1, last_error = %s,
  next_at = statement_timestamp() + make_interval(secs => coalesce(%s, least(%s, %s * 2 ^ least(attempts, 16))))
WHERE id = ANY(%s)
"""


@dataclass(frozen=True)
class Due:
    """An intent that is due. `at` is the time when it was last raised."""

    id: int
    key: str
    payload: dict[str, Any]
    attempts: int
    at: datetime


def due(kind: str, count: int) -> list[Due]:
    """Load at most `count` due intents of `kind`, the longest due first. Locks nothing."""
    with connection.cursor() as cursor:
        cursor.execute(DUE, [kind, count])
        return [Due(*row) for row in cursor.fetchall()]


def done(intents: Iterable[Due]) -> None:
    """Delete these intents, except those that were raised again after they were loaded."""
    rows = [(intent.id, intent.at) for intent in intents]
    if rows:
        with conductor.writing():
            conductor.cursor().execute(DONE, [[id for id, _ in rows], [at for _, at in rows]])


def waits(intent: Due, text: str, pause_s: float, **noted: Any) -> None:
    """Postpone an intent that waits for somebody else, without counting a failure.

    It becomes due after `pause_s` seconds, or earlier when `again` is called for its key. `text` is stored
    as `last_error`, and `noted` is merged into its payload until it is raised again, because raising replaces the
    payload. Do nothing if the intent was raised again after it was loaded.
    """
    with conductor.writing():
        conductor.cursor().execute(WAITING, [Jsonb(noted), text[:1000], pause_s, intent.id, intent.at])


def again(kind: str, keys: Iterable[str]) -> None:
    """Make the intents with these keys due now, and wake their job after the commit."""
    with conductor.writing():
        conductor.cursor().execute(AGAIN, [kind, list(keys)])
        jobs.wake_for(kind)


def failed(intents: Iterable[Due], error: str, pause_s: float | None = None) -> None:
    """Count a failure of each intent, store `error`, and schedule the retry.

    The retry is due after `pause_s` seconds; if that is None, after a back-off that doubles with every failure, from
    `FIRST_S` to `LONGEST_S`.
    """
    ids = [intent.id for intent in intents]
    if ids:
        with conductor.writing():
            conductor.cursor().execute(FAILED, [error[:1000], pause_s, LONGEST_S, FIRST_S, ids])
