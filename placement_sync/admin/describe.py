"""Describe writes to Placement, sent or planned, as lines for people. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from placement_sync.reconcile import Create, Delete, Move, SetInventories, SetTraits, Write
from placement_sync.sync import Outcome

SHOWN = ("total", "reserved", "max_unit")
"""The fields of an inventory whose changes are described. The others belong to Placement and its operators."""


def told(ended: Outcome | Exception) -> list[str]:
    """Return the lines that describe the result of one host, with `!` before each problem. Empty if it is in step."""
    if not isinstance(ended, Outcome):
        return [f"! {ended}"]
    return [*lines(ended.writes), *(f"! {problem}" for problem in ended.problems)]


def lines(writes: Iterable[Write]) -> Iterator[str]:
    """Yield a line for each difference: `+` is new, `-` is removed, `~` is changed."""
    for write in writes:
        match write:
            case Create():
                yield f"+ {write.name}: a new provider"
            case Move():
                yield f"~ {write.name}: moved here; it was {write.was}"
            case Delete():
                yield f"- {write.name}: the provider is deleted"
            case SetInventories():
                yield from _inventories(write)
            case SetTraits():
                yield from (f"+ {write.name}: trait {name}" for name in sorted(write.traits - write.was))
                yield from (f"- {write.name}: trait {name}" for name in sorted(write.was - write.traits))


def _inventories(write: SetInventories) -> Iterator[str]:
    for name in sorted(write.inventories.keys() | write.was.keys()):
        now, was = write.inventories.get(name), write.was.get(name)
        if was is None:
            yield f"+ {write.name}: {name} {_numbers(now or {})}"
        elif now is None:
            yield f"- {write.name}: {name} {_numbers(was)}"
        elif changed := {key: now[key] for key in SHOWN if now.get(key) != was.get(key)}:
            yield f"~ {write.name}: {name} {', '.join(f'{key} {was.get(key)} → {to}' for key, to in changed.items())}"


def _numbers(entry: Mapping[str, Any]) -> str:
    reserved = f", {entry['reserved']} reserved" if entry.get("reserved") else ""
    return f"{entry.get('total')}{reserved}"
