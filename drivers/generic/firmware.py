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
from drivers.generic.backend import service
from drivers.generic.pci_backend import Matched, readings
from drivers.inventory import BackendKind, Device, Fault, Service
from drivers.machine import PCI_DEVICES, Machine
from drivers.pci import binding, functions, sriov
from drivers.pci.host_usage import used_by_host
from drivers.plan import Act, Ask, Check, Plan, Step, Write

CLASS = "/sys/class/firmware"
DEPTHS = 8
WRITES = tuple(f"{PCI_DEVICES}/*:*:*.*/{'*/' * depth}firmware/*" for depth in range(DEPTHS))
UPLOAD_S = 600.0
NO_LOADER = "its kernel driver cannot load firmware: it has no directory in /sys/class/firmware"


class Firmware(Matched, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="firmware"):
    """Offers functions that can be programmed; they have no handles."""

    kind: ClassVar[BackendKind] = "firmware"
    writes: ClassVar[tuple[str, ...]] = WRITES

    def discover(self, machine: Machine) -> Findings:
        """Return the functions that have an upload directory; those without one become faults."""
        found = self.functions(machine)
        devices = [programmable(machine, device) for device in found.devices]
        faults = [Fault(device.address or device.key, NO_LOADER) for device in devices if not _takes(device)]
        return Findings(tuple(map(_unattachable, filter(_takes, devices))), (*found.faults, *faults))

    def services(self, machine: Machine, devices: tuple[Device, ...]) -> tuple[Service, ...]:
        """Return program and firmware, and health and stats."""
        return (*services(machine, devices), *readings(machine, devices))

    def plan(self, act: Act, machine: Machine, ask: Ask) -> Plan:
        """Return the upload for program, and a plan without steps for install, attach and detach.

        Raises Unsupported for other acts; for program, raises the errors of the function `plan` of this module.
        """
        return plan(machine, ask) if act == "program" else super().plan(act, machine, ask)


def loaders(machine: Machine, address: str) -> list[str]:
    """Return the upload directories of a function, as paths below the function in PCI_DEVICES."""
    home = f"{PCI_DEVICES}/{address}"
    top = machine.resolve(home) + "/"
    real = (machine.resolve(f"{CLASS}/{name}") for name in machine.names(CLASS))
    return [f"{home}/{path.removeprefix(top)}" for path in real if path.startswith(top)]


def programmable(machine: Machine, device: Device) -> Device:
    """Return the device; `program` is added to its acts if it has an upload directory."""
    if not device.address or not loaders(machine, device.address):
        return device
    return msgspec.structs.replace(device, acts=" ".join(sorted({*device.acts.split(), "program"})))


def services(machine: Machine, devices: tuple[Device, ...]) -> tuple[Service, Service]:
    """Return the services program and firmware, unavailable if none of the devices has an upload directory."""
    names = sorted(path.rpartition("/")[2] for device in devices for path in loaders(machine, device.address or ""))
    missing = "" if names else NO_LOADER
    limits = {"loaders": " ".join(names)} if names else {}
    return service("program", missing), service("firmware", missing, limits)


def plan(machine: Machine, ask: Ask) -> Plan:
    """Return the plan that uploads the image to the function.

    Raises Gone, Busy if the host or a guest uses the function or one of its virtual functions, Unsupported if it has no
    upload directory, and Failed if it has several.
    """
    address = functions.find(machine, ask.key)
    found = loaders(machine, address)
    if not found:
        raise Unsupported(f"{address} cannot be programmed: {NO_LOADER}")
    if len(found) > 1:
        names = ", ".join(path.rpartition("/")[2] for path in found)
        raise Failed(
            f"{address} has several directories in /sys/class/firmware ({names}), and this driver cannot choose one"
        )
    parts = [address, *sriov.virtual(machine, address)]
    binding.Look(machine, used_by_host(machine), acting=True).refuse(parts)
    name = ask.image.name if ask.image else "the image"
    step = Step(
        does=f"load {name or 'the image'} into {address}",
        write=Write(found[0], ""),
        image="firmware",
        expect=(Check(f"{found[0]}/status", "idle"),),
        idle=binding.nodes(machine, parts),
        timeout_s=UPLOAD_S,
    )
    return Plan((step,), step.does)


def _takes(device: Device) -> bool:
    return "program" in device.acts.split()


def _unattachable(device: Device) -> Device:
    bare = (msgspec.structs.replace(one, num_accelerators=0, handles=()) for one in device.deployables)
    return msgspec.structs.replace(device, deployables=tuple(bare), acts="health program", changeable="", sized_by="")
