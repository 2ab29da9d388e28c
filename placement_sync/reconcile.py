"""Compute the fewest writes that bring Placement in step: desired × written × observed → writes. This module is pure
and does not use Django.

The merge is three-way. Ours are: a provider with its parent and name; total, max_unit and reserved of our resource
class; the traits that we wrote. Everything else that somebody put there is kept. A provider is ours if we wrote it or
desire it. Deletions come last; the caller must not delete a provider that has allocations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from placement_sync.mapping import DesiredProvider

Inventory = Mapping[str, Any]
"""An inventory record as Placement shows it: total, reserved, min_unit, max_unit, step_size, allocation_ratio."""


@dataclass(frozen=True)
class ObservedProvider:
    """A provider as Placement shows it. Writes of inventories and traits fail if `generation` has changed."""

    uuid: str
    name: str
    parent: str
    generation: int
    inventories: Mapping[str, Inventory] = field(default_factory=dict)
    traits: frozenset[str] = frozenset()


@dataclass(frozen=True)
class WrittenRecord:
    """The data that we last wrote to a provider, and the provider as Placement showed it last (`seen`).

    `classes` has more than one entry while an old resource class still has allocations.
    """

    classes: frozenset[str] = frozenset()
    traits: frozenset[str] = frozenset()
    seen: ObservedProvider | None = None


@dataclass(frozen=True)
class CreateProvider:
    """Create a provider below `parent`."""

    uuid: str
    name: str
    parent: str


@dataclass(frozen=True)
class MoveProvider:
    """Set a provider's name and parent to the desired ones; `previous` is a text with the observed ones, for people."""

    uuid: str
    name: str
    parent: str
    previous: str


@dataclass(frozen=True)
class SetInventories:
    """Replace all inventories of a provider (by resource class); `previous` are the observed ones."""

    uuid: str
    name: str
    inventories: Mapping[str, Inventory]
    previous: Mapping[str, Inventory]


@dataclass(frozen=True)
class SetTraits:
    """Replace all traits of a provider; `previous` are the observed ones."""

    uuid: str
    name: str
    traits: frozenset[str]
    previous: frozenset[str]


@dataclass(frozen=True)
class DeleteProvider:
    """Delete a provider. The caller must make sure that it has no allocations."""

    uuid: str
    name: str


ProviderWrite = CreateProvider | MoveProvider | SetInventories | SetTraits | DeleteProvider


def plan_writes(
    root: str,
    desired: Mapping[str, DesiredProvider],
    written: Mapping[str, WrittenRecord],
    observed: Mapping[str, ObservedProvider],
) -> list[ProviderWrite]:
    """Return the writes in order: per provider create or move, inventories, traits; then all deletions.

    `observed` must hold every existing provider of `desired` and `written`. A provider that is only in `observed`
    belongs to somebody else and is left alone.
    """
    writes: list[ProviderWrite] = []
    for uuid, provider in sorted(desired.items()):
        writes += _plan_provider(root, provider, written.get(uuid, WrittenRecord()), observed.get(uuid))
    undesired = sorted(written.keys() - desired.keys())
    writes += [DeleteProvider(uuid, observed[uuid].name) for uuid in undesired if uuid in observed]
    return writes


def _plan_provider(
    root: str, desired: DesiredProvider, written: WrittenRecord, observed: ObservedProvider | None
) -> list[ProviderWrite]:
    """Return the writes for one desired provider; `observed` is None if it does not exist."""
    writes: list[ProviderWrite] = []
    if observed is None:
        writes.append(CreateProvider(desired.uuid, desired.name, root))
        observed = ObservedProvider(desired.uuid, desired.name, root, 0)
    elif (observed.name, observed.parent) != (desired.name, root):
        writes.append(
            MoveProvider(desired.uuid, desired.name, root, f"{observed.name} below {observed.parent or 'nothing'}")
        )
    inventories = merge_inventories(desired, written, observed.inventories)
    if inventories != observed.inventories:
        writes.append(SetInventories(desired.uuid, desired.name, inventories, observed.inventories))
    traits = (observed.traits - written.traits) | desired.traits
    if traits != observed.traits:
        writes.append(SetTraits(desired.uuid, desired.name, traits, observed.traits))
    return writes


def merge_inventories(
    desired: DesiredProvider, written: WrittenRecord, observed: Mapping[str, Inventory]
) -> dict[str, Inventory]:
    """Return all inventories of the provider, with our resource class as desired and our old classes removed.

    Placement accepts no total of 0. If nothing is left of our class, it keeps its last total, all of it reserved; if it
    had no inventory, it gets none.
    """
    own_class = desired.resource_class
    result = {name: entry for name, entry in observed.items() if name not in written.classes or name == own_class}
    if not own_class:
        return result
    existing = observed.get(own_class, {})
    if total := desired.total or int(existing.get("total", 0)):
        own_fields = {"total": total, "max_unit": total, "reserved": desired.reserved if desired.total else total}
        result[own_class] = {**existing, **own_fields}
    return result
