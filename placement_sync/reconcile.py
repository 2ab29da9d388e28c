"""Compute the fewest writes that bring Placement in step: desired × written × observed → writes. Pure, free of Django.

The merge is three-way. Ours are: a provider with its parent and name; total, max_unit and reserved of our resource
class; the traits that we wrote. Everything else that somebody put there is kept. A provider is ours if we wrote it or
desire it. Deletions come last; the caller must not delete a provider that has allocations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from placement_sync.mapping import Provider

Inventory = Mapping[str, Any]
"""An inventory record as Placement shows it: total, reserved, min_unit, max_unit, step_size, allocation_ratio."""


@dataclass(frozen=True)
class Observed:
    """A provider as Placement shows it. Writes of inventories and traits fail if `generation` has changed."""

    uuid: str
    name: str
    parent: str
    generation: int
    inventories: Mapping[str, Inventory] = field(default_factory=dict)
    traits: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Written:
    """What we last wrote to a provider, and how Placement showed it last (`seen`).

    `classes` has more than one entry while an old resource class still has allocations.
    """

    classes: frozenset[str] = frozenset()
    traits: frozenset[str] = frozenset()
    seen: Observed | None = None


@dataclass(frozen=True)
class Create:
    """Create a provider below `parent`."""

    uuid: str
    name: str
    parent: str


@dataclass(frozen=True)
class Move:
    """Set a provider's name and parent back to what they shall be; `previous` describes both as observed."""

    uuid: str
    name: str
    parent: str
    was: str


@dataclass(frozen=True)
class SetInventories:
    """Replace all inventories of a provider; `previous` is what was observed."""

    uuid: str
    name: str
    inventories: Mapping[str, Inventory]
    was: Mapping[str, Inventory]


@dataclass(frozen=True)
class SetTraits:
    """Replace all traits of a provider; `previous` is what was observed."""

    uuid: str
    name: str
    traits: frozenset[str]
    was: frozenset[str]


@dataclass(frozen=True)
class Delete:
    """Delete a provider. The caller must make sure that it has no allocations."""

    uuid: str
    name: str


Write = Create | Move | SetInventories | SetTraits | Delete


def plan(
    root: str,
    desired: Mapping[str, Provider],
    written: Mapping[str, Written],
    observed: Mapping[str, Observed],
) -> list[Write]:
    """Return the writes in order: per provider create or move, inventories, traits; then all deletions.

    `observed` must hold every existing provider of `desired` and `written`. A provider that is only in `observed`
    belongs to somebody else and is left alone.
    """
    writes: list[Write] = []
    for uuid, provider in sorted(desired.items()):
        writes += _bring(root, provider, written.get(uuid, Written()), observed.get(uuid))
    gone = sorted(written.keys() - desired.keys())
    writes += [Delete(uuid, observed[uuid].name) for uuid in gone if uuid in observed]
    return writes


def _bring(root: str, wanted: Provider, before: Written, now: Observed | None) -> list[Write]:
    """Return the writes for one desired provider; `observed` is None if it does not exist."""
    writes: list[Write] = []
    if now is None:
        writes.append(Create(wanted.uuid, wanted.name, root))
        now = Observed(wanted.uuid, wanted.name, root, 0)
    elif (now.name, now.parent) != (wanted.name, root):
        writes.append(Move(wanted.uuid, wanted.name, root, f"{now.name} below {now.parent or 'nothing'}"))
    inventories = merged(wanted, before, now.inventories)
    if inventories != now.inventories:
        writes.append(SetInventories(wanted.uuid, wanted.name, inventories, now.inventories))
    traits = (now.traits - before.traits) | wanted.traits
    if traits != now.traits:
        writes.append(SetTraits(wanted.uuid, wanted.name, traits, now.traits))
    return writes


def merged(wanted: Provider, before: Written, now: Mapping[str, Inventory]) -> dict[str, Inventory]:
    """Return all inventories of the provider, with our resource class as desired and our old classes removed.

    Placement accepts no total of 0. If nothing is left of our class, it keeps its last total, all of it reserved; if it
    had no inventory, it gets none.
    """
    ours = wanted.resource_class
    result = {name: entry for name, entry in now.items() if name not in before.classes or name == ours}
    if not ours:
        return result
    there = now.get(ours, {})
    if total := wanted.total or int(there.get("total", 0)):
        numbers = {"total": total, "max_unit": total, "reserved": wanted.reserved if wanted.total else total}
        result[ours] = {**there, **numbers}
    return result
