"""The product with a real Keystone: tokens of every scope, service tokens, revocation, an outage, logging in."""

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
class Cloud:
    """A Keystone, and the product that asks it."""

    keystone: Keystone
    product: Product

    def ask(self, method: str, path: str, token: str, service: str = "", body: Any = None) -> requests.Response:
        """A request to the product."""
        headers = {"X-Auth-Token": token} | ({"X-Service-Token": service} if service else {})
        return requests.request(
            method, f"http://127.0.0.1:{self.product.port}{path}", json=body, headers=headers, timeout=TIMEOUT_S
        )

    def status(self, path: str, token: str) -> int:
        """Of a GET."""
        return self.ask("GET", path, token).status_code


@pytest.fixture
def cloud(cloud: clients.Cloud) -> Cloud:
    """The product that the tests of this folder share, asked with tokens of every kind."""
    return Cloud(cloud.keystone, cloud.product)


def test_every_persona_gets_what_the_matrix_says(cloud: Cloud) -> None:
    for user in ("admin", "manager", "member", "reader", "observer", "service"):
        token = cloud.keystone.token(user)
        assert cloud.status("/v2/devices", token) == 200, user
        may = 403 if user != "admin" else 404
        assert cloud.ask("POST", f"/v2/devices/{UUID}/enable", token).status_code == may, user


def test_tokens_without_a_project_get_nothing(cloud: Cloud) -> None:
    for scope in ("unscoped", "system", "domain"):
        token = cloud.keystone.token("admin", **{scope: True})
        for path in ("/v2/devices", "/v2/accelerator_requests", "/v2/device_profiles"):
            assert cloud.status(path, token) == 403, (scope, path)


def test_a_bad_token_is_a_401_that_names_keystone(cloud: Cloud) -> None:
    for token in ("", "nope", cloud.keystone.token("member")[:-4] + "AAAA"):
        answer = cloud.ask("GET", "/v2/devices", token)
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"] == f'Keystone uri="{cloud.keystone.url}"'


def test_requests_of_another_project_are_not_there_and_binding_needs_a_service_token(cloud: Cloud) -> None:
    tokens = {user: cloud.keystone.token(user) for user in ("admin", "member", "other", "service")}
    name = f"one-fpga-{uuid.uuid4().hex[:8]}"
    profile = [{"name": name, "groups": [{"resources:FPGA": "1"}]}]
    assert cloud.ask("POST", "/v2/device_profiles", tokens["admin"], body=profile).status_code == 201
    made = cloud.ask("POST", "/v2/accelerator_requests", tokens["member"], body={"device_profile_name": name})
    assert made.status_code == 201, made.text
    path = f"/v2/accelerator_requests/{made.json()['arqs'][0]['uuid']}"
    assert [cloud.status(path, tokens[user]) for user in ("member", "other", "admin")] == [200, 404, 200]
    ours = cloud.keystone.id_of("project", "demo")
    assert cloud.ask("GET", path, tokens["member"]).json()["project_id"] == ours

    host = {"hostname": "cmp1", "device_rp_uuid": UUID, "instance_uuid": UUID}
    ops = {path.rpartition("/")[2]: [{"path": f"/{k}", "op": "add", "value": v} for k, v in host.items()]}
    bind = "/v2/accelerator_requests"
    refused = cloud.ask("PATCH", bind, tokens["member"], body=ops)
    assert refused.status_code == 403 and "requires a service token" in refused.text
    assert cloud.ask("PATCH", bind, tokens["member"], "nope", ops).status_code == 401
    assert cloud.ask("PATCH", bind, tokens["member"], tokens["admin"], ops).status_code == 401
    assert cloud.ask("PATCH", bind, tokens["member"], tokens["service"], ops).status_code not in (401, 403, 500)
    assert cloud.ask("DELETE", path, tokens["other"], tokens["service"]).status_code == 404
    arq = path.rpartition("/")[2]
    assert cloud.ask("DELETE", f"{bind}?arqs={arq}", tokens["member"], tokens["service"]).status_code == 204
    assert cloud.ask("DELETE", f"/v2/device_profiles?value={name}", tokens["admin"]).status_code == 204


def test_L3_with_keystone_away_whoever_is_known_goes_on(cloud: Cloud) -> None:
    known, unknown = cloud.keystone.token("member"), cloud.keystone.token("member")
    assert cloud.status("/v2/devices", known) == 200
    cloud.keystone.stop()
    try:
        assert cloud.status("/v2/devices", known) == 200
        answer = cloud.ask("GET", "/v2/devices", unknown)
        assert answer.status_code == 503 and "Keystone" in answer.text
        said = log_in(cloud, "admin")[1].text
        assert "Keystone cannot be asked now" in said
    finally:
        cloud.keystone.start()
    cloud.product.until(lambda: cloud.status("/v2/devices", unknown) == 200, TIMEOUT_S, "it validates again")


def log_in(cloud: Cloud, name: str, password: str = PASSWORD, project: str = "demo") -> tuple[requests.Session, Any]:
    """A browser that has filled in the console's door, and the answer it got."""
    browser, url = requests.Session(), f"http://127.0.0.1:{cloud.product.port}/admin/login/"
    page = browser.get(url, timeout=TIMEOUT_S).text
    (csrf,) = re.findall(r'name="csrfmiddlewaretoken" value="(\w+)"', page)
    fields = {"username": name, "password": password, "domain": "Default", "project": project, "next": "/admin/"}
    return browser, browser.post(url, fields | {"csrfmiddlewaretoken": csrf}, timeout=TIMEOUT_S)


def test_the_console_lets_in_administrators_and_managers_and_nobody_else(cloud: Cloud) -> None:
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


def test_nothing_secret_is_logged(cloud: Cloud) -> None:
    log_in(cloud, "admin")
    log_in(cloud, "admin", PASSWORD + "!")
    assert cloud.status("/v2/devices", cloud.keystone.token("member")) == 200
    assert PASSWORD not in cloud.product.log() and "gAAAA" not in cloud.product.log()
