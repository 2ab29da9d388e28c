"""Continue a list behind one of its rows, in any order of the list (keyset pagination).

The database then reads on at that row, so the rows behind the hundred thousandth are as fast as the first ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db.models import F, Q, QuerySet
from django.db.models.expressions import BaseExpression, OrderBy


def select_rows_behind(rows: QuerySet[Any], ordering: Sequence[Any], visible: QuerySet[Any], key: int) -> QuerySet[Any]:
    """Keep those of `rows` that stand behind the row with the primary key `key` in `ordering`.

    `ordering` is that of the rows: field names, with a leading `-` for descending, or expressions. It must determine
    the order completely. `visible` contains the row with this key; it need not be one of `rows`. Costs one statement.
    Raises LookupError if there is no such row.
    """
    expressions, signs = zip(*(_split_ordering(one) for one in ordering), strict=True)
    names = [f"_place{number}" for number in range(len(expressions))]
    places = dict(zip(names, expressions, strict=True))
    values = visible.order_by().filter(pk=key).annotate(**places).values_list(*names).first()
    if values is None:
        raise LookupError(f"there is no row {key}")
    behind = Q(pk__in=[])
    for name, is_descending, value in reversed(list(zip(names, signs, values, strict=True))):
        behind = _build_later_condition(name, is_descending, value) | (_build_equal_condition(name, value) & behind)
    if values[0] is not None and signs[0]:  # an index can begin at this bound
        behind &= Q(**{f"{names[0]}__lte": values[0]})
    elif values[0] is not None and not _may_be_null(rows, ordering[0]):
        behind &= Q(**{f"{names[0]}__gte": values[0]})
    rows_behind: QuerySet[Any] = rows.alias(**places).filter(behind)
    return rows_behind


def _split_ordering(one: Any) -> tuple[Any, bool]:
    """Return the expression of one element of an ordering, and whether it is descending."""
    if isinstance(one, OrderBy):
        return one.expression, one.descending
    if isinstance(one, (F, BaseExpression)):
        return one, False
    return F(one.removeprefix("-")), one.startswith("-")


def _build_later_condition(name: str, is_descending: bool, value: Any) -> Q:
    """Build the condition that a value sorts behind `value`. PostgreSQL sorts NULL behind all other values."""
    if value is None:
        return Q(**{f"{name}__isnull": False}) if is_descending else Q(pk__in=[])
    if is_descending:
        return Q(**{f"{name}__lt": value})
    return Q(**{f"{name}__gt": value}) | Q(**{f"{name}__isnull": True})


def _build_equal_condition(name: str, value: Any) -> Q:
    """Build the condition that a value sorts like `value`."""
    return Q(**{f"{name}__isnull": True}) if value is None else Q(**{name: value})


def _may_be_null(rows: QuerySet[Any], one: Any) -> bool:
    """Return False if `one` is the name of a field of the rows' own table that is never NULL."""
    name = one.removeprefix("-") if isinstance(one, str) else ""
    names = {
        attribute: field for field in rows.model._meta.concrete_fields for attribute in (field.name, field.attname)
    }
    return name != "pk" and (name not in names or names[name].null)
