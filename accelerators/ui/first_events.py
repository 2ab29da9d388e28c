"""Load the first events that match conditions, in the order of time, without reading all events.

For conditions that are each frequent but rare together, or that only old events meet, PostgreSQL would read a million
events in the order of time until a page is full. These functions limit the events that are read one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db.models import DateTimeField, ExpressionWrapper, F, QuerySet, Value
from django.db.models.expressions import Col
from django.db.models.functions import Coalesce
from django.db.models.lookups import GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual
from django.db.models.sql.where import AND, WhereNode

from accelerators.models import Event

MAX_READ_EVENTS = 10_000
"""Events that are read one by one for a page of events."""
UNINDEXED_TIME = ExpressionWrapper(F("at") + timedelta(0), output_field=DateTimeField())
"""The time of an event as an expression that no index has: PostgreSQL then does not read events in the order of time
until it has found enough matches."""
FIRST_TIME, LAST_TIME = datetime(1, 1, 2, tzinfo=UTC), datetime(9999, 12, 30, tzinfo=UTC)


def select_matches_near(matches: QuerySet[Event], start: datetime | None, *, is_descending: bool) -> QuerySet[Event]:
    """Return the query for those of `matches` that are among MAX_READ_EVENTS events in their order: newest first if
    `is_descending`, otherwise oldest first. The first of these events is the first one that lies beyond `start` and
    satisfies the conditions of `matches` that limit the time at this end, for example `at__lt` if `is_descending`. None
    stands for the end of the table.
    """
    sign, beyond, until, end = ("-", "lte", "gte", FIRST_TIME) if is_descending else ("", "gte", "lte", LAST_TIME)
    read = Event.objects.order_by(f"{sign}at", f"{sign}id")
    for lookup_name, bound in _find_time_bounds(matches.query.where, is_upper=is_descending):
        read = read.filter(**{f"at__{lookup_name}": bound})
    if start:
        read, matches = read.filter(**{f"at__{beyond}": start}), matches.filter(**{f"at__{beyond}": start})
    last_read = Coalesce(read.values("at")[MAX_READ_EVENTS - 1 : MAX_READ_EVENTS], Value(end, DateTimeField()))
    return matches.filter(**{f"at__{until}": last_read}).order_by(f"{sign}at", f"{sign}id")


def _find_time_bounds(conditions: WhereNode, *, is_upper: bool) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each comparison with the time of an event that is one of the conditions joined by AND:
    upper bounds of the time if `is_upper`, otherwise lower ones."""
    if conditions.negated or (conditions.connector != AND and len(conditions.children) > 1):
        return
    lookups = (LessThan, LessThanOrEqual) if is_upper else (GreaterThan, GreaterThanOrEqual)
    for condition in conditions.children:
        if isinstance(condition, WhereNode):
            yield from _find_time_bounds(condition, is_upper=is_upper)
        elif isinstance(condition, lookups) and isinstance(condition.lhs, Col) and condition.lhs.target.name == "at":
            yield condition.lookup_name, condition.rhs


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
