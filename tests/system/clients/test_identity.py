"""Tests of tokens, service tokens, console logins and an outage of Keystone, with the product and a real Keystone."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import Any

import pytest
import requests

from tests.system.clients import cloud as clients
from tests.system.keystone import PASSWORD, Keystone
from tests.system.product import Product

pytestmark = pytest.mark.system

UUID = "604c1d0e-3f10-4d5c-9c6b-6e0f9a3c1b2d"
TIMEOUT_S = 30.0


@dataclass
class IdentityCloud:
    """A Keystone and the product that validates tokens with it."""

    keystone: Keystone
    product: Product

    def send_request(
        self, method: str, path: str, token: str, service: str = "", body: Any = None
    ) -> requests.Response:
        """Send a request to the product with these tokens and return the answer."""
        headers = {"X-Auth-Token": token} | ({"X-Service-Token": service} if service else {})
        return requests.request(
            method, f"http://127.0.0.1:{self.product.port}{path}", json=body, headers=headers, timeout=TIMEOUT_S
        )

    def get_status(self, path: str, token: str) -> int:
        """Return the status of a GET."""
        return self.send_request("GET", path, token).status_code


@pytest.fixture
def cloud(cloud: clients.KeystoneCloud) -> IdentityCloud:
    """The shared product of this folder, for requests with tokens of all kinds."""
    return IdentityCloud(cloud.keystone, cloud.product)


def test_every_persona_may_read_devices_and_only_an_admin_may_enable_them(cloud: IdentityCloud) -> None:
    for user in ("admin", "manager", "member", "reader", "observer", "service"):
        token = cloud.keystone.token(user)
        assert cloud.get_status("/v2/devices", token) == 200, user
        may = 403 if user != "admin" else 404
        assert cloud.send_request("POST", f"/v2/devices/{UUID}/enable", token).status_code == may, user


def test_tokens_without_a_project_get_403(cloud: IdentityCloud) -> None:
    for scope in ("unscoped", "system", "domain"):
        token = cloud.keystone.token("admin", **{scope: True})
        for path in ("/v2/devices", "/v2/accelerator_requests", "/v2/device_profiles"):
            assert cloud.get_status(path, token) == 403, (scope, path)


def test_an_invalid_token_gets_401_with_the_url_of_keystone(cloud: IdentityCloud) -> None:
    for token in ("", "nope", cloud.keystone.token("member")[:-4] + "AAAA"):
        answer = cloud.send_request("GET", "/v2/devices", token)
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"] == f'Keystone uri="{cloud.keystone.url}"'


def test_requests_of_another_project_are_404_and_binding_needs_a_service_token(cloud: IdentityCloud) -> None:
    tokens = {user: cloud.keystone.token(user) for user in ("admin", "member", "other", "service")}
    name = f"one-fpga-{uuid.uuid4().hex[:8]}"
    profile = [{"name": name, "groups": [{"resources:FPGA": "1"}]}]
    assert cloud.send_request("POST", "/v2/device_profiles", tokens["admin"], body=profile).status_code == 201
    made = cloud.send_request("POST", "/v2/accelerator_requests", tokens["member"], body={"device_profile_name": name})
    assert made.status_code == 201, made.text
    path = f"/v2/accelerator_requests/{made.json()['arqs'][0]['uuid']}"
    assert [cloud.get_status(path, tokens[user]) for user in ("member", "other", "admin")] == [200, 404, 200]
    ours = cloud.keystone.id_of("project", "demo")
    assert cloud.send_request("GET", path, tokens["member"]).json()["project_id"] == ours

    host = {"hostname": "cmp1", "device_rp_uuid": UUID, "instance_uuid": UUID}
    ops = {path.rpartition("/")[2]: [{"path": f"/{k}", "op": "add", "value": v} for k, v in host.items()]}
    bind = "/v2/accelerator_requests"
    refused = cloud.send_request("PATCH", bind, tokens["member"], body=ops)
    assert refused.status_code == 403 and "requires a service token" in refused.text
    assert cloud.send_request("PATCH", bind, tokens["member"], "nope", ops).status_code == 401
    assert cloud.send_request("PATCH", bind, tokens["member"], tokens["admin"], ops).status_code == 401
    assert cloud.send_request("PATCH", bind, tokens["member"], tokens["service"], ops).status_code not in (
        401,
        403,
        500,
    )
    assert cloud.send_request("DELETE", path, tokens["other"], tokens["service"]).status_code == 404
    arq = path.rpartition("/")[2]
    assert cloud.send_request("DELETE", f"{bind}?arqs={arq}", tokens["member"], tokens["service"]).status_code == 204
    assert cloud.send_request("DELETE", f"/v2/device_profiles?value={name}", tokens["admin"]).status_code == 204


def test_L3_known_tokens_work_while_keystone_is_away_and_unknown_ones_get_503(cloud: IdentityCloud) -> None:
    known, unknown = cloud.keystone.token("member"), cloud.keystone.token("member")
    assert cloud.get_status("/v2/devices", known) == 200
    cloud.keystone.stop()
    try:
        assert cloud.get_status("/v2/devices", known) == 200
        answer = cloud.send_request("GET", "/v2/devices", unknown)
        assert answer.status_code == 503 and "Keystone" in answer.text
        said = log_in(cloud, "admin")[1].text
        assert "Keystone cannot be asked now" in said
    finally:
        cloud.keystone.start()
    cloud.product.until(lambda: cloud.get_status("/v2/devices", unknown) == 200, TIMEOUT_S, "it validates again")


def log_in(
    cloud: IdentityCloud, name: str, password: str = PASSWORD, project: str = "demo"
) -> tuple[requests.Session, Any]:
    """Fill in the login page of the console; return the browser session and the answer after redirects."""
    browser, url = requests.Session(), f"http://127.0.0.1:{cloud.product.port}/admin/login/"
    page = browser.get(url, timeout=TIMEOUT_S).text
    (csrf,) = re.findall(r'name="csrfmiddlewaretoken" value="(\w+)"', page)
    fields = {"username": name, "password": password, "domain": "Default", "project": project, "next": "/admin/"}
    return browser, browser.post(url, fields | {"csrfmiddlewaretoken": csrf}, timeout=TIMEOUT_S)


def test_only_administrators_and_managers_can_log_in_to_the_console(cloud: IdentityCloud) -> None:
    base = f"http://127.0.0.1:{cloud.product.port}"
    browser, inside = log_in(cloud, "admin")
    assert (inside.status_code, inside.url) == (200, f"{base}/admin/")
    assert browser.get(f"{base}/admin/auth/user/", timeout=TIMEOUT_S).status_code == 200
    assert browser.get(f"{base}/v2/devices", timeout=TIMEOUT_S).status_code == 200
    browser, inside = log_in(cloud, "manager")
    assert inside.url == f"{base}/admin/"
    assert browser.get(f"{base}/admin/auth/user/", timeout=TIMEOUT_S).status_code == 403
    for name in ("member", "reader", "observer"):
        assert "you do not have it" in log_in(cloud, name)[1].text
    for wrong in ({"password": "wrong"}, {"name": "nobody"}, {"project": "other"}):
        _, outside = log_in(cloud, **({"name": "admin"} | wrong))
        assert "does not accept this name, password, domain and project" in outside.text


def test_passwords_and_tokens_are_not_logged(cloud: IdentityCloud) -> None:
    log_in(cloud, "admin")
    log_in(cloud, "admin", PASSWORD + "!")
    assert cloud.get_status("/v2/devices", cloud.keystone.token("member")) == 200
    assert PASSWORD not in cloud.product.log() and "gAAAA" not in cloud.product.log()
