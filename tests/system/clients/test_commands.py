"""Tests of both implementations of `openstack accelerator …` with the product (contract section 7.3)."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.system.clients.cloud import GROUPS, KeystoneCloud
from tests.system.clients.lines import ClientProcess
from tests.system.clients.test_openstacksdk import upload_image

pytestmark = pytest.mark.system
Named = Callable[[str], str]

DEVICE_COLUMNS = {"uuid", "type", "vendor", "hostname", "std_board_info"}
REQUEST_COLUMNS = ["uuid", "state", "device_profile_name", "instance_uuid", "attach_handle_type", "attach_handle_info"]
REQUEST_SHOW_COLUMNS = {*REQUEST_COLUMNS, "hostname", "device_rp_uuid"}
PROFILE_COLUMNS = ["uuid", "name", "groups", "description"]


@dataclass
class AcceleratorCommands:
    """One implementation of the commands: "in_tree" (python-openstackclient) or "plugin" (python-cyborgclient)."""

    kind: str
    partner: ClientProcess

    def run(self, user: str, *words: str) -> tuple[int, str]:
        """Run a command as `user`; return the exit code, and standard output if it is 0, else standard error."""
        done = self.partner.ask(words=["--os-cloud", user, *words])
        return done["code"], done["out"] if done["code"] == 0 else done["err"]

    def run_successfully(self, user: str, *words: str) -> str:
        """Run a command and return its output; fail unless it succeeds."""
        code, said = self.run(user, *words)
        assert code == 0, said
        return said

    def run_for_json(self, user: str, *words: str) -> Any:
        """Run an accelerator command and return its decoded JSON output; fail unless it succeeds."""
        return json.loads(self.run_successfully(user, "accelerator", *words, "-f", "json"))

    def run_refused(self, user: str, *words: str) -> str:
        """Run an accelerator command and return its error output; fail if it succeeds."""
        code, said = self.run(user, "accelerator", *words)
        assert code != 0, said
        return said


@pytest.fixture(params=["in_tree", "plugin"])
def openstack(request: pytest.FixtureRequest) -> AcceleratorCommands:
    """Each of the two implementations."""
    return AcceleratorCommands(request.param, request.getfixturevalue(request.param))


@pytest.fixture
def profile(cloud: KeystoneCloud, named: Named) -> Iterator[str]:
    """The name of a profile that asks for one unit of the fake card."""
    made = cloud.create_profile(named("cli"))
    yield made["name"]
    cloud.http("admin", "DELETE", f"/device_profiles/{made['uuid']}")


def device_uuid(cloud: KeystoneCloud) -> str:
    """Return the uuid of the fake card."""
    return str(cloud.http("member", "GET", "/devices").json()["devices"][0]["uuid"])


def deployable_uuid(cloud: KeystoneCloud) -> str:
    """Return the uuid of the fake card's deployable."""
    return str(cloud.http("member", "GET", "/deployables").json()["deployables"][0]["uuid"])


def test_C1_device_list_has_upstreams_columns(openstack: AcceleratorCommands, cloud: KeystoneCloud) -> None:
    (short,) = openstack.run_for_json("member", "device", "list")
    assert set(short) - {"status"} == DEVICE_COLUMNS and short["hostname"] == cloud.host
    (long,) = openstack.run_for_json("member", "device", "list", "--long")
    more = {"created_at", "updated_at", "model", "vendor_board_info"}
    assert set(long) == DEVICE_COLUMNS | more | {"status"}
    assert long["status"] == ("enabled" if openstack.kind == "plugin" else None), "one asks at 2.3, the other at 2.0"


def test_C1_device_list_shows_the_status_from_2_3(openstack: AcceleratorCommands) -> None:
    words = ("--os-accelerator-api-version", "2.3", "accelerator", "device", "list", "--long", "-f", "json")
    (long,) = json.loads(openstack.run_successfully("member", *words))
    assert long["status"] == "enabled"


def test_C1_device_show_has_upstreams_fields_and_refuses_an_unknown_device(
    openstack: AcceleratorCommands, cloud: KeystoneCloud
) -> None:
    shown = openstack.run_for_json("member", "device", "show", device_uuid(cloud))
    assert {*DEVICE_COLUMNS, "created_at", "updated_at", "model", "vendor_board_info"} <= set(shown)
    assert shown["hostname"] == cloud.host
    assert "not found" in openstack.run_refused("member", "device", "show", str(uuid.uuid4())).lower()


def test_C1_device_disable_and_enable_work_for_an_admin_only(
    openstack: AcceleratorCommands, cloud: KeystoneCloud
) -> None:
    def status() -> str:
        return str(cloud.http("member", "GET", f"/devices/{device_uuid(cloud)}", version="2.3").json()["status"])

    openstack.run_successfully("admin", "accelerator", "device", "disable", device_uuid(cloud))
    try:
        assert status() == "maintaining"
        openstack.run_successfully(
            "member", "accelerator", "device", "enable", device_uuid(cloud)
        )  # the SDK ignores the 403
        assert status() == "maintaining"
    finally:
        openstack.run_successfully("admin", "accelerator", "device", "enable", device_uuid(cloud))
    assert status() == "enabled"


def test_C1_deployable_list_and_show_have_upstreams_fields(
    openstack: AcceleratorCommands, cloud: KeystoneCloud
) -> None:
    (short,) = openstack.run_for_json("member", "deployable", "list")
    assert set(short) == {"uuid", "name", "device_id"} and short["name"].endswith("_FakeDevice")
    (long,) = openstack.run_for_json("member", "deployable", "list", "--long")
    assert set(long) > {"parent_id", "root_id", "num_accelerators", "created_at"}
    shown = openstack.run_for_json("member", "deployable", "show", deployable_uuid(cloud))
    assert {"created_at", "updated_at", "uuid", "name"} <= set(shown)


def test_C1_deployable_program_works_in_tree_and_fails_inside_the_plugin(
    openstack: AcceleratorCommands, cloud: KeystoneCloud
) -> None:
    """Upstream answers with 405. The plugin sends no request: the SDK's `update_deployable` calls itself endlessly."""
    image = upload_image(cloud)
    words = ("deployable", "program", deployable_uuid(cloud))
    if openstack.kind == "in_tree":
        assert openstack.run_for_json("admin", *words, image)["uuid"] == deployable_uuid(cloud)
        assert "The image cannot be programmed" in openstack.run_refused("admin", *words, str(uuid.uuid4()))
    else:
        assert "maximum recursion depth" in openstack.run_refused("admin", *words, image)


def test_C1_a_device_profile_can_be_created_shown_listed_and_deleted(
    openstack: AcceleratorCommands, named: Named
) -> None:
    name = named("cli")
    if openstack.kind == "in_tree":
        groups = [word for group in GROUPS for word in ("--group", ",".join(f"{k}={v}" for k, v in group.items()))]
    else:
        groups = [json.dumps(GROUPS)]
    made = openstack.run_for_json("admin", "device", "profile", "create", name, *groups, "--description", "one unit")
    assert (made["name"], made["description"]) == (name, "one unit")
    assert "already exists" in openstack.run_refused("admin", "device", "profile", "create", name, *groups)
    (listed,) = [one for one in openstack.run_for_json("member", "device", "profile", "list") if one["name"] == name]
    assert list(listed) == PROFILE_COLUMNS
    (long,) = [
        one for one in openstack.run_for_json("member", "device", "profile", "list", "--long") if one["name"] == name
    ]
    assert set(long) == {*PROFILE_COLUMNS, "created_at", "updated_at"}
    assert openstack.run_for_json("member", "device", "profile", "show", made["uuid"])["name"] == name
    openstack.run_successfully("admin", "accelerator", "device", "profile", "delete", made["uuid"])
    assert "not found" in openstack.run_refused("member", "device", "profile", "show", made["uuid"])


def test_C1_device_profile_show_by_name_from_2_2(openstack: AcceleratorCommands, profile: str) -> None:
    words = ("accelerator", "device", "profile", "show", profile, "-f", "json")
    newer = ("--os-accelerator-api-version", "2.2", *words)
    assert json.loads(openstack.run_successfully("member", *newer))["name"] == profile
    if openstack.kind == "in_tree":
        assert openstack.run("member", *words)[0] != 0
    else:
        assert json.loads(openstack.run_successfully("member", *words))["name"] == profile


def test_C1_device_profiles_can_be_deleted_by_name(
    openstack: AcceleratorCommands, cloud: KeystoneCloud, named: Named
) -> None:
    names = [cloud.create_profile(named("cli"))["name"] for _ in range(2)]
    openstack.run_successfully("admin", "accelerator", "device", "profile", "delete", *names)
    assert cloud.http("member", "GET", f"/device_profiles?name={','.join(names)}").json() == {"device_profiles": []}


def test_C1_an_arq_can_be_created_shown_listed_and_deleted_by_its_project_only(
    openstack: AcceleratorCommands, profile: str
) -> None:
    made = openstack.run_for_json("member", "arq", "create", profile)
    assert set(made) == REQUEST_SHOW_COLUMNS and made["state"] == "Initial"
    assert openstack.run_for_json("member", "arq", "show", made["uuid"]) == made
    (listed,) = [one for one in openstack.run_for_json("member", "arq", "list") if one["uuid"] == made["uuid"]]
    assert list(listed) == REQUEST_COLUMNS
    (long,) = [one for one in openstack.run_for_json("member", "arq", "list", "--long") if one["uuid"] == made["uuid"]]
    assert set(long) == REQUEST_SHOW_COLUMNS
    openstack.run_refused("other", "arq", "show", made["uuid"])
    openstack.run_successfully("member", "accelerator", "arq", "delete", made["uuid"])
    assert "not found" in openstack.run_refused("member", "arq", "show", made["uuid"]).lower()


def test_C1_arq_bind_without_a_service_token_is_refused(
    openstack: AcceleratorCommands, cloud: KeystoneCloud, profile: str
) -> None:
    (made,) = cloud.create_requests(profile)
    instance = str(uuid.uuid4())
    words = (instance, cloud.provider) + ((cloud.project_id(),) if openstack.kind == "plugin" else ())
    complaint = openstack.run_refused("admin", "arq", "bind", made["uuid"], cloud.host, *words)
    assert "requires a service token" in complaint, complaint
    openstack.run_successfully("member", "accelerator", "arq", "delete", made["uuid"])


def test_C1_arq_unbind_without_a_service_token_is_refused(
    openstack: AcceleratorCommands, cloud: KeystoneCloud, profile: str
) -> None:
    (made,) = cloud.create_requests(profile)
    patch = {made["uuid"]: cloud.bind_operations(str(uuid.uuid4()))}
    assert cloud.http("member", "PATCH", "/accelerator_requests", patch, service=True).status_code == 202
    assert "requires a service token" in openstack.run_refused("member", "arq", "unbind", made["uuid"])
    assert openstack.run_for_json("member", "arq", "show", made["uuid"])["state"] == "Bound"
    gone = cloud.http("member", "DELETE", f"/accelerator_requests?arqs={made['uuid']}", service=True)
    assert gone.status_code == 204


def test_C1_a_device_attribute_can_be_created_shown_listed_and_deleted(
    openstack: AcceleratorCommands, named: Named
) -> None:
    listed = openstack.run_for_json("member", "device", "attribute", "list")
    assert set(listed[0]) == {"uuid", "deployable_id", "key", "value"}
    (rc,) = [one for one in listed if one["key"] == "rc"]
    key = named("rack")
    made = openstack.run_for_json("admin", "device", "attribute", "create", str(rc["deployable_id"]), key, "b7")
    assert (made["key"], made["value"], made["deployable_id"]) == (key, "b7", rc["deployable_id"])
    assert openstack.run_for_json("member", "device", "attribute", "show", made["uuid"])["value"] == "b7"
    long = openstack.run_for_json("member", "device", "attribute", "list", "--long")
    assert {"created_at", "updated_at"} <= set(long[0])
    openstack.run_successfully("admin", "accelerator", "device", "attribute", "delete", made["uuid"])
    openstack.run_refused("member", "device", "attribute", "show", made["uuid"])
