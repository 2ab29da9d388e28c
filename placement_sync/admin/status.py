"""How a host stands in Placement: what shall be there beside what was seen at the last look. Called by the console.

Nothing is asked here; `tasks.sync_hosts` with `dry_run` asks, and `said` says the differences of both in one way.
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
    """A provider as it shall be and as it was seen, in words; `drift` is what differs, a line each."""

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
    """Every provider of the host, by name, and what cannot be said in Placement's words; three statements."""
    desired, problems = mapping.desired(repository.parts(host))
    return pairs(desired, repository.written(host), repository.root(host), host.name), problems


def pairs(desired: Mapping[str, Provider], written: Mapping[str, Written], root: str, host: str) -> list[Beside]:
    """The same of plain values."""
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
    if wanted is None:
        return ("nothing: its device is gone",)
    if not wanted.resource_class:
        return ("no inventory",)
    return (_inventory(wanted.resource_class, {"total": wanted.total, "reserved": wanted.reserved}),)


def _inventory(name: str, entry: Inventory) -> str:
    return f"{name} {entry.get('total', 0)}, {entry.get('reserved', 0)} reserved"


def _parent(now: Observed | None, root: str, host: str) -> str:
    if now is None:
        return ""
    return host if now.parent == root else f"another provider, {now.parent}" if now.parent else "none"
