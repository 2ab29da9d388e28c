"""Bring one host's providers in Placement in step with what is desired. Free of Django: agents use it, too.

Each attempt reads the tree (one call; inventories and traits only of providers whose generation, name or parent
changed), computes the writes (`reconcile`) and sends them with generations. If another writer was faster, it reads
again and retries.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from placement_sync.client import IN_USE, Placement, PlacementConflictError
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
"""Attempts for one host when another writer changes the same providers."""
PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5
"""First and longest back-off between two attempts, in seconds. The pause is random between 0 and the back-off."""


class ProviderMissingError(Exception):
    """The host has no compute provider in Placement yet. Nova creates it."""


@dataclass
class Outcome:
    """The writes that were sent (in a dry run: would be sent), and the problems; store `written` for the next call."""

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
    """Make Placement show `desired` below the compute provider `host`. `root` is that provider's uuid, if it is known.

    With `dry_run`, only read, and return the writes that would be sent. A provider with allocations is not deleted, and
    an allocated resource class is not removed; each becomes a problem in the SyncOutcome.

    Raises ProviderMissingError; PlacementUnavailableError, PlacementRejectedError, WriterStoppedError;
    PlacementConflictError after MAX_ATTEMPTS attempts. Writes that were sent before an error are found by the next
    call.
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
        except PlacementConflictError as conflict:
            if attempt == TRIES - 1:
                raise
            root = outcome.root
            _forget(outcome.written, conflict)
            time.sleep(random.uniform(0, min(PAUSE_S * 2**attempt, LONGEST_PAUSE_S)))
    return outcome


def _look(
    placement: Placement, host: str, desired: Mapping[str, Provider], written: Mapping[str, Written], root: str
) -> tuple[str, dict[str, Observed]]:
    """Return the compute provider's uuid, and the observed state of the providers in `desired` or `written`.

    A written provider is found in other trees, too; one that is only desired is looked for in the host's tree alone.
    Raises ProviderMissingError.
    """
    tree = placement.tree(root) if root else {}
    if root not in tree or tree[root].name != host:
        found = placement.root(host)
        if found is None:
            raise ProviderMissingError(f"waiting for compute provider {host}")
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
    """Return the written state for the next attempt, with what is observed now as `seen`.

    A provider that is neither observed nor desired is dropped. Classes and traits that exist as desired count as ours,
    whoever wrote them: an agent, or a worker that was killed before it could store its result.
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


def _forget(written: dict[str, Written], conflict: PlacementConflictError) -> None:
    """Drop every `seen` after a conflict, so that the next attempt reads all providers again."""
    for uuid, entry in written.items():
        written[uuid] = replace(entry, seen=None)


def _apply(
    placement: Placement,
    write: Write,
    desired: Mapping[str, Provider],
    observed: dict[str, Observed],
    outcome: Outcome,
) -> None:
    """Send one write and update `observed` and `outcome`."""
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
    """Create a provider and return its state, or move the provider that already has this uuid.

    That one may be in another tree or have another name. Raises PlacementConflictError if a provider with another uuid
    has the name.
    """
    try:
        generation = placement.create(write.uuid, write.name, write.parent)
    except PlacementConflictError:
        there = placement.provider(write.uuid)
        if there is None:
            raise
        generation = placement.move(write.uuid, write.name, write.parent)
        return replace(there, name=write.name, parent=write.parent, generation=generation)
    return Observed(write.uuid, write.name, write.parent, generation)


def _inventories(placement: Placement, write: SetInventories, now: Observed, outcome: Outcome) -> Observed:
    """Replace the provider's inventories, but keep a class that has allocations, with all of it reserved (a problem).

    Returns the new state, or `current` itself if nothing had to be written.
    """
    inventories, gone = dict(write.inventories), now.inventories.keys() - write.inventories.keys()
    held = {name for amounts in placement.allocations(write.uuid).values() for name in amounts} & gone if gone else None
    if held:
        kept: dict[str, Inventory] = {
            name: {**now.inventories[name], "reserved": now.inventories[name]["total"]} for name in held
        }
        inventories |= kept
        classes = ", ".join(sorted(held))
        outcome.problems.append(f"{write.name} keeps {classes}, fully reserved, because of its allocations")
    if inventories == now.inventories:
        return now
    generation = placement.set_inventories(write.uuid, now.generation, inventories)
    return replace(now, generation=generation, inventories=inventories)


def _delete(placement: Placement, write: Delete, outcome: Outcome) -> None:
    """Delete the provider; if it has allocations, keep it and add a problem."""
    consumers = placement.allocations(write.uuid)
    try:
        if not consumers:
            placement.delete(write.uuid)
    except PlacementConflictError as conflict:
        if conflict.code not in IN_USE:
            raise
        consumers = placement.allocations(write.uuid)
    if consumers:
        who = ", ".join(sorted(consumers)[:5])
        outcome.problems.append(
            f"{write.name} was removed from its host but stays in Placement, because it is allocated to {who}"
        )
    else:
        outcome.written.pop(write.uuid, None)
        outcome.writes.append(write)
