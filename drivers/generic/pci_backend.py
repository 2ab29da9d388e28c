"""The base class of backends whose devices are PCI functions: it selects functions and reads their health and load.

It is based on `drivers.pci.functions`, so functions that the host itself uses are not offered here either.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from drivers.base import Findings
from drivers.generic.backend import Kind, service
from drivers.inventory import Device, DeviceType, Sample, Service
from drivers.machine import Machine
from drivers.pci import functions as pci
from drivers.pci import pci_health
from drivers.plan import Ask, Vitals


class Matched(Kind, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Selects the functions that one of `match` matches.

    `type` is their device type; it is needed if their PCI class does not tell it.
    """

    match: Annotated[list[pci.Match], Meta(min_length=1, max_length=64)]
    type: DeviceType | None = None

    def problem(self) -> str:
        """Return a reason if a match selects every function, which is a mistake; '' otherwise."""
        if pci.Match() in self.match:
            return "one entry of `match` selects every function: state vendor, product, class or address"
        return ""

    def functions(self, machine: Machine) -> Findings:
        """Return the devices and faults that `drivers.pci.functions` finds for the matches."""
        return pci.take(machine, [self._rule(match) for match in self.match])

    def health(self, machine: Machine, ask: Ask) -> Vitals:
        """Return the health of a function, with its link, errors, power state and temperatures. Raises Gone."""
        return pci.PciDriver().health(machine, {}, ask)

    def stats(self, machine: Machine, ask: Ask) -> tuple[Sample, ...]:
        """Return the load that sysfs shows: utilization, memory, temperatures, power, errors. Raises Gone."""
        return pci.PciDriver().stats(machine, {}, ask)

    def _rule(self, match: pci.Match) -> pci.Rule:
        return pci.Rule(match.vendor, match.product, match.pci_class, match.address, self.type)


def readings(machine: Machine, devices: tuple[Device, ...]) -> tuple[Service, Service]:
    """Return the services health and stats; stats is unavailable if none of the devices has samples."""
    measured = any(device.address and pci_health.samples(machine, "", device.address) for device in devices)
    return service("health"), service("stats", "" if measured else "its devices have no sensor and count no errors")
