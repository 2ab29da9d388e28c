"""What cyborg-tempest-plugin asserts, as plain requests (contract section 7.4); its server scenarios as far as they are
ours."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
import requests

from tests.system.clients.cloud import GROUPS, Cloud, faultstring

pytestmark = pytest.mark.system
Named = Callable[[str], str]
NOBODYS = [{"resources:FPGA": "1", "trait:CUSTOM_FAKE_DEVICE": "required", "trait:CUSTOM_NOBODY_HAS_IT": "required"}]


def posted(cloud: Cloud, **profile: Any) -> requests.Response:
    """The admin creates a profile."""
    return cloud.http("admin", "POST", "/device_profiles", [{"groups": GROUPS, **profile}])


def test_C1_a_request_is_created_whether_or_not_any_device_fits(cloud: Cloud, named: Named) -> None:
    profile = cloud.profile(named("tempest"), NOBODYS)
    (arq,) = cloud.request(profile["name"], "admin")
    assert arq["device_profile_name"] == profile["name"]
    assert arq["uuid"] in [one["uuid"] for one in cloud.http("admin", "GET", "/accelerator_requests").json()["arqs"]]
    assert cloud.http("admin", "GET", f"/accelerator_requests/{arq['uuid']}").json()["uuid"] == arq["uuid"]
    assert cloud.http("admin", "DELETE", f"/accelerator_requests?arqs={arq['uuid']}").status_code == 204
    assert arq["uuid"] not in cloud.http("admin", "GET", "/accelerator_requests").text
    assert cloud.http("admin", "DELETE", f"/device_profiles/{profile['name']}").status_code == 204


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_C1_a_request_nobody_knows_is_404(cloud: Cloud, method: str) -> None:
    name = uuid.uuid4()
    path = f"/accelerator_requests/{name}" if method == "GET" else f"/accelerator_requests?arqs={name}"
    assert cloud.http("admin", method, path).status_code == 404


@pytest.mark.parametrize("name", ["", "no-such-profile", "!@#$%^&*()"])
def test_C1_a_request_for_a_profile_nobody_knows_is_404(cloud: Cloud, name: str) -> None:
    answer = cloud.http("admin", "POST", "/accelerator_requests", {"device_profile_name": name})
    assert answer.status_code == 404, answer.text


def test_C1_attributes(cloud: Cloud) -> None:
    listed = cloud.http("admin", "GET", "/attributes").json()
    assert list(listed) == ["attributes"]
    first = listed["attributes"][0]
    assert cloud.http("admin", "GET", f"/attributes/{first['uuid']}").json() == first
    assert cloud.http("admin", "GET", f"/attributes/{uuid.uuid4()}").status_code == 404


def test_C1_deployables(cloud: Cloud) -> None:
    listed = cloud.http("admin", "GET", "/deployables").json()
    assert next(iter(listed)) == "deployables"
    first = listed["deployables"][0]
    assert cloud.http("admin", "GET", f"/deployables/{first['uuid']}").json()["uuid"] == first["uuid"]
    assert cloud.http("admin", "GET", f"/deployables/{uuid.uuid4()}").status_code == 404


def test_C1_devices_and_their_filters(cloud: Cloud) -> None:
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


def test_C1_profiles_are_created_shown_and_deleted(cloud: Cloud, named: Named) -> None:
    names = [named("tempest") for _ in range(4)]
    made = [posted(cloud, name=name, description="a profile") for name in names]
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


def test_C1_profiles_that_are_not_there(cloud: Cloud) -> None:
    for method in ("GET", "DELETE"):
        assert cloud.http("admin", method, f"/device_profiles/{uuid.uuid4()}").status_code == 404
    assert cloud.http("admin", "DELETE", "/device_profiles?value=no-such,nor-such").status_code == 404
    assert cloud.http("admin", "DELETE", "/device_profiles/").status_code == 400


def test_C1_profiles_that_cannot_be_made(cloud: Cloud, named: Named) -> None:
    """500 is what its tests want for three of them (contract annex A, 4)."""
    made = cloud.profile(named("tempest"))
    assert posted(cloud, name=made["name"]).status_code == 409
    assert posted(cloud, name=named("tempest"), uuid=made["uuid"]).status_code == 500
    assert posted(cloud, name="").status_code == 500
    assert posted(cloud, name="n" * 256).status_code == 500
    assert cloud.http("admin", "DELETE", f"/device_profiles/{made['uuid']}").status_code == 204
    assert cloud.http("admin", "GET", "/device_profiles").status_code == 200


def test_C1_a_service_role_makes_requests_and_a_reader_reads(cloud: Cloud, named: Named) -> None:
    profile = cloud.profile(named("tempest"))
    (arq,) = cloud.request(profile["name"], "service")
    assert cloud.http("admin", "GET", f"/accelerator_requests/{arq['uuid']}").status_code == 200
    assert cloud.http("service", "DELETE", f"/accelerator_requests?arqs={arq['uuid']}").status_code == 204
    for path in ("/device_profiles", "/accelerator_requests"):
        assert cloud.http("reader", "GET", path).status_code == 200
    assert cloud.http("admin", "DELETE", f"/device_profiles/{profile['uuid']}").status_code == 204


def test_C1_a_system_scoped_admin_gets_nothing(cloud: Cloud) -> None:
    headers = {"X-Auth-Token": cloud.keystone.token("admin", system=True)}
    assert cloud.http("", "GET", "/devices", headers=headers).status_code == 403


def test_C1_what_belongs_to_a_server_is_deleted_with_a_service_token_only(cloud: Cloud, named: Named) -> None:
    profile, instance = cloud.profile(named("tempest")), str(uuid.uuid4())
    (arq,) = cloud.request(profile["name"])
    path = f"/accelerator_requests?instance={instance}"
    assert cloud.http("member", "GET", path).json() == {"arqs": []}
    patch = {arq["uuid"]: cloud.binding(instance)}
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
