"""A compute host on a simulated bus: `umockdev-wrapper python -m tests.bench.simulated_host`, started by `rows_uevent`.

The real agent is its child. Each line of standard input has the address and the product id of a card to plug in; the
answer is the monotonic time just before its uevent.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time

from drivers.isolation.process import die_with_parent
from tests.drivers.pci.hotplug import LIBRARY, SimulatedBus


def describe_card(address: str, product: str) -> bytes:
    """Return the description of a PCI card in umockdev's format."""
    return (
        f"P: /devices/pci0000:00/{address}\nE: SUBSYSTEM=pci\nE: PCI_SLOT_NAME={address}\n"
        "L: iommu_group=../../../kernel/iommu_groups/7\n"
        f"A: vendor=0x10de\\n\nA: device=0x{product}\\n\nA: class=0x030200\\n\n"
    ).encode()


def plug_card(bus: SimulatedBus, address: str, product: str) -> float:
    """Add a card to the bus, which sends the uevent; return the monotonic time just before."""
    error, found = ctypes.c_void_p(), describe_card(address, product)
    began = time.monotonic()
    if not LIBRARY.umockdev_testbed_add_from_string(bus.testbed, found, ctypes.byref(error)):
        raise RuntimeError(f"umockdev does not take {found!r}")
    return began


def main() -> None:
    """Plug in cards until standard input ends; start the agent after the first card."""
    die_with_parent()
    bus, agent = SimulatedBus(), None
    try:
        for line in sys.stdin:
            print(plug_card(bus, *line.split()), flush=True)
            agent = agent or subprocess.Popen([sys.executable, "-m", "agents.host.main", "--die-with-parent"])
    finally:
        ctypes.CDLL("libgobject-2.0.so.0").g_object_unref(bus.testbed)  # removes the test bed's folder


if __name__ == "__main__":
    main()
