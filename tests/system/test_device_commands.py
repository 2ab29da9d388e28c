"""Test that installs, binds and programs change the host through the whole product, or fail with the reason.

The hardware is simulated by the fake driver with files in its state directory, which a reboot deletes.
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

from tests.system.conftest import fresh_folder
from tests.system.machine import run_fake_command
from tests.system.product import Product, running

pytestmark = pytest.mark.system
SETTINGS = {"CYBORG_HOST_NAME": "here.example", "CYBORG_HOST_NODE": "here", "CYBORG_ENABLED_DRIVERS": "fake_driver"}
SETTINGS |= {"CYBORG_BEAT_S": "1", "CYBORG_RESCAN_S": "2"}
SOON_S = 30.0


class ProductWithCard:
    """A product with one fake card (`device`), an administrator's token and Nova's service token."""

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

    def device_state(self) -> str:
        return str(self.call("GET", f"/api/devices/{self.device}/").json()["state"])

    def post_action(self, verb: str) -> None:
        path = f"/api/devices/{self.device}/{verb}/"
        answer = self.call("POST", path, {"reason": "a test"})
        if preview := answer.json().get("preview"):  # the device is held
            answer = self.call("POST", path, {"reason": "a test", "token": preview["token"]})
        assert answer.status_code == 200, answer.text

    def handle_types(self) -> set[str]:
        there = "SELECT attach_type FROM accelerators_attachhandle WHERE missing_since IS NULL"
        return {kind for (kind,) in self.product.rows(there)}

    def commands(self, op: str) -> list[dict[str, Any]]:
        return list(self.product.json(f"/api/commands/?op={op}", self.admin)["results"])

    def list_hardware_files(self, name: str = "*") -> list[Path]:
        return sorted((self.product.state / "agent" / "drivers" / "fake_driver").glob(f"*/0/{name}"))

    def bind_new_request(self, instance: str = "", **group: str) -> tuple[str, str]:
        """Create a request and start to bind it to an instance, a new one by default; return the uuids of both.

        `group` are further entries of the profile's group.
        """
        profile, instance = f"p-{uuid.uuid4().hex[:8]}", instance or str(uuid.uuid4())
        body = [{"name": profile, "groups": [{"resources:FPGA": "1"} | group]}]
        assert self.call("POST", "/v2/device_profiles", body).status_code == 201
        (request,) = self.call("POST", "/v2/accelerator_requests", {"device_profile_name": profile}).json()["arqs"]
        values = {"hostname": "here.example", "device_rp_uuid": self.provider_uuid(), "instance_uuid": instance}
        patch = {request["uuid"]: [{"op": "add", "path": f"/{name}", "value": v} for name, v in values.items()]}
        answer = self.call("PATCH", "/v2/accelerator_requests", patch)
        assert answer.status_code == 202, answer.text
        return request["uuid"], instance

    def provider_uuid(self) -> str:
        (part,) = self.call("GET", "/v2/deployables").json()["deployables"]
        return str(part["rp_uuid"])

    def read_request(self, request: str) -> dict[str, Any]:
        return dict(self.call("GET", f"/v2/accelerator_requests/{request}").json())

    def until_state(self, request: str, state: str) -> dict[str, Any]:
        self.until(lambda: self.read_request(request)["state"] == state, f"the request is {state}")
        return self.read_request(request)


ROLES = ("admin", "service")


@pytest.fixture(scope="module")
def site() -> Iterator[ProductWithCard]:
    with fresh_folder() as folder, running(Product(folder / "state", SETTINGS)) as product:
        yield ProductWithCard(product)


def reset_card(site: ProductWithCard, *script: tuple[str, object]) -> None:
    """Reset the fake card and disable it, so that a test can enable it.

    `script` are the settings of the fake hardware; they are written in one step, so no rescan sees a part of them.
    """
    control = site.product.state / "fake-driver.json"
    control.with_suffix(".new").write_text(json.dumps(dict(script)))
    control.with_suffix(".new").replace(control)
    if site.device_state() in ("ready", "installing"):
        site.post_action("disable")


def test_an_enabled_device_becomes_ready_when_installed_else_failed_with_the_reason(site: ProductWithCard) -> None:
    reset_card(site, ("install", ["firmware", "clock"]))
    site.until(lambda: "clock" in str(site.devices()[0]["to_install"]), "what would be done is shown")
    site.post_action("enable")
    site.until(lambda: site.device_state() == "ready", "it is ready")
    assert [path.name for path in site.list_hardware_files()] == ["clock", "firmware"]

    reset_card(site, ("install", ["firmware", "clock", "fan"]), ("refuse", {"install": ["Busy", "a guest has it"]}))
    site.until(lambda: "fan" in str(site.devices()[0]["to_install"]), "what would be done is shown")
    site.post_action("enable")
    site.until(lambda: site.device_state() == "failed", "it has failed")
    assert "a guest has it" in site.devices()[0]["state_reason"]
    assert [path.name for path in site.list_hardware_files()] == ["clock", "firmware"]

    reset_card(site, ("install", ["firmware", "clock", "fan"]), ("wrong", {"install": True}))
    site.post_action("enable")

    def undone() -> bool:
        last = site.commands("install")[0]
        return last["state"] == "failed" and "Undone: " in last["text"]

    site.until(undone, "the command failed and was undone")
    assert [path.name for path in site.list_hardware_files()] == ["clock", "firmware"]


def test_an_mdev_is_created_by_its_bind_and_removed_with_its_request(site: ProductWithCard) -> None:
    reset_card(site, ("handle_type", "MDEV"))
    site.until(lambda: site.handle_types() == {"MDEV"}, "handles of another type")
    site.post_action("enable")
    request, instance = site.bind_new_request()
    bound = site.until_state(request, "Bound")
    (made,) = site.list_hardware_files("mdev-*")
    assert made.name == f"mdev-{bound['attach_handle_uuid']}"
    assert made.read_text() == instance
    assert site.call("DELETE", f"/v2/accelerator_requests?instance={instance}").status_code == 204
    site.until(lambda: not site.list_hardware_files("mdev-*"), "it is taken away")


def test_an_mdev_is_restored_under_its_uuid_after_a_reboot(site: ProductWithCard) -> None:
    reset_card(site, ("handle_type", "MDEV"))
    site.until(lambda: site.handle_types() == {"MDEV"}, "handles of another type")
    site.post_action("enable")
    request, instance = site.bind_new_request()
    site.until_state(request, "Bound")
    (made,) = site.list_hardware_files("mdev-*")
    product = site.product
    product.interrupt()
    for path in site.list_hardware_files():
        path.unlink()
    with sqlite3.connect(product.state / "agent" / "journal.sqlite3") as journal:
        journal.execute("UPDATE applied SET boot = 'the boot before'")
    journal.close()
    product.start()
    site.until(lambda: [path.name for path in site.list_hardware_files("mdev-*")] == [made.name], "it is put back")
    assert made.read_text() == instance
    assert site.read_request(request)["state"] == "Bound"
    assert site.devices()[0]["status"] == "ok"
    site.call("DELETE", f"/v2/accelerator_requests?instance={instance}")
    site.until(lambda: not site.list_hardware_files("mdev-*"), "it is taken away")


@pytest.mark.parametrize("victim", ["agent", "web", "work", "ingest"])
def test_an_install_ends_when_any_process_is_killed_during_it(site: ProductWithCard, victim: str) -> None:
    reset_card(site, ("install", [f"part{victim}", "rest"]), ("slow_s", {"install": 1.5}))
    site.until(lambda: f"part{victim}" in str(site.devices()[0]["to_install"]), "what would be done is shown")
    site.post_action("enable")
    site.until(lambda: site.commands("install")[0]["state"] in ("taken", "started", "succeeded"), "it is under way")
    child = site.product.child(victim)
    assert child
    os.kill(child.pid, signal.SIGKILL)
    site.until(lambda: site.product.get("/healthz")[0] == 200, "the web is there")
    run_fake_command(site.product, "set", "slow_s", "{}")
    site.until(lambda: site.device_state() in ("ready", "failed"), "it has ended")
    (command, *_) = site.commands("install")
    assert command["ended_at"]
    assert (site.device_state() == "ready") == (command["state"] == "succeeded")


def test_a_bind_writes_the_requested_bitstream_and_shows_it_on_the_deployable(site: ProductWithCard) -> None:
    reset_card(site)
    site.until(lambda: site.handle_types() == {"TEST_PCI"}, "plain handles")
    site.post_action("enable")
    bits = os.urandom(200_000)
    answer = site.call(
        "POST",
        "/api/images/?name=bits&property=accel:function_id=AB-cd",
        data=bits,
        headers={"Content-Type": "application/octet-stream"},
    )
    assert answer.status_code == 201, answer.text
    image = answer.json()["uuid"]
    request, instance = site.bind_new_request(**{"accel:bitstream_id": image})
    site.until_state(request, "Bound")
    (written,) = site.list_hardware_files("image")
    assert hashlib.sha256(written.read_bytes()).digest() == hashlib.sha256(bits).digest()
    (part,) = site.call("GET", "/v2/deployables").json()["deployables"]
    assert part["bitstream_id"] == image
    assert "CUSTOM_FPGA_FUNCTION_ID_FAKE_AB_CD" in part["attributes_list"]
    other = site.call("PATCH", f"/v2/deployables/{part['uuid']}/program", program_patch(image))
    assert other.status_code == 409, other.text
    site.call("DELETE", f"/v2/accelerator_requests?instance={instance}")
    again_written = site.call("PATCH", f"/v2/deployables/{part['uuid']}/program", program_patch(image))
    assert again_written.status_code == 200, again_written.text


def program_patch(image: str) -> list[dict[str, Any]]:
    return [{"op": "replace", "path": "/program", "value": [{"image_uuid": image}]}]
