"""`placement_sync` against a real Placement: the stories of `tests/placement`, where a model cannot lie."""

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
from placement_sync.mapping import DeployableRecord, compute_desired_providers
from placement_sync.reconcile import WrittenRecord
from placement_sync.sync import ProviderMissingError, SyncOutcome, synchronize_host
from tests.system import environments
from tests.system.keystone import Keystone
from tests.system.placement import Placement

pytestmark = pytest.mark.system


class Site:
    """One host of its own, its compute provider, and what was written for it."""

    def __init__(self, there: Placement, session: Session) -> None:
        self.there, self.session = there, session
        self.host = f"cmp-{uuid.uuid4().hex[:8]}"
        self.root = there.compute(self.host)
        self.written: dict[str, WrittenRecord] = {}

    def part(
        self, name: str = "FakeDevice", total: int = 16, offered: bool = True, **attributes: str
    ) -> DeployableRecord:
        known = {"rc": "FPGA", "traits1": "CUSTOM_FAKE_DEVICE", "trait2": "OWNER_CYBORG"} | attributes
        return DeployableRecord(f"{self.host}_{name}", "", total, known, offered)

    def sync(self, *parts: DeployableRecord, **more: Any) -> SyncOutcome:
        self.asked = client.PlacementClient(self.session, **more)
        outcome = synchronize_host(self.asked, self.host, compute_desired_providers(parts)[0], self.written, self.root)
        self.written = outcome.written
        return outcome

    def show(self) -> dict[str, Any]:
        return {name.removeprefix(f"{self.host}_"): one for name, one in self.there.tree(self.root).items()}

    def uuid(self, name: str = "FakeDevice") -> str:
        return str(compute_provider_uuid(f"{self.host}_{name}"))


@pytest.fixture(scope="module")
def session(keystone: Keystone, placement: Placement) -> Session:
    return Session(V3Password(**keystone.credentials("admin")))


@pytest.fixture
def site(placement: Placement, session: Session) -> Iterator[Site]:
    return Site(placement, session)


def test_new_unchanged_changed_and_removed(site: Site) -> None:
    site.sync(site.part())
    assert site.asked.writes <= 5  # the trait too is new to this Placement
    shown = site.show()["FakeDevice"]
    fpga = shown["inventories"]["FPGA"]
    assert (fpga["total"], fpga["max_unit"], fpga["reserved"], fpga["allocation_ratio"]) == (16, 16, 0, 1.0)
    assert shown["traits"] == ["CUSTOM_FAKE_DEVICE", "OWNER_CYBORG"]
    assert (shown["uuid"], shown["parent_provider_uuid"]) == (site.uuid(), site.root)

    assert not site.sync(site.part()).writes
    assert (site.asked.writes, site.asked.reads) == (0, 1)

    site.sync(site.part(total=4, offered=False), site.part("two", rc="CUSTOM_PCI"))
    assert site.show()["FakeDevice"]["inventories"]["FPGA"]["reserved"] == 4
    assert site.show()["two"]["inventories"]["CUSTOM_PCI"]["total"] == 16
    site.sync()
    assert site.show() == {}


def test_what_is_allocated_stays_and_goes_when_it_is_free(site: Site) -> None:
    site.sync(site.part())
    consumer = site.there.allocate(site.uuid(), 3)
    (problem,) = site.sync(site.part(rc="CUSTOM_OTHER")).problems
    assert problem.endswith("keeps FPGA, fully reserved, because of its allocations")
    inventories = site.show()["FakeDevice"]["inventories"]
    assert (inventories["FPGA"]["reserved"], inventories["CUSTOM_OTHER"]["total"]) == (16, 16)
    site.sync(site.part(rc="CUSTOM_OTHER"))
    assert site.asked.writes == 0
    (problem,) = site.sync().problems
    assert consumer in problem
    assert site.there.call("GET", f"/allocations/{consumer}")["allocations"]
    site.there.release(consumer)
    site.sync()
    assert site.show() == {}


def test_what_others_wrote_is_kept_and_what_they_broke_is_mended(site: Site) -> None:
    site.sync(site.part())
    there, path = site.there, f"/resource_providers/{site.uuid()}"
    now = there.call("GET", path)["generation"]
    fpga = site.show()["FakeDevice"]["inventories"]["FPGA"] | {"total": 99, "allocation_ratio": 3.0}
    body = {"resource_provider_generation": now, "inventories": {"FPGA": fpga, "VGPU": {"total": 2}}}
    now = there.call("PUT", f"{path}/inventories", body)["resource_provider_generation"]
    body = {"resource_provider_generation": now, "traits": ["HW_CPU_X86_AVX2"]}
    there.call("PUT", f"{path}/traits", body)
    site.sync(site.part())
    shown = site.show()["FakeDevice"]
    fpga = shown["inventories"]["FPGA"]
    assert (fpga["total"], fpga["allocation_ratio"], shown["inventories"]["VGPU"]["total"]) == (16, 3.0, 2)
    assert shown["traits"] == ["CUSTOM_FAKE_DEVICE", "HW_CPU_X86_AVX2", "OWNER_CYBORG"]
    assert not site.sync(site.part()).writes

    there.call("DELETE", path)
    site.sync(site.part())
    assert site.show()["FakeDevice"]["inventories"]["FPGA"]["total"] == 16


def test_a_host_that_moved_takes_its_providers_along(site: Site) -> None:
    site.sync(site.part())
    consumer = site.there.allocate(site.uuid(), 1)
    other = Site(site.there, site.session)
    synchronize_host(
        client.PlacementClient(site.session), other.host, compute_desired_providers([site.part()])[0], {}, other.root
    )
    assert site.show() == {}
    assert other.there.tree(other.root)[f"{site.host}_FakeDevice"]["inventories"]["FPGA"]["total"] == 16
    assert site.there.call("GET", f"/allocations/{consumer}")["allocations"]


def test_no_compute_provider_and_no_placement(site: Site) -> None:
    with pytest.raises(ProviderMissingError, match="waiting for compute provider nowhere"):
        synchronize_host(
            client.PlacementClient(site.session), "nowhere", compute_desired_providers([site.part()])[0], {}
        )
    with pytest.raises(client.PlacementUnavailableError):
        site.sync(site.part(), endpoint="http://127.0.0.1:1")
    with pytest.raises(client.PlacementUnavailableError):
        site.sync(site.part(), timeout_s=0.0001)
    site.sync(site.part())
    assert site.show()["FakeDevice"]["inventories"]["FPGA"]["total"] == 16


def test_osc_placement_shows_what_we_wrote(site: Site) -> None:
    """Somebody else's client looks from outside."""
    site.sync(site.part(), site.part("idle", total=4, offered=False))
    command = environments.python("placement").with_name("openstack")
    kept = {"PATH": "/usr/bin:/bin", "PYTHONWARNINGS": "ignore"} | site.there.keystone.environment("admin")

    def said(*words: str) -> Any:
        whole = [command, "--os-placement-api-version", "1.39", "resource", "provider", *words, "-f", "json"]
        return json.loads(subprocess.run(whole, capture_output=True, check=True, env=kept).stdout)

    listed = {one["name"]: one for one in said("list", "--in-tree", site.root)}
    assert listed.keys() == {site.host, f"{site.host}_FakeDevice", f"{site.host}_idle"}
    assert listed[f"{site.host}_FakeDevice"]["parent_provider_uuid"] == site.root
    (fpga,) = said("inventory", "list", site.uuid())
    assert (fpga["resource_class"], fpga["total"], fpga["reserved"]) == ("FPGA", 16, 0)
    (idle,) = said("inventory", "list", site.uuid("idle"))
    assert (idle["total"], idle["reserved"]) == (4, 4)
    assert {one["name"] for one in said("trait", "list", site.uuid())} == {"CUSTOM_FAKE_DEVICE", "OWNER_CYBORG"}
