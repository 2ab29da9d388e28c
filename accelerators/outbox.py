"""Intents: what is to be done outside the database because of a change in it. Raised by `conductor.intend`.

Its kind's job, declared with `ticks.register`, takes what is due, and says of each that it is done or why not.
None is dropped: what fails is tried again after a pause that doubles. No row is locked while the outside is talked to,
so a raise never waits for it; one that was raised again meanwhile is not done.
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
"""After so many failures an intent is shown as stuck."""

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
    """An intent whose time has come. `at`: when it was last raised."""

    id: int
    key: str
    payload: dict[str, Any]
    attempts: int
    at: datetime


def due(kind: str, count: int) -> list[Due]:
    """At most `count`, the longest waiting first."""
    with connection.cursor() as cursor:
        cursor.execute(DUE, [kind, count])
        return [Due(*row) for row in cursor.fetchall()]


def done(intents: Iterable[Due]) -> None:
    """They are; but one that was raised again since stays."""
    rows = [(intent.id, intent.at) for intent in intents]
    if rows:
        with conductor.writing():
            conductor.cursor().execute(DONE, [[id for id, _ in rows], [at for _, at in rows]])


def waits(intent: Due, text: str, pause_s: float, **noted: Any) -> None:
    """Somebody else is at it: look again after `pause_s`, or at `again`. `noted` is kept in its payload; neither counts
    where it was raised again since, and a raise forgets what was noted."""
    with conductor.writing():
        conductor.cursor().execute(WAITING, [Jsonb(noted), text[:1000], pause_s, intent.id, intent.at])


def again(kind: str, keys: Iterable[str]) -> None:
    """What these wait for has come: they are due now."""
    with conductor.writing():
        conductor.cursor().execute(AGAIN, [kind, list(keys)])
        jobs.wake_for(kind)


def failed(intents: Iterable[Due], error: str, pause_s: float | None = None) -> None:
    """They are to be tried again: after `pause_s`, else after a pause that doubles with every failure."""
    ids = [intent.id for intent in intents]
    if ids:
        with conductor.writing():
            conductor.cursor().execute(FAILED, [error[:1000], pause_s, LONGEST_S, FIRST_S, ids])
