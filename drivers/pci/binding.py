"""Read which kernel driver a PCI function is bound to, check what prevents a change, and plan the steps to another one.

This module only reads and plans. Setting `driver_override` alone binds nothing, and the kernel does not report a probe
that fails because of it; a write to `bind` returns an error. Source: Documentation/ABI/testing/sysfs-bus-pci,
-iommu_groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from drivers.errors import Busy, Unsupported
from drivers.machine import PCI_DEVICES, Machine
from drivers.plan import Check, Path, Step, Write

VFIO = "vfio-pci"
DRIVERS = "/sys/bus/pci/drivers"
NO_OVERRIDE = "(null)"
OPTED_OUT = "none"
"""A value for `driver_override` that is the name of no driver, so the kernel binds no driver to the function."""
HARMLESS = frozenset({"", VFIO, "pci-stub"})
"""Drivers that the other functions of an IOMMU group may be bound to while a guest uses one of them."""
BIND_S = 30.0


@dataclass(frozen=True)
class Look:
    """The machine as seen before an act, or, if not `acting`, for a report.

    `in_use` maps PCI addresses that the host itself uses to reasons. For a report, no device node is opened, because a
    guest that starts at that moment would find it busy. Nor is a file read for which the kernel takes the device's lock
    (`sriov_numvfs`, `driver_override`), because a hanging write may hold that lock for ever.
    """

    machine: Machine
    in_use: Mapping[str, str]
    acting: bool

    def refuse(self, addresses: Iterable[str]) -> None:
        """Raise Busy if the host uses one of the functions or, when `acting`, a guest does."""
        for address in addresses:
            if reason := self.in_use.get(address):
                raise Busy(f"{address} cannot be changed: {reason}")
            for node in nodes(self.machine, [address]) if self.acting else ():
                if self.machine.is_open(node):
                    raise Busy(f"{address} cannot be changed: a guest uses it ({node} is open)")

    def override(self, address: str) -> str:
        """Return the only driver that may be bound to the function; `(null)` for any driver, and if not `acting`."""
        path = f"{PCI_DEVICES}/{address}/driver_override"
        return self.machine.text(path, NO_OVERRIDE) if self.acting else NO_OVERRIDE


def driver_of(machine: Machine, address: str) -> str:
    """Return the kernel driver that a function is bound to; '' if it has none."""
    return machine.link(f"{PCI_DEVICES}/{address}/driver")


def nodes(machine: Machine, addresses: Iterable[str]) -> tuple[Path, ...]:
    """Return the device nodes that a guest has open while it uses one of the functions, without duplicates.

    At most 64 are returned, the maximum of `Step.idle`.
    """
    groups = (group_of(machine, address) for address in addresses if driver_of(machine, address) == VFIO)
    return tuple(dict.fromkeys(f"/dev/vfio/{group}" for group in groups if group))[:64]


def group_of(machine: Machine, address: str) -> str:
    """Return the function's IOMMU group; '' without an IOMMU."""
    return machine.link(f"{PCI_DEVICES}/{address}/iommu_group")


def is_bound(machine: Machine, address: str, wanted: str) -> bool:
    """Return whether the function is bound to the wanted driver.

    If no driver is wanted (''), vfio-pci is accepted too, because libvirt binds functions to it when it attaches them.
    """
    driver = driver_of(machine, address)
    return driver in ("", VFIO) if wanted == "" else driver == wanted


def refuse_unable(machine: Machine, address: str, wanted: str) -> None:
    """Raise Unsupported, with advice, if the kernel cannot bind this function and its parts to `wanted`."""
    if wanted and not machine.exists(f"{DRIVERS}/{wanted}"):
        raise Unsupported(f"the kernel has no driver {wanted}: load it now (modprobe {wanted}) and at every boot")
    if wanted == VFIO and not group_of(machine, address):
        raise Unsupported(
            f"{address} is in no IOMMU group, so it cannot be bound to {VFIO}: switch the IOMMU on (VT-d or AMD-Vi in "
            "the firmware, intel_iommu=on on the kernel's command line for Intel)"
        )


def plan(look: Look, address: str, wanted: str) -> list[Step]:
    """Return the steps that bind one function to the driver `wanted` ('' for none); no steps if `is_bound` is true.

    Raises Busy if the host or a guest uses the function, or the host uses another function of its IOMMU group and
    vfio-pci is wanted. Raises Unsupported if the kernel cannot bind it.
    """
    machine = look.machine
    if is_bound(machine, address, wanted):
        return []
    look.refuse([address])
    refuse_unable(machine, address, wanted)
    if wanted == VFIO:
        _refuse_neighbours(machine, address)
    driver, before = driver_of(machine, address), look.override(address)
    path = f"{PCI_DEVICES}/{address}"
    override, back = Write(f"{path}/driver_override", wanted or OPTED_OUT), _overriding(address, before)
    held = nodes(machine, [address])
    steps = [
        Step(
            does=f"let {address} be bound to {wanted or 'no driver'} only",
            write=override,
            idle=held,
            seen=(Check(override.path, override.value),),
            undo=(back,),
        )
    ]
    if driver:
        again = (back, Write(f"{DRIVERS}/{driver}/bind", address))
        steps.append(_unbound(machine, address, driver, undo=again))
    if wanted:
        steps.append(
            Step(
                does=f"bind {address} to {wanted}",
                write=Write(f"{DRIVERS}/{wanted}/bind", address),
                expect=(Check(f"{path}/driver", "", link=True),),
                seen=(Check(f"{path}/driver", wanted, link=True),),
                undo=(Write(f"{DRIVERS}/{wanted}/unbind", address),),
                timeout_s=BIND_S,
            )
        )
    return steps


def back(look: Look, address: str, first: Mapping[str, str]) -> list[Step]:
    """Return the steps that restore the first `driver_override` and let the kernel choose a driver again.

    `first` is `Ask.first`; without an override in it, or if it is unchanged, there are no steps. Raises Busy.
    """
    path = f"{PCI_DEVICES}/{address}/driver_override"
    machine = look.machine
    if path not in first or (before := look.override(address)) == first[path]:
        return []
    look.refuse([address])
    driver, held = driver_of(machine, address), nodes(machine, [address])
    write, undo = _overriding(address, first[path]), _overriding(address, before)
    says = f"let {address} be bound to {first[path] if first[path] != NO_OVERRIDE else 'any driver'}"
    steps = [Step(does=says, write=write, idle=held, seen=(Check(path, first[path]),), undo=(undo,))]
    if driver:
        steps.append(_unbound(machine, address, driver, undo=(undo, Write(f"{DRIVERS}/{driver}/bind", address))))
    probe = Write("/sys/bus/pci/drivers_probe", address)
    steps.append(Step(does=f"have the kernel choose a driver for {address}", write=probe, timeout_s=BIND_S))
    return steps


def _unbound(machine: Machine, address: str, driver: str, undo: tuple[Write, ...]) -> Step:
    """Return a step that unbinds a function from its kernel driver."""
    link = f"{PCI_DEVICES}/{address}/driver"
    return Step(
        does=f"unbind {address} from {driver}",
        write=Write(f"{DRIVERS}/{driver}/unbind", address),
        expect=(Check(link, driver, link=True),),
        idle=nodes(machine, [address]),
        seen=(Check(link, "", link=True),),
        undo=undo,
        timeout_s=BIND_S,
    )


def _overriding(address: str, value: str) -> Write:
    """Return the write that sets `driver_override`.

    No override is written as an empty line, because an empty write never reaches the kernel.
    """
    return Write(f"{PCI_DEVICES}/{address}/driver_override", "\n" if value in ("", NO_OVERRIDE) else value)


def _refuse_neighbours(machine: Machine, address: str) -> None:
    """Raise Busy if another function of the same IOMMU group is bound to a driver of the host.

    A guest gets all functions of a group or none. Bridges do not count.
    """
    group = group_of(machine, address)
    for other in machine.names(f"/sys/kernel/iommu_groups/{group}/devices"):
        driver = driver_of(machine, other)
        if driver in HARMLESS or machine.text(f"{PCI_DEVICES}/{other}/class").startswith("0x06"):
            continue
        if other != address:
            raise Busy(
                f"{address} is in the same IOMMU group ({group}) as {other}, which is bound to the host's driver "
                f"{driver}: a guest gets all functions of a group or none, so unbind {other}, or bind it to {VFIO} "
                "with a rule"
            )
