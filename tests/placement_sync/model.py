"""A model of Placement in memory with the methods of `placement_sync.client.PlacementClient`, for tests without HTTP.

Generations, conflicts and allocations behave as those of the real Placement; the system lane plays the same scenarios
with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from placement_sync.allocations import ConsumerAllocations
from placement_sync.client import PlacementConflictError
from placement_sync.reconcile import Inventory, ObservedProvider

DEFAULTS = {"reserved": 0, "min_unit": 1, "max_unit": 2147483647, "step_size": 1, "allocation_ratio": 1.0}
CONCURRENT_UPDATE = PlacementConflictError("placement.concurrent_update", "somebody was faster")


@dataclass
class PlacementModel:
    """The state of the model. `allocated` maps (provider, class) to the amount of each consumer.

    `before_write` is called before every write is carried out. `reads` and `writes` count the calls.
    """

    providers: dict[str, ObservedProvider] = field(default_factory=dict)
    allocated: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)
    consumer_generations: dict[str, int] = field(default_factory=dict)
    before_write: Callable[[], None] = lambda: None
    reads: int = 0
    writes: int = 0

    def find_compute_provider(self, name: str) -> ObservedProvider | None:
        self.reads += 1
        return next((one for one in self.providers.values() if one.name == name), None)

    def read_tree(self, root: str) -> dict[str, ObservedProvider]:
        self.reads += 1
        inside = {uuid: one for uuid, one in self.providers.items() if root in (uuid, one.parent)}
        return {uuid: ObservedProvider(uuid, one.name, one.parent, one.generation) for uuid, one in inside.items()}

    def read_provider(self, uuid: str) -> ObservedProvider | None:
        self.reads += 1
        return self.providers.get(uuid)

    def read_details(self, bare: ObservedProvider) -> ObservedProvider:
        self.reads += 2
        return self.providers[bare.uuid]

    def read_allocations(self, uuid: str) -> dict[str, dict[str, int]]:
        self.reads += 1
        found: dict[str, dict[str, int]] = {}
        for (provider, name), consumers in self.allocated.items():
            if provider == uuid:
                for consumer, amount in consumers.items():
                    found.setdefault(consumer, {})[name] = amount
        return found

    def read_consumer(self, uuid: str) -> ConsumerAllocations:
        self.reads += 1
        return self._consumer(uuid)

    def replace_allocations(self, uuid: str, body: Mapping[str, Any]) -> None:
        """Replace all allocations of a consumer.

        Raises PlacementConflictError if the consumer has another generation, or if the amounts exceed the capacity.
        """
        self._count_write()
        before = self._consumer(uuid)
        if before.generation != body["consumer_generation"]:
            raise CONCURRENT_UPDATE
        wanted = {(rp, name): n for rp, one in body["allocations"].items() for name, n in one["resources"].items()}
        for key, amount in wanted.items():
            self._refuse_over_capacity(uuid, *key, amount)
        for consumers in self.allocated.values():
            consumers.pop(uuid, None)
        for key, amount in wanted.items():
            self.allocated.setdefault(key, {})[uuid] = amount
        self.consumer_generations[uuid] = (before.generation or 0) + 1
        for provider in {provider for provider, _ in wanted} & self.providers.keys():
            self._raise_generation(provider)

    def _consumer(self, uuid: str) -> ConsumerAllocations:
        has: dict[str, dict[str, int]] = {}
        for (provider, name), consumers in self.allocated.items():
            if amount := consumers.get(uuid):
                has.setdefault(provider, {})[name] = amount
        return (
            ConsumerAllocations(uuid, self.consumer_generations.setdefault(uuid, 1), has, "p1", "u1")
            if has
            else ConsumerAllocations(uuid)
        )

    def _refuse_over_capacity(self, uuid: str, provider: str, name: str, amount: int) -> None:
        entry = self.providers[provider].inventories.get(name)
        consumers = self.allocated.get((provider, name), {})
        used = sum(n for who, n in consumers.items() if who != uuid) + amount
        if entry and used > entry["total"] - entry["reserved"] and amount > consumers.get(uuid, 0):
            raise PlacementConflictError(
                "placement.undefined_code", f"Unable to allocate inventory: {name} is over capacity"
            )

    def create_provider(self, uuid: str, name: str, parent: str) -> int:
        self._count_write()
        if uuid in self.providers or any(one.name == name for one in self.providers.values()):
            raise PlacementConflictError("", "there is one")
        self.providers[uuid] = ObservedProvider(uuid, name, parent, 0)
        return 0

    def move_provider(self, uuid: str, name: str, parent: str) -> int:
        self._count_write()
        self.providers[uuid] = replace(self.providers[uuid], name=name, parent=parent)
        return self._raise_generation(uuid)

    def set_inventories(self, uuid: str, generation: int, inventories: Mapping[str, Inventory]) -> int:
        now = self._write_at_generation(uuid, generation)
        for name in now.inventories.keys() - inventories.keys():
            if self.allocated.get((uuid, name)):
                raise PlacementConflictError("placement.inventory.inuse", f"{name} is in use")
        whole = {name: {**DEFAULTS, **entry} for name, entry in inventories.items()}
        self.providers[uuid] = replace(self.providers[uuid], inventories=whole)
        return self._raise_generation(uuid)

    def set_traits(self, uuid: str, generation: int, traits: Iterable[str]) -> int:
        self._write_at_generation(uuid, generation)
        self.providers[uuid] = replace(self.providers[uuid], traits=frozenset(traits))
        return self._raise_generation(uuid)

    def delete_provider(self, uuid: str) -> None:
        self._count_write()
        if self.read_allocations(uuid):
            raise PlacementConflictError("placement.resource_provider.inuse", "it is allocated")
        self.providers.pop(uuid, None)

    def _count_write(self) -> None:
        self.writes += 1
        self.before_write()

    def _write_at_generation(self, uuid: str, generation: int) -> ObservedProvider:
        self._count_write()
        if uuid not in self.providers or self.providers[uuid].generation != generation:
            raise CONCURRENT_UPDATE
        return self.providers[uuid]

    def _raise_generation(self, uuid: str) -> int:
        now = self.providers[uuid]
        self.providers[uuid] = replace(now, generation=now.generation + 1)
        return now.generation + 1
