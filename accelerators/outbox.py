"""Outbox: read due intents and store the result of each attempt.

An intent is work that has to be done outside the database because of a change in it; `conductor.raise_intents` writes
it. The job that is registered with its kind as `intent_kind` (`jobs.JOBS`) loads the due intents, does the work, and
reports each as done, waiting or failed. No intent is dropped: a failed one is retried with exponential
back-off. No row is locked while the job calls other services, so raising an intent never waits for them. An intent that
was raised again meanwhile is not deleted as done; the job handles it again.
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

FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
STUCK_AFTER_FAILURES = 10
"""Number of failures after which an intent is shown as stuck."""

SELECT_DUE = """
SELECT id, key, payload::json, attempts, coalesce(updated_at, created_at) FROM accelerators_intent
WHERE kind = %s AND next_at <= statement_timestamp() ORDER BY next_at, id LIMIT %s
"""
DELETE_DONE = """
DELETE FROM accelerators_intent t USING unnest(%s::bigint[], %s::timestamptz[]) AS x(id, at)
WHERE t.id = x.id AND coalesce(t.updated_at, t.created_at) = x.at
"""
POSTPONE = """
UPDATE accelerators_intent t SET payload = t.payload || %s::jsonb, last_error = %s,
  next_at = statement_timestamp() + make_interval(secs => %s)
WHERE t.id = %s AND coalesce(t.updated_at, t.created_at) = %s
"""
MAKE_DUE = "UPDATE accelerators_intent SET next_at = statement_timestamp() WHERE kind = %s AND key = ANY(%s)"
RECORD_FAILURE = """
UPDATE accelerators_intent SET attempts = attempts + 1, last_error = %s,
  next_at = statement_timestamp() + make_interval(secs => coalesce(%s, least(%s, %s * 2 ^ least(attempts, 16))))
WHERE id = ANY(%s)
"""


@dataclass(frozen=True)
class DueIntent:
    """An intent that is due. `raised_at` is the time when it was last raised."""

    id: int
    key: str
    payload: dict[str, Any]
    attempts: int
    raised_at: datetime


def load_due_intents(kind: str, count: int) -> list[DueIntent]:
    """Load at most `count` due intents of `kind`, the longest due first. Locks nothing."""
    with connection.cursor() as cursor:
        cursor.execute(SELECT_DUE, [kind, count])
        return [DueIntent(*row) for row in cursor.fetchall()]


def delete_done_intents(intents: Iterable[DueIntent]) -> None:
    """Delete these intents, except those that were raised again after they were loaded."""
    rows = [(intent.id, intent.raised_at) for intent in intents]
    if rows:
        with conductor.writing():
            conductor.open_cursor().execute(DELETE_DONE, [[id for id, _ in rows], [at for _, at in rows]])


def postpone_intent(intent: DueIntent, text: str, pause_s: float, **progress: Any) -> None:
    """Postpone an intent that waits for somebody else, without counting a failure.

    It becomes due after `pause_s` seconds, or earlier when `make_intents_due` is called for its key. `text` is stored
    as `last_error`, and `progress` is merged into its payload until it is raised again, because raising replaces the
    payload. Do nothing if the intent was raised again after it was loaded.
    """
    with conductor.writing():
        conductor.open_cursor().execute(POSTPONE, [Jsonb(progress), text[:1000], pause_s, intent.id, intent.raised_at])


def make_intents_due(kind: str, keys: Iterable[str]) -> None:
    """Make the intents with these keys due now, and wake their job after the commit."""
    with conductor.writing():
        conductor.open_cursor().execute(MAKE_DUE, [kind, list(keys)])
        jobs.enqueue_handler_after_commit(kind)


def record_failures(intents: Iterable[DueIntent], error: str, pause_s: float | None = None) -> None:
    """Count a failure of each intent, store `error`, and schedule the retry.

    The retry is due after `pause_s` seconds; if that is None, after a back-off that doubles with every failure, from
    `FIRST_RETRY_S` to `LONGEST_RETRY_S`.
    """
    ids = [intent.id for intent in intents]
    if ids:
        with conductor.writing():
            conductor.open_cursor().execute(
                RECORD_FAILURE, [error[:1000], pause_s, LONGEST_RETRY_S, FIRST_RETRY_S, ids]
            )
