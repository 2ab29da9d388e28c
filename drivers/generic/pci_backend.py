"""What all kinds have in common whose devices are PCI functions: which functions, of what type, and how they are.

`drivers.pci.functions` knows the functions; what the host itself uses is nobody's here either.
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
    """Functions that one of `match` takes; `type` where their PCI class does not tell it."""

    match: Annotated[list[pci.Match], Meta(min_length=1, max_length=64)]
    type: DeviceType | None = None

    def problem(self) -> str:
        """A match that takes everything is a mistake."""
        if pci.Match() in self.match:
            return "one of its match takes everything: state vendor, product, class or address"
        return ""

    def functions(self, machine: Machine) -> Findings:
        """The devices that they are for `drivers.pci.functions`, handed out whole."""
        return pci.take(machine, [self._rule(match) for match in self.match])

    def health(self, machine: Machine, ask: Ask) -> Vitals:
        """Link, errors, power, temperatures."""
        return pci.PciDriver().health(machine, {}, ask)

    def stats(self, machine: Machine, ask: Ask) -> tuple[Sample, ...]:
        """Utilization, memory, temperatures, power, errors: what sysfs has of them."""
        return pci.PciDriver().stats(machine, {}, ask)

    def _rule(self, match: pci.Match) -> pci.Rule:
        return pci.Rule(match.vendor, match.product, match.pci_class, match.address, self.type)


def readings(machine: Machine, devices: tuple[Device, ...]) -> tuple[Service, Service]:
    """The services health and stats of functions."""
    measured = any(device.address and pci_health.samples(machine, "", device.address) for device in devices)
    return service("health"), service("stats", "" if measured else "its devices have no sensor and count no errors")
