"""Plug and unplug cards on a simulated bus while a driver runs in its own process; uevents come as from the kernel.

`test_hotplug` runs this below `umockdev-wrapper`. It prints the addresses that the driver finds, one line for each
discovery. libumockdev is called by ctypes.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time

import pyudev

from drivers.inventory import DriverReport
from drivers.isolation.runner import DriverProcess

LIBRARY = ctypes.CDLL("libumockdev.so.0")
LIBRARY.umockdev_testbed_new.restype = ctypes.c_void_p
LIBRARY.umockdev_testbed_get_root_dir.restype = ctypes.c_char_p
FIRST, SECOND = "0000:3b:00.0", "10000:e1:00.0"


def describe_card(address: str) -> bytes:
    """Return the description of a T4 in umockdev's notation."""
    return (
        f"P: /devices/pci0000:00/{address}\nE: SUBSYSTEM=pci\nE: PCI_SLOT_NAME={address}\n"
        "L: iommu_group=../../../kernel/iommu_groups/7\n"
        "A: vendor=0x10de\\n\nA: device=0x1eb8\\n\nA: class=0x030200\\n\n"
    ).encode()


class SimulatedBus:
    """Plugs and unplugs cards; both send a uevent."""

    def __init__(self) -> None:
        self.testbed = ctypes.c_void_p(LIBRARY.umockdev_testbed_new())
        root: bytes = LIBRARY.umockdev_testbed_get_root_dir(self.testbed)
        # The library sets it in C only, so Python would not pass it to the driver's process.
        os.environ["UMOCKDEV_DIR"] = root.decode()

    def plug(self, address: str) -> None:
        """Add a card."""
        error = ctypes.c_void_p()
        assert LIBRARY.umockdev_testbed_add_from_string(self.testbed, describe_card(address), ctypes.byref(error))

    def unplug(self, address: str) -> None:
        """Remove a card."""
        path = f"/sys/devices/pci0000:00/{address}".encode()
        LIBRARY.umockdev_testbed_uevent(self.testbed, path, b"remove")
        LIBRARY.umockdev_testbed_remove_device(self.testbed, path)


def wait_for_uevent(monitor: pyudev.Monitor, action: str, address: str) -> None:
    """Wait at most 10 s for a uevent. `poll` may return None earlier, if an event of another subsystem was filtered."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        event = monitor.poll(0.2)
        if event is not None and (event.action, event.sys_name) == (action, address):
            return
    raise TimeoutError(f"no {action} of {address}")


def print_addresses(report: DriverReport) -> None:
    """Print the line that the test reads: the addresses, or the driver's error."""
    print(report.error or [device.address for device in report.devices], flush=True)


async def main() -> None:
    """Discover, plug a card, discover, unplug a card, discover."""
    bus = SimulatedBus()
    bus.plug(FIRST)
    monitor = pyudev.Monitor.from_netlink(pyudev.Context(), source="kernel")
    driver = DriverProcess("pci_driver", "n", {"rules": [{"vendor": "10de"}]})
    print_addresses(await driver.discover())
    for subsystem in driver.subsystems:
        monitor.filter_by(subsystem)
    monitor.start()
    bus.plug(SECOND)
    wait_for_uevent(monitor, "add", SECOND)
    print_addresses(await driver.discover())
    bus.unplug(FIRST)
    wait_for_uevent(monitor, "remove", FIRST)
    print_addresses(await driver.discover())
    await driver.close()


if __name__ == "__main__":
    asyncio.run(main())
