"""Test the whole product with a real Keystone, a real Placement and a fake Nova that records its external events."""

from __future__ import annotations

import os
import signal
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.support.nova import FakeNova, running_nova
from tests.support.webserver import until
from tests.system.clients.cloud import HANDLES, KeystoneCloud
from tests.system.conftest import fresh_folder
from tests.system.keystone import Keystone
from tests.system.placement import Placement
from tests.system.product import Product, running
from tests.system.slow_proxy import http_proxy

pytestmark = pytest.mark.system
SOON_S = 20.0


@pytest.fixture(scope="module")
def nova() -> Iterator[FakeNova]:
    with running_nova() as one:
        yield one


@pytest.fixture(scope="module")
def cloud(keystone: Keystone, placement: Placement, nova: FakeNova) -> Iterator[KeystoneCloud]:
    """A product that two tests of this file share; these tests kill parts of it."""
    host = f"cmp-{uuid.uuid4().hex[:8]}"
    settings = keystone.environment("service") | {"CYBORG_AUTH": "keystone", "CYBORG_NOVA_ENDPOINT": nova.url}
    settings |= {"CYBORG_HOST_NAME": host, "CYBORG_HOST_NODE": host, "CYBORG_ENABLED_DRIVERS": "fake_driver"}
    with fresh_folder() as folder, running(Product(folder / "state", settings)) as product:
        yield KeystoneCloud(product, keystone)


def fake_provider(placement: Placement, root: str) -> dict[str, Any]:
    """Return the fake card's provider as Placement shows it; {} while there is none."""
    return next(iter(placement.tree(root).values()), {})


def reserved_units(placement: Placement, root: str) -> int:
    return int(fake_provider(placement, root).get("inventories", {}).get("FPGA", {}).get("reserved", -1))


def list_intents(cloud: KeystoneCloud) -> list[tuple[Any, ...]]:
    return cloud.product.rows("SELECT kind, attempts, last_error FROM accelerators_intent")


def test_placement_and_nova_follow_the_hardware_through_binds_outages_and_kills(
    cloud: KeystoneCloud, placement: Placement, nova: FakeNova
) -> None:
    """A late compute provider, a disable, an enable, a bind, then an outage in which the workers are killed."""
    cloud.enable_card()
    host = cloud.product.settings["CYBORG_HOST_NAME"]
    until(lambda: any(f"waiting for compute provider {host}" in row[2] for row in list_intents(cloud)), SOON_S)
    root = placement.create_compute_provider(host)
    cloud.product.manage("placement_sync")
    provider = fake_provider(placement, root)
    assert (provider["uuid"], provider["name"]) == (cloud.provider, f"{host}_FakeDevice")
    assert (provider["inventories"]["FPGA"]["total"], provider["traits"]) == (HANDLES, ["CUSTOM_FAKE_DEVICE"])

    (device,) = cloud.http("admin", "GET", "/devices").json()["devices"]
    cloud.http("admin", "POST", f"/devices/{device['uuid']}/disable")
    until(lambda: reserved_units(placement, root) == HANDLES, SOON_S)
    cloud.http("admin", "POST", f"/devices/{device['uuid']}/enable")
    until(lambda: reserved_units(placement, root) == 0, SOON_S)

    cloud.create_profile("fpga")
    instance = str(uuid.uuid4())
    nova.known[instance] = 422
    (request,) = cloud.http("member", "POST", "/accelerator_requests", {"device_profile_name": "fpga"}).json()["arqs"]
    values = {"hostname": host, "device_rp_uuid": cloud.provider, "instance_uuid": instance}
    patch = {request["uuid"]: [{"path": f"/{key}", "op": "add", "value": value} for key, value in values.items()]}
    assert cloud.http("member", "PATCH", "/accelerator_requests", patch, service=True).status_code == 202
    until(lambda: nova.received_statuses().get(request["uuid"]) == ["completed"], SOON_S)

    placement.stop()
    try:
        cloud.http("admin", "POST", f"/devices/{device['uuid']}/disable")
        until(lambda: any(row[0] == "provider" and row[1] for row in list_intents(cloud)), SOON_S)
        assert cloud.http("admin", "GET", "/devices").status_code == 200
        for worker in cloud.product.workers("work", 2):
            os.kill(worker.pid, signal.SIGKILL)
    finally:
        placement.start()  # other tests of this process use it, too
    until(lambda: reserved_units(placement, root) == HANDLES, 60.0)
    until(lambda: not list_intents(cloud), SOON_S)


def test_L2_a_decommissioned_host_is_removed_although_the_workers_are_killed_and_its_name_joins_again(
    keystone: Keystone, placement: Placement, nova: FakeNova, folder: Path
) -> None:
    """Refused while a request or an allocation exists. Then the workers are killed while they delete in Placement.

    The agent then joins again with the state directory of its first life.
    """
    host = f"cmp-{uuid.uuid4().hex[:8]}"
    settings = keystone.environment("service") | {"CYBORG_AUTH": "keystone", "CYBORG_NOVA_ENDPOINT": nova.url}
    settings |= {"CYBORG_HOST_NAME": host, "CYBORG_HOST_NODE": host, "CYBORG_ENABLED_DRIVERS": "fake_driver"}
    settings |= {"CYBORG_HOST_REMOVAL_DELAY_S": "0"}
    root = placement.create_compute_provider(host)
    with (
        http_proxy(placement.url) as between,
        running(Product(folder / "state", settings | {"CYBORG_PLACEMENT_ENDPOINT": between.url})) as product,
    ):
        cloud = KeystoneCloud(product, keystone).enable_card()
        until(lambda: fake_provider(placement, root), SOON_S)
        ((host_uuid,),) = product.rows("SELECT uuid FROM accelerators_host")

        def order_removal() -> requests.Response:
            return requests.post(
                f"{cloud.url}/api/hosts/{host_uuid}/remove/",
                json={"confirm": host, "reason": "its lease is over"},
                headers={"X-Auth-Token": cloud.token("admin")},
                timeout=60,
            )

        def assert_refused(holder: str) -> None:
            refused = order_removal()
            assert (refused.status_code, holder in refused.text) == (409, True), refused.text
            assert fake_provider(placement, root) and product.rows("SELECT 1 FROM accelerators_device")

        consumer = placement.allocate(cloud.provider, 1)
        assert_refused(consumer)
        placement.release(consumer)
        cloud.create_profile("fpga")
        request = bind_request(cloud)
        assert_refused(request)
        cloud.http("member", "DELETE", f"/accelerator_requests?arqs={request}", service=True)
        ((endpoint,),) = product.rows("SELECT uuid FROM placement_sync_novaendpoint")
        product.manage("nova", "confirm", str(endpoint))  # this Nova has never shown the instance

        between.delay_s = 0.2
        assert (answer := order_removal()).status_code == 202, answer.text
        for _ in range(3):
            between.silent = True  # so the worker waits for Placement in the middle of the removal when it is killed
            seen = between.delayed
            until(lambda seen=seen: between.delayed > seen, SOON_S)
            assert product.rows("SELECT 1 FROM accelerators_host WHERE removing_since IS NOT NULL")
            for worker in until(lambda: product.workers("work", 2), SOON_S):
                os.kill(worker.pid, signal.SIGKILL)
        between.silent, between.delay_s = False, 0.0
        until(lambda: not product.rows("SELECT 1 FROM accelerators_host"), 120.0)
        assert placement.tree(root) == {}
        for table in ("accelerators_device", "accelerators_intent", "agents_agent"):
            assert not product.rows(f"SELECT 1 FROM {table}"), table
        assert product.rows("SELECT reason FROM accelerators_event WHERE action = 'host.removed'") == [
            ("its lease is over",)
        ]
        assert_joins_again(cloud, placement, root)


def bind_request(cloud: KeystoneCloud) -> str:
    """Bind a request for the profile `fpga` to a new instance on the fake card, as Nova does; return its uuid."""
    (request,) = cloud.create_requests("fpga")
    patch = {request["uuid"]: cloud.bind_operations(str(uuid.uuid4()))}
    assert cloud.http("member", "PATCH", "/accelerator_requests", patch, service=True).status_code == 202
    return str(request["uuid"])


def assert_joins_again(cloud: KeystoneCloud, placement: Placement, root: str) -> None:
    """Restart the product, whose agent then joins with a new token, its old key and its old journal.

    Fail unless the card is found as a new device, and is offered and bound as in the first life of the host.
    """
    product, provider_before = cloud.product, cloud.provider
    (removed,) = product.rows("SELECT subject FROM accelerators_event WHERE action = 'device.removed'")
    product.interrupt()
    product.start()
    rows = product.until(lambda: product.rows("SELECT uuid, state FROM accelerators_device"), SOON_S, "the fake card")
    ((device, state),) = rows
    assert (state, device == removed[0]) == ("inactive", False)
    assert placement.tree(root) == {}, "a new device is not published before somebody enables it"
    cloud.enable_card()
    assert cloud.provider == provider_before, "the id is computed from the name"
    until(lambda: reserved_units(placement, root) == 0, SOON_S)
    provider = fake_provider(placement, root)
    assert (provider["uuid"], provider["traits"]) == (provider_before, ["CUSTOM_FAKE_DEVICE"])
    assert provider["inventories"]["FPGA"]["total"] == HANDLES
    request = bind_request(cloud)
    shown = cloud.http("member", "GET", f"/accelerator_requests/{request}").json()
    assert (shown["state"], shown["hostname"]) == ("Bound", cloud.host)
    until(lambda: not [row for row in list_intents(cloud) if row[0] == "provider"], SOON_S)
    assert product.manage("placement_sync", "--dry-run") == ["1 host, 0 to be written"]
    agents = product.rows("SELECT barred FROM agents_agent")
    assert agents == [("",)], "nothing of the revocation is left"


def get_status(cloud: KeystoneCloud, token: str) -> int:
    """Return the status of a GET of the devices with this token."""
    return requests.get(f"{cloud.url}/v2/devices", headers={"X-Auth-Token": token}, timeout=30).status_code


def test_a_revoked_token_is_refused_once_keystone_is_asked_again(cloud: KeystoneCloud) -> None:
    seen, unseen = cloud.keystone.token("member"), cloud.keystone.token("member")
    assert get_status(cloud, seen) == 200
    for token in (seen, unseen):
        cloud.keystone.revoke(token)
    assert get_status(cloud, unseen) == 401
    web = cloud.product.child("web")
    assert web
    os.kill(web.pid, signal.SIGKILL)  # the new process has no cached tokens
    cloud.product.until(lambda: cloud.product.get("/healthz")[0] == 200, 30, "web is back")
    assert get_status(cloud, seen) == 401


def test_the_product_starts_while_keystone_placement_and_nova_are_down(keystone: Keystone, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
    settings = keystone.environment("service") | {"OS_AUTH_URL": f"{nobody}/v3", "CYBORG_NOVA_ENDPOINT": nobody}
    with running(Product(folder / "state", settings)) as product:
        product.until(lambda: product.rows("SELECT 1 FROM accelerators_device"), 30, "the fake card")
        assert product.get("/readyz")[0] == 200
