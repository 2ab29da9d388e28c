"""`openstack accelerator …` in both its implementations (contract section 7.3)."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.system.clients.cloud import GROUPS, Cloud
from tests.system.clients.lines import Partner
from tests.system.clients.test_openstacksdk import uploaded

pytestmark = pytest.mark.system
Named = Callable[[str], str]

DEVICE = {"uuid", "type", "vendor", "hostname", "std_board_info"}
REQUEST = ["uuid", "state", "device_profile_name", "instance_uuid", "attach_handle_type", "attach_handle_info"]
REQUEST_SHOWN = {*REQUEST, "hostname", "device_rp_uuid"}
PROFILE = ["uuid", "name", "groups", "description"]


@dataclass
class Commands:
    """One implementation. `kind` is "in_tree" or "plugin"."""

    kind: str
    partner: Partner

    def run(self, user: str, *words: str) -> tuple[int, str]:
        """Exit code, and what it printed: results when it went well, else complaints."""
        done = self.partner.ask(words=["--os-cloud", user, *words])
        return done["code"], done["out"] if done["code"] == 0 else done["err"]

    def ok(self, user: str, *words: str) -> str:
        """What it printed; AssertionError unless it succeeded."""
        code, said = self.run(user, *words)
        assert code == 0, said
        return said

    def read(self, user: str, *words: str) -> Any:
        """A result, decoded."""
        return json.loads(self.ok(user, "accelerator", *words, "-f", "json"))

    def refused(self, user: str, *words: str) -> str:
        """Its complaint; AssertionError when it succeeds."""
        code, said = self.run(user, "accelerator", *words)
        assert code != 0, said
        return said


@pytest.fixture(params=["in_tree", "plugin"])
def openstack(request: pytest.FixtureRequest) -> Commands:
    """The two implementations, one after the other."""
    return Commands(request.param, request.getfixturevalue(request.param))


@pytest.fixture
def profile(cloud: Cloud, named: Named) -> Iterator[str]:
    """The name of a profile that asks for one unit of the fake card."""
    made = cloud.profile(named("cli"))
    yield made["name"]
    cloud.http("admin", "DELETE", f"/device_profiles/{made['uuid']}")


def device(cloud: Cloud) -> str:
    """The fake card."""
    return str(cloud.http("member", "GET", "/devices").json()["devices"][0]["uuid"])


def deployable(cloud: Cloud) -> str:
    """Its deployable."""
    return str(cloud.http("member", "GET", "/deployables").json()["deployables"][0]["uuid"])


def test_C1_device_list(openstack: Commands, cloud: Cloud) -> None:
    (short,) = openstack.read("member", "device", "list")
    assert set(short) - {"status"} == DEVICE and short["hostname"] == cloud.host
    (long,) = openstack.read("member", "device", "list", "--long")
    more = {"created_at", "updated_at", "model", "vendor_board_info"}
    assert set(long) == DEVICE | more | {"status"}
    assert long["status"] == ("enabled" if openstack.kind == "plugin" else None), "one asks at 2.3, the other at 2.0"


def test_C1_device_list_shows_the_status_when_asked_at_2_3(openstack: Commands) -> None:
    words = ("--os-accelerator-api-version", "2.3", "accelerator", "device", "list", "--long", "-f", "json")
    (long,) = json.loads(openstack.ok("member", *words))
    assert long["status"] == "enabled"


def test_C1_device_show(openstack: Commands, cloud: Cloud) -> None:
    shown = openstack.read("member", "device", "show", device(cloud))
    assert {*DEVICE, "created_at", "updated_at", "model", "vendor_board_info"} <= set(shown)
    assert shown["hostname"] == cloud.host
    assert "not found" in openstack.refused("member", "device", "show", str(uuid.uuid4())).lower()


def test_C1_device_disable_and_enable(openstack: Commands, cloud: Cloud) -> None:
    def status() -> str:
        return str(cloud.http("member", "GET", f"/devices/{device(cloud)}", version="2.3").json()["status"])

    openstack.ok("admin", "accelerator", "device", "disable", device(cloud))
    try:
        assert status() == "maintaining"
        openstack.ok("member", "accelerator", "device", "enable", device(cloud))  # the SDK does not look at the 403
        assert status() == "maintaining"
    finally:
        openstack.ok("admin", "accelerator", "device", "enable", device(cloud))
    assert status() == "enabled"


def test_C1_deployable_list_and_show(openstack: Commands, cloud: Cloud) -> None:
    (short,) = openstack.read("member", "deployable", "list")
    assert set(short) == {"uuid", "name", "device_id"} and short["name"].endswith("_FakeDevice")
    (long,) = openstack.read("member", "deployable", "list", "--long")
    assert set(long) > {"parent_id", "root_id", "num_accelerators", "created_at"}
    shown = openstack.read("member", "deployable", "show", deployable(cloud))
    assert {"created_at", "updated_at", "uuid", "name"} <= set(shown)


def test_C1_deployable_program(openstack: Commands, cloud: Cloud) -> None:
    """Upstream answers 405. The plugin's never leaves the client: the SDK's `update_deployable` calls itself."""
    image = uploaded(cloud)
    words = ("deployable", "program", deployable(cloud))
    if openstack.kind == "in_tree":
        assert openstack.read("admin", *words, image)["uuid"] == deployable(cloud)
        assert "The image cannot be programmed" in openstack.refused("admin", *words, str(uuid.uuid4()))
    else:
        assert "maximum recursion depth" in openstack.refused("admin", *words, image)


def test_C1_device_profile_create_show_list_and_delete(openstack: Commands, named: Named) -> None:
    name = named("cli")
    if openstack.kind == "in_tree":
        groups = [word for group in GROUPS for word in ("--group", ",".join(f"{k}={v}" for k, v in group.items()))]
    else:
        groups = [json.dumps(GROUPS)]
    made = openstack.read("admin", "device", "profile", "create", name, *groups, "--description", "one unit")
    assert (made["name"], made["description"]) == (name, "one unit")
    assert "already exists" in openstack.refused("admin", "device", "profile", "create", name, *groups)
    (listed,) = [one for one in openstack.read("member", "device", "profile", "list") if one["name"] == name]
    assert list(listed) == PROFILE
    (long,) = [one for one in openstack.read("member", "device", "profile", "list", "--long") if one["name"] == name]
    assert set(long) == {*PROFILE, "created_at", "updated_at"}
    assert openstack.read("member", "device", "profile", "show", made["uuid"])["name"] == name
    openstack.ok("admin", "accelerator", "device", "profile", "delete", made["uuid"])
    assert "not found" in openstack.refused("member", "device", "profile", "show", made["uuid"])


def test_C1_device_profile_show_by_name_from_2_2(openstack: Commands, profile: str) -> None:
    words = ("accelerator", "device", "profile", "show", profile, "-f", "json")
    newer = ("--os-accelerator-api-version", "2.2", *words)
    assert json.loads(openstack.ok("member", *newer))["name"] == profile
    if openstack.kind == "in_tree":
        assert openstack.run("member", *words)[0] != 0
    else:
        assert json.loads(openstack.ok("member", *words))["name"] == profile


def test_C1_device_profile_delete_by_name(openstack: Commands, cloud: Cloud, named: Named) -> None:
    names = [cloud.profile(named("cli"))["name"] for _ in range(2)]
    openstack.ok("admin", "accelerator", "device", "profile", "delete", *names)
    assert cloud.http("member", "GET", f"/device_profiles?name={','.join(names)}").json() == {"device_profiles": []}


def test_C1_arq_create_show_list_and_delete(openstack: Commands, profile: str) -> None:
    made = openstack.read("member", "arq", "create", profile)
    assert set(made) == REQUEST_SHOWN and made["state"] == "Initial"
    assert openstack.read("member", "arq", "show", made["uuid"]) == made
    (listed,) = [one for one in openstack.read("member", "arq", "list") if one["uuid"] == made["uuid"]]
    assert list(listed) == REQUEST
    (long,) = [one for one in openstack.read("member", "arq", "list", "--long") if one["uuid"] == made["uuid"]]
    assert set(long) == REQUEST_SHOWN
    openstack.refused("other", "arq", "show", made["uuid"])
    openstack.ok("member", "accelerator", "arq", "delete", made["uuid"])
    assert "not found" in openstack.refused("member", "arq", "show", made["uuid"]).lower()


def test_C1_arq_bind_needs_the_service_token_that_only_nova_has(
    openstack: Commands, cloud: Cloud, profile: str
) -> None:
    (made,) = cloud.request(profile)
    instance = str(uuid.uuid4())
    words = (instance, cloud.provider) + ((cloud.project(),) if openstack.kind == "plugin" else ())
    complaint = openstack.refused("admin", "arq", "bind", made["uuid"], cloud.host, *words)
    assert "requires a service token" in complaint, complaint
    openstack.ok("member", "accelerator", "arq", "delete", made["uuid"])


def test_C1_arq_unbind_needs_the_service_token_that_only_nova_has(
    openstack: Commands, cloud: Cloud, profile: str
) -> None:
    (made,) = cloud.request(profile)
    patch = {made["uuid"]: cloud.binding(str(uuid.uuid4()))}
    assert cloud.http("member", "PATCH", "/accelerator_requests", patch, service=True).status_code == 202
    assert "requires a service token" in openstack.refused("member", "arq", "unbind", made["uuid"])
    assert openstack.read("member", "arq", "show", made["uuid"])["state"] == "Bound"
    gone = cloud.http("member", "DELETE", f"/accelerator_requests?arqs={made['uuid']}", service=True)
    assert gone.status_code == 204


def test_C1_device_attribute_create_show_list_and_delete(openstack: Commands, named: Named) -> None:
    listed = openstack.read("member", "device", "attribute", "list")
    assert set(listed[0]) == {"uuid", "deployable_id", "key", "value"}
    (rc,) = [one for one in listed if one["key"] == "rc"]
    key = named("rack")
    made = openstack.read("admin", "device", "attribute", "create", str(rc["deployable_id"]), key, "b7")
    assert (made["key"], made["value"], made["deployable_id"]) == (key, "b7", rc["deployable_id"])
    assert openstack.read("member", "device", "attribute", "show", made["uuid"])["value"] == "b7"
    long = openstack.read("member", "device", "attribute", "list", "--long")
    assert {"created_at", "updated_at"} <= set(long[0])
    openstack.ok("admin", "accelerator", "device", "attribute", "delete", made["uuid"])
    openstack.refused("member", "device", "attribute", "show", made["uuid"])
