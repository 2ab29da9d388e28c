"""Backends of kind `pci`: functions handed out whole or as their virtual functions, with `drivers.pci.functions`."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta, Struct

from drivers.base import Findings, Settings
from drivers.generic import firmware
from drivers.generic.backend import make_service
from drivers.generic.pci_backend import OfferedFunctionBackend, make_reading_services
from drivers.inventory import BackendKind, Device, Service
from drivers.machine import PCI_DEVICES, Machine
from drivers.pci import functions, iommu, rules
from drivers.plan import Act, Ask, Plan


class DesiredFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """The wanted state of each function: number of virtual functions and kernel driver; None leaves it unchanged.

    `vfs_beside_host` is described at `drivers.pci.rules.PciRule`.
    """

    vfs: rules.VfCount | None = None
    bind: rules.KernelDriverName | None = None
    vfs_beside_host: Annotated[list[rules.FunctionName], Meta(max_length=64)] = []


class PciBackend(OfferedFunctionBackend, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="pci"):
    """Offers functions for passthrough and SR-IOV; those with a firmware upload directory can also be programmed."""

    kind: ClassVar[BackendKind] = "pci"
    passthrough: ClassVar[bool] = True
    writes: ClassVar[tuple[str, ...]] = (*functions.PciDriver.writes, *firmware.WRITTEN_PATHS)

    desired: DesiredFunction = DesiredFunction()

    def probe(self, machine: Machine) -> tuple[str, ...]:
        """Return what is missing: privileges, a writable /sys, an IOMMU, the kernel driver of `desired.bind`."""
        return functions.PciDriver().probe(machine, self._make_driver_settings())

    def discover(self, machine: Machine) -> Findings:
        """Return the functions with their handles; programmable ones have `program` among their acts.

        Raises DriverError if it cannot be determined which functions the host uses.
        """
        findings = self.find_functions(machine)
        return findings._replace(
            devices=tuple(firmware.add_program_act(machine, device) for device in findings.devices)
        )

    def list_services(self, machine: Machine, devices: tuple[Device, ...]) -> tuple[Service, ...]:
        """Return passthrough, sriov, reset, program, firmware, health and stats; some may be unavailable."""
        paths = [f"{PCI_DEVICES}/{device.address}" for device in devices]
        total = sum(machine.read_int(f"{path}/sriov_totalvfs", 0) for path in paths)
        methods = {word for path in paths for word in machine.text(f"{path}/reset_method").split()}
        resets = methods or any(machine.exists(f"{path}/reset") for path in paths)
        return (
            make_service("passthrough", "" if iommu.has_iommu(machine) else iommu.describe_missing_iommu(machine)),
            make_service(
                "sriov", "" if total else "none of its devices can have virtual functions", {"total_vfs": str(total)}
            ),
            make_service(
                "reset",
                "" if resets else "the kernel knows no method to reset its devices",
                {"methods": " ".join(sorted(methods))} if methods else {},
            ),
            *firmware.make_program_services(machine, devices),
            *make_reading_services(machine, devices),
        )

    def plan(self, act: Act, machine: Machine, ask: Ask) -> Plan:
        """Return the plan of `drivers.pci.functions`, or the upload of `drivers.generic.firmware` for program.

        Raises the errors of these, and Invalid if the layout wants more virtual functions than `limits.max_handles`.
        """
        if act == "program":
            return firmware.plan_upload(machine, ask)
        wanted_vfs = ask.layout.get("vfs", "")
        if wanted_vfs.isdecimal():
            self.refuse_above_max_handles(int(wanted_vfs))
        plan: Plan = getattr(functions.PciDriver(), act)(machine, self._make_driver_settings(), ask)
        return plan

    def _make_driver_settings(self) -> Settings:
        """Return the settings of a PciDriver, with one rule for each entry of `match`."""
        return {"rules": [msgspec.to_builtins(self._make_rule(match)) for match in self.match]}

    def _make_rule(self, match: rules.PciMatch) -> rules.PciRule:
        """Return the rule of one entry of `match`, with the wanted state of `desired`."""
        rule = super()._make_rule(match)
        desired = self.desired
        return msgspec.structs.replace(
            rule, vfs=desired.vfs, bind=desired.bind, vfs_beside_host=desired.vfs_beside_host
        )
