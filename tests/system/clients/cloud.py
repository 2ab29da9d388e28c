"""Run the whole product with a real Keystone and a ready fake card.

The tests of this folder use it as the fixture `cloud`, through clients or by plain HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from tests.system.keystone import USERS, Keystone
from tests.system.product import Product, running

HANDLES = 16
"""How many attach handles the fake card has."""
GROUPS = [{"resources:FPGA": "1", "trait:CUSTOM_FAKE_DEVICE": "required"}]
ANSWER_S = 30.0


@dataclass
class KeystoneCloud:
    """One product and its Keystone. `provider` is the uuid of the resource provider of its only deployable."""

    product: Product
    keystone: Keystone
    provider: str = ""
    _tokens: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The base URL of the product."""
        return f"http://127.0.0.1:{self.product.port}"

    @property
    def endpoint(self) -> str:
        """The endpoint of the accelerator service in the catalogue."""
        return f"{self.url}/accelerator/v2"

    def token(self, user: str) -> str:
        """Return a token of the user, scoped to its own project; it is cached for the whole run."""
        if user not in self._tokens:
            self._tokens[user] = self.keystone.token(user)
        return self._tokens[user]

    def http(
        self,
        user: str,
        method: str,
        path: str,
        body: Any = None,
        *,
        version: str = "",
        service: bool = False,
        **more: Any,
    ) -> requests.Response:
        """Send a request below /accelerator/v2; `service` adds Nova's service token, the user '' sends no token."""
        headers = {"X-Auth-Token": self.token(user)} if user else {}
        headers |= {"OpenStack-API-Version": f"accelerator {version}"} if version else {}
        headers |= {"X-Service-Token": self.token("service")} if service else {}
        headers |= more.pop("headers", {})
        return requests.request(
            method,
            f"{self.endpoint}{path}",
            json=body,
            headers=headers,
            timeout=ANSWER_S,
            allow_redirects=False,
            **more,
        )

    def project_id(self, user: str = "member") -> str:
        """Return the id of the user's project."""
        return self.keystone.id_of("project", USERS[user][0])

    def enable_card(self) -> KeystoneCloud:
        """Wait for the fake card, enable it as an operator does, and set `provider`; return this object."""
        found = "SELECT p.uuid::text, d.uuid::text FROM accelerators_deployable p JOIN accelerators_device d"
        rows = self.product.until(lambda: self.product.rows(f"{found} ON d.id = p.device_id"), 30, "the fake card")
        ((deployable, device),) = rows

        def enable() -> list[requests.Response]:
            answer = self.http("admin", "POST", f"/devices/{device}/enable")
            return [] if answer.status_code == 503 else [answer]

        # The first answer of a Keystone that has just started may take longer than the product waits: 5 s, then a 503.
        (answer,) = self.product.until(enable, 60, "Keystone's answer about the administrator's token")
        assert answer.status_code == 204, answer.text
        self.provider = self.http("admin", "GET", f"/deployables/{deployable}").json()["rp_uuid"]
        return self

    def create_profile(self, name: str, groups: Any = None) -> dict[str, Any]:
        """Create a device profile as admin and return it."""
        wanted = [{"name": name, "groups": groups or GROUPS}]
        answer = self.http("admin", "POST", "/device_profiles", wanted)
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    def create_requests(self, profile: str, user: str = "member") -> list[dict[str, Any]]:
        """Create accelerator requests for a profile and return them."""
        answer = self.http(user, "POST", "/accelerator_requests", {"device_profile_name": profile})
        assert answer.status_code == 201, answer.text
        return list(answer.json()["arqs"])

    def bind_operations(self, instance: str, op: str = "add") -> list[dict[str, str]]:
        """Return the patch operations that bind a request to `instance` on the fake card, or unbind it."""
        values = {"hostname": self.host, "device_rp_uuid": self.provider, "instance_uuid": instance}
        return [{"op": op, "path": f"/{key}"} | ({"value": v} if op == "add" else {}) for key, v in values.items()]

    @property
    def host(self) -> str:
        """The host's name as Placement and Nova know it."""
        ((name,),) = self.product.rows("SELECT name FROM accelerators_host")
        return str(name)


@contextmanager
def running_cloud(keystone: Keystone, folder: Path, neighbours: str) -> Iterator[KeystoneCloud]:
    """Run a product that is in the catalogue and whose card is ready for the block.

    `neighbours` is the URL below which compute and image answer; the catalogue gets them, too.
    """
    settings = {"CYBORG_AUTH": "keystone", "CYBORG_ENABLED_DRIVERS": "fake_driver"}
    settings["CYBORG_PLACEMENT_ENDPOINT"] = "off"  # otherwise programs are refused: holders are unknown
    with running(Product(folder / "state", settings | keystone.environment("service"))) as product:
        cloud = KeystoneCloud(product, keystone)
        keystone.publish("accelerator", cloud.endpoint)
        keystone.publish("compute", f"{neighbours}/compute/v2.1")
        keystone.publish("image", f"{neighbours}/image")
        (folder / "clouds.yaml").write_text(keystone.clouds())
        yield cloud.enable_card()


def faultstring(answer: requests.Response) -> str:
    """Return the `faultstring` in the JSON text inside `error_message` (contract section 2.1, form A)."""
    return str(json.loads(answer.json()["error_message"])["faultstring"])
