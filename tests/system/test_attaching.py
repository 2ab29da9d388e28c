"""kill -9 of the cluster that attaches, again and again, before a real Placement: each is claimed once, or not."""

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

from tests.support.nova import Nova, recording
from tests.support.webserver import until
from tests.system import processes, trouble
from tests.system.clients.cloud import Cloud
from tests.system.keystone import Keystone
from tests.system.placement import Placement
from tests.system.product import Product, running
from tests.system.trouble import Trouble

pytestmark = pytest.mark.system
COUNT, KILLS = 6, 2
LIFE_S = 3.0
"""The longest that a cluster lives once it is complete."""
CALL_S = 0.05
"""So long takes each call to Placement, so that most of a cluster's life is amid one."""
STATES = "SELECT uuid::text, state, fault FROM accelerators_attachment ORDER BY id"


@pytest.fixture
def nova() -> Iterator[Nova]:
    with recording() as one:
        yield one


@pytest.fixture
def between(placement: Placement) -> Iterator[Trouble]:
    with trouble.before(placement.url) as one:
        yield one


@pytest.fixture
def cloud(keystone: Keystone, between: Trouble, nova: Nova, folder: Path) -> Iterator[Cloud]:
    host = f"cmp-{uuid.uuid4().hex[:8]}"
    settings = keystone.environment("service") | {"CYBORG_AUTH": "keystone", "CYBORG_NOVA_ENDPOINT": nova.url}
    settings |= {"CYBORG_HOST_NAME": host, "CYBORG_HOST_NODE": host, "CYBORG_ENABLED_DRIVERS": "fake_driver"}
    settings |= {"CYBORG_PLACEMENT_ENDPOINT": between.url}
    settings["CYBORG_TICK_STALL_S"] = "30"  # all of it dies here: nothing is left that could dead-lock
    with running(Product(folder / "state", settings)) as product:
        yield Cloud(product, keystone).ready()


def asked(cloud: Cloud, path: str, body: Any) -> dict[str, Any]:
    """A POST below /api/attachments/, as admin."""
    where = f"{cloud.url}/api/attachments/{path}"
    answer = requests.post(where, json=body, headers={"X-Auth-Token": cloud.token("admin")}, timeout=30)
    assert answer.status_code == 202, answer.text
    return dict(answer.json())


def test_L2_the_worker_dies_amid_attaching_and_detaching(
    cloud: Cloud, placement: Placement, nova: Nova, between: Trouble
) -> None:
    product, host = cloud.product, cloud.host
    root = placement.compute(host)
    until(lambda: placement.tree(root), 60)
    cloud.profile("fpga")
    nova.project = cloud.project()
    instances = [placement.allocate(root, 1, "VCPU") for _ in range(COUNT)]
    nova.shown |= {instance: ("ACTIVE", host) for instance in instances}
    before = {instance: _consumer(placement, instance) for instance in instances}
    between.next = lambda: time.sleep(CALL_S) or ("", True)  # type: ignore[method-assign,func-returns-value]

    rows = [asked(cloud, "", {"instance": instance, "profile": "fpga"}) for instance in instances]
    _dying(product, lambda: _at(product, "attached"), COUNT)
    for instance in instances:
        now = _consumer(placement, instance)
        assert now["allocations"] == {root: {"VCPU": 1}, cloud.provider: {"FPGA": 1}}
        assert {**now, "allocations": 0} == {**before[instance], "allocations": 0}
    assert _requests(product) == COUNT

    for row in rows[1:]:
        asked(cloud, f"{row['uuid']}/detach/", {"reason": "enough"})
    _dying(product, lambda: _at(product, "detached"), COUNT - 1)
    assert _consumer(placement, instances[0])["allocations"][cloud.provider] == {"FPGA": 1}
    for instance in instances[1:]:
        assert _consumer(placement, instance) == before[instance]
    assert _requests(product) == 1
    bound = product.rows("SELECT uuid::text FROM accelerators_acceleratorrequest")
    product.until(lambda: not product.rows("SELECT FROM accelerators_intent WHERE kind = 'notice'"), 60, "notices")
    assert {uuid for (uuid,) in bound} <= nova.told().keys()


def _consumer(placement: Placement, instance: str) -> dict[str, Any]:
    """What it has, and whose it is; but for its generation."""
    found = placement.call("GET", f"/allocations/{instance}")
    has = {provider: entry["resources"] for provider, entry in found["allocations"].items()}
    return {name: found[name] for name in ("project_id", "user_id", "consumer_type")} | {"allocations": has}


def _at(product: Product, state: str) -> int:
    return sum(found == state for _, found, _ in product.rows(STATES))


def _requests(product: Product) -> int:
    ((count,),) = product.rows("SELECT count(*) FROM accelerators_acceleratorrequest")
    return int(count)


def _dying(product: Product, done: Callable[[], int], wanted: int) -> None:
    """The cluster `work` is killed with everything below it while this is going on, then left to finish it."""
    chance = random.Random(wanted)
    for _ in range(KILLS):
        if done() == wanted:
            break
        product.until(lambda: product.workers("work", 2), 60, "the cluster is complete")
        time.sleep(chance.uniform(0.0, LIFE_S))  # it dies at another moment each time
        top = product.child("work")
        assert top
        for one in [top, *processes.below(top.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)
    product.until(lambda: done() == wanted, 120, lambda: f"{product.rows(STATES)}")
