"""Backends of kind `accel-class`: hardware with a device node in /dev/accel, which is handed out.

The hardware is PCI functions (`match`) or devices on another bus, such as the NPU of a system on a chip (`off_pci`).
A handle of type `DEV` names a device node and its permissions, for use in a container. Nova cannot give a device node
to a guest, so these devices have no resource class and are not offered to Nova. Sources:
Documentation/accel/introduction.rst, Documentation/devicetree/usage-model.rst.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from drivers.base import Findings
from drivers.errors import Gone
from drivers.generic.backend import make_service
from drivers.generic.pci_backend import PciFunctionBackend, make_reading_services
from drivers.inventory import AttachHandle, Attribute, BackendKind, Deployable, Device, Fault, Sample, Service
from drivers.machine import PCI_ADDRESS, PCI_DEVICES, SYS_KEY, Machine
from drivers.pci import functions
from drivers.pci.rules import PciMatch
from drivers.plan import Act, Ask, Plan, Vitals

ACCEL_CLASS_FOLDER = "/sys/class/accel"
UNKNOWN_HEALTH = "the kernel shows no health of a device that is not on PCI"


class DesiredNode(Struct, frozen=True, forbid_unknown_fields=True):
    """The permissions that a consumer gets on the node: read, write, or both."""

    permissions: Literal["r", "w", "rw"] = "rw"


class OffPciMatch(Struct, frozen=True, forbid_unknown_fields=True):
    """Selects devices that are not on PCI by globs over the kernel driver (`rocket`) and the name (`fdab0000.npu`)."""

    driver: Annotated[str, Meta(min_length=1, max_length=64)] = "*"
    name: Annotated[str, Meta(min_length=1, max_length=128)] = "*"


class AccelBackend(PciFunctionBackend, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="accel-class"):
    """Offers one handle for each PCI function and each device off PCI that is selected: its device node."""

    kind: ClassVar[BackendKind] = "accel-class"

    match: Annotated[list[PciMatch], Meta(max_length=64)] = []
    off_pci: Annotated[list[OffPciMatch], Meta(max_length=64)] = []
    desired: DesiredNode = DesiredNode()

    def describe_problem(self) -> str:
        """Return a reason if nothing or everything is selected, or if devices off PCI have no type; '' otherwise."""
        if not self.match and not self.off_pci:
            return "it selects nothing: state `match` for PCI functions, or `off_pci` for other devices"
        if OffPciMatch() in self.off_pci:
            return "one entry of `off_pci` selects every device: state driver or name"
        if self.off_pci and self.type is None:
            return "devices in `off_pci` have no PCI class that determines their type: set `type`"
        return super().describe_problem()

    def discover(self, machine: Machine) -> Findings:
        """Return a device for each selected one that has a device node, and a fault for each function without one.

        Raises DriverError if it cannot be determined which functions the host uses.
        """
        off_pci = self._discover_off_pci(machine)
        if not self.match:
            return Findings(off_pci)
        findings = self.find_functions(machine, shared=True)
        nodes = {device.key: find_device_node(machine, device.address or "") for device in findings.devices}
        devices_without_node = [device for device in findings.devices if not nodes[device.key]]
        faults = [
            Fault(device.address or device.key, "it has no node in /dev/accel: is its driver bound?")
            for device in devices_without_node
        ]
        devices = (
            self._make_offered_device(device, nodes[device.key]) for device in findings.devices if nodes[device.key]
        )
        return Findings((*devices, *off_pci), (*findings.faults, *faults))

    def list_services(self, machine: Machine, devices: tuple[Device, ...]) -> tuple[Service, ...]:
        """Return health and stats, and `passthrough` as unavailable with the reason why Nova cannot use the devices."""
        return (
            make_service(
                "passthrough",
                "it hands out device nodes (DEV), which Nova cannot give to a guest: it is not offered to Nova",
            ),
            *make_reading_services(machine, devices),
        )

    def plan(self, act: Act, machine: Machine, ask: Ask) -> Plan:
        """Return a plan without steps for install, attach and detach.

        For attach, raises Gone if the function is absent, or if `ask.handle` is not the handle that it has now. Raises
        Unsupported for all other acts.
        """
        if act == "attach":
            node = _find_node(machine, ask)
            if ask.handle is None or ask.handle != self._make_handle(node):
                raise Gone(f"{ask.key} has no such node (any more)")
        return super().plan(act, machine, ask)

    def health(self, machine: Machine, ask: Ask) -> Vitals:
        """Return the health of a PCI function; of a device off PCI it is unknown. Raises Gone if it is absent."""
        if not ask.key.startswith(SYS_KEY):
            return super().health(machine, ask)
        _find_node(machine, ask)
        return Vitals("unknown", UNKNOWN_HEALTH)

    def stats(self, machine: Machine, ask: Ask) -> tuple[Sample, ...]:
        """Return the load of a PCI function; there are no samples of a device off PCI. Raises Gone as `health`."""
        return () if ask.key.startswith(SYS_KEY) else super().stats(machine, ask)

    def _discover_off_pci(self, machine: Machine) -> tuple[Device, ...]:
        """Return the devices that `off_pci` selects."""
        devices = []
        for sys_path, node in _iterate_off_pci(machine) if self.off_pci else ():
            name, driver = sys_path.rpartition("/")[2], machine.link(f"{sys_path}/driver")
            if any(fnmatchcase(driver, one.driver) and fnmatchcase(name, one.name) for one in self.off_pci):
                devices.append(self._make_device_off_pci(machine, sys_path, driver, node))
        return tuple(devices)

    def _make_device_off_pci(self, machine: Machine, sys_path: str, driver: str, node: str) -> Device:
        """Return the device at a directory of /sys/devices that is not on PCI, with the handle of its node.

        `driver` is its kernel driver, '' if it has none.
        """
        name = sys_path.rpartition("/")[2]
        vendor, _, model = machine.text(f"{sys_path}/of_node/compatible").partition("\0")[0].partition(",")
        part = Deployable(
            f"{machine.node}_{name}",
            1,
            (Attribute("trait0", "OWNER_CYBORG"),),
            (self._make_handle(node),),
            driver or "none",
        )
        return Device(
            key=_make_key(sys_path),
            type=self.type or "AICHIP",
            vendor=vendor or driver or "unknown",
            model=model or name,
            status="unknown",
            status_reason=UNKNOWN_HEALTH,
            kernel_driver=driver,
            deployables=(part,),
            acts="attach detach health",
        )

    def _make_offered_device(self, device: Device, node: str) -> Device:
        """Return the device with one `DEV` handle for the node, and without a resource class and a layout."""
        (part,) = device.deployables
        traits = tuple(attribute for attribute in part.attributes if attribute.key != "rc")
        part = Deployable(part.name, 1, traits, (self._make_handle(node),), part.driver_name)
        acts = "attach detach health"
        return msgspec.structs.replace(device, deployables=(part,), acts=acts, changeable="", sized_by="")

    def _make_handle(self, node: str) -> AttachHandle:
        """Return the `DEV` handle of a device node, with the permissions of `desired`."""
        return AttachHandle("DEV", json.dumps({"path": node, "permissions": self.desired.permissions}, sort_keys=True))


def _iterate_off_pci(machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield (directory in /sys/devices, device node) for each device of the accel class that is not on PCI."""
    for name in machine.names(ACCEL_CLASS_FOLDER, "accel[0-9]*"):
        sys_path = machine.find_bus_device(f"{ACCEL_CLASS_FOLDER}/{name}")
        is_on_pci = any(map(PCI_ADDRESS.fullmatch, sys_path.split("/")))
        if sys_path and not is_on_pci and machine.exists(f"/dev/accel/{name}"):
            yield sys_path, f"/dev/accel/{name}"


def _make_key(sys_path: str) -> str:
    """Return the key of the device at a directory in /sys/devices."""
    return f"{SYS_KEY}{sys_path.removeprefix('/sys/devices/')}"


def _find_node(machine: Machine, ask: Ask) -> str:
    """Return the device node of the device that `ask` names; '' if a PCI function has none.

    Raises Gone if the device is absent.
    """
    if not ask.key.startswith(SYS_KEY):
        return find_device_node(machine, functions.find_address(machine, ask.key, ask.address))
    for sys_path, node in _iterate_off_pci(machine):
        if ask.key == _make_key(sys_path):
            return node
    raise Gone(f"there is no {ask.key} on this host (any more)")


def find_device_node(machine: Machine, address: str) -> str:
    """Return the device node of a function, such as `/dev/accel/accel0`; '' if it has none."""
    for name in machine.names(f"{PCI_DEVICES}/{address}/accel"):
        if machine.exists(f"{ACCEL_CLASS_FOLDER}/{name}") and machine.exists(f"/dev/accel/{name}"):
            return f"/dev/accel/{name}"
    return ""
