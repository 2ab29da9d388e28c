"""The real agent with its real drivers on this very machine: what an operator sees of it, and of what goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.system.machine import DEVICES, FAKE, HOST, fake, states, until_fake
from tests.system.product import Product

pytestmark = pytest.mark.system

UNITS = """
accelerators_attachhandle u JOIN accelerators_deployable p ON p.id = u.deployable_id
JOIN accelerators_device d ON d.id = p.device_id WHERE d.uuid = %s AND u.missing_since IS NULL
"""


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
    """What a client sees of this machine."""
    return [one for one in product.json("/v2/devices", token).get("devices", []) if one["hostname"] == HOST]


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
    assert product.rows(f"SELECT count(*) FROM {UNITS} AND u.attach_type = 'TEST_PCI'", one["uuid"]) == [(16,)]


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
    of_card = f"subject = (SELECT d.uuid FROM {DEVICES} AND d.vendor = %s)"
    newest = f"SELECT action FROM accelerators_event WHERE {of_card} ORDER BY id DESC LIMIT 2"
    told = product.rows(newest, HOST, FAKE[0])
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
