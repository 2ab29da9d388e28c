"""Parse query strings: known parameters, the `filters` array, paging and uuids (contract 2.0, 2.4).

Pure. Every value that cannot be used raises V2Error 400 with one sentence.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from accelerators.api.v2.faults import V2Error, bad_input, missing_argument

Params = dict[str, list[str]]

FILTERS = (
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

_INDEXED = re.compile(r"filters\[([0-9]{1,6})\]\.(field|value)")
_COUNT = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class ListQuery:
    """The parsed query of a list. `sort` is None for the default order, oldest first."""

    equal: Mapping[str, str] = field(default_factory=dict)
    sort: tuple[str, str] | None = None
    limit: int | None = None
    marker: str | None = None


def listing(params: Iterable[tuple[str, list[str]]], exact: Collection[str], sortable: Collection[str]) -> ListQuery:
    """Parse the query string of a list; the parameters in `column_filters` are compared with columns.

    The filter `name` is ignored if the resource has no such column. Any filter, even an ignored one, changes the order
    to newest first (contract 2.0, Lists).
    """
    left = dict(params)
    filters = _filters(left)
    scalars = _scalars(left, {*exact, "limit", "marker"})
    equal = {name: scalars[name] for name in exact if scalars.get(name)}
    sort = _sort(filters, sortable) if filters or equal else None
    if "name" in filters and "name" in sortable:
        equal["name"] = filters["name"]
    return _page(scalars, equal, sort, filters.get("limit"))


def page(params: Iterable[tuple[str, list[str]]], known: Collection[str]) -> tuple[ListQuery, Mapping[str, str]]:
    """Parse paging for a list that handles its own parameters; return the page (oldest first) and the given parameters
    of `known`."""
    scalars = _scalars(dict(params), {*known, "limit", "marker"})
    return _page(scalars, {}, None, None), {name: scalars[name] for name in known if name in scalars}


def only(params: Iterable[tuple[str, list[str]]], *known: str) -> Mapping[str, str]:
    """Return the parameters of the query string; raise V2Error 400 for any that is not in `known`."""
    return _scalars(dict(params), known)


def _page(
    scalars: Mapping[str, str], equal: Mapping[str, str], sort: tuple[str, str] | None, limit: str | None
) -> ListQuery:
    marker = scalars.get("marker")
    if marker is not None and canonical(marker) is None:
        raise unknown_marker(marker)
    return ListQuery(equal, sort, _limit(scalars.get("limit", limit)), marker and canonical(marker))


def unknown_marker(value: str) -> V2Error:
    """Return the error 400 for a marker that is not an item of the list."""
    return bad_input("marker", value, "It must be the uuid of an item of this list.")


def canonical(value: str) -> str | None:
    """Return the uuid in its stored form, or None if `value` is not a uuid. Case, dashes and braces do not matter."""
    try:
        parsed = uuid.UUID(value)
    except ValueError:
        return None
    bare = value.replace("urn:", "").replace("uuid:", "").strip("{}").replace("-", "").lower()
    return str(parsed) if parsed.hex == bare else None


def check_uuid(value: str) -> None:
    """Raise V2Error 400, with upstream's text, unless `value` is a uuid (contract 2.0)."""
    if canonical(value) is None:
        raise bad_input("uuid", value, f"unable to convert to uuid. Error: Expected a uuid but received {value}.")


def stored(value: str) -> bool:
    """Return whether `value` is a uuid in exactly the stored form. Upstream compares strings, so other forms find
    nothing."""
    return canonical(value) == value


def _scalars(params: Params, known: Collection[str]) -> dict[str, str]:
    """Return each parameter with its last value. Raise V2Error 400 for an unknown parameter, or a NUL, which the
    database cannot store."""
    if unknown := sorted(set(params) - set(known)):
        raise V2Error(400, f'Unknown argument: "{", ".join(unknown)}"')
    scalars = {name: values[-1] for name, values in params.items()}
    for name, value in scalars.items():
        _no_nul(name, value)
    return scalars


def _filters(params: Params) -> dict[str, str]:
    """Remove the filters from `params` and return them by name.

    Two forms are accepted: `filters.field=F&filters.value=V`, repeated, and `filters[0].field=F…`.
    """
    if "filters" in params:
        raise bad_input("filters", params["filters"][-1], "unable to convert to ArrayType.")
    dotted = params.pop("filters.field", []), params.pop("filters.value", [])
    pairs = _indexed(params) if not any(dotted) else _paired(*dotted)
    for name, value in pairs:
        if name not in FILTERS:
            raise bad_input("field", name, f"Value should be one of: {', '.join(FILTERS)}")
        _no_nul(name, value)
    return dict(pairs)


def _paired(fields: list[str], values: list[str]) -> list[tuple[str, str]]:
    if len(fields) != len(values):
        raise missing_argument("filters.value" if len(fields) > len(values) else "filters.field")
    return list(zip(fields, values, strict=True))


def _indexed(params: Params) -> list[tuple[str, str]]:
    found: dict[int, dict[str, str]] = {}
    for name in list(params):
        if match := _INDEXED.fullmatch(name):
            found.setdefault(int(match[1]), {})[match[2]] = params.pop(name)[-1]
    for index, pair in found.items():
        for part in ("field", "value"):
            if part not in pair:
                raise missing_argument(f"filters[{index}].{part}")
    return [(found[index]["field"], found[index]["value"]) for index in sorted(found)]


def _sort(filters: Mapping[str, str], sortable: Collection[str]) -> tuple[str, str]:
    key, direction = filters.get("sort_key", "created_at"), filters.get("sort_dir", "desc")
    if key not in sortable:
        raise V2Error(400, f'The sort_key value "{key}" is an invalid field for sorting')
    if direction not in ("asc", "desc"):
        raise bad_input("sort_dir", direction, "Value should be one of: asc, desc")
    return key, direction


def _limit(value: str | None) -> int | None:
    if value is None:
        return None
    if not _COUNT.fullmatch(value):
        raise bad_input("limit", value, "It must be an integer, 0 or more.")
    return int(value)


def _no_nul(name: str, value: str) -> None:
    if "\0" in value:
        raise bad_input(name, value.replace("\0", "\\0"), "It must not contain NUL.")
