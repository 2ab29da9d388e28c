"""Backends of kind `firmware`: PCI functions that can be programmed and have no handles.

They are programmed through the kernel's firmware upload class, whose class device is somewhere below the function in
sysfs (for example below an FPGA's management controller). `drivers.generic.pci` uses the functions of this module for
the devices that it hands out. Source: Documentation/ABI/testing/sysfs-class-firmware.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from drivers.base import Findings
from drivers.errors import Failed, Unsupported
from drivers.generic.backend import make_service
from drivers.generic.pci_backend import PciFunctionBackend, make_reading_services
from drivers.inventory import BackendKind, Device, Fault, Service
from drivers.machine import PCI_DEVICES, Machine
from drivers.pci import functions
from drivers.pci.iommu import list_card_functions
from drivers.plan import Act, Ask, Check, Plan, Step, Write

FIRMWARE_CLASS_FOLDER = "/sys/class/firmware"
MAX_DEPTH = 8
WRITTEN_PATHS = tuple(f"{PCI_DEVICES}/*:*:*.*/{'*/' * depth}firmware/*" for depth in range(MAX_DEPTH))
UPLOAD_S = 600.0
NO_LOADER = "its kernel driver cannot load firmware: it has no directory in /sys/class/firmware"


class FirmwareBackend(PciFunctionBackend, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="firmware"):
    """Offers functions that can be programmed; they have no handles."""

    kind: ClassVar[BackendKind] = "firmware"
    writes: ClassVar[tuple[str, ...]] = WRITTEN_PATHS

    def discover(self, machine: Machine) -> Findings:
        """Return a device for each function that has an upload directory, and a fault for each function without one.

        Raises DriverError if it cannot be determined which functions the host uses.
        """
        findings = self.find_functions(machine, shared=True)
        devices = [add_program_act(machine, device) for device in findings.devices]
        faults = [Fault(device.address or device.key, NO_LOADER) for device in devices if not _is_programmable(device)]
        return Findings(tuple(map(_remove_handles, filter(_is_programmable, devices))), (*findings.faults, *faults))

    def list_services(self, machine: Machine, devices: tuple[Device, ...]) -> tuple[Service, ...]:
        """Return the services program, firmware, health and stats; all but health may be unavailable."""
        return (*make_program_services(machine, devices), *make_reading_services(machine, devices))

    def plan(self, act: Act, machine: Machine, ask: Ask) -> Plan:
        """Return the upload for program, and a plan without steps for install, attach and detach.

        Raises Unsupported for other acts; for program, raises the errors of the function `plan_upload` of this module.
        """
        return plan_upload(machine, ask) if act == "program" else super().plan(act, machine, ask)


def list_upload_folders(machine: Machine, address: str) -> list[str]:
    """Return the upload directories of a function as paths below the function in PCI_DEVICES; it may have none."""
    function_folder = f"{PCI_DEVICES}/{address}"
    resolved_prefix = machine.resolve(function_folder) + "/"
    resolved_paths = (
        machine.resolve(f"{FIRMWARE_CLASS_FOLDER}/{name}") for name in machine.names(FIRMWARE_CLASS_FOLDER)
    )
    return [
        f"{function_folder}/{path.removeprefix(resolved_prefix)}"
        for path in resolved_paths
        if path.startswith(resolved_prefix)
    ]


def add_program_act(machine: Machine, device: Device) -> Device:
    """Return the device; `program` is added to its acts if it has an upload directory."""
    if not device.address or not list_upload_folders(machine, device.address):
        return device
    return msgspec.structs.replace(device, acts=" ".join(sorted({*device.acts.split(), "program"})))


def make_program_services(machine: Machine, devices: tuple[Device, ...]) -> tuple[Service, Service]:
    """Return the two services `program` and `firmware`. Both are unavailable if no device has an upload directory."""
    names = sorted(
        path.rpartition("/")[2] for device in devices for path in list_upload_folders(machine, device.address or "")
    )
    missing = "" if names else NO_LOADER
    limits = {"loaders": " ".join(names)} if names else {}
    return make_service("program", missing), make_service("firmware", missing, limits)


def plan_upload(machine: Machine, ask: Ask) -> Plan:
    """Return a plan of one step, which uploads the image to the flash memory of the function.

    The step is there even if this image is loaded already, because the kernel does not show what the flash contains.
    Raises Gone if the function is absent, Unsupported if it has no upload directory, Failed if it has several, and Busy
    if the host or a guest uses the function, or one of its companion or virtual functions.
    """
    address = functions.find_address(machine, ask.key, ask.address)
    upload_folders = list_upload_folders(machine, address)
    if not upload_folders:
        raise Unsupported(f"{address} cannot be programmed: {NO_LOADER}")
    if len(upload_folders) > 1:
        names = ", ".join(path.rpartition("/")[2] for path in upload_folders)
        raise Failed(
            f"{address} has several directories in /sys/class/firmware ({names}), and this driver cannot choose one"
        )
    functions.inspect_usage_for_act(machine, address).refuse_if_used(list_card_functions(machine, address))
    name = ask.image.name if ask.image else "the image"
    step = Step(
        does=f"load {name or 'the image'} into {address}",
        write=Write(upload_folders[0], ""),
        image="firmware",
        expect=(Check(f"{upload_folders[0]}/status", "idle"),),
        timeout_s=UPLOAD_S,
    )
    return Plan((step,), step.does, "flash")


def _is_programmable(device: Device) -> bool:
    """Return whether `program` is among the device's acts."""
    return "program" in device.acts.split()


def _remove_handles(device: Device) -> Device:
    """Return the device without handles and without a layout; its only acts are health and program."""
    deployables = (msgspec.structs.replace(one, num_accelerators=0, handles=()) for one in device.deployables)
    return msgspec.structs.replace(
        device, deployables=tuple(deployables), acts="health program", changeable="", sized_by=""
    )
