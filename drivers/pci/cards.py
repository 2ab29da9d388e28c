"""What distinguishes one vendor's cards from other PCI functions: identity, resource class, traits, health and load.

`AnyCard` is any PCI function, as `pci_driver` and the generic driver offer it. A vendor's driver has a subclass of it,
and gets discovery, binding, virtual functions and reset from `drivers.pci.functions` unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from msgspec import Struct

from drivers.inventory import DeviceType, Health, Sample
from drivers.machine import Machine
from drivers.pci import pci_health
from drivers.pci.offer import OWNER_TRAIT
from drivers.pci.rules import PciFunction, PciRule, find_matching_rule
from drivers.plan import Signal

VENDORS = {"10de": "NVIDIA", "102b": "MATROX", "10ee": "XILINX", "1bd4": "INSPUR", "8086": "INTEL", "19e5": "HUAWEI"}
"""Vendors that upstream shows by name; other vendors are shown by their number."""
CLASS_TYPES: tuple[tuple[str, str, DeviceType], ...] = (
    ("03", "*", "GPU"),
    ("0b40", "8086", "QAT"),
    ("0108", "*", "SSD"),
    ("02", "*", "NIC"),
)
"""(PCI class prefix, vendor, type). Class 1200, processing accelerator, does not tell the type, so the rule must."""
HEALTH_ORDER: tuple[Health, ...] = ("ok", "unknown", "degraded", "failed")


class CardDescription(Struct, frozen=True):
    """How a card is reported: `resource_class` and `traits` are for Placement, and `owner` is the vendor's name.

    `std_board_info` is a JSON document, as upstream's drivers write it (contract 6.3).
    """

    resource_class: str
    traits: tuple[str, ...]
    owner: str
    std_board_info: str


class AnyCard:
    """Any PCI function. A subclass selects the cards of one vendor and knows more about them."""

    def selects(self, function: PciFunction) -> bool:
        """Return whether the function is a card of this kind."""
        return True

    def get_type(self, function: PciFunction) -> DeviceType | None:
        """Return the device type of the function; None if it cannot be told."""
        for prefix, vendor, kind in CLASS_TYPES:
            if function.pci_class.startswith(prefix) and fnmatchcase(function.vendor, vendor):
                return kind
        return None

    def describe(self, function: PciFunction, *, divided: bool) -> CardDescription:
        """Return how the card is reported. `divided` means that virtual functions are handed out."""
        vendor = VENDORS.get(function.vendor)
        traits = [OWNER_TRAIT]
        if vendor:
            traits.append(f"CUSTOM_PCI_{vendor}")
        traits.append(f"CUSTOM_PCI_PRODUCT_ID_{function.product.upper()}")
        board = json.dumps({"product_id": function.product, "controller": None})
        return CardDescription("CUSTOM_PCI", tuple(traits), vendor or function.vendor.upper(), board)

    def explain_withheld(self, machine: Machine, function: PciFunction, *, divided: bool) -> str:
        """Return why nothing of the card may be handed out, with what to do about it; '' if it may (the default).

        `divided` is described at `describe`.
        """
        return ""

    def read_status(self, machine: Machine, address: str) -> tuple[Health, str]:
        """Return the health of the card and its reason ('' for ok).

        A subclass adds the vendor's own signs with `worse`. Raises the errors of `pci_health.read_status`.
        """
        return pci_health.read_status(machine, address)

    def read_signals(self, machine: Machine, address: str) -> tuple[Signal, ...]:
        """Return the readings behind the health, at most `pci_health.MAX_SIGNALS`."""
        return pci_health.read_signals(machine, address)

    def read_samples(self, machine: Machine, key: str, address: str) -> tuple[Sample, ...]:
        """Return the load of the card as samples with the device key `key`."""
        return pci_health.read_samples(machine, key, address)


def worse(one: tuple[Health, str], other: tuple[Health, str]) -> tuple[Health, str]:
    """Return the worse of two states of health, with the reasons of both if they are equally bad."""
    ranks = [HEALTH_ORDER.index(each[0]) for each in (one, other)]
    if ranks[0] == ranks[1]:
        return one[0], "; ".join(filter(None, dict.fromkeys((one[1], other[1]))))
    return one if ranks[0] > ranks[1] else other


@dataclass(frozen=True)
class Selection:
    """The functions that a driver offers: those of its kind of cards that one of the rules matches."""

    rules: Sequence[PciRule]
    cards: AnyCard

    def find_rule(self, function: PciFunction) -> PciRule | None:
        """Return the first rule that matches the function, or None if the driver does not offer it."""
        return find_matching_rule(function, self.rules) if self.cards.selects(function) else None
