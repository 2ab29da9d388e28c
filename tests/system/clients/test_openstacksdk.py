"""Tests of every accelerator call of openstacksdk through the catalogue of a real Keystone (contract section 7.2)."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
from keystoneauth1 import session
from keystoneauth1.identity.v3 import Password
from keystoneauth1.service_token import ServiceTokenAuthWrapper
from openstack import connection, exceptions

from tests.system.clients.cloud import GROUPS, HANDLES, KeystoneCloud
from tests.system.keystone import REGION

pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore::openstack.warnings.RemovedInSDK50Warning"),
]
Connect = Callable[..., connection.Connection]
Named = Callable[[str], str]


@pytest.fixture
def connect(cloud: KeystoneCloud) -> Iterator[Connect]:
    """Return a function that returns an SDK connection of a user; `service` adds Nova's service token."""
    made = []

    def connected(user: str, service: bool = False, **options: Any) -> connection.Connection:
        auth: Any = Password(**cloud.keystone.credentials(user))
        if service:
            auth = ServiceTokenAuthWrapper(auth, Password(**cloud.keystone.credentials("service")))
        made.append(connection.Connection(session=session.Session(auth=auth), region_name=REGION, **options))
        return made[-1]

    yield connected
    for one in made:
        one.close()


@pytest.fixture
def profile(cloud: KeystoneCloud, named: Named) -> Iterator[dict[str, Any]]:
    """A profile that asks for one unit of the fake card."""
    made = cloud.create_profile(named("sdk"))
    yield made
    cloud.http("admin", "DELETE", f"/device_profiles/{made['uuid']}")


def upload_image(cloud: KeystoneCloud) -> str:
    """Upload a bitstream for the fake card as admin and return the image's uuid."""
    headers = {"X-Auth-Token": cloud.token("admin"), "Content-Type": "application/octet-stream"}
    answer = requests.post(f"{cloud.url}/api/images/?name=bits", data=b"a bitstream", headers=headers, timeout=30)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["uuid"])


def test_C1_the_sdk_lists_devices_with_status_from_2_3(connect: Connect, cloud: KeystoneCloud) -> None:
    (device,) = connect("member").accelerator.devices()
    assert (device.type, device.hostname, device.status) == ("FPGA", cloud.host, None)
    (device,) = connect("member", accelerator_default_microversion="2.3").accelerator.devices(hostname=cloud.host)
    assert device.status == "enabled"
    assert list(connect("member").accelerator.devices(hostname="nowhere")) == []


def test_C1_the_sdk_gets_a_device_and_raises_not_found_for_another(connect: Connect) -> None:
    accelerator = connect("member").accelerator
    (device,) = accelerator.devices()
    assert accelerator.get_device(device.uuid).to_dict() == accelerator.get_device(device).to_dict()
    with pytest.raises(exceptions.NotFoundException, match="Device not found with uuid="):
        accelerator.get_device(str(uuid.uuid4()))


def test_C1_the_sdk_enables_and_disables_a_device_for_an_admin_only(connect: Connect) -> None:
    accelerator = connect("admin", accelerator_default_microversion="2.3").accelerator
    (device,) = accelerator.devices()
    accelerator.disable_device(device.uuid)
    try:
        assert accelerator.get_device(device.uuid).status == "maintaining"
        connect("member").accelerator.enable_device(device.uuid)  # refused with 403, which the SDK ignores
        assert accelerator.get_device(device.uuid).status == "maintaining"
    finally:
        accelerator.enable_device(device.uuid)
    assert accelerator.get_device(device.uuid).status == "enabled"


def test_C1_the_sdk_lists_deployables(connect: Connect) -> None:
    (deployable,) = connect("member").accelerator.deployables()
    assert deployable.num_accelerators == HANDLES and deployable.name.endswith("_FakeDevice")


def test_C1_the_sdk_gets_a_deployable_and_refuses_an_id_that_is_no_uuid(connect: Connect) -> None:
    accelerator = connect("member").accelerator
    (deployable,) = accelerator.deployables()
    assert accelerator.get_deployable(deployable.id).name == deployable.name
    with pytest.raises(exceptions.BadRequestException, match="Expected a uuid but received nope"):
        accelerator.get_deployable("nope")


def test_C1_the_sdk_programs_a_deployable(connect: Connect, cloud: KeystoneCloud) -> None:
    """The SDK sends a path that contains the id twice; upstream answers it with 405."""

    def operations(image: object) -> list[dict[str, Any]]:
        return [{"op": "replace", "path": "/program", "value": [{"image_uuid": str(image)}]}]

    accelerator, image = connect("admin").accelerator, upload_image(cloud)
    (deployable,) = accelerator.deployables()
    assert accelerator.patch_deployable(deployable.id, operations(image)).id == deployable.id
    shown = cloud.http("member", "GET", f"/deployables/{deployable.id}").json()
    assert shown["bitstream_id"] == image and "CUSTOM_FPGA_FUNCTION_ID_" in shown["attributes_list"]
    with pytest.raises(exceptions.BadRequestException, match="The image cannot be programmed: Glance has no bytes"):
        accelerator.patch_deployable(deployable.id, operations(uuid.uuid4()))
    with pytest.raises(exceptions.ForbiddenException, match="cyborg:deployable:program"):
        connect("member").accelerator.patch_deployable(deployable.id, operations(image))


def test_C1_the_sdk_lists_device_profiles(connect: Connect, profile: dict[str, Any]) -> None:
    found = [one for one in connect("member").accelerator.device_profiles() if one.name == profile["name"]]
    assert [(one.uuid, one.groups) for one in found] == [(profile["uuid"], GROUPS)]


def test_C1_the_sdk_gets_a_device_profile_by_uuid_and_from_2_2_by_name(
    connect: Connect, profile: dict[str, Any]
) -> None:
    assert connect("member").accelerator.get_device_profile(profile["uuid"]).name == profile["name"]
    newer = connect("member", accelerator_default_microversion="2.2").accelerator
    assert newer.get_device_profile(profile["name"]).uuid == profile["uuid"]
    with pytest.raises(exceptions.NotFoundException, match="Device Profile not found with name=nope"):
        newer.get_device_profile("nope")


@pytest.mark.parametrize("key", ["uuid", "name"])
def test_C1_the_sdk_creates_and_deletes_a_device_profile(connect: Connect, named: Named, key: str) -> None:
    accelerator = connect("admin").accelerator
    wanted = {"name": named("sdk"), "groups": GROUPS, "description": "one unit"}
    made = accelerator.create_device_profile(**wanted)
    assert {name: made[name] for name in wanted} == wanted
    with pytest.raises(exceptions.ConflictException, match="already exists"):
        accelerator.create_device_profile(**wanted)
    accelerator.delete_device_profile(made[key], ignore_missing=False)
    with pytest.raises(exceptions.NotFoundException):
        accelerator.delete_device_profile(made[key], ignore_missing=False)


def test_C1_the_sdk_creates_gets_lists_and_deletes_an_accelerator_request(
    connect: Connect, profile: dict[str, Any]
) -> None:
    accelerator = connect("member").accelerator
    made = accelerator.create_accelerator_request(device_profile_name=profile["name"])
    assert (made.state, made.device_profile_group_id, made.attach_handle_info) == ("Initial", 0, {})
    assert accelerator.get_accelerator_request(made.uuid).device_profile_name == profile["name"]
    assert made.uuid in [one.uuid for one in accelerator.accelerator_requests()]
    with pytest.raises(exceptions.NotFoundException):
        connect("other").accelerator.get_accelerator_request(made.uuid)
    accelerator.delete_accelerator_request(made.uuid, ignore_missing=False)
    assert made.uuid not in [one.uuid for one in accelerator.accelerator_requests()]
    with pytest.raises(exceptions.NotFoundException, match="ExtArq not found with uuid="):
        accelerator.get_accelerator_request(made.uuid)


@pytest.mark.parametrize("method", ["patch_accelerator_request", "update_accelerator_request"])
def test_C1_the_sdk_binds_and_unbinds_a_request_with_a_service_token_only(
    connect: Connect, cloud: KeystoneCloud, profile: dict[str, Any], method: str
) -> None:
    (made,) = cloud.create_requests(profile["name"])
    with pytest.raises(exceptions.ForbiddenException, match="requires a service token"):
        getattr(connect("member").accelerator, method)(made["uuid"], cloud.bind_operations(str(uuid.uuid4())))
    accelerator = connect("member", service=True).accelerator
    instance = str(uuid.uuid4())
    assert getattr(accelerator, method)(made["uuid"], cloud.bind_operations(instance)).state is None
    bound = accelerator.get_accelerator_request(made["uuid"])
    assert (bound.state, bound.instance_uuid, bound.attach_handle_type) == ("Bound", instance, "TEST_PCI")
    getattr(accelerator, method)(made["uuid"], cloud.bind_operations(instance, "remove"))
    assert accelerator.get_accelerator_request(made["uuid"]).state == "Unbound"
    accelerator.delete_accelerator_request(made["uuid"], ignore_missing=False)


def test_C1_the_sdk_lists_and_gets_attributes(connect: Connect) -> None:
    accelerator = connect("member").accelerator
    pairs = {(one.key, one.value) for one in accelerator.attributes()}
    assert ("rc", "FPGA") in pairs
    (one,) = [one for one in accelerator.attributes() if one.key == "rc"]
    assert accelerator.get_attribute(one.uuid).to_dict() == one.to_dict()


def test_C1_the_sdk_creates_and_deletes_an_attribute(connect: Connect, named: Named) -> None:
    """The SDK wraps the body in `attribute`; upstream answers it with 500."""
    accelerator = connect("admin").accelerator
    (rc,) = [one for one in accelerator.attributes() if one.key == "rc"]
    made = accelerator.create_attribute(deployable_id=rc.deployable_id, key=named("rack"), value="b7")
    assert (accelerator.get_attribute(made.uuid).value, made.deployable_id) == ("b7", rc.deployable_id)
    accelerator.delete_attribute(made.uuid, ignore_missing=False)
    with pytest.raises(exceptions.NotFoundException):
        accelerator.get_attribute(made.uuid)


def test_C1_the_sdk_pages_through_a_list_by_limit_and_marker(
    connect: Connect, cloud: KeystoneCloud, profile: dict[str, Any]
) -> None:
    """The SDK sends `limit` for every further page; upstream refuses it."""
    mine = [cloud.create_requests(profile["name"])[0]["uuid"] for _ in range(3)]
    accelerator = connect("member").accelerator
    assert [one.uuid for one in accelerator.accelerator_requests(limit=2) if one.uuid in mine] == mine
    assert [one.uuid for one in accelerator.accelerator_requests(marker=mine[0])] == mine[1:]
    assert cloud.http("member", "DELETE", f"/accelerator_requests?arqs={','.join(mine)}").status_code == 204


def test_C1_the_cloud_layer_of_the_sdk_creates_binds_unbinds_and_deletes(
    connect: Connect, cloud: KeystoneCloud, named: Named
) -> None:
    admin, member = connect("admin"), connect("member", service=True)
    profile = admin.create_device_profile({"name": named("sdk"), "groups": GROUPS})
    assert profile.uuid in [one.uuid for one in member.list_device_profiles()]
    assert len(member.list_devices()) == len(member.list_deployables()) == 1
    made = member.create_accelerator_request({"device_profile_name": profile.name})
    instance = str(uuid.uuid4())
    member.bind_accelerator_request(made.uuid, cloud.bind_operations(instance))
    (bound,) = member.list_accelerator_requests({"instance_uuid": instance})
    assert (bound.uuid, bound.state) == (made.uuid, "Bound")
    member.unbind_accelerator_request(made.uuid, cloud.bind_operations(instance, "remove"))
    assert member.accelerator.get_accelerator_request(made.uuid).instance_uuid is None
    assert member.delete_accelerator_request(made.uuid)
    assert admin.delete_device_profile(profile.uuid)
