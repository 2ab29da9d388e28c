"""Describe a host's providers for the console: the desired state beside the one observed at the last look.

Only the database is read. `providers.sync_hosts` with `dry_run` reads from Placement instead; both describe differences
with `describe.describe_writes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from accelerators.models import Host
from placement_sync import mapping
from placement_sync.admin import describe
from placement_sync.jobs import repository
from placement_sync.mapping import DesiredProvider
from placement_sync.reconcile import Inventory, ObservedProvider, WrittenRecord, plan_writes

NOT_SEEN_TEXT = "was not seen in Placement yet"


@dataclass(frozen=True)
class ProviderComparison:
    """A provider as desired and as observed, in words. `drift` has one line per difference.

    `generation` is None if Placement has not shown the provider yet.
    """

    uuid: str
    name: str
    desired: tuple[str, ...]
    observed: tuple[str, ...]
    desired_traits: tuple[str, ...]
    observed_traits: tuple[str, ...]
    parent: str
    generation: int | None
    drift: tuple[str, ...]


def load_comparisons(host: Host) -> tuple[list[ProviderComparison], list[str]]:
    """Return all providers of the host, ordered by name, and the problems of its deployables.

    Reads only the database, with three statements; see `compare_providers`.
    """
    desired, problems = mapping.compute_desired_providers(repository.load_deployables(host))
    root, _ = repository.load_root_and_foreign(host)
    return compare_providers(desired, repository.load_written(host), root, host.name), problems


def compare_providers(
    desired: Mapping[str, DesiredProvider], written: Mapping[str, WrittenRecord], root: str, host: str
) -> list[ProviderComparison]:
    """Compare each provider in `desired` or `written` (by uuid) with its state in Placement as it was last read
    (`WrittenRecord.seen`); order by name. Reads and writes nothing. `root` is the uuid of the host's compute provider
    ('' if it is not known), the wanted parent of all providers; `host` is the host's name, which describes that parent.
    """
    observed = {uuid: entry.seen for uuid, entry in written.items() if entry.seen}
    drift: dict[str, list[str]] = {}
    for write in plan_writes(root, desired, written, observed):
        lines = (line.replace(f" {write.name}: ", " ", 1) for line in describe.describe_writes([write]))
        drift.setdefault(write.uuid, []).extend(lines)
    comparisons = []
    for uuid in desired.keys() | written.keys():
        provider, seen = desired.get(uuid), observed.get(uuid)
        comparisons.append(
            ProviderComparison(
                uuid=uuid,
                name=provider.name if provider else seen.name if seen else uuid,
                desired=_describe_desired(provider),
                observed=tuple(_describe_inventory(*entry) for entry in sorted(seen.inventories.items()))
                if seen
                else (NOT_SEEN_TEXT,),
                desired_traits=tuple(sorted(provider.traits)) if provider else (),
                observed_traits=tuple(sorted(seen.traits)) if seen else (),
                parent=_describe_parent(seen, root, host),
                generation=seen.generation if seen else None,
                drift=tuple(drift.get(uuid, ())),
            )
        )
    return sorted(comparisons, key=lambda one: (one.name, one.uuid))


def _describe_desired(desired: DesiredProvider | None) -> tuple[str, ...]:
    """Return the desired inventory in words; `desired` is None if the device was removed."""
    if desired is None:
        return ("nothing: its device was removed",)
    if not desired.resource_class:
        return ("no inventory",)
    return (_describe_inventory(desired.resource_class, {"total": desired.total, "reserved": desired.reserved}),)


def _describe_inventory(name: str, entry: Inventory) -> str:
    """Return the total and the reserved amount of a resource class as text."""
    return f"{name} {entry.get('total', 0)}, {entry.get('reserved', 0)} reserved"


def _describe_parent(observed: ObservedProvider | None, root: str, host: str) -> str:
    """Return the observed parent in words: the host's name, another provider, or "none".

    '' if the provider was not observed.
    """
    if observed is None:
        return ""
    return host if observed.parent == root else f"another provider, {observed.parent}" if observed.parent else "none"
