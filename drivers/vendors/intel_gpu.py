"""The driver of Intel's data centre GPUs: whole cards, and virtual functions that the kernel drivers xe and i915 make.

Graphics that are part of a CPU are not offered: they have other product ids. Sources: the ids of Intel's xpumanager,
drivers/gpu/drm/xe/xe_pci_sriov.c and xe_survivability_mode.c of Linux.
"""

from __future__ import annotations

from typing import ClassVar

from drivers.errors import DriverError
from drivers.inventory import DeviceType, Health
from drivers.machine import PCI_DEVICES, Machine
from drivers.pci import pci_health
from drivers.pci.cards import worse
from drivers.vendors.card_driver import VendorCard, VendorDriver


class IntelGpu(VendorCard):
    """Intel's GPUs of the series Flex, Max and Arc Pro."""

    vendor: ClassVar[str] = "8086"
    owner: ClassVar[str] = "INTEL"
    products: ClassVar[dict[str, str]] = {
        "56c0": "FLEX_170",
        "56c1": "FLEX_140",
        "0b69": "MAX_1550",
        "0bd0": "MAX_1550",
        "0bd5": "MAX_1550",
        "0bd6": "MAX_1450",
        "0bd9": "MAX_1100",
        "0bda": "MAX_1100",
        "0bdb": "MAX_1100",
        "e211": "ARC_PRO_B60",
        "e212": "ARC_PRO_B50",
        "e216": "ARC_PRO",
        "e222": "ARC_PRO",
        "e223": "ARC_PRO",
    }
    device_type: ClassVar[DeviceType] = "GPU"
    trait_prefix: ClassVar[str] = "CUSTOM_INTEL"
    whole_class: ClassVar[str] = "PGPU"
    divided_class: ClassVar[str] = "VGPU"

    def read_status(self, machine: Machine, address: str) -> tuple[Health, str]:
        """Return the health of the card; it has `failed` if its firmware is lost, so that only an update helps."""
        status = super().read_status(machine, address)
        return worse(status, _read_survivability(machine, address))


def _read_survivability(machine: Machine, address: str) -> tuple[Health, str]:
    """Return `failed` with the reason if the kernel's driver could start the card for a firmware update only."""
    try:
        mode = machine.text(f"{PCI_DEVICES}/{address}/survivability_mode")
    except DriverError as error:
        return "unknown", f"its survivability mode cannot be read: {error}"
    if not mode:
        return "ok", ""
    first_line = mode.splitlines()[0][: pci_health.MAX_PATH]
    return (
        "failed",
        f"its firmware cannot be used ({first_line}): update the firmware of the card, then restart the host",
    )


class IntelGpuDriver(VendorDriver):
    """Offers Intel's data centre GPUs."""

    name: ClassVar[str] = "intel_gpu_driver"
    version: ClassVar[str] = "1"
    matches: ClassVar[tuple[str, ...]] = tuple(
        f"pci:v00008086d0000{product.upper()}*" for product in sorted(IntelGpu.products)
    )
    cards: ClassVar[IntelGpu] = IntelGpu()
