"""Parse query strings: known parameters, the `filters` array, paging and uuids (contract 2.0, 2.4).

This module is pure. Every value that cannot be used raises V2Error 400 with one sentence.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from accelerators.api.v2.faults import V2Error, bad_input_error, missing_argument_error

QueryParams = dict[str, list[str]]

FILTER_NAMES = (
    "parent_uuid",
    "root_uuid",
    "board",
    "availability",
    "interface_type",
    "instance_uuid",
    "limit",
    "marker",
    "sort_key",
    "sort_dir",
    "name",
)
"""Names that `filters` accepts. All except limit, sort_key, sort_dir and name are ignored."""

_INDEXED_FILTER = re.compile(r"filters\[([0-9]{1,6})\]\.(field|value)")
_LIMIT = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class ListQuery:
    """The parsed query of a list. `equal_filters` maps columns to the values that they must have.

    `sort` is a key and a direction; None means the default order, oldest first. `limit` None means no limit. `marker`
    is the uuid of the element after which the list begins, None for the first.
    """

    equal_filters: Mapping[str, str] = field(default_factory=dict)
    sort: tuple[str, str] | None = None
    limit: int | None = None
    marker: str | None = None


def parse_list_query(
    params: Iterable[tuple[str, list[str]]], column_filters: Collection[str], sortable: Collection[str]
) -> ListQuery:
    """Parse the query string of a list; the parameters in `column_filters` are compared with columns.

    The filter `name` is ignored if the resource has no such column. Any filter, even an ignored one, changes the order
    to newest first (contract 2.0, Lists). Raises V2Error 400 for an unknown or invalid parameter or filter.
    """
    remaining = dict(params)
    filters = _extract_filters(remaining)
    values = _get_last_values(remaining, {*column_filters, "limit", "marker"})
    equal = {name: values[name] for name in column_filters if values.get(name)}
    sort = _parse_sort(filters, sortable) if filters or equal else None
    if "name" in filters and "name" in sortable:
        equal["name"] = filters["name"]
    return _build_list_query(values, equal, sort, filters.get("limit"))


def parse_page_query(
    params: Iterable[tuple[str, list[str]]], known: Collection[str]
) -> tuple[ListQuery, Mapping[str, str]]:
    """Parse the query string of a list that handles its own parameters, those in `known`.

    Returns the ListQuery (limit and marker; the order is the default one, oldest first) and the parameters of `known`
    that were given. Raises V2Error 400 for an unknown parameter and for an invalid limit or marker.
    """
    values = _get_last_values(dict(params), {*known, "limit", "marker"})
    return _build_list_query(values, {}, None, None), {name: values[name] for name in known if name in values}


def parse_known_arguments(params: Iterable[tuple[str, list[str]]], *known: str) -> Mapping[str, str]:
    """Return the parameters of the query string, each with its last value; raise V2Error 400 for any that is not in
    `known`."""
    return _get_last_values(dict(params), known)


def _build_list_query(
    values: Mapping[str, str], equal: Mapping[str, str], sort: tuple[str, str] | None, limit: str | None
) -> ListQuery:
    """Build the query of a list, with the marker and the limit in `values`; `limit` is used if `values` has none.

    Raises V2Error 400 for a marker that is not a uuid and for an invalid limit.
    """
    marker = values.get("marker")
    if marker is not None and to_canonical_uuid(marker) is None:
        raise unknown_marker_error(marker)
    return ListQuery(equal, sort, _parse_limit(values.get("limit", limit)), marker and to_canonical_uuid(marker))


def unknown_marker_error(value: str) -> V2Error:
    """Return the error 400 for a marker that is not an item of the list."""
    return bad_input_error("marker", value, "It must be the uuid of an item of this list.")


def to_canonical_uuid(value: str) -> str | None:
    """Return the uuid in its stored form, or None if `value` is not a uuid. Case, dashes and braces do not matter."""
    try:
        parsed = uuid.UUID(value)
    except ValueError:
        return None
    digits = value.replace("urn:", "").replace("uuid:", "").strip("{}").replace("-", "").lower()
    return str(parsed) if parsed.hex == digits else None


def check_uuid(value: str, name: str) -> None:
    """Raise V2Error 400, with upstream's text, unless `value` is a uuid (contract 2.0). `name` is the argument that has
    this value: `uuid` for a path."""
    if to_canonical_uuid(value) is None:
        raise bad_input_error(name, value, f"unable to convert to uuid. Error: Expected a uuid but received {value}.")


def is_canonical_uuid(value: str) -> bool:
    """Return whether `value` is a uuid in exactly the stored form. Upstream compares strings, so other forms find
    nothing."""
    return to_canonical_uuid(value) == value


def _get_last_values(params: QueryParams, known: Collection[str]) -> dict[str, str]:
    """Return each parameter with its last value. Raise V2Error 400 for an unknown parameter, or a NUL, which the
    database cannot store."""
    if unknown := sorted(set(params) - set(known)):
        raise V2Error(400, f'Unknown argument: "{", ".join(unknown)}"')
    last_values = {name: values[-1] for name, values in params.items()}
    for name, value in last_values.items():
        _check_no_nul(name, value)
    return last_values


def _extract_filters(params: QueryParams) -> dict[str, str]:
    """Remove the filters from `params` and return them by name.

    Two forms are accepted: `filters.field=F&filters.value=V`, repeated, and `filters[0].field=F…`. Raises V2Error 400
    for another form, for a name that is not in FILTER_NAMES, and for a value with NUL.
    """
    if "filters" in params:
        raise bad_input_error("filters", params["filters"][-1], "unable to convert to ArrayType.")
    dotted = params.pop("filters.field", []), params.pop("filters.value", [])
    pairs = _extract_indexed_filters(params) if not any(dotted) else _pair_filters(*dotted)
    for name, value in pairs:
        if name not in FILTER_NAMES:
            raise bad_input_error("field", name, f"Value should be one of: {', '.join(FILTER_NAMES)}")
        _check_no_nul(name, value)
    return dict(pairs)


def _pair_filters(fields: list[str], values: list[str]) -> list[tuple[str, str]]:
    """Return each field with its value; raise V2Error 400 if there are more of one than of the other."""
    if len(fields) != len(values):
        raise missing_argument_error("filters.value" if len(fields) > len(values) else "filters.field")
    return list(zip(fields, values, strict=True))


def _extract_indexed_filters(params: QueryParams) -> list[tuple[str, str]]:
    """Remove the parameters `filters[N].field` and `filters[N].value` from `params`; return the pairs, ordered by N.

    Raises V2Error 400 if one part of a pair is missing.
    """
    parts_by_index: dict[int, dict[str, str]] = {}
    for name in list(params):
        if match := _INDEXED_FILTER.fullmatch(name):
            parts_by_index.setdefault(int(match[1]), {})[match[2]] = params.pop(name)[-1]
    for index, pair in parts_by_index.items():
        for part in ("field", "value"):
            if part not in pair:
                raise missing_argument_error(f"filters[{index}].{part}")
    return [(parts_by_index[index]["field"], parts_by_index[index]["value"]) for index in sorted(parts_by_index)]


def _parse_sort(filters: Mapping[str, str], sortable: Collection[str]) -> tuple[str, str]:
    """Return the sort key and the direction that the filters name; `created_at` and `desc` if they name none.

    Raises V2Error 400 for a key that is not in `sortable`, and for another direction than `asc` and `desc`.
    """
    key, direction = filters.get("sort_key", "created_at"), filters.get("sort_dir", "desc")
    if key not in sortable:
        raise V2Error(400, f'The sort_key value "{key}" is an invalid field for sorting')
    if direction not in ("asc", "desc"):
        raise bad_input_error("sort_dir", direction, "Value should be one of: asc, desc")
    return key, direction


def _parse_limit(value: str | None) -> int | None:
    """Return the limit as a number, None if there is none; raise V2Error 400 unless it has 1 to 18 digits."""
    if value is None:
        return None
    if not _LIMIT.fullmatch(value):
        raise bad_input_error("limit", value, "It must be an integer, 0 or more.")
    return int(value)


def _check_no_nul(name: str, value: str) -> None:
    """Raise V2Error 400 if the value of the parameter `name` contains NUL."""
    if "\0" in value:
        raise bad_input_error(name, value.replace("\0", "\\0"), "It must not contain NUL.")
