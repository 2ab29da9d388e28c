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
from datetime import datetime, timedelta
from typing import Any

from django.db.models import DurationField, ExpressionWrapper, F, Value
from django.db.models.expressions import CombinedExpression
from django.db.models.functions import Coalesce, Least, Now, Power

from accelerators import conductor
from accelerators.models import Intent
from accelerators.runtime import jobs

FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
STUCK_AFTER_FAILURES = 10
"""Number of failures after which an intent is shown as stuck."""

RAISED_AT = Coalesce("updated_at", "created_at")


def build_retry_pause(first_s: float, longest_s: float) -> ExpressionWrapper[CombinedExpression]:
    """Return the back-off after a failure as an SQL expression over the column `attempts`, the failures before it.

    It is `first_s` seconds after the first failure, and doubles with every failure, up to `longest_s`.
    """
    seconds = Least(longest_s, first_s * Power(2.0, Least(F("attempts"), 16)))
    return ExpressionWrapper(seconds * timedelta(seconds=1), DurationField())


RETRY_PAUSE = build_retry_pause(FIRST_RETRY_S, LONGEST_RETRY_S)
DELETE_DONE = """
DELETE FROM accelerators_intent t USING unnest(%s::bigint[], %s::timestamptz[]) AS x(id, at)
WHERE t.id = x.id AND coalesce(t.updated_at, t.created_at) = x.at
"""
"""Delete a batch of intents by pairs of id and RAISED_AT. The ORM cannot compare with a list of pairs."""


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
    due = Intent.objects.filter(kind=kind, next_at__lte=Now()).order_by("next_at", "id")
    return [DueIntent(*row) for row in due.values_list("id", "key", "payload", "attempts", RAISED_AT)[:count]]


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
        Intent.objects.alias(raised_at=RAISED_AT).filter(id=intent.id, raised_at=intent.raised_at).update(
            payload=intent.payload | progress, last_error=text[:1000], next_at=Now() + timedelta(seconds=pause_s)
        )


def make_intents_due(kind: str, keys: Iterable[str]) -> None:
    """Make the intents with these keys due now, and wake their job after the commit."""
    with conductor.writing():
        Intent.objects.filter(kind=kind, key__in=list(keys)).update(next_at=Now())
        jobs.enqueue_handler_after_commit(kind)


def record_failures(intents: Iterable[DueIntent], error: str, pause_s: float | None = None) -> None:
    """Count a failure of each intent, store `error`, and schedule the retry.

    The retry is due after `pause_s` seconds; if that is None, after a back-off that doubles with every failure, from
    `FIRST_RETRY_S` to `LONGEST_RETRY_S`. An intent that was raised again since it was loaded is postponed as well.
    """
    pause = RETRY_PAUSE if pause_s is None else Value(timedelta(seconds=pause_s))
    if ids := [intent.id for intent in intents]:
        with conductor.writing():
            Intent.objects.filter(id__in=ids).update(
                attempts=F("attempts") + 1, last_error=error[:1000], next_at=Now() + pause
            )
