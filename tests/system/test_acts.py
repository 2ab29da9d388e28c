"""Commands through the whole product: an operator's decision, a bind, a program become changes of a host, or reasons.

The hardware is the fake driver's: files below `/state` that forget at a reboot, as real hardware does.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sqlite3
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.system.conftest import fresh
from tests.system.machine import fake
from tests.system.product import Product, running

pytestmark = pytest.mark.system
SETTINGS = {"CYBORG_HOST_NAME": "here.example", "CYBORG_HOST_NODE": "here", "CYBORG_ENABLED_DRIVERS": "fake_driver"}
SETTINGS |= {"CYBORG_BEAT_S": "1", "CYBORG_RESCAN_S": "2"}
SOON_S = 30.0


class Site:
    """The product, its tokens, its one fake card."""

    def __init__(self, product: Product) -> None:
        self.product = product
        self.admin, self.service = (product.manage("api_token", f"t-{role}", "--role", role)[-1] for role in ROLES)
        self.until(lambda: self.devices(), "the fake card")
        self.device = self.devices()[0]["uuid"]

    def call(self, method: str, path: str, body: Any = None, **more: Any) -> requests.Response:
        headers = {"X-Auth-Token": self.admin, "X-Service-Token": self.service} | more.pop("headers", {})
        return requests.request(
            method, f"http://127.0.0.1:{self.product.port}{path}", json=body, headers=headers, timeout=90, **more
        )

    def until(self, condition: Any, what: str) -> Any:
        return self.product.until(condition, SOON_S, what)

    def devices(self) -> list[dict[str, Any]]:
        return list(self.product.json("/api/devices/", self.admin).get("results", ()))

    def state(self) -> str:
        return str(self.call("GET", f"/api/devices/{self.device}/").json()["state"])

    def act(self, verb: str) -> None:
        answer = self.call("POST", f"/api/devices/{self.device}/{verb}/", {"reason": "a test"})
        assert answer.status_code == 200, answer.text

    def handle_types(self) -> set[str]:
        there = "SELECT attach_type FROM accelerators_attachhandle WHERE missing_since IS NULL"
        return {kind for (kind,) in self.product.rows(there)}

    def commands(self, op: str) -> list[dict[str, Any]]:
        return list(self.product.json(f"/api/commands/?op={op}", self.admin)["results"])

    def hardware(self, name: str = "*") -> list[Path]:
        return sorted((self.product.state / "agent" / "drivers" / "fake_driver").glob(f"*/0/{name}"))

    def bind(self, instance: str = "", **group: str) -> tuple[str, str]:
        """A new request, bound or begun to be: its uuid, the instance's."""
        profile, instance = f"p-{uuid.uuid4().hex[:8]}", instance or str(uuid.uuid4())
        body = [{"name": profile, "groups": [{"resources:FPGA": "1"} | group]}]
        assert self.call("POST", "/v2/device_profiles", body).status_code == 201
        (request,) = self.call("POST", "/v2/accelerator_requests", {"device_profile_name": profile}).json()["arqs"]
        values = {"hostname": "here.example", "device_rp_uuid": self.provider(), "instance_uuid": instance}
        patch = {request["uuid"]: [{"op": "add", "path": f"/{name}", "value": v} for name, v in values.items()]}
        answer = self.call("PATCH", "/v2/accelerator_requests", patch)
        assert answer.status_code == 202, answer.text
        return request["uuid"], instance

    def provider(self) -> str:
        (part,) = self.call("GET", "/v2/deployables").json()["deployables"]
        return str(part["rp_uuid"])

    def request(self, request: str) -> dict[str, Any]:
        return dict(self.call("GET", f"/v2/accelerator_requests/{request}").json())

    def until_state(self, request: str, state: str) -> dict[str, Any]:
        self.until(lambda: self.request(request)["state"] == state, f"the request is {state}")
        return self.request(request)


ROLES = ("admin", "service")


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with fresh() as folder, running(Product(folder / "state", SETTINGS)) as product:
        yield Site(product)


def again(site: Site, *script: tuple[str, object]) -> None:
    """The card as at first, but for what the script says (in one step: no look comes between), ready to be enabled."""
    control = site.product.state / "fake-driver.json"
    control.with_suffix(".new").write_text(json.dumps(dict(script)))
    control.with_suffix(".new").replace(control)
    if site.state() in ("ready", "installing"):
        site.act("disable")


def test_ready_means_installed_or_failed_with_the_drivers_reason(site: Site) -> None:
    again(site, ("install", ["firmware", "clock"]))
    site.until(lambda: "clock" in str(site.devices()[0]["to_install"]), "what would be done is shown")
    site.act("enable")
    site.until(lambda: site.state() == "ready", "it is ready")
    assert [path.name for path in site.hardware()] == ["clock", "firmware"]

    again(site, ("install", ["firmware", "clock", "fan"]), ("refuse", {"install": ["Busy", "a guest has it"]}))
    site.until(lambda: "fan" in str(site.devices()[0]["to_install"]), "what would be done is shown")
    site.act("enable")
    site.until(lambda: site.state() == "failed", "it has failed")
    assert "a guest has it" in site.devices()[0]["state_reason"]
    assert [path.name for path in site.hardware()] == ["clock", "firmware"]

    again(site, ("install", ["firmware", "clock", "fan"]), ("wrong", {"install": True}))
    site.act("enable")

    def undone() -> bool:
        last = site.commands("install")[0]
        return last["state"] == "failed" and "Undone: " in last["text"]

    site.until(undone, "the command failed and was undone")
    assert [path.name for path in site.hardware()] == ["clock", "firmware"]


def test_a_handle_is_made_for_its_request_and_taken_away_with_it(site: Site) -> None:
    again(site, ("handle_type", "MDEV"))
    site.until(lambda: site.handle_types() == {"MDEV"}, "handles of another type")
    site.act("enable")
    request, instance = site.bind()
    bound = site.until_state(request, "Bound")
    (made,) = site.hardware("mdev-*")
    assert made.name == f"mdev-{bound['attach_handle_uuid']}"
    assert made.read_text() == instance
    assert site.call("DELETE", f"/v2/accelerator_requests?instance={instance}").status_code == 204
    site.until(lambda: not site.hardware("mdev-*"), "it is taken away")


def test_after_a_reboot_what_was_made_is_there_again_under_its_uuid(site: Site) -> None:
    again(site, ("handle_type", "MDEV"))
    site.until(lambda: site.handle_types() == {"MDEV"}, "handles of another type")
    site.act("enable")
    request, instance = site.bind()
    site.until_state(request, "Bound")
    (made,) = site.hardware("mdev-*")
    product = site.product
    product.interrupt()
    for path in site.hardware():
        path.unlink()
    with sqlite3.connect(product.state / "agent" / "journal.sqlite3") as journal:
        journal.execute("UPDATE applied SET boot = 'the boot before'")
    journal.close()
    product.start()
    site.until(lambda: [path.name for path in site.hardware("mdev-*")] == [made.name], "it is put back")
    assert made.read_text() == instance
    assert site.request(request)["state"] == "Bound"
    assert site.devices()[0]["status"] == "ok"
    site.call("DELETE", f"/v2/accelerator_requests?instance={instance}")
    site.until(lambda: not site.hardware("mdev-*"), "it is taken away")


@pytest.mark.parametrize("victim", ["agent", "web", "work", "ingest"])
def test_whoever_is_killed_amid_an_install_it_ends(site: Site, victim: str) -> None:
    again(site, ("install", [f"part{victim}", "rest"]), ("slow_s", {"install": 1.5}))
    site.until(lambda: f"part{victim}" in str(site.devices()[0]["to_install"]), "what would be done is shown")
    site.act("enable")
    site.until(lambda: site.commands("install")[0]["state"] in ("taken", "started", "succeeded"), "it is under way")
    child = site.product.child(victim)
    assert child
    os.kill(child.pid, signal.SIGKILL)
    site.until(lambda: site.product.get("/healthz")[0] == 200, "the web is there")
    fake(site.product, "set", "slow_s", "{}")
    site.until(lambda: site.state() in ("ready", "failed"), "it has ended")
    (command, *_) = site.commands("install")
    assert command["ended_at"]
    assert (site.state() == "ready") == (command["state"] == "succeeded")


def test_a_bitstream_is_written_and_named(site: Site) -> None:
    again(site)
    site.until(lambda: site.handle_types() == {"TEST_PCI"}, "plain handles")
    site.act("enable")
    bits = os.urandom(200_000)
    answer = site.call(
        "POST",
        "/api/images/?name=bits&property=accel:function_id=AB-cd",
        data=bits,
        headers={"Content-Type": "application/octet-stream"},
    )
    assert answer.status_code == 201, answer.text
    image = answer.json()["uuid"]
    request, instance = site.bind(**{"accel:bitstream_id": image})
    site.until_state(request, "Bound")
    (written,) = site.hardware("image")
    assert hashlib.sha256(written.read_bytes()).digest() == hashlib.sha256(bits).digest()
    (part,) = site.call("GET", "/v2/deployables").json()["deployables"]
    assert part["bitstream_id"] == image
    assert "CUSTOM_FPGA_FUNCTION_ID_FAKE_AB_CD" in part["attributes_list"]
    other = site.call("PATCH", f"/v2/deployables/{part['uuid']}/program", PROGRAM(image))
    assert other.status_code == 409, other.text
    site.call("DELETE", f"/v2/accelerator_requests?instance={instance}")
    again_written = site.call("PATCH", f"/v2/deployables/{part['uuid']}/program", PROGRAM(image))
    assert again_written.status_code == 200, again_written.text


def PROGRAM(image: str) -> list[dict[str, Any]]:
    return [{"op": "replace", "path": "/program", "value": [{"image_uuid": image}]}]
