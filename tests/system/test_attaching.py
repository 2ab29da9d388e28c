"""Test that each attachment is claimed once in a real Placement while the `work` cluster is killed repeatedly."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.support.nova import FakeNova, running_nova
from tests.support.webserver import until
from tests.system import failing_proxy, processes
from tests.system.clients.cloud import KeystoneCloud
from tests.system.failing_proxy import TroubleProxy
from tests.system.keystone import Keystone
from tests.system.placement import Placement
from tests.system.product import Product, running

pytestmark = pytest.mark.system
COUNT, KILLS = 6, 2
LIFE_S = 3.0
"""How many seconds a cluster lives at most before it is killed, counted from the moment when all its workers run."""
CALL_S = 0.2
"""The delay of each call to Placement, so that work is left at the first kill and most kills come during a call."""
STATES = "SELECT uuid::text, state, fault FROM accelerators_attachment ORDER BY id"


@pytest.fixture
def nova() -> Iterator[FakeNova]:
    with running_nova() as one:
        yield one


@pytest.fixture
def between(placement: Placement) -> Iterator[TroubleProxy]:
    with failing_proxy.trouble_proxy(placement.url) as one:
        yield one


@pytest.fixture
def cloud(keystone: Keystone, between: TroubleProxy, nova: FakeNova, folder: Path) -> Iterator[KeystoneCloud]:
    host = f"cmp-{uuid.uuid4().hex[:8]}"
    settings = keystone.environment("service") | {"CYBORG_AUTH": "keystone", "CYBORG_NOVA_ENDPOINT": nova.url}
    settings |= {"CYBORG_HOST_NAME": host, "CYBORG_HOST_NODE": host, "CYBORG_ENABLED_DRIVERS": "fake_driver"}
    settings |= {"CYBORG_PLACEMENT_ENDPOINT": between.url}
    settings["CYBORG_TICK_STALL_S"] = "30"  # a cluster that is killed as a whole cannot be dead-locked
    with running(Product(folder / "state", settings)) as product:
        yield KeystoneCloud(product, keystone).enable_card()


def post_attachment(cloud: KeystoneCloud, path: str, body: Any) -> dict[str, Any]:
    """Send a POST below /api/attachments/ as admin, with the token of its preview if it must be confirmed, and return
    the answer; fail unless the status is 202."""
    where, headers = f"{cloud.url}/api/attachments/{path}", {"X-Auth-Token": cloud.token("admin")}
    answer = requests.post(where, json=body, headers=headers, timeout=30)
    if preview := answer.json().get("preview"):
        answer = requests.post(where, json=body | {"token": preview["token"]}, headers=headers, timeout=30)
    assert answer.status_code == 202, answer.text
    return dict(answer.json())


def test_L2_attachments_are_claimed_and_released_once_while_the_worker_is_killed(
    cloud: KeystoneCloud, placement: Placement, nova: FakeNova, between: TroubleProxy
) -> None:
    product, host = cloud.product, cloud.host
    root = placement.create_compute_provider(host)
    until(lambda: placement.tree(root), 60)
    cloud.create_profile("fpga")
    nova.project = cloud.project_id()
    instances = [placement.allocate(root, 1, "VCPU") for _ in range(COUNT)]
    nova.shown |= {instance: ("ACTIVE", host) for instance in instances}
    before = {instance: _read_consumer(placement, instance) for instance in instances}
    between.next = lambda: time.sleep(CALL_S) or ("", True)  # type: ignore[method-assign,func-returns-value]

    rows = [post_attachment(cloud, "", {"instance": instance, "profile": "fpga"}) for instance in instances]
    assert _kill_worker_until_done(product, lambda: _count_in_state(product, "attached"), COUNT)
    for instance in instances:
        now = _read_consumer(placement, instance)
        assert now["allocations"] == {root: {"VCPU": 1}, cloud.provider: {"FPGA": 1}}
        assert {**now, "allocations": 0} == {**before[instance], "allocations": 0}
    assert _count_requests(product) == COUNT

    for row in rows[1:]:
        post_attachment(cloud, f"{row['uuid']}/detach/", {"reason": "enough"})
    assert _kill_worker_until_done(product, lambda: _count_in_state(product, "detached"), COUNT - 1)
    assert _read_consumer(placement, instances[0])["allocations"][cloud.provider] == {"FPGA": 1}
    for instance in instances[1:]:
        assert _read_consumer(placement, instance) == before[instance]
    assert _count_requests(product) == 1
    bound = product.rows("SELECT uuid::text FROM accelerators_acceleratorrequest")
    product.until(lambda: not product.rows("SELECT FROM accelerators_intent WHERE kind = 'notice'"), 60, "notices")
    assert {uuid for (uuid,) in bound} <= nova.received_statuses().keys()


def _read_consumer(placement: Placement, instance: str) -> dict[str, Any]:
    """Return the allocations, project, user and type of a consumer, without its generation."""
    found = placement.call("GET", f"/allocations/{instance}")
    has = {provider: entry["resources"] for provider, entry in found["allocations"].items()}
    return {name: found[name] for name in ("project_id", "user_id", "consumer_type")} | {"allocations": has}


def _count_in_state(product: Product, state: str) -> int:
    return sum(found == state for _, found, _ in product.rows(STATES))


def _count_requests(product: Product) -> int:
    ((count,),) = product.rows("SELECT count(*) FROM accelerators_acceleratorrequest")
    return int(count)


def _kill_worker_until_done(product: Product, done: Callable[[], int], wanted: int) -> int:
    """Kill the cluster `work` with all its processes up to KILLS times, then wait until `done` returns `wanted`.

    The first kill comes at once, so that work is left. Returns how many kills came while `done` was below `wanted`.
    """
    chance, kills = random.Random(wanted), 0
    for _ in range(KILLS):
        if done() == wanted:
            break
        product.until(lambda: product.workers("work", 2), 60, "the cluster is complete")
        if kills:
            time.sleep(chance.uniform(0.0, LIFE_S))  # so that each kill hits another moment of the work
        kills += done() < wanted
        top = product.child("work")
        assert top
        for one in [top, *processes.list_descendants(top.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)
    product.until(lambda: done() == wanted, 120, lambda: f"{product.rows(STATES)}")
    return kills
