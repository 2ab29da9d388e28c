"""Read the devices that the product's own agent reports for this machine, and control the fake card.

The fake card is a simulated FPGA; `python -m drivers.fake` controls it.
"""

from __future__ import annotations

import subprocess
import sys

from tests.system.product import ROOT, Product, environment

HOST = "here.example"
"""The host name that tests give this machine (CYBORG_HOST_NAME)."""
FAKE_CARD = ("0xABCD", "0000:0c:00.0")
"""The vendor and the address of the fake card."""
DEVICES = "accelerators_device d JOIN accelerators_host h ON h.id = d.host_id WHERE h.name = %s"


def run_fake_command(product: Product, *words: str) -> None:
    """Run `python -m drivers.fake` with these arguments; raise CalledProcessError if it fails."""
    command = [sys.executable, "-m", "drivers.fake", *words]
    subprocess.run(command, check=True, cwd=ROOT, env=environment(CYBORG_STATE_DIR=str(product.state)))


def device_states(product: Product) -> dict[tuple[str, str], str]:
    """Return the state of each device of this machine by (vendor, address)."""
    found = product.rows(f"SELECT vendor, address, d.state FROM {DEVICES}", HOST)
    return {(vendor, address): state for vendor, address, state in found}


def wait_for_fake_state(product: Product, state: str) -> None:
    """Wait until the fake FPGA is in this state; fail after 30 s."""
    product.until(lambda: device_states(product).get(FAKE_CARD) == state, 30, f"the fake FPGA is {state}")
