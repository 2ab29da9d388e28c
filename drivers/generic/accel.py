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
from drivers.generic.backend import service
from drivers.generic.pci_backend import Matched, readings
from drivers.inventory import AttachHandle, BackendKind, Deployable, Device, Fault, Service
from drivers.machine import PCI_DEVICES, Machine
from drivers.pci import functions
from drivers.plan import Act, Ask, Plan

CLASS = "/sys/class/accel"


class Desired(Struct, frozen=True, forbid_unknown_fields=True):
    """The permissions that a consumer gets on the node: read, write, or both."""

    permissions: Literal["r", "w", "rw"] = "rw"


class Accel(Matched, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="accel-class"):
    """Offers one handle for each function: its device node."""

    kind: ClassVar[BackendKind] = "accel-class"

    desired: Desired = Desired()

    def discover(self, machine: Machine) -> Findings:
        """Return the functions that have a device node; those without one become faults."""
        found = self.functions(machine)
        nodes = {device.key: node_of(machine, device.address or "") for device in found.devices}
        bare = [device for device in found.devices if not nodes[device.key]]
        faults = [
            Fault(device.address or device.key, "it has no node in /dev/accel: is its driver bound?") for device in bare
        ]
        devices = (self._offered(device, nodes[device.key]) for device in found.devices if nodes[device.key])
        return Findings(tuple(devices), (*found.faults, *faults))

    def services(self, machine: Machine, devices: tuple[Device, ...]) -> tuple[Service, ...]:
        """Return health and stats, and `passthrough` as unavailable with the reason why Nova cannot use the devices."""
        return (
            service(
                "passthrough",
                "it hands out device nodes (DEV), which Nova cannot give to a guest: it is not offered to Nova",
            ),
            *readings(machine, devices),
        )

    def plan(self, act: Act, machine: Machine, ask: Ask) -> Plan:
        """Return a plan without steps for install, attach and detach.

        For attach, raises Gone if the handle's node does not exist. Raises Unsupported for all other acts.
        """
        if act == "attach":
            address = functions.find(machine, ask.key)
            if ask.handle is None or ask.handle != self._handle(node_of(machine, address)):
                raise Gone(f"{address} has no such node (any more)")
        return super().plan(act, machine, ask)

    def _offered(self, device: Device, node: str) -> Device:
        (part,) = device.deployables
        traits = tuple(attribute for attribute in part.attributes if attribute.key != "rc")
        part = Deployable(part.name, 1, traits, (self._handle(node),), part.driver_name)
        acts = "attach detach health"
        return msgspec.structs.replace(device, deployables=(part,), acts=acts, changeable="", sized_by="")

    def _handle(self, node: str) -> AttachHandle:
        return AttachHandle("DEV", json.dumps({"path": node, "permissions": self.desired.permissions}, sort_keys=True))


def node_of(machine: Machine, address: str) -> str:
    """Return the device node of a function, such as `/dev/accel/accel0`; '' if it has none."""
    for name in machine.names(f"{PCI_DEVICES}/{address}/accel"):
        if machine.exists(f"{CLASS}/{name}") and machine.exists(f"/dev/accel/{name}"):
            return f"/dev/accel/{name}"
    return ""
