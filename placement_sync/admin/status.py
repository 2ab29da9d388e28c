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
from placement_sync.mapping import Provider
from placement_sync.reconcile import Inventory, Observed, Written, plan

NOTHING_SEEN = "was not seen in Placement yet"


@dataclass(frozen=True)
class Beside:
    """A provider as desired and as observed, in words. `drift` has one line per difference."""

    uuid: str
    name: str
    wanted: tuple[str, ...]
    seen: tuple[str, ...]
    wanted_traits: tuple[str, ...]
    seen_traits: tuple[str, ...]
    parent: str
    generation: int | None
    drift: tuple[str, ...]


def beside(host: Host) -> tuple[list[Beside], list[str]]:
    """Return all providers of the host, ordered by name, and the problems of its deployables. Three statements."""
    desired, problems = mapping.desired(repository.parts(host))
    return pairs(desired, repository.written(host), repository.root(host), host.name), problems


def pairs(desired: Mapping[str, Provider], written: Mapping[str, Written], root: str, host: str) -> list[Beside]:
    """Return the providers as desired and as observed, ordered by name. Pure."""
    observed = {uuid: entry.seen for uuid, entry in written.items() if entry.seen}
    drift: dict[str, list[str]] = {}
    for write in plan(root, desired, written, observed):
        lines = (line.replace(f" {write.name}: ", " ", 1) for line in describe.lines([write]))
        drift.setdefault(write.uuid, []).extend(lines)
    found = []
    for uuid in desired.keys() | written.keys():
        wanted, now = desired.get(uuid), observed.get(uuid)
        found.append(
            Beside(
                uuid=uuid,
                name=wanted.name if wanted else now.name if now else uuid,
                wanted=_wanted(wanted),
                seen=tuple(_inventory(*entry) for entry in sorted(now.inventories.items())) if now else (NOTHING_SEEN,),
                wanted_traits=tuple(sorted(wanted.traits)) if wanted else (),
                seen_traits=tuple(sorted(now.traits)) if now else (),
                parent=_parent(now, root, host),
                generation=now.generation if now else None,
                drift=tuple(drift.get(uuid, ())),
            )
        )
    return sorted(found, key=lambda one: (one.name, one.uuid))


def _wanted(wanted: Provider | None) -> tuple[str, ...]:
    """Describe the desired inventory."""
    if wanted is None:
        return ("nothing: its device was removed",)
    if not wanted.resource_class:
        return ("no inventory",)
    return (_inventory(wanted.resource_class, {"total": wanted.total, "reserved": wanted.reserved}),)


def _inventory(name: str, entry: Inventory) -> str:
    return f"{name} {entry.get('total', 0)}, {entry.get('reserved', 0)} reserved"


def _parent(now: Observed | None, root: str, host: str) -> str:
    """Describe the observed parent: the host's name, another provider, or none."""
    if now is None:
        return ""
    return host if now.parent == root else f"another provider, {now.parent}" if now.parent else "none"
