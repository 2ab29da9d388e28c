"""Test with plain requests what cyborg-tempest-plugin asserts (contract section 7.4).

Of its server scenarios only the requests to the Accelerator API are tested.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
import requests

from tests.system.clients.cloud import GROUPS, KeystoneCloud, faultstring

pytestmark = pytest.mark.system
Named = Callable[[str], str]
UNFITTING_GROUPS = [
    {"resources:FPGA": "1", "trait:CUSTOM_FAKE_DEVICE": "required", "trait:CUSTOM_NOBODY_HAS_IT": "required"}
]


def post_profile(cloud: KeystoneCloud, **profile: Any) -> requests.Response:
    """Create a profile as admin and return the answer."""
    return cloud.http("admin", "POST", "/device_profiles", [{"groups": GROUPS, **profile}])


def test_C1_a_request_is_created_whether_or_not_any_device_fits(cloud: KeystoneCloud, named: Named) -> None:
    profile = cloud.create_profile(named("tempest"), UNFITTING_GROUPS)
    (arq,) = cloud.create_requests(profile["name"], "admin")
    assert arq["device_profile_name"] == profile["name"]
    assert arq["uuid"] in [one["uuid"] for one in cloud.http("admin", "GET", "/accelerator_requests").json()["arqs"]]
    assert cloud.http("admin", "GET", f"/accelerator_requests/{arq['uuid']}").json()["uuid"] == arq["uuid"]
    assert cloud.http("admin", "DELETE", f"/accelerator_requests?arqs={arq['uuid']}").status_code == 204
    assert arq["uuid"] not in cloud.http("admin", "GET", "/accelerator_requests").text
    assert cloud.http("admin", "DELETE", f"/device_profiles/{profile['name']}").status_code == 204


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_C1_an_unknown_request_is_404(cloud: KeystoneCloud, method: str) -> None:
    name = uuid.uuid4()
    path = f"/accelerator_requests/{name}" if method == "GET" else f"/accelerator_requests?arqs={name}"
    assert cloud.http("admin", method, path).status_code == 404


@pytest.mark.parametrize("name", ["", "no-such-profile", "!@#$%^&*()"])
def test_C1_creating_a_request_for_an_unknown_profile_is_404(cloud: KeystoneCloud, name: str) -> None:
    answer = cloud.http("admin", "POST", "/accelerator_requests", {"device_profile_name": name})
    assert answer.status_code == 404, answer.text


def test_C1_attributes_are_listed_and_shown_and_an_unknown_one_is_404(cloud: KeystoneCloud) -> None:
    listed = cloud.http("admin", "GET", "/attributes").json()
    assert list(listed) == ["attributes"]
    first = listed["attributes"][0]
    assert cloud.http("admin", "GET", f"/attributes/{first['uuid']}").json() == first
    assert cloud.http("admin", "GET", f"/attributes/{uuid.uuid4()}").status_code == 404


def test_C1_deployables_are_listed_and_shown_and_an_unknown_one_is_404(cloud: KeystoneCloud) -> None:
    listed = cloud.http("admin", "GET", "/deployables").json()
    assert next(iter(listed)) == "deployables"
    first = listed["deployables"][0]
    assert cloud.http("admin", "GET", f"/deployables/{first['uuid']}").json()["uuid"] == first["uuid"]
    assert cloud.http("admin", "GET", f"/deployables/{uuid.uuid4()}").status_code == 404


def test_C1_devices_are_filtered_by_type_vendor_and_hostname(cloud: KeystoneCloud) -> None:
    listed = cloud.http("admin", "GET", "/devices").json()
    assert next(iter(listed)) == "devices"
    (device,) = listed["devices"]
    for query in (*(f"{key}={device[key]}" for key in ("type", "vendor", "hostname")),):
        assert cloud.http("admin", "GET", f"/devices?{query}").json()["devices"] == [device]
    whole = f"type={device['type']}&vendor={device['vendor']}&hostname={device['hostname']}"
    assert cloud.http("admin", "GET", f"/devices?{whole}").json()["devices"] == [device]
    for query in ("type=nope", "vendor=nope", "hostname=nope", f"{whole}x"):
        answer = cloud.http("admin", "GET", f"/devices?{query}")
        assert (answer.status_code, answer.json()) == (200, {"devices": []})
    assert cloud.http("admin", "GET", f"/devices/{uuid.uuid4()}").status_code == 404


def test_C1_profiles_are_created_shown_and_deleted(cloud: KeystoneCloud, named: Named) -> None:
    names = [named("tempest") for _ in range(4)]
    made = [post_profile(cloud, name=name, description="a profile") for name in names]
    assert [one.status_code for one in made] == [201] * 4
    first = made[0].json()
    assert {key: first[key] for key in ("name", "groups", "description")} == {
        "name": names[0],
        "groups": GROUPS,
        "description": "a profile",
    }
    shown = cloud.http("admin", "GET", f"/device_profiles/{first['uuid']}").json()
    assert list(shown) == ["device_profile"] and shown["device_profile"]["name"] == names[0]
    assert cloud.http("admin", "DELETE", f"/device_profiles/{first['uuid']}").status_code == 204
    assert cloud.http("admin", "DELETE", f"/device_profiles/{names[1]}").status_code == 204
    assert cloud.http("admin", "DELETE", f"/device_profiles?value={names[2]},{names[3]}").status_code == 204
    assert cloud.http("admin", "GET", f"/device_profiles?name={','.join(names)}").json() == {"device_profiles": []}


def test_C1_unknown_profiles_are_404_and_an_empty_name_is_400(cloud: KeystoneCloud) -> None:
    for method in ("GET", "DELETE"):
        assert cloud.http("admin", method, f"/device_profiles/{uuid.uuid4()}").status_code == 404
    assert cloud.http("admin", "DELETE", "/device_profiles?value=no-such,nor-such").status_code == 404
    assert cloud.http("admin", "DELETE", "/device_profiles/").status_code == 400


def test_C1_profiles_with_a_taken_or_invalid_name_are_refused(cloud: KeystoneCloud, named: Named) -> None:
    """Three of these requests get 500, because the plugin's tests expect it (contract annex A, 4)."""
    made = cloud.create_profile(named("tempest"))
    assert post_profile(cloud, name=made["name"]).status_code == 409
    assert post_profile(cloud, name=named("tempest"), uuid=made["uuid"]).status_code == 500
    assert post_profile(cloud, name="").status_code == 500
    assert post_profile(cloud, name="n" * 256).status_code == 500
    assert cloud.http("admin", "DELETE", f"/device_profiles/{made['uuid']}").status_code == 204
    assert cloud.http("admin", "GET", "/device_profiles").status_code == 200


def test_C1_a_service_role_can_create_requests_and_a_reader_can_read(cloud: KeystoneCloud, named: Named) -> None:
    profile = cloud.create_profile(named("tempest"))
    (arq,) = cloud.create_requests(profile["name"], "service")
    assert cloud.http("admin", "GET", f"/accelerator_requests/{arq['uuid']}").status_code == 200
    assert cloud.http("service", "DELETE", f"/accelerator_requests?arqs={arq['uuid']}").status_code == 204
    for path in ("/device_profiles", "/accelerator_requests"):
        assert cloud.http("reader", "GET", path).status_code == 200
    assert cloud.http("admin", "DELETE", f"/device_profiles/{profile['uuid']}").status_code == 204


def test_C1_a_system_scoped_admin_gets_403(cloud: KeystoneCloud) -> None:
    headers = {"X-Auth-Token": cloud.keystone.token("admin", system=True)}
    assert cloud.http("", "GET", "/devices", headers=headers).status_code == 403


def test_C1_requests_of_a_server_can_be_deleted_only_with_a_service_token(cloud: KeystoneCloud, named: Named) -> None:
    profile, instance = cloud.create_profile(named("tempest")), str(uuid.uuid4())
    (arq,) = cloud.create_requests(profile["name"])
    path = f"/accelerator_requests?instance={instance}"
    assert cloud.http("member", "GET", path).json() == {"arqs": []}
    patch = {arq["uuid"]: cloud.bind_operations(instance)}
    assert cloud.http("member", "PATCH", "/accelerator_requests", patch, service=True).status_code == 202
    (seen,) = cloud.http("admin", "GET", f"{path}&bind_state=resolved").json()["arqs"]
    assert (seen["uuid"], seen["state"]) == (arq["uuid"], "Bound")
    assert set(seen["attach_handle_info"]) >= {"domain", "bus", "device", "function"}
    for by in (f"instance={instance}", f"arqs={arq['uuid']}"):
        refused = cloud.http("admin", "DELETE", f"/accelerator_requests?{by}")
        assert refused.status_code == 403
        assert "requires a service token" in faultstring(refused) or "Use the Compute API" in faultstring(refused)
    assert cloud.http("member", "DELETE", path, service=True).status_code == 204
    assert cloud.http("admin", "GET", path).json() == {"arqs": []}
    assert cloud.http("admin", "DELETE", f"/device_profiles/{profile['uuid']}").status_code == 204
