"""Test the real agent with its real drivers on this machine: what the tables and the v2 API show of its devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.system.machine import DEVICES, FAKE_CARD, HOST, device_states, run_fake_command, wait_for_fake_state
from tests.system.product import Product

pytestmark = pytest.mark.system

HANDLES_OF_DEVICE = """
accelerators_attachhandle u JOIN accelerators_deployable p ON p.id = u.deployable_id
JOIN accelerators_device d ON d.id = p.device_id WHERE d.uuid = %s AND u.missing_since IS NULL
"""


def driver_error(product: Product, driver: str) -> str | None:
    """Return the error of a driver in the host's row: '' if the driver is ok, None if there is no report of it yet."""
    found = product.rows("SELECT drivers -> %s ->> 'error' FROM accelerators_host WHERE name = %s", driver, HOST)
    return found[0][0] if found else None


def is_host_stale(product: Product) -> bool:
    """Tell whether the host is stale, because its agent has sent no heartbeat for too long."""
    return product.rows("SELECT stale_since IS NOT NULL FROM accelerators_host WHERE name = %s", HOST) == [(True,)]


def virtio_addresses() -> set[str]:
    """Return the PCI addresses of this machine's virtio functions."""
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    return {path.parent.name for path in vendors if path.read_text().strip() == "0x1af4"}


def v2_devices(product: Product, token: str) -> list[dict[str, Any]]:
    """Return the devices of this machine as the v2 API lists them."""
    return [one for one in product.json("/v2/devices", token).get("devices", []) if one["hostname"] == HOST]


def test_every_virtio_function_is_a_device_or_has_a_fault_with_the_reason(product: Product) -> None:
    if not virtio_addresses():
        pytest.skip("this machine has no virtio functions")
    product.until(lambda: driver_error(product, "pci_driver") == "", 30, "pci_driver has answered")
    devices = {address for vendor, address in device_states(product) if vendor == "1af4"}
    query = "SELECT drivers #> '{pci_driver,faults}' FROM accelerators_host WHERE name = %s"
    faults = dict(product.rows(query, HOST)[0][0])
    assert devices | faults.keys() == virtio_addresses() and not devices & faults.keys()
    assert all("the host uses it" in reason for reason in faults.values())


def test_the_v2_api_lists_the_devices_that_the_agent_found(product: Product) -> None:
    token = product.manage("api_token", "test")[-1]
    assert product.get("/v2/devices")[0] == 401
    seen = v2_devices(product, token)
    assert {device["vendor"] for device in seen} == {vendor for vendor, _ in device_states(product)}
    [one] = [device for device in seen if device["vendor"] == FAKE_CARD[0]]
    assert (one["type"], one["hostname"]) == ("FPGA", HOST)
    assert product.json(f"/v2/devices/{one['uuid']}", token)["uuid"] == one["uuid"]
    assert product.rows(f"SELECT count(*) FROM {HANDLES_OF_DEVICE} AND u.attach_type = 'TEST_PCI'", one["uuid"]) == [
        (16,)
    ]


def test_an_unplugged_device_becomes_missing_and_ready_again_when_plugged(product: Product) -> None:
    token = product.manage("api_token", "plug")[-1]
    others = {key: state for key, state in device_states(product).items() if key != FAKE_CARD}
    run_fake_command(product, "unplug", "0")
    wait_for_fake_state(product, "missing")
    assert FAKE_CARD[0] not in {device["vendor"] for device in v2_devices(product, token)}
    assert others == {key: state for key, state in device_states(product).items() if key != FAKE_CARD}
    run_fake_command(product, "plug", "0")
    wait_for_fake_state(product, "ready")
    assert FAKE_CARD[0] in {device["vendor"] for device in v2_devices(product, token)}
    of_card = f"subject = (SELECT d.uuid FROM {DEVICES} AND d.vendor = %s)"
    newest = f"SELECT action FROM accelerators_event WHERE {of_card} ORDER BY id DESC LIMIT 2"
    told = product.rows(newest, HOST, FAKE_CARD[0])
    assert told == [("device.back",), ("device.missing",)]


@pytest.mark.parametrize("how", ["raise", "hang", "flood", "rubbish", "die"])
def test_a_misbehaving_driver_keeps_its_devices_and_affects_no_other_driver(product: Product, how: str) -> None:
    before = device_states(product)
    run_fake_command(product, "misbehave", how)
    product.until(lambda: driver_error(product, "fake_driver"), 30, f"the conductor knows that fake_driver does {how}")
    assert driver_error(product, "pci_driver") == "" and device_states(product) == before and not is_host_stale(product)
    run_fake_command(product, "reset")
    product.manage("command", "rescan", HOST, "--driver", "fake_driver")  # ends its quarantine
    product.until(lambda: driver_error(product, "fake_driver") == "", 60, "it answers again")
    assert device_states(product) == before
    agent = product.child("agent")
    assert agent and not [one for one in product.drivers() if one.parent != agent.pid]
