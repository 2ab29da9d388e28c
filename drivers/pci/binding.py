"""Read which kernel driver a PCI function is bound to, check what prevents a change, and plan the steps to another one.

This module only reads and plans. Setting `driver_override` does not bind the function by itself, and if a later
automatic probe fails, the kernel reports nothing. A write to the driver's `bind` file does return an error. Source:
Documentation/ABI/testing/sysfs-bus-pci, -iommu_groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from drivers.errors import Busy, Unsupported
from drivers.machine import PCI_DEVICES, Machine
from drivers.pci import iommu
from drivers.pci.guest_usage import refuse_if_guest_uses
from drivers.plan import Check, Step, Write

VFIO = "vfio-pci"
DRIVERS_FOLDER = "/sys/bus/pci/drivers"
NO_OVERRIDE = "(null)"
NO_DRIVER = "none"
"""A value for `driver_override` that is the name of no driver, so the kernel binds no driver to the function."""
BIND_S = 30.0


@dataclass(frozen=True)
class HostUsage:
    """The known uses of the machine's functions, for planning an act or, if not `for_act`, for a report.

    `in_use` maps PCI addresses that the host itself uses to reasons. The kernel is asked here, before the first step of
    a plan, whether the host or a guest uses a function; the agent asks both again right before each step that takes
    something away (`agents.host.execution.preflight`), so the steps have no condition for it. For a report, no VFIO
    node is opened, because a guest that starts at that moment would find it busy. Nor is a file read for which the
    kernel takes the device's lock (`sriov_numvfs`, `driver_override`), because a hanging write may hold that lock for
    ever.
    """

    machine: Machine
    in_use: Mapping[str, str]
    for_act: bool

    def refuse_if_used(self, addresses: Iterable[str]) -> None:
        """Raise Busy if the host uses one of the functions or, when `for_act`, a guest does.

        Raises Denied if it is not known whether a guest does.
        """
        functions = tuple(addresses)
        for address in functions:
            if reason := self.in_use.get(address):
                raise Busy(f"{address} cannot be changed: {reason}")
        if self.for_act:
            refuse_if_guest_uses(self.machine, (f"{PCI_DEVICES}/{address}" for address in functions))

    def read_driver_override(self, address: str) -> str:
        """Return the only driver that may be bound to the function, or `(null)` if any driver may.

        If not `for_act`, the result is always `(null)`, because the file is not read.
        """
        path = f"{PCI_DEVICES}/{address}/driver_override"
        return self.machine.text(path, NO_OVERRIDE) if self.for_act else NO_OVERRIDE


def read_bound_driver(machine: Machine, address: str) -> str:
    """Return the kernel driver that a function is bound to; '' if it has none."""
    return machine.link(f"{PCI_DEVICES}/{address}/driver")


def is_bound(machine: Machine, address: str, wanted: str) -> bool:
    """Return whether the function is bound to the wanted driver.

    If vfio-pci or no driver ('') is wanted, every driver of the VFIO family is accepted, because libvirt binds
    functions to vfio-pci or to the variant for their hardware, such as mlx5_vfio_pci, when it attaches them. A variant
    that is wanted by its name is the only one accepted.
    """
    driver = read_bound_driver(machine, address)
    return driver == wanted or (wanted in ("", VFIO) and iommu.is_vfio_driver(driver))


def refuse_unless_bindable(machine: Machine, address: str, wanted: str) -> None:
    """Raise Unsupported, with advice, if the kernel cannot bind the function to `wanted`; '' is always possible.

    The kernel must have the driver, and for a driver of VFIO the function must be in an IOMMU group.
    """
    if wanted and not machine.exists(f"{DRIVERS_FOLDER}/{wanted}"):
        raise Unsupported(f"the kernel has no driver {wanted}: load it now (modprobe {wanted}) and at every boot")
    if iommu.is_vfio_driver(wanted) and not iommu.find_group(machine, address):
        raise Unsupported(f"{address} cannot be bound to {wanted}: {iommu.describe_missing_iommu(machine)}")


def plan_binding(view: HostUsage, address: str, wanted: str) -> list[Step]:
    """Return the steps that bind one function to the driver `wanted` ('' for none); no steps if `is_bound` is true.

    The other functions of its IOMMU group are not looked at (`drivers.pci.iommu` does that). Raises Busy if the host
    uses the function or, checked only when `view.for_act`, a guest does. Raises Unsupported if the kernel cannot bind
    it.
    """
    machine = view.machine
    if is_bound(machine, address, wanted):
        return []
    view.refuse_if_used([address])
    refuse_unless_bindable(machine, address, wanted)
    driver, override_before = read_bound_driver(machine, address), view.read_driver_override(address)
    path = f"{PCI_DEVICES}/{address}"
    override_write, restore_write = (
        Write(f"{path}/driver_override", wanted or NO_DRIVER),
        _make_override_write(address, override_before),
    )
    steps = [
        Step(
            does=f"let {address} be bound to {wanted or 'no driver'} only",
            write=override_write,
            seen=(Check(override_write.path, override_write.value),),
            undo=(restore_write,),
        )
    ]
    if driver:
        rebind_writes = (restore_write, Write(f"{DRIVERS_FOLDER}/{driver}/bind", address))
        steps.append(_make_unbind_step(address, driver, undo=rebind_writes))
    if wanted:
        steps.append(
            Step(
                does=f"bind {address} to {wanted}",
                write=Write(f"{DRIVERS_FOLDER}/{wanted}/bind", address),
                expect=(Check(f"{path}/driver", "", link=True),),
                seen=(Check(f"{path}/driver", wanted, link=True),),
                undo=(Write(f"{DRIVERS_FOLDER}/{wanted}/unbind", address),),
                timeout_s=BIND_S,
            )
        )
    return steps


def plan_binding_restore(view: HostUsage, address: str, first: Mapping[str, str]) -> list[Step]:
    """Return the steps that restore the first `driver_override` and let the kernel choose a driver again.

    `first` is `Ask.first`; without an override in it, or if it is unchanged, there are no steps. Raises Busy if the
    host uses the function, or if a guest does (checked only when `view.for_act`).
    """
    path = f"{PCI_DEVICES}/{address}/driver_override"
    machine = view.machine
    if path not in first or (override_before := view.read_driver_override(address)) == first[path]:
        return []
    view.refuse_if_used([address])
    driver = read_bound_driver(machine, address)
    write, undo = _make_override_write(address, first[path]), _make_override_write(address, override_before)
    description = f"let {address} be bound to {first[path] if first[path] != NO_OVERRIDE else 'any driver'}"
    steps = [Step(does=description, write=write, seen=(Check(path, first[path]),), undo=(undo,))]
    if driver:
        steps.append(_make_unbind_step(address, driver, undo=(undo, Write(f"{DRIVERS_FOLDER}/{driver}/bind", address))))
    probe = Write("/sys/bus/pci/drivers_probe", address)
    steps.append(Step(does=f"have the kernel choose a driver for {address}", write=probe, timeout_s=BIND_S))
    return steps


def _make_unbind_step(address: str, driver: str, undo: tuple[Write, ...]) -> Step:
    """Return a step that unbinds a function from its kernel driver; `undo` holds the writes that revert the step."""
    link = f"{PCI_DEVICES}/{address}/driver"
    return Step(
        does=f"unbind {address} from {driver}",
        write=Write(f"{DRIVERS_FOLDER}/{driver}/unbind", address),
        expect=(Check(link, driver, link=True),),
        seen=(Check(link, "", link=True),),
        undo=undo,
        timeout_s=BIND_S,
    )


def _make_override_write(address: str, value: str) -> Write:
    """Return the write that sets `driver_override`.

    '' and `(null)` stand for no override. They are written as an empty line, because an empty write never reaches the
    kernel.
    """
    return Write(f"{PCI_DEVICES}/{address}/driver_override", "\n" if value in ("", NO_OVERRIDE) else value)
