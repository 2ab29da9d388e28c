"""Load the first events that match conditions, in the order of time, without reading all events.

For conditions that are each frequent but rare together, or that only old events meet, PostgreSQL would read a million
events in the order of time until a page is full. These functions limit the events that are read one by one.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from django.db.models import DateTimeField, ExpressionWrapper, F, QuerySet, Value
from django.db.models.functions import Coalesce

from accelerators.models import Event

MAX_READ_EVENTS = 10_000
"""Events that are read one by one for a page of events."""
UNINDEXED_TIME = ExpressionWrapper(F("at") + timedelta(0), output_field=DateTimeField())
"""The time of an event as an expression that no index has: PostgreSQL then does not read events in the order of time
until it has found enough matches."""
FIRST_TIME, LAST_TIME = datetime(1, 1, 2, tzinfo=UTC), datetime(9999, 12, 30, tzinfo=UTC)


def select_matches_near(matches: QuerySet[Event], start: datetime | None, *, is_descending: bool) -> QuerySet[Event]:
    """Return the query for those of `matches` that are among the MAX_READ_EVENTS events from the time `start` on, in
    their order: newest first and older than `start` if `is_descending`, otherwise oldest first and newer. None stands
    for the end of the table at which this order begins.
    """
    sign, beyond, until, end = ("-", "lte", "gte", FIRST_TIME) if is_descending else ("", "gte", "lte", LAST_TIME)
    read = Event.objects.order_by(f"{sign}at", f"{sign}id")
    if start:
        read, matches = read.filter(**{f"at__{beyond}": start}), matches.filter(**{f"at__{beyond}": start})
    last_read = Coalesce(read.values("at")[MAX_READ_EVENTS - 1 : MAX_READ_EVENTS], Value(end, DateTimeField()))
    return matches.filter(**{f"at__{until}": last_read}).order_by(f"{sign}at", f"{sign}id")


def sort_all_matches(matches: QuerySet[Event], *, is_descending: bool) -> QuerySet[Event]:
    """Return the query that finds all of `matches` first and then sorts them, newest first if `is_descending`."""
    time = UNINDEXED_TIME.desc() if is_descending else UNINDEXED_TIME.asc()
    return matches.order_by(time, "-id" if is_descending else "id")


def load_first_matches(
    matches: QuerySet[Event], start: datetime | None, count: int, *, is_descending: bool
) -> list[Event]:
    """Return the first `count` of `matches`, which all lie beyond `start`; see `select_matches_near`. Costs one
    statement, and another one if they are not among the events that are read one by one."""
    rows = list(select_matches_near(matches, start, is_descending=is_descending)[:count])
    return rows if len(rows) == count else list(sort_all_matches(matches, is_descending=is_descending)[:count])
