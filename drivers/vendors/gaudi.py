"""The driver of Intel's Gaudi accelerators (Habana Labs): whole cards for passthrough.

Health is the word that the kernel driver habanalabs shows. It is absent while the card is bound to vfio-pci. Sources:
Documentation/ABI/testing/sysfs-driver-habanalabs and drivers/accel/habanalabs/common/sysfs.c of Linux.
"""

from __future__ import annotations

from typing import ClassVar

from drivers.errors import DriverError
from drivers.inventory import DeviceType, Health
from drivers.machine import PCI_DEVICES, Machine
from drivers.pci import pci_health
from drivers.pci.cards import worse
from drivers.plan import Signal
from drivers.vendors.card_driver import VendorCard, VendorDriver

STATUS_HEALTH: dict[str, tuple[Health, str]] = {
    "operational": ("ok", ""),
    "in reset": ("unknown", "the card is being reset"),
    "in device creation": ("unknown", "the kernel driver is starting the card"),
    "in reset after device release": ("unknown", "the card is being reset after its last user"),
    "needs reset": ("degraded", "the card must be reset before it is used again: order a reset"),
    "disabled": ("failed", "the kernel driver has switched the card off after a malfunction: replace it"),
}
"""The words of the attribute `status` in lower case (older kernels), and the health each stands for."""


class GaudiCard(VendorCard):
    """Gaudi, Gaudi 2 and Gaudi 3."""

    vendor: ClassVar[str] = "1da3"
    owner: ClassVar[str] = "HABANA"
    products: ClassVar[dict[str, str]] = {
        "1000": "GAUDI",
        "1001": "GAUDI",
        "1010": "GAUDI",
        "1011": "GAUDI",
        "1020": "GAUDI2",
        "1030": "GAUDI3",
        "1060": "GAUDI3",
        "1061": "GAUDI3",
        "1062": "GAUDI3",
        "1063": "GAUDI3",
    }
    device_type: ClassVar[DeviceType] = "AICHIP"
    trait_prefix: ClassVar[str] = "CUSTOM_HABANA"
    whole_class: ClassVar[str] = "CUSTOM_GAUDI"

    def read_status(self, machine: Machine, address: str) -> tuple[Health, str]:
        """Return the health of the PCI function and the one that the kernel driver reports, whichever is worse."""
        return worse(super().read_status(machine, address), _read_driver_status(machine, address))

    def read_signals(self, machine: Machine, address: str) -> tuple[Signal, ...]:
        """Return the readings of the PCI function, and the status and the number of resets of the card."""
        folder = _find_folder(machine, address)
        own = (
            Signal(name, text, source=f"{folder}/{name}")
            for name in ("status", "hard_reset_cnt", "soft_reset_cnt", "module_id")
            if folder and (text := _read_or_empty(machine, f"{folder}/{name}"))
        )
        return (*super().read_signals(machine, address), *own)[: pci_health.MAX_SIGNALS]


def _find_folder(machine: Machine, address: str) -> str:
    """Return the directory with the attributes of habanalabs for a card; '' if the card is not bound to it.

    The kernel puts them below `accel/accelN/device`, which may be the PCI function itself or a directory of its own.
    """
    for name in machine.names(f"{PCI_DEVICES}/{address}/accel", "accel*"):
        folder = f"{PCI_DEVICES}/{address}/accel/{name}/device"
        if machine.exists(f"{folder}/status"):
            return folder
    return ""


def _read_driver_status(machine: Machine, address: str) -> tuple[Health, str]:
    """Return the health that habanalabs reports; ok if the card is not bound to it."""
    if not (folder := _find_folder(machine, address)):
        return "ok", ""
    try:
        word = machine.read(f"{folder}/status")
    except DriverError as error:
        return "unknown", f"its status cannot be read: {error}"
    unknown_word: tuple[Health, str] = ("unknown", f"the kernel driver reports the unknown status {word[:64]!r}")
    return STATUS_HEALTH.get(word.lower(), unknown_word)


def _read_or_empty(machine: Machine, path: str) -> str:
    """Return the text of an attribute, shortened to the size of a signal; '' if it cannot be read."""
    try:
        return machine.read(path)[:255]
    except DriverError:
        return ""


class GaudiDriver(VendorDriver):
    """Offers Gaudi accelerators."""

    name: ClassVar[str] = "gaudi_driver"
    version: ClassVar[str] = "1"
    matches: ClassVar[tuple[str, ...]] = tuple(
        f"pci:v00001DA3d0000{product.upper()}*" for product in sorted(GaudiCard.products)
    )
    cards: ClassVar[GaudiCard] = GaudiCard()
