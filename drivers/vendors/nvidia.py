"""The driver of NVIDIA's GPUs: whole cards for passthrough.

A virtual function of an NVIDIA card is a vGPU only while it stays bound to NVIDIA's driver. Nova gives every PCI
function away with vfio-pci, which destroys the vGPU, so virtual functions are shown and not offered. Sources:
upstream's `gpu/nvidia` driver (names of classes and traits), NVIDIA's vGPU documentation (vendor-specific VFIO).
"""

from __future__ import annotations

from typing import ClassVar

from drivers.inventory import DeviceType
from drivers.machine import Machine
from drivers.pci.rules import PciFunction
from drivers.vendors.card_driver import VendorCard, VendorDriver


class NvidiaGpu(VendorCard):
    """NVIDIA's GPUs with and without a display. NVSwitch has another PCI class and is none of them."""

    vendor: ClassVar[str] = "10de"
    owner: ClassVar[str] = "NVIDIA"
    classes: ClassVar[tuple[str, ...]] = ("0300", "0302")
    device_type: ClassVar[DeviceType] = "GPU"
    trait_prefix: ClassVar[str] = "CUSTOM_NVIDIA"
    whole_class: ClassVar[str] = "PGPU"
    divided_class: ClassVar[str] = "VGPU"

    def explain_withheld(self, machine: Machine, function: PciFunction, *, divided: bool) -> str:
        """Return why virtual functions are not offered; '' for a whole card."""
        if not divided:
            return ""
        return (
            "its virtual functions are not offered: each needs NVIDIA's driver while a guest has it, and Nova binds"
            " every PCI function to vfio-pci. Switch them off (sriov-manage -d) to offer the whole card"
        )


class NvidiaGpuDriver(VendorDriver):
    """Offers NVIDIA's GPUs."""

    name: ClassVar[str] = "nvidia_gpu_driver"
    version: ClassVar[str] = "1"
    matches: ClassVar[tuple[str, ...]] = ("pci:v000010DEd*bc03sc00*", "pci:v000010DEd*bc03sc02*")
    cards: ClassVar[NvidiaGpu] = NvidiaGpu()
