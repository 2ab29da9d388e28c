"""The services of OpenStack that the product asks about instances and tells about devices: a fake Nova, and the model
of Placement behind HTTP."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from placement_sync.reconcile import ObservedProvider
from tests.support.nova import FakeNova, running_nova
from tests.support.placement import ServedPlacement, serving_placement


@dataclass
class SimulatedCloud:
    """Nova and Placement, in which tests create compute hosts and running instances."""

    nova: FakeNova
    placement: ServedPlacement

    @property
    def settings(self) -> dict[str, str]:
        """Return the settings with which a product uses these services."""
        return {"CYBORG_NOVA_ENDPOINT": self.nova.url} | self.placement.environ

    def create_compute_provider(self, host: str) -> str:
        """Create the provider of a compute host in Placement, as Nova does; return its uuid."""
        provider = str(uuid.uuid4())
        self.placement.session.model.providers[provider] = ObservedProvider(provider, host, "", 0)
        return provider

    def boot_instance(self, host: str, provider: str) -> str:
        """Create a running instance on a compute host, in Nova and with allocations in Placement; return its uuid."""
        instance = str(uuid.uuid4())
        self.nova.servers.append(instance)
        self.nova.known[instance] = 200
        self.nova.shown[instance] = ("ACTIVE", host)
        self.placement.session.model.allocated.setdefault((provider, "VCPU"), {})[instance] = 4
        return instance

    def read_claims(self, instance: str) -> list[dict[str, int]]:
        """Return what an instance has allocated in Placement, provider by provider, without its VCPUs."""
        found = self.placement.session.model.read_consumer(instance).allocations
        return [amounts for amounts in found.values() if "VCPU" not in amounts]


@contextmanager
def running_cloud() -> Iterator[SimulatedCloud]:
    """Run both services on free ports of 127.0.0.1 for the block."""
    with running_nova() as nova, serving_placement() as placement:
        yield SimulatedCloud(nova, placement)
