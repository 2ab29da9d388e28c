"""Desired × written × observed → the fewest writes that make Placement right. Pure, free of Django.

Three-way: ours are a provider, its parent and name, our class's total, max_unit and reserved, and the traits we wrote;
whatever else somebody put there is kept. A provider is ours when we wrote it, or desire it. Deletions come last and
never while allocations exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from placement_sync.mapping import Provider

Inventory = Mapping[str, Any]
"""An inventory record as Placement has it: total, reserved, min_unit, max_unit, step_size, allocation_ratio."""


@dataclass(frozen=True)
class Observed:
    """A provider as Placement shows it. `generation` guards every write."""

    uuid: str
    name: str
    parent: str
    generation: int
    inventories: Mapping[str, Inventory] = field(default_factory=dict)
    traits: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Written:
    """What we last wrote of a provider (more than one class while an old one is allocated), and how we saw it last."""

    classes: frozenset[str] = frozenset()
    traits: frozenset[str] = frozenset()
    seen: Observed | None = None


@dataclass(frozen=True)
class Create:
    """Make a provider below `parent`."""

    uuid: str
    name: str
    parent: str


@dataclass(frozen=True)
class Move:
    """Give a provider its name and its parent back."""

    uuid: str
    name: str
    parent: str
    was: str


@dataclass(frozen=True)
class SetInventories:
    """Replace all inventories of a provider by these."""

    uuid: str
    name: str
    inventories: Mapping[str, Inventory]
    was: Mapping[str, Inventory]


@dataclass(frozen=True)
class SetTraits:
    """Replace all traits of a provider by these."""

    uuid: str
    name: str
    traits: frozenset[str]
    was: frozenset[str]


@dataclass(frozen=True)
class Delete:
    """Take a provider away; whoever does it makes sure that nothing is allocated there."""

    uuid: str
    name: str


Write = Create | Move | SetInventories | SetTraits | Delete


def plan(
    root: str,
    desired: Mapping[str, Provider],
    written: Mapping[str, Written],
    observed: Mapping[str, Observed],
) -> list[Write]:
    """The writes in order: what is new, what is moved, inventories, traits, and what is to go, last.

    `observed` holds at least every provider of `desired` and `written` that exists. What the third knows and neither of
    the others is somebody else's.
    """
    writes: list[Write] = []
    for uuid, provider in sorted(desired.items()):
        writes += _bring(root, provider, written.get(uuid, Written()), observed.get(uuid))
    gone = sorted(written.keys() - desired.keys())
    writes += [Delete(uuid, observed[uuid].name) for uuid in gone if uuid in observed]
    return writes


def _bring(root: str, wanted: Provider, before: Written, now: Observed | None) -> list[Write]:
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
    """The provider's inventories with ours as it shall be. A class of ours that nothing is left of goes.

    Placement takes no total of 0: such a part keeps the last total, all of it reserved, or has no inventory yet.
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
