"""Backends of kind `pci`: functions handed out whole or as their virtual functions, as `drivers.pci.functions` does
it."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from msgspec import Struct

from drivers.base import Findings, Settings
from drivers.errors import Invalid
from drivers.generic import firmware
from drivers.generic.backend import service
from drivers.generic.pci_backend import Matched, readings
from drivers.inventory import BackendKind, Device, Service
from drivers.machine import PCI_DEVICES, Machine
from drivers.pci import functions
from drivers.plan import Act, Ask, Plan


class Desired(Struct, frozen=True, forbid_unknown_fields=True):
    """What a function is to be made of; what is not said is left as it is."""

    vfs: functions.Vfs | None = None
    bind: functions.Bind | None = None


class Pci(Matched, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="pci"):
    """Passthrough and SR-IOV; a function that takes firmware can be programmed, too."""

    kind: ClassVar[BackendKind] = "pci"
    writes: ClassVar[tuple[str, ...]] = (*functions.PciDriver.writes, *firmware.WRITES)

    desired: Desired = Desired()

    def probe(self, machine: Machine) -> tuple[str, ...]:
        """Privileges, an IOMMU, the driver that is to be bound."""
        return functions.PciDriver().probe(machine, self._settings())

    def discover(self, machine: Machine) -> Findings:
        """The functions with what is handed out of them."""
        found = self.functions(machine)
        return found._replace(devices=tuple(firmware.programmable(machine, device) for device in found.devices))

    def services(self, machine: Machine, devices: tuple[Device, ...]) -> tuple[Service, ...]:
        """As the kernel offers them for these functions."""
        paths = [f"{PCI_DEVICES}/{device.address}" for device in devices]
        groups = machine.names("/sys/kernel/iommu_groups")
        total = sum(machine.read_int(f"{path}/sriov_totalvfs", 0) for path in paths)
        methods = {word for path in paths for word in machine.text(f"{path}/reset_method").split()}
        resets = methods or any(machine.exists(f"{path}/reset") for path in paths)
        return (
            service(
                "passthrough", "" if groups else "no IOMMU: switch it on in firmware and on the kernel's command line"
            ),
            service(
                "sriov", "" if total else "none of its devices can have virtual functions", {"total_vfs": str(total)}
            ),
            service(
                "reset",
                "" if resets else "the kernel knows no method to reset its devices",
                {"methods": " ".join(sorted(methods))} if methods else {},
            ),
            *firmware.services(machine, devices),
            *readings(machine, devices),
        )

    def plan(self, act: Act, machine: Machine, ask: Ask) -> Plan:
        """As `drivers.pci.functions` plans it, within the limits."""
        if act == "program":
            return firmware.plan(machine, ask)
        wanted, most = ask.layout.get("vfs", ""), self.limits.max_handles
        if most is not None and wanted.isdecimal() and int(wanted) > most:
            raise Invalid(f"this backend hands out at most {most} in all (its limits.max_handles), not {wanted}")
        plan: Plan = getattr(functions.PciDriver(), act)(machine, self._settings(), ask)
        return plan

    def _settings(self) -> Settings:
        return {"rules": [msgspec.to_builtins(self._rule(match)) for match in self.match]}

    def _rule(self, match: functions.Match) -> functions.Rule:
        rule = super()._rule(match)
        return msgspec.structs.replace(rule, vfs=self.desired.vfs, bind=self.desired.bind)
