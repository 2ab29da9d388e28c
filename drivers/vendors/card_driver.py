"""The base class of vendors' drivers: a PCI driver that knows its cards and needs no rules to find them."""

from __future__ import annotations

import json
from typing import ClassVar

from drivers.inventory import DeviceType
from drivers.pci.cards import AnyCard, CardDescription
from drivers.pci.functions import PciDriver
from drivers.pci.offer import OWNER_TRAIT
from drivers.pci.rules import PciFunction

CONTROLLERS = {"0300": "VGA compatible controller", "0302": "3D controller", "0380": "Display controller"}
"""The names that upstream's drivers report for these PCI classes."""


class VendorCard(AnyCard):
    """The cards of one vendor, known by their product ids or by their PCI class.

    `products` maps product ids to what a trait calls the model; if it is empty, all products of the `classes` are the
    driver's. `trait_prefix` and the product id make the trait of the product, such as `CUSTOM_NVIDIA_1EB8`.
    """

    vendor: ClassVar[str]
    owner: ClassVar[str]
    classes: ClassVar[tuple[str, ...]] = ()
    products: ClassVar[dict[str, str]] = {}
    device_type: ClassVar[DeviceType]
    trait_prefix: ClassVar[str]
    whole_class: ClassVar[str]
    """The resource class of whole cards."""
    divided_class: ClassVar[str] = ""
    """The resource class of virtual functions; '' if it is the one of whole cards."""

    def selects(self, function: PciFunction) -> bool:
        """Return whether the function is a card of this vendor and kind."""
        if function.vendor != self.vendor:
            return False
        return function.product in self.products if self.products else function.pci_class[:4] in self.classes

    def get_type(self, function: PciFunction) -> DeviceType | None:
        """Return the device type of the vendor's cards."""
        return self.device_type

    def describe(self, function: PciFunction, *, divided: bool) -> CardDescription:
        """Return how the card is reported: the product has a trait, and its model has one if it is known."""
        traits = [OWNER_TRAIT, f"{self.trait_prefix}_{function.product.upper()}"]
        if model := self.products.get(function.product):
            traits.append(f"{self.trait_prefix}_{model}")
        controller = CONTROLLERS.get(function.pci_class[:4], "Processing accelerators")
        board = json.dumps({"product_id": function.product, "controller": controller})
        resource_class = (self.divided_class if divided else "") or self.whole_class
        return CardDescription(resource_class, tuple(traits), self.owner, board)


class VendorDriver(PciDriver):
    """Offers all cards of its kind; `rules` in its settings narrow them down and say how each is offered."""

    finds_own_cards: ClassVar[bool] = True
