"""Describe writes to Placement, sent or planned, as lines for people. This module is pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from placement_sync.apply_writes import SyncOutcome
from placement_sync.reconcile import (
    CreateProvider,
    DeleteProvider,
    MoveProvider,
    ProviderWrite,
    SetInventories,
    SetTraits,
)

DESCRIBED_FIELDS = ("total", "reserved", "max_unit")
"""The fields of an inventory whose changes are described. The others belong to Placement and its operators."""


def describe_result(result: SyncOutcome | Exception) -> list[str]:
    """Return a line for each write to Placement and for each problem of one host; problems begin with `!`.

    Empty if Placement agrees with the inventory. If `result` is an exception, the only line is its message.
    """
    if not isinstance(result, SyncOutcome):
        return [f"! {result}"]
    return [*describe_writes(result.writes), *(f"! {problem}" for problem in result.problems)]


def describe_writes(writes: Iterable[ProviderWrite]) -> Iterator[str]:
    """Yield a line for each difference that the writes correct: `+` is new, `-` is removed, `~` is changed.

    Changes of an inventory's fields other than DESCRIBED_FIELDS are left out.
    """
    for write in writes:
        match write:
            case CreateProvider():
                yield f"+ {write.name}: a new provider"
            case MoveProvider():
                yield f"~ {write.name}: moved here; it was {write.previous}"
            case DeleteProvider():
                yield f"- {write.name}: the provider is deleted"
            case SetInventories():
                yield from _describe_inventories(write)
            case SetTraits():
                yield from (f"+ {write.name}: trait {name}" for name in sorted(write.traits - write.previous))
                yield from (f"- {write.name}: trait {name}" for name in sorted(write.previous - write.traits))


def _describe_inventories(write: SetInventories) -> Iterator[str]:
    """Yield a line for each resource class that is added, removed, or changed in DESCRIBED_FIELDS."""
    for name in sorted(write.inventories.keys() | write.previous.keys()):
        current, previous = write.inventories.get(name), write.previous.get(name)
        if previous is None:
            yield f"+ {write.name}: {name} {_format_amounts(current or {})}"
        elif current is None:
            yield f"- {write.name}: {name} {_format_amounts(previous)}"
        elif changed := {key: current[key] for key in DESCRIBED_FIELDS if current.get(key) != previous.get(key)}:
            changes_text = ", ".join(f"{key} {previous.get(key)} → {to}" for key, to in changed.items())
            yield f"~ {write.name}: {name} {changes_text}"


def _format_amounts(entry: Mapping[str, Any]) -> str:
    """Return the total of an inventory and, if it is not 0, the reserved amount, such as "8, 2 reserved"."""
    reserved = f", {entry['reserved']} reserved" if entry.get("reserved") else ""
    return f"{entry.get('total')}{reserved}"
