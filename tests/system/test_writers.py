"""Test that Placement stays correct when the Placement writer is switched live and an agent is killed during a write.

Keystone and Placement are real.
"""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.webserver import until
from tests.system import failing_proxy
from tests.system.clients.cloud import HANDLES, KeystoneCloud
from tests.system.failing_proxy import TroubleProxy
from tests.system.keystone import Keystone
from tests.system.placement import Placement
from tests.system.product import Product, running

pytestmark = pytest.mark.system
SOON_S = 30.0
COMMANDS = "SELECT state, text FROM accelerators_command WHERE op = 'placement' ORDER BY id"


@pytest.fixture
def between(placement: Placement) -> Iterator[TroubleProxy]:
    with failing_proxy.trouble_proxy(placement.url) as one:
        yield one


@pytest.fixture
def cloud(keystone: Keystone, between: TroubleProxy, folder: Path) -> Iterator[KeystoneCloud]:
    """A product whose agent can write to Placement, because it has the same `OS_…` variables as the conductor."""
    host = f"cmp-{uuid.uuid4().hex[:8]}"
    settings = keystone.environment("service") | {"CYBORG_AUTH": "keystone", "CYBORG_NOVA_ENDPOINT": "off"}
    settings |= {"CYBORG_HOST_NAME": host, "CYBORG_HOST_NODE": host, "CYBORG_ENABLED_DRIVERS": "fake_driver"}
    settings |= {"CYBORG_PLACEMENT_ENDPOINT": between.url, "CYBORG_BEAT_S": "1", "CYBORG_LEASE_FLUSH_S": "0.5"}
    with running(Product(folder / "state", settings)) as product:
        yield KeystoneCloud(product, keystone)


def list_placement_commands(cloud: KeystoneCloud) -> list[tuple[Any, ...]]:
    return cloud.product.rows(COMMANDS)


def has_no_intents(cloud: KeystoneCloud) -> bool:
    return not cloud.product.rows("SELECT 1 FROM accelerators_intent WHERE kind = 'provider'")


def reserved_units(placement: Placement, root: str) -> int:
    (card,) = placement.tree(root).values()
    return int(card["inventories"]["FPGA"]["reserved"])


def check_synchronized(cloud: KeystoneCloud, placement: Placement, root: str, wanted: int) -> None:
    """Wait until no provider intent is left and `wanted` units are reserved; another run must have nothing to write."""
    until(lambda: has_no_intents(cloud) and reserved_units(placement, root) == wanted, SOON_S)
    assert cloud.product.manage("placement_sync", "--dry-run")[-1] == "1 host, 0 to be written"


def test_placement_is_correct_while_writers_are_switched_and_an_agent_is_killed(
    cloud: KeystoneCloud, placement: Placement, between: TroubleProxy
) -> None:
    cloud.enable_card()
    root = placement.create_compute_provider(cloud.product.settings["CYBORG_HOST_NAME"])
    until(lambda: placement.tree(root), 40.0)
    (device,) = cloud.http("admin", "GET", "/devices").json()["devices"]

    def offer(word: str) -> None:
        assert cloud.http("admin", "POST", f"/devices/{device['uuid']}/{word}").status_code == 204

    said = cloud.product.manage("placement_writer", "agents", "--reason", "closer to the hardware")
    assert said[0].startswith("agents, epoch 1, since ")
    assert said[1:] == ["the agent of every host can write"]
    offer("disable")
    check_synchronized(cloud, placement, root, HANDLES)
    assert list_placement_commands(cloud) == [("succeeded", "writes: 1, reads: 1")]

    for n in range(6):
        offer("enable" if n % 2 == 0 else "disable")
        cloud.product.manage("placement_writer", "agents" if n % 2 else "conductor")
    check_synchronized(cloud, placement, root, HANDLES)
    before = len(list_placement_commands(cloud))

    gate, calls, waiting = threading.Event(), iter(range(1000)), list[int]()

    def block_writes() -> tuple[str, bool]:
        """Let the reads of the conductor and of the agent pass (two calls); block the agent's write until `gate`."""
        if (number := next(calls)) >= 2:
            waiting.append(number)
            gate.wait(SOON_S)
        return "", True

    between.next = block_writes  # type: ignore[method-assign]
    try:
        offer("enable")
        until(
            lambda: (
                len(list_placement_commands(cloud)) > before
                and list_placement_commands(cloud)[-1][0] == "started"
                and len(waiting) == 1
            ),
            SOON_S,
        )
        agent = cloud.product.child("agent")
        assert agent
        os.kill(agent.pid, signal.SIGKILL)
        until(lambda: list_placement_commands(cloud)[-1][0] == "unknown", SOON_S)
    finally:
        gate.set()
    check_synchronized(cloud, placement, root, 0)
    assert list_placement_commands(cloud)[-1][1].startswith("interrupted, because the agent stopped while it ran")
    assert len(placement.tree(root)) == 1
