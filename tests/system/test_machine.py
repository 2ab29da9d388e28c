"""The real agent with its real drivers on this very machine: what an operator sees of it, and of what goes wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.conftest import fresh
from tests.system.product import ROOT, Product, environment, running

pytestmark = pytest.mark.system

HOST = "here.example"
FAKE = ("0xABCD", "0000:0c:00.0")
SETTINGS = {
    "CYBORG_HOST_NAME": HOST,
    "CYBORG_HOST_NODE": "here",
    "CYBORG_BEAT_S": "1",
    "CYBORG_RESCAN_S": "2",
    "CYBORG_DRIVER_DEADLINE_S": "3",
}


@pytest.fixture(scope="module")
def product() -> Iterator[Product]:
    """One product for this file, which has seen the fake FPGA."""
    with fresh() as folder, running(Product(folder / "state", SETTINGS)) as started:
        until_fake(started, "ready")
        yield started


def fake(product: Product, *words: str) -> None:
    """`python -m drivers.fake …`, as an operator types it."""
    command = [sys.executable, "-m", "drivers.fake", *words]
    subprocess.run(command, check=True, cwd=ROOT, env=environment(CYBORG_STATE_DIR=str(product.state)))


def states(product: Product) -> dict[tuple[str, str], str]:
    """(vendor, address) of each device → its state."""
    found = product.rows("SELECT vendor, address, state FROM accelerators_device")
    return {(vendor, address): state for vendor, address, state in found}


def until_fake(product: Product, state: str) -> None:
    """Wait until the fake FPGA is in this state."""
    product.until(lambda: states(product).get(FAKE) == state, 30, f"the fake FPGA is {state}")


def error(product: Product, driver: str) -> str | None:
    """What the host's entry says of a driver: '' for ok, None before anything is known."""
    found = product.rows("SELECT drivers -> %s ->> 'error' FROM accelerators_host WHERE name = %s", driver, HOST)
    return found[0][0] if found else None


def stale(product: Product) -> bool:
    """Whether the conductor has not heard of the agent for too long."""
    return product.rows("SELECT stale_since IS NOT NULL FROM accelerators_host WHERE name = %s", HOST) == [(True,)]


def virtio() -> set[str]:
    """The addresses of this machine's virtio functions."""
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    return {path.parent.name for path in vendors if path.read_text().strip() == "0x1af4"}


def v2_devices(product: Product, token: str) -> list[dict[str, Any]]:
    """What a client sees."""
    devices: list[dict[str, Any]] = product.json("/v2/devices", token).get("devices", [])
    return devices


def test_every_virtio_function_is_a_device_or_it_is_said_why_not(product: Product) -> None:
    if not virtio():
        pytest.skip("this machine has no virtio functions")
    product.until(lambda: error(product, "pci_driver") == "", 30, "pci_driver has answered")
    devices = {address for vendor, address in states(product) if vendor == "1af4"}
    query = "SELECT drivers #> '{pci_driver,faults}' FROM accelerators_host WHERE name = %s"
    faults = dict(product.rows(query, HOST)[0][0])
    assert devices | faults.keys() == virtio() and not devices & faults.keys()
    assert all("the host uses it" in reason for reason in faults.values())


def test_a_client_sees_what_the_agent_found(product: Product) -> None:
    token = product.manage("api_token", "test")[-1]
    assert product.get("/v2/devices")[0] == 401
    seen = v2_devices(product, token)
    assert {device["vendor"] for device in seen} == {vendor for vendor, _ in states(product)}
    [one] = [device for device in seen if device["vendor"] == FAKE[0]]
    assert (one["type"], one["hostname"]) == ("FPGA", HOST)
    assert product.json(f"/v2/devices/{one['uuid']}", token)["uuid"] == one["uuid"]
    units = "SELECT count(*) FROM accelerators_attachhandle WHERE attach_type = 'TEST_PCI' AND missing_since IS NULL"
    assert product.rows(units) == [(16,)]


def test_an_unplugged_device_is_missing_and_a_plugged_one_is_back(product: Product) -> None:
    token = product.manage("api_token", "plug")[-1]
    others = {key: state for key, state in states(product).items() if key != FAKE}
    fake(product, "unplug", "0")
    until_fake(product, "missing")
    assert FAKE[0] not in {device["vendor"] for device in v2_devices(product, token)}
    assert others == {key: state for key, state in states(product).items() if key != FAKE}
    fake(product, "plug", "0")
    until_fake(product, "ready")
    assert FAKE[0] in {device["vendor"] for device in v2_devices(product, token)}
    told = product.rows("SELECT action FROM accelerators_event WHERE action LIKE 'device.%%' ORDER BY id DESC LIMIT 2")
    assert told == [("device.back",), ("device.missing",)]


@pytest.mark.parametrize("how", ["raise", "hang", "flood", "rubbish", "die"])
def test_a_driver_that_misbehaves_keeps_its_devices_and_harms_no_other(product: Product, how: str) -> None:
    before = states(product)
    fake(product, "misbehave", how)
    product.until(lambda: error(product, "fake_driver"), 30, f"the conductor knows that fake_driver does {how}")
    assert error(product, "pci_driver") == "" and states(product) == before and not stale(product)
    fake(product, "reset")
    product.manage("command", "rescan", HOST, "--driver", "fake_driver")  # whatever it broke before is forgiven
    product.until(lambda: error(product, "fake_driver") == "", 60, "it answers again")
    assert states(product) == before
    agent = product.child("agent")
    assert agent and not [one for one in product.drivers() if one.parent != agent.pid]


def test_what_changed_while_the_gateway_was_away_is_told_when_it_is_back(product: Product) -> None:
    web, agent = product.child("web"), product.child("agent")
    assert web and agent
    os.kill(web.pid, signal.SIGSTOP)
    try:
        fake(product, "unplug", "0")
        fake(product, "count", "3")
    finally:
        os.kill(web.pid, signal.SIGKILL)
    until_fake(product, "missing")
    product.until(lambda: len([v for v, _ in states(product) if v == FAKE[0]]) == 3, 30, "three fake FPGAs")
    fake(product, "reset")
    until_fake(product, "ready")
    assert product.child("agent") == agent


def test_an_agent_that_is_silent_is_stale_and_live_again_when_it_is_heard(product: Product) -> None:
    before = states(product)
    agent = product.until(lambda: product.child("agent"), 30, "the agent runs")
    os.kill(agent.pid, signal.SIGSTOP)
    try:
        product.until(lambda: stale(product), 30, "its host is stale")
        assert states(product) == before
    finally:
        os.kill(agent.pid, signal.SIGCONT)
    product.until(lambda: not stale(product), 30, "its host is live")
    assert states(product) == before
