"""Query strings are closed sets, and lists know filters, order and pages (contract sections 2.0, 2.4). Pure.

Called by `view` for every request and by `resource` for lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from accelerators.api.v2.faults import Fault

FILTERS = "filters"
FIELDS = frozenset(
    "parent_uuid root_uuid board availability interface_type instance_uuid limit marker sort_key sort_dir name".split()
)
"""What `filters` may name. All but limit, sort_key, sort_dir and name are accepted and ignored, as upstream does."""

_PAIR = re.compile(r"filters(?:\[(?P<index>[0-9]{1,4})\])?\.(?P<part>field|value)", re.ASCII)
_COUNT = re.compile(r"[0-9]{1,9}", re.ASCII)


class Parameters(Protocol):
    """What is read of a QueryDict."""

    def __iter__(self) -> Iterator[str]: ...
    def __getitem__(self, name: str) -> str: ...
    def __contains__(self, name: object) -> bool: ...
    def getlist(self, name: str) -> list[str]: ...


@dataclass(frozen=True)
class Page:
    """What a list is asked for. `filtered`: any filter was given, which alone changes the order."""

    equal: dict[str, str]
    filtered: bool
    sort_key: str | None
    descending: bool
    limit: int | None
    marker: str | None


def check_known(parameters: Parameters, arguments: frozenset[str]) -> None:
    """400 for a parameter that the route does not have, or for a value no column can hold."""
    unknown = [name for name in parameters if not (_known(name, arguments))]
    if unknown:
        raise Fault(400, f'Unknown argument: "{", ".join(unknown)}"')
    if any("\0" in value for name in parameters for value in parameters.getlist(name)):
        raise Fault(400, "A parameter's value contains a NUL character.")


def _known(name: str, arguments: frozenset[str]) -> bool:
    return name in arguments or (FILTERS in arguments and _PAIR.fullmatch(name) is not None)


def page(parameters: Parameters, columns: frozenset[str]) -> Page:
    """What the list is asked for; `columns` may be given as parameters of their own. Empty ones count as absent."""
    pairs = filters(parameters)
    equal = {name: parameters[name] for name in sorted(columns) if parameters.get(name)}
    limit, marker = parameters.get("limit", pairs.get("limit")), parameters.get("marker")
    direction = pairs.get("sort_dir", "desc")
    if direction not in ("asc", "desc"):
        raise Fault(400, f'The sort_dir value "{direction}" is neither asc nor desc.')
    return Page(
        equal=equal | {name: value for name, value in pairs.items() if name == "name"},
        filtered=bool(equal or pairs),
        sort_key=pairs.get("sort_key"),
        descending=direction == "desc",
        limit=None if limit is None else _count(limit),
        marker=None if marker is None else canonical(marker),
    )


def filters(parameters: Parameters) -> dict[str, str]:
    """The field → value pairs of `filters.field=F&filters.value=V`, repeated or indexed; the last of a field wins."""
    if FILTERS in parameters:
        raise Fault(400, "filters is a list of pairs: filters.field=F&filters.value=V.")
    halves: dict[str, dict[str, list[str]]] = {}
    for name in parameters:
        if found := _PAIR.fullmatch(name):
            halves.setdefault(found["index"] or "", {})[found["part"]] = parameters.getlist(name)
    pairs: dict[str, str] = {}
    for half in halves.values():
        fields, values = half.get("field", []), half.get("value", [])
        if len(fields) != len(values):
            raise Fault(400, "Every filters.field needs its filters.value, and the other way round.")
        pairs.update(zip(fields, values, strict=True))
    if unknown := sorted(pairs.keys() - FIELDS):
        raise Fault(400, f'Invalid filter field "{unknown[0]}": it is one of {", ".join(sorted(FIELDS))}.')
    return pairs


def _count(text: str) -> int:
    if not _COUNT.fullmatch(text):
        raise Fault(400, f'Invalid limit "{text[:64]}": it is a whole number, 0 or more.')
    return int(text)


def canonical(text: str) -> str:
    """`text`, if it looks like a uuid; else a 400 with upstream's sentence (contract section 2.0)."""
    try:
        UUID(text)
    except ValueError:
        raise Fault(
            400,
            f"Invalid input for field/attribute uuid. Value: '{text}'. unable to convert to uuid. "
            f"Error: Expected a uuid but received {text}.",
        ) from None
    return text
