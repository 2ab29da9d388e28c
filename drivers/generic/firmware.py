"""Backends of kind `firmware`: functions that take an image by the kernel's firmware upload class; nothing is attached.

Such a class device lies below the function it belongs to, at any depth (an FPGA's management controller, say).
Source: Documentation/ABI/testing/sysfs-class-firmware. `drivers.generic.pci` programs what it hands out the same way.
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
NO_LOADER = "its kernel driver takes no firmware: there is no directory of it in /sys/class/firmware"


class Firmware(Matched, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="firmware"):
    """Functions that can be programmed and are not handed out."""

    kind: ClassVar[BackendKind] = "firmware"
    writes: ClassVar[tuple[str, ...]] = WRITES

    def discover(self, machine: Machine) -> Findings:
        """Functions without an upload directory are faults."""
        found = self.functions(machine)
        devices = [programmable(machine, device) for device in found.devices]
        faults = [Fault(device.address or device.key, NO_LOADER) for device in devices if not _takes(device)]
        return Findings(tuple(map(_unattachable, filter(_takes, devices))), (*found.faults, *faults))

    def services(self, machine: Machine, devices: tuple[Device, ...]) -> tuple[Service, ...]:
        """Programming, and its readings."""
        return (*services(machine, devices), *readings(machine, devices))

    def plan(self, act: Act, machine: Machine, ask: Ask) -> Plan:
        """Only program has steps."""
        return plan(machine, ask) if act == "program" else super().plan(act, machine, ask)


def loaders(machine: Machine, address: str) -> list[str]:
    """The upload directories of a function, as paths below it."""
    home = f"{PCI_DEVICES}/{address}"
    top = machine.resolve(home) + "/"
    real = (machine.resolve(f"{CLASS}/{name}") for name in machine.names(CLASS))
    return [f"{home}/{path.removeprefix(top)}" for path in real if path.startswith(top)]


def programmable(machine: Machine, device: Device) -> Device:
    """The device, with `program` among its acts when it takes firmware."""
    if not device.address or not loaders(machine, device.address):
        return device
    return msgspec.structs.replace(device, acts=" ".join(sorted({*device.acts.split(), "program"})))


def services(machine: Machine, devices: tuple[Device, ...]) -> tuple[Service, Service]:
    """program and firmware, of the devices that take it."""
    names = sorted(path.rpartition("/")[2] for device in devices for path in loaders(machine, device.address or ""))
    missing = "" if names else NO_LOADER
    limits = {"loaders": " ".join(names)} if names else {}
    return service("program", missing), service("firmware", missing, limits)


def plan(machine: Machine, ask: Ask) -> Plan:
    """Upload the image. Raises Busy when the host or a guest uses the function or a part of it, Unsupported."""
    address = functions.find(machine, ask.key)
    found = loaders(machine, address)
    if not found:
        raise Unsupported(f"{address} cannot be programmed: {NO_LOADER}")
    if len(found) > 1:
        names = ", ".join(path.rpartition("/")[2] for path in found)
        raise Failed(
            f"{address} takes firmware in more than one place ({names}): this driver cannot tell which is meant"
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
