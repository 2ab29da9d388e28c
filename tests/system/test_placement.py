"""Test `placement_sync` with a real Placement: the scenarios that `tests/placement_sync` plays with a fake one."""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from keystoneauth1.identity import V3Password
from keystoneauth1.session import Session

from accelerators.domain.provider_ids import compute_provider_uuid
from placement_sync import client
from placement_sync.apply_writes import ProviderMissingError, SyncOutcome, synchronize_host
from placement_sync.mapping import DeployableRecord, compute_desired_providers
from placement_sync.reconcile import WrittenRecord
from tests.system import environments
from tests.system.keystone import Keystone
from tests.system.placement import Placement

pytestmark = pytest.mark.system


class HostInPlacement:
    """A host with a new name and its compute provider. `written` are the records of its last synchronisation."""

    def __init__(self, there: Placement, session: Session) -> None:
        self.placement, self.session = there, session
        self.host = f"cmp-{uuid.uuid4().hex[:8]}"
        self.root = there.create_compute_provider(self.host)
        self.written: dict[str, WrittenRecord] = {}

    def make_part(
        self, name: str = "FakeDevice", total: int = 16, offered: bool = True, **attributes: str
    ) -> DeployableRecord:
        known = {"rc": "FPGA", "traits1": "CUSTOM_FAKE_DEVICE", "trait2": "OWNER_CYBORG"} | attributes
        return DeployableRecord(f"{self.host}_{name}", "", total, known, offered)

    def sync_parts(self, *parts: DeployableRecord, **more: Any) -> SyncOutcome:
        self.client = client.PlacementClient(self.session, **more)
        outcome = synchronize_host(self.client, self.host, compute_desired_providers(parts)[0], self.written, self.root)
        self.written = outcome.written
        return outcome

    def read_providers(self) -> dict[str, Any]:
        return {name.removeprefix(f"{self.host}_"): one for name, one in self.placement.tree(self.root).items()}

    def provider_uuid(self, name: str = "FakeDevice") -> str:
        return str(compute_provider_uuid(f"{self.host}_{name}"))


@pytest.fixture(scope="module")
def session(keystone: Keystone, placement: Placement) -> Session:
    return Session(V3Password(**keystone.credentials("admin")))


@pytest.fixture
def site(placement: Placement, session: Session) -> Iterator[HostInPlacement]:
    return HostInPlacement(placement, session)


def test_providers_are_created_changed_and_removed_and_unchanged_ones_cost_one_read(site: HostInPlacement) -> None:
    site.sync_parts(site.make_part())
    assert site.client.writes <= 5  # this Placement may not know the custom trait yet, so it is created, too
    shown = site.read_providers()["FakeDevice"]
    fpga = shown["inventories"]["FPGA"]
    assert (fpga["total"], fpga["max_unit"], fpga["reserved"], fpga["allocation_ratio"]) == (16, 16, 0, 1.0)
    assert shown["traits"] == ["CUSTOM_FAKE_DEVICE", "OWNER_CYBORG"]
    assert (shown["uuid"], shown["parent_provider_uuid"]) == (site.provider_uuid(), site.root)

    assert not site.sync_parts(site.make_part()).writes
    assert (site.client.writes, site.client.reads) == (0, 1)

    site.sync_parts(site.make_part(total=4, offered=False), site.make_part("two", rc="CUSTOM_PCI"))
    assert site.read_providers()["FakeDevice"]["inventories"]["FPGA"]["reserved"] == 4
    assert site.read_providers()["two"]["inventories"]["CUSTOM_PCI"]["total"] == 16
    site.sync_parts()
    assert site.read_providers() == {}


def test_an_allocated_provider_stays_fully_reserved_and_is_removed_when_it_is_free(site: HostInPlacement) -> None:
    site.sync_parts(site.make_part())
    consumer = site.placement.allocate(site.provider_uuid(), 3)
    (problem,) = site.sync_parts(site.make_part(rc="CUSTOM_OTHER")).problems
    assert problem.endswith("keeps FPGA, fully reserved, because of its allocations")
    inventories = site.read_providers()["FakeDevice"]["inventories"]
    assert (inventories["FPGA"]["reserved"], inventories["CUSTOM_OTHER"]["total"]) == (16, 16)
    site.sync_parts(site.make_part(rc="CUSTOM_OTHER"))
    assert site.client.writes == 0
    (problem,) = site.sync_parts().problems
    assert consumer in problem
    assert site.placement.call("GET", f"/allocations/{consumer}")["allocations"]
    site.placement.release(consumer)
    site.sync_parts()
    assert site.read_providers() == {}


def test_values_of_others_are_kept_and_changes_to_ours_are_corrected(site: HostInPlacement) -> None:
    site.sync_parts(site.make_part())
    there, path = site.placement, f"/resource_providers/{site.provider_uuid()}"
    now = there.call("GET", path)["generation"]
    fpga = site.read_providers()["FakeDevice"]["inventories"]["FPGA"] | {"total": 99, "allocation_ratio": 3.0}
    body = {"resource_provider_generation": now, "inventories": {"FPGA": fpga, "VGPU": {"total": 2}}}
    now = there.call("PUT", f"{path}/inventories", body)["resource_provider_generation"]
    body = {"resource_provider_generation": now, "traits": ["HW_CPU_X86_AVX2"]}
    there.call("PUT", f"{path}/traits", body)
    site.sync_parts(site.make_part())
    shown = site.read_providers()["FakeDevice"]
    fpga = shown["inventories"]["FPGA"]
    assert (fpga["total"], fpga["allocation_ratio"], shown["inventories"]["VGPU"]["total"]) == (16, 3.0, 2)
    assert shown["traits"] == ["CUSTOM_FAKE_DEVICE", "HW_CPU_X86_AVX2", "OWNER_CYBORG"]
    assert not site.sync_parts(site.make_part()).writes

    there.call("DELETE", path)
    site.sync_parts(site.make_part())
    assert site.read_providers()["FakeDevice"]["inventories"]["FPGA"]["total"] == 16


def test_providers_are_moved_below_the_new_compute_provider_with_their_allocations(site: HostInPlacement) -> None:
    site.sync_parts(site.make_part())
    consumer = site.placement.allocate(site.provider_uuid(), 1)
    other = HostInPlacement(site.placement, site.session)
    synchronize_host(
        client.PlacementClient(site.session),
        other.host,
        compute_desired_providers([site.make_part()])[0],
        {},
        other.root,
    )
    assert site.read_providers() == {}
    assert other.placement.tree(other.root)[f"{site.host}_FakeDevice"]["inventories"]["FPGA"]["total"] == 16
    assert site.placement.call("GET", f"/allocations/{consumer}")["allocations"]


def test_a_missing_compute_provider_and_an_unavailable_placement_raise_their_errors(site: HostInPlacement) -> None:
    with pytest.raises(ProviderMissingError, match="waiting for compute provider nowhere"):
        synchronize_host(
            client.PlacementClient(site.session), "nowhere", compute_desired_providers([site.make_part()])[0], {}
        )
    with pytest.raises(client.PlacementUnavailableError):
        site.sync_parts(site.make_part(), endpoint="http://127.0.0.1:1")
    with pytest.raises(client.PlacementUnavailableError):
        site.sync_parts(site.make_part(), timeout_s=0.0001)
    site.sync_parts(site.make_part())
    assert site.read_providers()["FakeDevice"]["inventories"]["FPGA"]["total"] == 16


def test_the_osc_placement_client_shows_our_providers(site: HostInPlacement) -> None:
    """The openstack command of another project shows tree, inventories and traits as we wrote them."""
    site.sync_parts(site.make_part(), site.make_part("idle", total=4, offered=False))
    command = environments.python("placement").with_name("openstack")
    kept = {"PATH": "/usr/bin:/bin", "PYTHONWARNINGS": "ignore"} | site.placement.keystone.environment("admin")

    def run_provider_command(*words: str) -> Any:
        whole = [command, "--os-placement-api-version", "1.39", "resource", "provider", *words, "-f", "json"]
        return json.loads(subprocess.run(whole, capture_output=True, check=True, env=kept).stdout)

    listed = {one["name"]: one for one in run_provider_command("list", "--in-tree", site.root)}
    assert listed.keys() == {site.host, f"{site.host}_FakeDevice", f"{site.host}_idle"}
    assert listed[f"{site.host}_FakeDevice"]["parent_provider_uuid"] == site.root
    (fpga,) = run_provider_command("inventory", "list", site.provider_uuid())
    assert (fpga["resource_class"], fpga["total"], fpga["reserved"]) == ("FPGA", 16, 0)
    (idle,) = run_provider_command("inventory", "list", site.provider_uuid("idle"))
    assert (idle["total"], idle["reserved"]) == (4, 4)
    assert {one["name"] for one in run_provider_command("trait", "list", site.provider_uuid())} == {
        "CUSTOM_FAKE_DEVICE",
        "OWNER_CYBORG",
    }
