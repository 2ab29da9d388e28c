"""Tests of Nova's own accelerator client with the product: all its calls for a server (contract section 7.1)."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.system.clients.cloud import GROUPS, HANDLES, KeystoneCloud
from tests.system.clients.lines import ClientProcess

pytestmark = pytest.mark.system


@dataclass
class NovaClient:
    """Nova's client, acting for a user of `project`."""

    cloud: KeystoneCloud
    partner: ClientProcess
    project: str

    def call_raw(self, method: str, *arguments: Any) -> Any:
        """Call a method of Nova's client as `member`; return {"result"}, or {"error", "text"} of its exception."""
        urls = {f"{kind}URL": self.cloud.endpoint for kind in ("public", "internal", "admin")}
        catalogue = [{"type": "accelerator", "name": "cyborg", "endpoints": [urls | {"region": "RegionOne"}]}]
        user = {"token": self.cloud.token("member"), "project": self.project, "catalogue": catalogue}
        return self.partner.ask(method=method, arguments=arguments, **user)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of Nova's client and return its result; fail if it raised an exception."""
        answer = self.call_raw(method, *arguments)
        assert "result" in answer, answer
        return answer["result"]

    def create_bound_requests(self, profile: str, instance: str) -> list[dict[str, Any]]:
        """Create requests for a profile and bind them to an instance; return them as they were before the bind."""
        amount = len(
            self.cloud.http("member", "GET", f"/device_profiles?name={profile}").json()["device_profiles"][0]["groups"]
        )
        providers = {f"device_profile_{index}": [self.cloud.provider] for index in range(amount)}
        made = self.call("create_arqs_and_match_resource_providers", profile, providers)
        self.call("bind_arqs", {arq["uuid"]: self.bind_target(instance) for arq in made})
        return list(made)

    def bind_target(self, instance: str) -> dict[str, str]:
        """Return the host, provider and instance to which a request is to be bound."""
        return {"hostname": self.cloud.host, "device_rp_uuid": self.cloud.provider, "instance_uuid": instance}


@pytest.fixture
def compute(cloud: KeystoneCloud, nova: ClientProcess) -> NovaClient:
    """Nova acting for `member`."""
    return NovaClient(cloud, nova, cloud.project_id())


@pytest.fixture
def profile(cloud: KeystoneCloud, named: Callable[[str], str]) -> Iterator[str]:
    """The name of a profile of two groups, one unit each."""
    made = cloud.create_profile(named("nova"), [*GROUPS, {"resources:FPGA": "1"}])
    yield made["name"]
    cloud.http("admin", "DELETE", f"/device_profiles/{made['uuid']}")


def test_C1_nova_reads_the_groups_of_a_device_profile(compute: NovaClient, profile: str) -> None:
    groups = compute.call("get_device_profile_groups", profile)
    assert groups == [*GROUPS, {"resources:FPGA": "1"}]
    assert compute.call("get_device_request_groups", groups, None) == [
        ["device_profile_0", {"FPGA": 1}, ["CUSTOM_FAKE_DEVICE"]],
        ["device_profile_1", {"FPGA": 1}, []],
    ]
    assert compute.call_raw("get_device_profile_groups", "nope")["error"] == "DeviceProfileError"


def test_C1_nova_creates_binds_reads_and_deletes_requests_of_an_instance(compute: NovaClient, profile: str) -> None:
    instance = str(uuid.uuid4())
    made = compute.create_bound_requests(profile, instance)
    assert [arq["device_profile_group_id"] for arq in made] == [0, 1]
    seen = compute.call("get_arqs_for_instance", instance, True)
    assert [arq["uuid"] for arq in seen] == [arq["uuid"] for arq in made]
    for arq in seen:
        assert (arq["state"], arq["attach_handle_type"]) == ("Bound", "TEST_PCI")
        assert set(arq["attach_handle_info"]) >= {"domain", "bus", "device", "function"}
    assert compute.call("get_arq_by_uuid", made[0]["uuid"])["instance_uuid"] == instance
    compute.call("delete_arqs_for_instance", instance)
    compute.call("delete_arqs_for_instance", instance)
    assert compute.call_raw("get_arqs_for_instance", instance)["error"] == "AcceleratorRequestOpFailed"


def test_C1_nova_deletes_requests_by_uuid(compute: NovaClient, profile: str) -> None:
    instance = str(uuid.uuid4())
    made = [arq["uuid"] for arq in compute.create_bound_requests(profile, instance)]
    compute.call("delete_arqs_by_uuid", made)
    assert compute.call_raw("get_arq_by_uuid", made[0])["error"] == "AcceleratorRequestOpFailed"


def test_C1_a_refused_bind_raises_novas_binding_failure_and_the_requests_can_be_deleted(
    compute: NovaClient, profile: str
) -> None:
    made = compute.call("create_arqs", profile)
    elsewhere = {
        "hostname": compute.cloud.host,
        "device_rp_uuid": str(uuid.uuid4()),
        "instance_uuid": str(uuid.uuid4()),
    }
    answer = compute.call_raw("bind_arqs", {arq["uuid"]: elsewhere for arq in made})
    assert answer["error"] == "AcceleratorRequestBindingFailed", answer
    compute.call("delete_arqs_by_uuid", [arq["uuid"] for arq in made])


def test_C1_as_many_requests_are_bound_as_there_are_handles_and_deleting_frees_them(
    compute: NovaClient, cloud: KeystoneCloud, profile: str
) -> None:
    instances = [str(uuid.uuid4()) for _ in range(HANDLES // 2)]
    places = set()
    for instance in instances:
        compute.create_bound_requests(profile, instance)
        places |= {tuple(arq["attach_handle_info"].values()) for arq in compute.call("get_arqs_for_instance", instance)}
    assert len(places) == HANDLES
    one_more = compute.call("create_arqs", profile)
    answer = compute.call_raw("bind_arqs", {arq["uuid"]: compute.bind_target(str(uuid.uuid4())) for arq in one_more})
    assert answer["error"] == "AcceleratorRequestBindingFailed"
    compute.call("delete_arqs_by_uuid", [arq["uuid"] for arq in one_more])
    for instance in instances:
        compute.call("delete_arqs_for_instance", instance)
    assert cloud.http("member", "GET", "/accelerator_requests").json() == {"arqs": []}
