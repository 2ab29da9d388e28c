"""Test that Placement and Nova end up correct when the cluster that calls them is killed repeatedly during changes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.nova import FakeNova, running_nova
from tests.support.webserver import until
from tests.system import processes
from tests.system.clients.cloud import KeystoneCloud
from tests.system.keystone import Keystone
from tests.system.placement import Placement
from tests.system.product import Product, running

pytestmark = pytest.mark.system
CARDS, KILLS = 8, 6
LIFE_S = 2.0
"""How many seconds a cluster lives at most before it is killed, counted from the moment when all its workers run."""
PROVIDERS_OF_DEVICES = """
SELECT d.uuid::text, d.state, p.rp_uuid::text, p.name, p.num_accelerators FROM accelerators_deployable p
JOIN accelerators_device d ON d.id = p.device_id ORDER BY p.id
"""


@pytest.fixture
def nova() -> Iterator[FakeNova]:
    with running_nova() as one:
        yield one


@pytest.fixture
def cloud(keystone: Keystone, placement: Placement, nova: FakeNova, folder: Path) -> Iterator[KeystoneCloud]:
    host = f"cmp-{uuid.uuid4().hex[:8]}"
    script = folder / "fake.json"
    script.write_text(json.dumps({"count": CARDS}))
    (folder / "drivers.toml").write_text(f'[fake_driver]\ncontrol_file = "{script}"\n')
    settings = keystone.environment("service") | {"CYBORG_AUTH": "keystone", "CYBORG_NOVA_ENDPOINT": nova.url}
    settings |= {"CYBORG_HOST_NAME": host, "CYBORG_HOST_NODE": host, "CYBORG_ENABLED_DRIVERS": "fake_driver"}
    settings["CYBORG_TICK_STALL_S"] = "30"  # a cluster that is killed as a whole cannot be dead-locked
    settings |= {"CYBORG_DRIVER_SETTINGS": str(folder / "drivers.toml")}
    with running(Product(folder / "state", settings)) as product:
        yield KeystoneCloud(product, keystone)


class RandomChanges:
    """Random changes as an operator and Nova make them: cards are enabled and disabled, requests are bound.

    `bound` are the requests whose bind was accepted, `made` is the number of changes.
    """

    def __init__(self, cloud: KeystoneCloud, nova: FakeNova) -> None:
        self.cloud, self.nova, self.chance = cloud, nova, random.Random(3)
        self.host = cloud.host
        self.bound: list[str] = []
        self.made = 0

    def make_one(self) -> None:
        """Enable or disable a random card, or bind a request to it."""
        device, state, provider, *_ = self.chance.choice(self.cloud.product.rows(PROVIDERS_OF_DEVICES))
        if self.chance.random() < 0.5:
            act = "disable" if state == "ready" else "enable"
            assert self.cloud.http("admin", "POST", f"/devices/{device}/{act}").status_code == 204
        elif state == "ready":
            self._bind(provider)
        self.made += 1

    def _bind(self, provider: str) -> None:
        instance = str(uuid.uuid4())
        self.nova.known[instance] = 200
        (request,) = self.cloud.create_requests("fpga")
        values = {"hostname": self.host, "device_rp_uuid": provider, "instance_uuid": instance}
        patch = {request["uuid"]: [{"path": f"/{key}", "op": "add", "value": value} for key, value in values.items()]}
        answer = self.cloud.http("member", "PATCH", "/accelerator_requests", patch, service=True)
        if answer.status_code == 202:  # otherwise the card was disabled meanwhile
            self.bound.append(request["uuid"])

    @contextlib.contextmanager
    def make_changes_meanwhile(self) -> Iterator[None]:
        """Make changes in a thread during the block; fail at its end if a change failed."""
        stop, wrong = threading.Event(), list[BaseException]()

        def run() -> None:
            while not stop.is_set() and not wrong:
                try:
                    self.make_one()
                except BaseException as error:  # noqa: BLE001  (raised in the main thread)
                    wrong.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        assert not wrong, wrong


def test_L2_placement_and_nova_are_correct_after_the_worker_was_killed_during_changes(
    cloud: KeystoneCloud, placement: Placement, nova: FakeNova
) -> None:
    product, chance = cloud.product, random.Random(5)
    devices = product.until(
        lambda: len(found := product.rows(PROVIDERS_OF_DEVICES)) == CARDS and found, 30, "the cards"
    )
    root = placement.create_compute_provider(cloud.host)
    for device, *_ in devices:
        assert cloud.http("admin", "POST", f"/devices/{device}/enable").status_code == 204
    until(lambda: len(placement.tree(root)) == CARDS, 60)
    held = {placement.allocate(provider, 1) for _, _, provider, *_ in product.rows(PROVIDERS_OF_DEVICES)}
    cloud.create_profile("fpga")
    changes = RandomChanges(cloud, nova)
    with changes.make_changes_meanwhile():
        for _ in range(KILLS):
            product.until(lambda: product.workers("work", 2), 60, "the cluster is complete")
            time.sleep(chance.uniform(0.0, LIFE_S))  # so that each kill hits another moment of the work
            _kill_group(product)
    product.until(lambda: not _list_left_intents(product), 120, lambda: f"{_list_left_intents(product)}")
    shown = placement.tree(root)
    wanted = {
        name: (rp, n, 0 if state == "ready" else n) for _, state, rp, name, n in product.rows(PROVIDERS_OF_DEVICES)
    }
    assert {name: _provider_numbers(one) for name, one in shown.items()} == wanted
    for consumer in held:
        assert placement.call("GET", f"/allocations/{consumer}")["allocations"]
    assert changes.made >= KILLS and changes.bound
    assert set(changes.bound) <= nova.received_statuses().keys()
    assert {status for request in changes.bound for status in nova.received_statuses()[request]} == {"completed"}
    assert product.manage("placement_sync", "--dry-run") == ["1 host, 0 to be written"]


def _provider_numbers(one: dict[str, Any]) -> tuple[str, int, int]:
    entry = one["inventories"]["FPGA"]
    return one["uuid"], entry["total"], entry["reserved"]


def _list_left_intents(product: Product) -> list[tuple[Any, ...]]:
    kinds = "'provider', 'notice'"
    return product.rows(f"SELECT kind, attempts, last_error FROM accelerators_intent WHERE kind IN ({kinds})")


def _kill_group(product: Product) -> None:
    """Kill the first process of the cluster `work` and all its descendants with SIGKILL."""
    top = product.child("work")
    assert top
    for one in [top, *processes.list_descendants(top.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGKILL)
