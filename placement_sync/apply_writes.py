"""Bring one host's providers in Placement in step with what is desired. It does not use Django: agents use it, too.

Each attempt reads the tree (one call; inventories and traits only of providers whose generation, name or parent
changed), computes the writes (`reconcile`) and sends them with generations. If another writer was faster, it reads
again and retries.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from placement_sync.client import (
    IN_USE_CODES,
    PlacementClient,
    PlacementConflictError,
    PlacementRejectedError,
    PlacementUnavailableError,
)
from placement_sync.errors import PlacementSyncError
from placement_sync.mapping import DesiredProvider
from placement_sync.reconcile import (
    CreateProvider,
    DeleteProvider,
    Inventory,
    MoveProvider,
    ObservedProvider,
    ProviderWrite,
    SetInventories,
    SetTraits,
    WrittenRecord,
    plan_writes,
)

MAX_ATTEMPTS = 8
"""Attempts for one host when another writer changes the same providers."""
FIRST_BACK_OFF_S, MAX_BACK_OFF_S = 0.02, 0.5
"""First and longest back-off between two attempts, in seconds. The pause is random between 0 and the back-off."""
MAX_READ_FOREIGN, MAX_FOREIGN = 8, 64
"""Numbers of providers of others whose inventories and traits are read in one call, and that are remembered for a
host."""


class ProviderMissingError(PlacementSyncError):
    """The host has no compute provider in Placement yet. Nova creates it."""


@dataclass
class SyncOutcome:
    """The result of a synchronization: the writes that were sent (in a dry run: would be sent), and the problems.

    `root` is the uuid of the host's compute provider. `written` maps each provider (uuid) to what has been written to
    it; the caller stores it and passes it to the next call. `foreign` are the other providers in the tree, by uuid, if
    the caller asked for them.
    """

    root: str = ""
    writes: list[ProviderWrite] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    written: dict[str, WrittenRecord] = field(default_factory=dict)
    foreign: dict[str, ObservedProvider] = field(default_factory=dict)


def synchronize_host(
    placement: PlacementClient,
    host: str,
    desired: Mapping[str, DesiredProvider],
    written: Mapping[str, WrittenRecord],
    root: str = "",
    dry_run: bool = False,
    known_foreign: Mapping[str, ObservedProvider] | None = None,
) -> SyncOutcome:
    """Make Placement show `desired` below the compute provider `host`. `root` is that provider's uuid, if it is known.

    With `dry_run`, only read, and return the writes that would be sent. A provider with allocations is not deleted, and
    an allocated resource class is not removed; each becomes a problem in the SyncOutcome. If `known_foreign` is given,
    also return the providers below the compute provider that are neither desired nor written: `known_foreign` are those
    of the last call, and only new and changed ones are read. They are read once, after the writes, and a failure of
    these reads is no error.

    Raises ProviderMissingError; PlacementUnavailableError, PlacementRejectedError, WriterStoppedError;
    PlacementConflictError after MAX_ATTEMPTS attempts. Writes that were sent before an error are found by the next
    call.
    """
    outcome = SyncOutcome(written=dict(written))
    for attempt in range(MAX_ATTEMPTS):
        try:
            outcome.root, tree, observed = _read_observed(placement, host, desired, outcome.written, root)
            outcome.written = _merge_observed(outcome.written, observed, desired)
            writes = plan_writes(outcome.root, desired, outcome.written, observed)
            if dry_run:
                outcome.writes = writes
                break
            outcome.problems.clear()
            for write in writes:
                _apply_write(placement, write, desired, observed, outcome)
            break
        except PlacementConflictError as conflict:
            if attempt == MAX_ATTEMPTS - 1:
                raise
            root = outcome.root
            _drop_seen(outcome.written, conflict)
            time.sleep(random.uniform(0, min(FIRST_BACK_OFF_S * 2**attempt, MAX_BACK_OFF_S)))
    if known_foreign is not None:
        others = [one for one in tree.values() if one.uuid not in observed and one.uuid != outcome.root]
        outcome.foreign = _read_foreign(placement, others, known_foreign)
    return outcome


def _read_observed(
    placement: PlacementClient,
    host: str,
    desired: Mapping[str, DesiredProvider],
    written: Mapping[str, WrittenRecord],
    root: str,
) -> tuple[str, dict[str, ObservedProvider], dict[str, ObservedProvider]]:
    """Return the compute provider's uuid, its tree, and the observed state of the providers in `desired` or `written`.

    A written provider is found in other trees, too; one that is only desired is looked for in the host's tree alone.
    Raises ProviderMissingError.
    """
    tree = placement.read_tree(root) if root else {}
    if root not in tree or tree[root].name != host:
        compute_provider = placement.find_compute_provider(host)
        if compute_provider is None:
            raise ProviderMissingError(f"waiting for compute provider {host}")
        root, tree = compute_provider.uuid, placement.read_tree(compute_provider.uuid)
    observed = {}
    for uuid in desired.keys() | written.keys():
        last_seen = written[uuid].seen if uuid in written else None
        if uuid in tree:
            summary = tree[uuid]
            is_unchanged = last_seen is not None and (last_seen.generation, last_seen.name, last_seen.parent) == (
                summary.generation,
                summary.name,
                summary.parent,
            )
            observed[uuid] = last_seen if last_seen and is_unchanged else placement.read_details(summary)
        elif uuid in written and (elsewhere := placement.read_provider(uuid)):
            observed[uuid] = elsewhere
    return root, tree, observed


def _read_foreign(
    placement: PlacementClient, providers: Iterable[ObservedProvider], known: Mapping[str, ObservedProvider]
) -> dict[str, ObservedProvider]:
    """Return these providers of the tree with their inventories and traits, at most MAX_FOREIGN, by uuid.

    `known` are those of the last look. A provider is read if it is new or its generation changed, at most
    MAX_READ_FOREIGN in one call; the others keep what is known, or are left to the next look. So does a provider that
    changes or disappears while it is read. When Placement is unavailable, no further provider is read.
    """
    foreign: dict[str, ObservedProvider] = {}
    reads = 0
    for provider in sorted(providers, key=lambda one: one.uuid)[:MAX_FOREIGN]:
        current = known.get(provider.uuid)
        if (current is None or current.generation != provider.generation) and reads < MAX_READ_FOREIGN:
            reads += 1
            try:
                current = placement.read_details(provider)
            except (PlacementConflictError, PlacementRejectedError):
                pass  # the next look reads it
            except PlacementUnavailableError:
                reads = MAX_READ_FOREIGN
        if current is not None:
            foreign[provider.uuid] = current
    return foreign


def _merge_observed(
    written: Mapping[str, WrittenRecord],
    observed: Mapping[str, ObservedProvider],
    desired: Mapping[str, DesiredProvider],
) -> dict[str, WrittenRecord]:
    """Return the written state for the next attempt, with what is observed now as `seen`.

    A provider that is neither observed nor desired is dropped. Classes and traits that exist as desired count as ours,
    whoever wrote them: an agent, or a worker that was killed before it could store its result.
    """
    merged: dict[str, WrittenRecord] = {}
    for uuid in written.keys() | observed.keys():
        record, current, provider = written.get(uuid, WrittenRecord()), observed.get(uuid), desired.get(uuid)
        if current and provider:
            classes = record.classes | ({provider.resource_class} & current.inventories.keys())
            record = WrittenRecord(classes, record.traits | (provider.traits & current.traits))
        if current or provider:
            merged[uuid] = replace(record, seen=current)
    return merged


def _drop_seen(written: dict[str, WrittenRecord], conflict: PlacementConflictError) -> None:
    """Drop every `seen` after a conflict, so that the next attempt reads all providers again."""
    for uuid, entry in written.items():
        written[uuid] = replace(entry, seen=None)


def _apply_write(
    placement: PlacementClient,
    write: ProviderWrite,
    desired: Mapping[str, DesiredProvider],
    observed: dict[str, ObservedProvider],
    outcome: SyncOutcome,
) -> None:
    """Send one write. Put the provider's new state into `observed` and `outcome.written`, and the write into
    `outcome.writes` if it changed something. A deleted provider is removed from `outcome.written` only.

    A provider or a resource class with allocations stays and becomes a problem in `outcome`. Raises the errors of
    PlacementClient, among them PlacementConflictError if the provider has changed meanwhile.
    """
    uuid = write.uuid
    if isinstance(write, DeleteProvider):
        _delete_provider(placement, write, outcome)
        return
    provider, current = desired[uuid], observed.get(uuid)
    if isinstance(write, CreateProvider):
        current = _create_provider(placement, write)
    elif isinstance(write, MoveProvider):
        assert current
        generation = placement.move_provider(uuid, write.name, write.parent)
        current = replace(current, name=write.name, parent=write.parent, generation=generation)
    elif isinstance(write, SetInventories):
        assert current
        current = _replace_inventories(placement, write, current, outcome)
    else:
        assert current and isinstance(write, SetTraits)
        generation = placement.set_traits(uuid, current.generation, write.traits)
        current = replace(current, generation=generation, traits=write.traits)
    changed, observed[uuid] = current is not observed.get(uuid), current
    record = outcome.written.get(uuid, WrittenRecord())
    classes = (record.classes | {provider.resource_class}) & current.inventories.keys()
    traits = provider.traits if isinstance(write, SetTraits) or provider.traits <= current.traits else record.traits
    outcome.written[uuid] = WrittenRecord(classes, traits, current)
    if changed:
        outcome.writes.append(write)


def _create_provider(placement: PlacementClient, write: CreateProvider) -> ObservedProvider:
    """Create a provider and return its state, or move the provider that already has this uuid.

    That one may be in another tree or have another name. Raises PlacementConflictError if a provider with another uuid
    has the name.
    """
    try:
        generation = placement.create_provider(write.uuid, write.name, write.parent)
    except PlacementConflictError:
        existing = placement.read_provider(write.uuid)
        if existing is None:
            raise
        generation = placement.move_provider(write.uuid, write.name, write.parent)
        return replace(existing, name=write.name, parent=write.parent, generation=generation)
    return ObservedProvider(write.uuid, write.name, write.parent, generation)


def _replace_inventories(
    placement: PlacementClient, write: SetInventories, current: ObservedProvider, outcome: SyncOutcome
) -> ObservedProvider:
    """Replace the provider's inventories, but keep a class that has allocations, with all of it reserved (a problem).

    Returns the new state, or `current` itself if nothing had to be written.
    """
    inventories, removed_classes = dict(write.inventories), current.inventories.keys() - write.inventories.keys()
    allocated_classes = (
        {name for amounts in placement.read_allocations(write.uuid).values() for name in amounts} & removed_classes
        if removed_classes
        else None
    )
    if allocated_classes:
        kept_inventories: dict[str, Inventory] = {
            name: {**current.inventories[name], "reserved": current.inventories[name]["total"]}
            for name in allocated_classes
        }
        inventories |= kept_inventories
        classes = ", ".join(sorted(allocated_classes))
        outcome.problems.append(f"{write.name} keeps {classes}, fully reserved, because of its allocations")
    if inventories == current.inventories:
        return current
    generation = placement.set_inventories(write.uuid, current.generation, inventories)
    return replace(current, generation=generation, inventories=inventories)


def _delete_provider(placement: PlacementClient, write: DeleteProvider, outcome: SyncOutcome) -> None:
    """Delete the provider; if it has allocations, keep it and add a problem."""
    consumers = placement.read_allocations(write.uuid)
    try:
        if not consumers:
            placement.delete_provider(write.uuid)
    except PlacementConflictError as conflict:
        if conflict.code not in IN_USE_CODES:
            raise
        consumers = placement.read_allocations(write.uuid)
    if consumers:
        consumer_list = ", ".join(sorted(consumers)[:5])
        outcome.problems.append(
            f"{write.name} was removed from its host but stays in Placement, because it is allocated to {consumer_list}"
        )
    else:
        outcome.written.pop(write.uuid, None)
        outcome.writes.append(write)
