"""Carry out plans on a simulated kernel while the agent's change watcher waits for uevents.

`test_hotplug` runs this below `umockdev-wrapper` with the name of a driver, which has a process of its own. Only the
kernel is simulated. It prints one line for each discovery.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable

from agents.host.discovery.change_watcher import ChangeWatcher
from drivers.inventory import Device
from drivers.isolation.process import die_with_parent
from drivers.isolation.runner import DriverProcess
from drivers.plan import Act, Ask
from tests.support.kernel import SimulatedKernel

CARD = "0000:01:00.0"
RULE_MATCH, RULE_LAYOUT = {"vendor": "1b36"}, {"vfs": 2, "bind": ""}
SETTINGS: dict[str, dict[str, object]] = {
    "pci_driver": {"rules": [RULE_MATCH | RULE_LAYOUT]},
    "generic_driver": {"backends": {"disks": {"kind": "pci", "match": [RULE_MATCH], "desired": RULE_LAYOUT}}},
}
DEADLINE_S = 20.0


class HostWithCard:
    """A simulated kernel with one card, a driver in its own process, and the agent's change watcher."""

    def __init__(self, driver: str) -> None:
        self.kernel = SimulatedKernel()
        self.kernel.load("nvme", "1b36:0010")
        self.kernel.pci(CARD, "0x1b36", "0x0010", "0x010802", group=7, vfs=4)
        self.driver = DriverProcess(driver, "n", SETTINGS[driver], machine=self.kernel.machine)
        self.watch = ChangeWatcher({driver: self.driver}, debounce_s=0.05, rescan_s=3600)

    async def run_act(self, act: Act, ask: Ask) -> None:
        """Plan an act and write its steps."""
        hand = self.kernel.hand()
        for step in (await self.driver.plan(act, ask)).steps:
            await hand.write(step.write.path, step.write.value, step.timeout_s)

    async def discover_card(self) -> Device:
        """Return the card as the driver reports it."""
        report = await self.driver.discover()
        assert report.devices, report
        return report.devices[0]

    async def wait_until(self, condition: Callable[[Device], bool]) -> Device:
        """Discover after each change that the watcher reports, until the condition is true; return the card."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                await self.watch.wait_for_changes()
                if condition(device := await self.discover_card()):
                    return device


def print_device(device: Device) -> None:
    """Print the line that the test reads."""
    (deployable,) = device.deployables
    functions = [json.loads(handle.info)["function"] for handle in deployable.handles]
    print(deployable.num_accelerators, functions, device.to_install.replace("\n", "; ") or "as wanted", flush=True)


async def main(driver: str) -> None:
    """Make two virtual functions and remove them."""
    host = HostWithCard(driver)
    host.watch.start()
    print_device(await host.discover_card())
    await host.run_act("install", Ask(f"pci:{CARD}"))
    print_device(await host.wait_until(lambda device: not device.to_install))
    await host.run_act("uninstall", Ask(f"pci:{CARD}", first={f"/sys/bus/pci/devices/{CARD}/sriov_numvfs": "0"}))
    print_device(await host.wait_until(lambda device: not device.deployables[0].handles))
    host.watch.close()
    await host.driver.close()
    host.kernel.close()


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(main(sys.argv[1]))
