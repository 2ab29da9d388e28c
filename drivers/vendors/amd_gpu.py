"""The driver of AMD's GPUs: whole cards, and virtual functions that AMD's host driver GIM makes.

Health is read from the files of the kernel driver amdgpu. The file `reset_gpu` of GIM is never read, because reading it
resets the card. Sources: Documentation/gpu/amdgpu/ras.rst and drivers/gpu/drm/amd/amdgpu/amdgpu_ras.c of Linux;
the product ids of the PCI ID database; amd/MxGPU-Virtualization (which cards fail after passthrough).
"""

from __future__ import annotations

from typing import ClassVar

from drivers.errors import DriverError
from drivers.inventory import DeviceType, Health
from drivers.machine import PCI_DEVICES, Machine
from drivers.pci import pci_health
from drivers.pci.cards import worse
from drivers.pci.rules import PciFunction
from drivers.plan import Signal
from drivers.vendors.card_driver import VendorCard, VendorDriver

LOST_AFTER_RESET = {"74a1": "MI300X", "75a3": "MI355X"}
"""Cards that stop answering after the reset which ends a passthrough of the whole card, until the host restarts."""
UNUSABLE_PAGE = "F"
"""The flag of a bad page of memory that could not be reserved (`R`: it is reserved, `P`: it will be)."""


class AmdGpu(VendorCard):
    """AMD's GPUs: display controllers, and accelerators without a display, which have PCI class 1200."""

    vendor: ClassVar[str] = "1002"
    owner: ClassVar[str] = "AMD"
    classes: ClassVar[tuple[str, ...]] = ("0300", "0302", "0380", "1200")
    device_type: ClassVar[DeviceType] = "GPU"
    trait_prefix: ClassVar[str] = "CUSTOM_AMD"
    whole_class: ClassVar[str] = "PGPU"
    divided_class: ClassVar[str] = "VGPU"

    def explain_withheld(self, machine: Machine, function: PciFunction, *, divided: bool) -> str:
        """Return why a whole card of a model that does not survive passthrough is not offered; '' for other cards."""
        model = LOST_AFTER_RESET.get(function.product)
        if divided or not model:
            return ""
        return (
            f"a whole {model} is not offered: after the reset that ends a passthrough it stops answering until the host"
            " restarts. Its virtual functions can be offered (AMD's host driver GIM makes them)"
        )

    def read_status(self, machine: Machine, address: str) -> tuple[Health, str]:
        """Return the health of the card; bad memory that cannot be reserved and uncorrectable errors make it worse."""
        return worse(super().read_status(machine, address), _read_ras_status(machine, address))

    def read_signals(self, machine: Machine, address: str) -> tuple[Signal, ...]:
        """Return the readings of the PCI function, and the error counters of each part of the card."""
        counters = (
            Signal(f"ras {block} {kind}", str(count), source=_ras_file(address, f"{block}_err_count"))
            for block, counts in _read_error_counts(machine, address).items()
            for kind, count in counts.items()
        )
        return (*super().read_signals(machine, address), *counters)[: pci_health.MAX_SIGNALS]


def _ras_file(address: str, name: str) -> str:
    """Return the path of a file in which amdgpu reports reliability of the card."""
    return f"{PCI_DEVICES}/{address}/ras/{name}"


def _read_ras_status(machine: Machine, address: str) -> tuple[Health, str]:
    """Return the health that the counters and the list of bad pages show; ok if the card has no such files."""
    try:
        pages = machine.text(_ras_file(address, "gpu_vram_bad_pages"))
    except DriverError as error:
        return "unknown", f"its list of bad memory pages cannot be read: {error}"
    flags = [line.rpartition(":")[2].strip() for line in pages.splitlines()]
    if lost := flags.count(UNUSABLE_PAGE):
        return "failed", f"{lost} bad pages of its memory cannot be reserved: replace the card"
    counts = _read_error_counts(machine, address)
    if blocks := sorted(block for block, kinds in counts.items() if kinds.get("ue", 0)):
        return "degraded", f"uncorrectable errors since it was started in: {', '.join(blocks)}"
    return "ok", ""


def _read_error_counts(machine: Machine, address: str) -> dict[str, dict[str, int]]:
    """Return block of the card → kind of error (`ue` uncorrectable, `ce` correctable) → count.

    Files that cannot be read are left out.
    """
    counts: dict[str, dict[str, int]] = {}
    for name in machine.names(f"{PCI_DEVICES}/{address}/ras", "*_err_count"):
        try:
            text = machine.read(_ras_file(address, name))
        except DriverError:
            continue  # a block that is powered off cannot be asked
        pairs = (line.partition(":") for line in text.splitlines())
        counts[name.removesuffix("_err_count")] = {
            kind.strip(): int(count) for kind, _, count in pairs if count.strip().isdecimal()
        }
    return counts


class AmdGpuDriver(VendorDriver):
    """Offers AMD's GPUs."""

    name: ClassVar[str] = "amd_gpu_driver"
    version: ClassVar[str] = "1"
    matches: ClassVar[tuple[str, ...]] = ("pci:v00001002d*bc03*", "pci:v00001002d*bc12sc00*")
    cards: ClassVar[AmdGpu] = AmdGpu()
