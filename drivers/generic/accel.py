"""Backends of kind `accel-class`: PCI functions with a device node in /dev/accel, which is handed out.

A handle of type `DEV` names a device node and its permissions, for use in a container. Nova cannot give a device node
to a guest, so these devices have no resource class and are not offered to Nova. Source:
Documentation/accel/introduction.rst.
"""

from __future__ import annotations

import json
from typing import ClassVar, Literal

import msgspec
from msgspec import Struct

from drivers.base import Findings
from drivers.errors import Gone
from drivers.generic.backend import make_service
from drivers.generic.pci_backend import PciFunctionBackend, make_reading_services
from drivers.inventory import AttachHandle, BackendKind, Deployable, Device, Fault, Service
from drivers.machine import PCI_DEVICES, Machine
from drivers.pci import functions
from drivers.plan import Act, Ask, Plan

ACCEL_CLASS_FOLDER = "/sys/class/accel"


class DesiredNode(Struct, frozen=True, forbid_unknown_fields=True):
    """The permissions that a consumer gets on the node: read, write, or both."""

    permissions: Literal["r", "w", "rw"] = "rw"


class AccelBackend(PciFunctionBackend, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="accel-class"):
    """Offers one handle for each function: its device node."""

    kind: ClassVar[BackendKind] = "accel-class"

    desired: DesiredNode = DesiredNode()

    def discover(self, machine: Machine) -> Findings:
        """Return a device for each function that has a device node, and a fault for each function without one.

        Raises DriverError if it cannot be determined which functions the host uses.
        """
        findings = self.find_functions(machine)
        nodes = {device.key: find_device_node(machine, device.address or "") for device in findings.devices}
        devices_without_node = [device for device in findings.devices if not nodes[device.key]]
        faults = [
            Fault(device.address or device.key, "it has no node in /dev/accel: is its driver bound?")
            for device in devices_without_node
        ]
        devices = (
            self._make_offered_device(device, nodes[device.key]) for device in findings.devices if nodes[device.key]
        )
        return Findings(tuple(devices), (*findings.faults, *faults))

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
            address = functions.find_address(machine, ask.key, ask.address)
            if ask.handle is None or ask.handle != self._make_handle(find_device_node(machine, address)):
                raise Gone(f"{address} has no such node (any more)")
        return super().plan(act, machine, ask)

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


def find_device_node(machine: Machine, address: str) -> str:
    """Return the device node of a function, such as `/dev/accel/accel0`; '' if it has none."""
    for name in machine.names(f"{PCI_DEVICES}/{address}/accel"):
        if machine.exists(f"{ACCEL_CLASS_FOLDER}/{name}") and machine.exists(f"/dev/accel/{name}"):
            return f"/dev/accel/{name}"
    return ""
