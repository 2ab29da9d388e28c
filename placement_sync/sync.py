"""Bring one host's providers in step with Placement. Free of Django: it ships to compute hosts too.

Called by `tasks`, and by `direct` on compute hosts. Looks (one read of the tree; inventories and traits only where a
generation moved), plans (`reconcile`), writes with generations, and looks again where somebody was faster.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from placement_sync.client import IN_USE, Conflict, Placement
from placement_sync.mapping import Provider
from placement_sync.reconcile import (
    Create,
    Delete,
    Inventory,
    Move,
    Observed,
    SetInventories,
    SetTraits,
    Write,
    Written,
    plan,
)

TRIES = 8
"""How often one host is looked at again because somebody else writes there at the same time."""
PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5


class Waiting(Exception):
    """There is no compute provider of that name yet: Nova makes it."""


@dataclass
class Outcome:
    """What was done to a host, or would have been; `written` is to be remembered for the next time."""

    root: str = ""
    writes: list[Write] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    written: dict[str, Written] = field(default_factory=dict)


def bring(
    placement: Placement,
    host: str,
    desired: Mapping[str, Provider],
    written: Mapping[str, Written],
    root: str = "",
    dry_run: bool = False,
) -> Outcome:
    """Make Placement show `desired` below the compute provider `host`; `root` is its uuid when it is known.

    Raises Waiting, and the client's Away, Rejected and Stopped; what was written until then is found again by the next
    look. A provider that is allocated is not deleted, a class that is allocated not taken away: both are problems.
    """
    outcome = Outcome(written=dict(written))
    for attempt in range(TRIES):
        try:
            outcome.root, observed = _look(placement, host, desired, outcome.written, root)
            outcome.written = _remember(outcome.written, observed, desired)
            writes = plan(outcome.root, desired, outcome.written, observed)
            if dry_run:
                outcome.writes = writes
                return outcome
            outcome.problems.clear()
            for write in writes:
                _apply(placement, write, desired, observed, outcome)
            break
        except Conflict as conflict:
            if attempt == TRIES - 1:
                raise
            root = outcome.root
            _forget(outcome.written, conflict)
            time.sleep(random.uniform(0, min(PAUSE_S * 2**attempt, LONGEST_PAUSE_S)))
    return outcome


def _look(
    placement: Placement, host: str, desired: Mapping[str, Provider], written: Mapping[str, Written], root: str
) -> tuple[str, dict[str, Observed]]:
    """The root's uuid, and every provider there is of those desired or written."""
    tree = placement.tree(root) if root else {}
    if root not in tree or tree[root].name != host:
        found = placement.root(host)
        if found is None:
            raise Waiting(f"waiting for compute provider {host}")
        root, tree = found.uuid, placement.tree(found.uuid)
    observed = {}
    for uuid in desired.keys() | written.keys():
        seen = written[uuid].seen if uuid in written else None
        if uuid in tree:
            bare = tree[uuid]
            same = seen is not None and (seen.generation, seen.name, seen.parent) == (
                bare.generation,
                bare.name,
                bare.parent,
            )
            observed[uuid] = seen if seen and same else placement.filled(bare)
        elif uuid in written and (elsewhere := placement.provider(uuid)):
            observed[uuid] = elsewhere
    return root, observed


def _remember(
    written: Mapping[str, Written], observed: Mapping[str, Observed], desired: Mapping[str, Provider]
) -> dict[str, Written]:
    """What we wrote, with how it is seen now; what is neither there nor desired is forgotten.

    What is there as it is desired is ours, whoever wrote it: an agent, or a worker that did not live to tell.
    """
    remembered: dict[str, Written] = {}
    for uuid in written.keys() | observed.keys():
        before, now, wanted = written.get(uuid, Written()), observed.get(uuid), desired.get(uuid)
        if now and wanted:
            classes = before.classes | ({wanted.resource_class} & now.inventories.keys())
            before = Written(classes, before.traits | (wanted.traits & now.traits))
        if now or wanted:
            remembered[uuid] = replace(before, seen=now)
    return remembered


def _forget(written: dict[str, Written], conflict: Conflict) -> None:
    """After a conflict nothing that was seen counts."""
    for uuid, entry in written.items():
        written[uuid] = replace(entry, seen=None)


def _apply(
    placement: Placement,
    write: Write,
    desired: Mapping[str, Provider],
    observed: dict[str, Observed],
    outcome: Outcome,
) -> None:
    uuid = write.uuid
    if isinstance(write, Delete):
        _delete(placement, write, outcome)
        return
    wanted, now = desired[uuid], observed.get(uuid)
    if isinstance(write, Create):
        now = _create(placement, write)
    elif isinstance(write, Move):
        assert now
        generation = placement.move(uuid, write.name, write.parent)
        now = replace(now, name=write.name, parent=write.parent, generation=generation)
    elif isinstance(write, SetInventories):
        assert now
        now = _inventories(placement, write, now, outcome)
    else:
        assert now and isinstance(write, SetTraits)
        generation = placement.set_traits(uuid, now.generation, write.traits)
        now = replace(now, generation=generation, traits=write.traits)
    changed, observed[uuid] = now is not observed.get(uuid), now
    before = outcome.written.get(uuid, Written())
    classes = (before.classes | {wanted.resource_class}) & now.inventories.keys()
    traits = wanted.traits if isinstance(write, SetTraits) or wanted.traits <= now.traits else before.traits
    outcome.written[uuid] = Written(classes, traits, now)
    if changed:
        outcome.writes.append(write)


def _create(placement: Placement, write: Create) -> Observed:
    """A provider of that id may live in another tree, or one of that name have another id."""
    try:
        generation = placement.create(write.uuid, write.name, write.parent)
    except Conflict:
        there = placement.provider(write.uuid)
        if there is None:
            raise
        generation = placement.move(write.uuid, write.name, write.parent)
        return replace(there, name=write.name, parent=write.parent, generation=generation)
    return Observed(write.uuid, write.name, write.parent, generation)


def _inventories(placement: Placement, write: SetInventories, now: Observed, outcome: Outcome) -> Observed:
    """A class that is allocated stays, all of it reserved; `now` itself when nothing else is to be written."""
    inventories, gone = dict(write.inventories), now.inventories.keys() - write.inventories.keys()
    held = {name for amounts in placement.allocations(write.uuid).values() for name in amounts} & gone if gone else None
    if held:
        kept: dict[str, Inventory] = {
            name: {**now.inventories[name], "reserved": now.inventories[name]["total"]} for name in held
        }
        inventories |= kept
        outcome.problems.append(f"{write.name}: {', '.join(sorted(held))} is allocated, so it stays, all reserved")
    if inventories == now.inventories:
        return now
    generation = placement.set_inventories(write.uuid, now.generation, inventories)
    return replace(now, generation=generation, inventories=inventories)


def _delete(placement: Placement, write: Delete, outcome: Outcome) -> None:
    consumers = placement.allocations(write.uuid)
    try:
        if not consumers:
            placement.delete(write.uuid)
    except Conflict as conflict:
        if conflict.code not in IN_USE:
            raise
        consumers = placement.allocations(write.uuid)
    if consumers:
        who = ", ".join(sorted(consumers)[:5])
        outcome.problems.append(f"{write.name} is gone from its host and allocated to {who}: the provider stays")
    else:
        outcome.written.pop(write.uuid, None)
        outcome.writes.append(write)
