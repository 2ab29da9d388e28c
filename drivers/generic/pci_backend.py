"""The base class of backends whose devices are PCI functions: it selects functions and reads their health and load.

It is based on `drivers.pci.functions`, so functions that the host itself uses are not offered here either. Only the
kind `pci` needs an IOMMU: mediated devices are isolated by the driver that makes them, and device nodes and firmware do
not give the function itself away.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from drivers.base import Findings
from drivers.generic.backend import BackendBase, make_service
from drivers.inventory import Device, DeviceType, Sample, Service
from drivers.machine import Machine
from drivers.pci import functions, pci_health, rules
from drivers.pci.cards import AnyCard, Selection
from drivers.pci.offer import MAX_DEVICES, DeviceOffer, Offer, describe_problem
from drivers.plan import Ask, Vitals


class PciFunctionBackend(BackendBase, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Selects the functions that one of `match` matches.

    `type` is their device type; None takes it from the PCI class, and a function whose class does not determine the
    type becomes a fault.
    """

    passthrough: ClassVar[bool] = False
    """Whether guests get the functions themselves, so that an IOMMU must isolate them."""

    match: Annotated[list[rules.PciMatch], Meta(min_length=1, max_length=64)]
    type: DeviceType | None = None

    def describe_problem(self) -> str:
        """Return a reason if a match selects every function, which is a mistake; '' otherwise."""
        if rules.PciMatch() in self.match:
            return "one entry of `match` selects every function: state vendor, product, class or address"
        return ""

    def find_functions(self, machine: Machine, *, shared: bool = False) -> Findings:
        """Return the devices and faults that `drivers.pci.functions` finds for the matches.

        `shared` means that the functions stay bound to their kernel driver when they are handed out. Raises DriverError
        if it cannot be determined which functions the host uses.
        """
        selection = Selection([self._make_rule(match) for match in self.match], AnyCard())
        return functions.discover_devices(machine, selection, passthrough=self.passthrough, shared=shared)

    def health(self, machine: Machine, ask: Ask) -> Vitals:
        """Return the health of a function, with its link, errors, power state and temperatures.

        Raises Gone if the function is absent, and DriverError if its health cannot be read.
        """
        return functions.PciDriver().health(machine, {}, ask)

    def stats(self, machine: Machine, ask: Ask) -> tuple[Sample, ...]:
        """Return the load that sysfs shows: utilization, memory, temperatures, power, errors.

        Raises Gone if the function is absent.
        """
        return functions.PciDriver().stats(machine, {}, ask)

    def _make_rule(self, match: rules.PciMatch) -> rules.PciRule:
        """Return the rule that selects the functions of one entry of `match`; it leaves their state as it is."""
        return rules.PciRule(match.vendor, match.product, match.pci_class, match.address, self.type)


class OfferedFunctionBackend(PciFunctionBackend, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Selects functions that guests get, whole or as mediated devices, so that Nova finds them in Placement.

    `offer` and `devices` are described at `drivers.pci.rules.PciRule`.
    """

    offer: Offer = Offer()
    devices: Annotated[list[DeviceOffer], Meta(max_length=MAX_DEVICES)] = []

    def describe_problem(self) -> str:
        """Return a reason if a match selects every function or Placement has no such name; '' otherwise."""
        return super().describe_problem() or describe_problem(self.offer, self.devices)

    def _make_rule(self, match: rules.PciMatch) -> rules.PciRule:
        """Return the rule of one entry of `match`, with the resource class and traits that the operator chose."""
        return msgspec.structs.replace(super()._make_rule(match), offer=self.offer, devices=self.devices)


def make_reading_services(machine: Machine, devices: tuple[Device, ...]) -> tuple[Service, Service]:
    """Return the services health and stats; stats is unavailable if none of the devices has samples."""
    measured = any(device.address and pci_health.read_samples(machine, "", device.address) for device in devices)
    return make_service("health"), make_service(
        "stats", "" if measured else "its devices have no sensor and count no errors"
    )
