"""Backends of kind `pci`: functions handed out whole or as their virtual functions, with `drivers.pci.functions`."""

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
    """The wanted state of each function: number of virtual functions and kernel driver; None leaves it unchanged."""

    vfs: functions.Vfs | None = None
    bind: functions.Bind | None = None


class Pci(Matched, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="pci"):
    """Offers functions for passthrough and SR-IOV; those with a firmware upload directory can also be programmed."""

    kind: ClassVar[BackendKind] = "pci"
    writes: ClassVar[tuple[str, ...]] = (*functions.PciDriver.writes, *firmware.WRITES)

    desired: Desired = Desired()

    def probe(self, machine: Machine) -> tuple[str, ...]:
        """Return what is missing: privileges, a writable /sys, an IOMMU, the kernel driver of `desired.bind`."""
        return functions.PciDriver().probe(machine, self._settings())

    def discover(self, machine: Machine) -> Findings:
        """Return the functions with their handles; programmable ones have `program` among their acts."""
        found = self.functions(machine)
        return found._replace(devices=tuple(firmware.programmable(machine, device) for device in found.devices))

    def services(self, machine: Machine, devices: tuple[Device, ...]) -> tuple[Service, ...]:
        """Return passthrough, sriov, reset, program, firmware, health and stats; some may be unavailable."""
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
        """Return the plan of `drivers.pci.functions`, or the upload of `drivers.generic.firmware` for program.

        Raises Invalid if the layout wants more virtual functions than `limits.max_handles`.
        """
        if act == "program":
            return firmware.plan(machine, ask)
        wanted, most = ask.layout.get("vfs", ""), self.limits.max_handles
        if most is not None and wanted.isdecimal() and int(wanted) > most:
            raise Invalid(f"this backend hands out at most {most} handles (its limits.max_handles), not {wanted}")
        plan: Plan = getattr(functions.PciDriver(), act)(machine, self._settings(), ask)
        return plan

    def _settings(self) -> Settings:
        return {"rules": [msgspec.to_builtins(self._rule(match)) for match in self.match]}

    def _rule(self, match: functions.Match) -> functions.Rule:
        rule = super()._rule(match)
        return msgspec.structs.replace(rule, vfs=self.desired.vfs, bind=self.desired.bind)
