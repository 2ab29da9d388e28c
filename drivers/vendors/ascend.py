"""The driver of Huawei's Ascend AI processors: whole cards for passthrough, under the name of upstream's driver.

The kernel driver is not part of Linux, so health and load are those of the PCI function. Upstream's driver reports no
resource class; a profile can ask for the one of this driver.
"""

from __future__ import annotations

from typing import ClassVar

from drivers.inventory import DeviceType
from drivers.vendors.card_driver import VendorCard, VendorDriver


class AscendCard(VendorCard):
    """Ascend 310, 310P and 910."""

    vendor: ClassVar[str] = "19e5"
    owner: ClassVar[str] = "HUAWEI"
    products: ClassVar[dict[str, str]] = {
        "d100": "310",
        "d500": "310P",
        "d801": "910A",
        "d802": "910B",
        "d803": "910C",
    }
    device_type: ClassVar[DeviceType] = "AICHIP"
    trait_prefix: ClassVar[str] = "CUSTOM_ASCEND"
    whole_class: ClassVar[str] = "CUSTOM_ASCEND"


class AscendDriver(VendorDriver):
    """Offers Ascend AI processors."""

    name: ClassVar[str] = "huawei_ascend_driver"
    version: ClassVar[str] = "1"
    matches: ClassVar[tuple[str, ...]] = tuple(
        f"pci:v000019E5d0000{product.upper()}*" for product in sorted(AscendCard.products)
    )
    cards: ClassVar[AscendCard] = AscendCard()
