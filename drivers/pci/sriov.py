"""List the virtual functions of a PCI card (SR-IOV), and plan the steps to another number of them.

This module only reads and plans. The kernel accepts a new number only while there are no virtual functions, and it may
create fewer than requested without an error; therefore each step checks the result. Sources: drivers/pci/iov.c,
Documentation/ABI/testing/sysfs-bus-pci.
"""

from __future__ import annotations

from collections.abc import Mapping

from drivers.errors import Busy, Invalid, Unsupported
from drivers.machine import PCI_DEVICES, Machine
from drivers.pci.binding import HostUsage, read_bound_driver
from drivers.pci.host_usage import USED
from drivers.pci.iommu import is_vfio_driver, list_virtual_functions
from drivers.plan import Check, Step, Write

CREATE_S, PER_FUNCTION_S = 10.0, 1.0
"""Timeout in seconds of the write that changes the number, and the seconds added for each virtual function: the write
returns only when all of them exist."""
MAX_CHECKED_LINKS = 62
"""Number of links that are checked after the write, plus the last one and the count; a Step has room for 64 checks."""


def supports_sriov(machine: Machine, address: str) -> bool:
    """Return whether the function can have virtual functions, whether or not there are any now."""
    return machine.read_int(f"{PCI_DEVICES}/{address}/sriov_totalvfs", 0) > 0


def plan_virtual_functions(view: HostUsage, address: str, wanted: int, *, unbound: bool) -> list[Step]:
    """Return the steps after which the card has exactly `wanted` virtual functions; no steps if it has that many
    already.

    With `unbound`, the kernel does not bind drivers to the new functions. Raises Busy if the host or a guest uses the
    card or one of its virtual functions (guests are checked only when `view.for_act`), Invalid if `wanted` exceeds the
    card's maximum, and Unsupported if the card or its kernel driver has no SR-IOV.
    """
    machine, path = view.machine, f"{PCI_DEVICES}/{address}"
    existing = list_virtual_functions(machine, address)
    if len(existing) == wanted:
        return []
    total = machine.read_int(f"{path}/sriov_totalvfs", 0)
    if total == 0:
        raise Unsupported(
            f"{address} cannot have virtual functions: remove vfs from its rule, or enable SR-IOV in its firmware"
        )
    if wanted > total:
        raise Invalid(f"{address} can have at most {total} virtual functions, not {wanted}: change vfs")
    _refuse_without_driver(machine, address)
    _refuse_if_used(view, address, existing)
    current_count = machine.read_int(f"{path}/sriov_numvfs", 0) if view.for_act else len(existing)
    steps = [_make_count_step(machine, address, current_count, 0)] if current_count else []
    autoprobe_path = f"{path}/sriov_drivers_autoprobe"
    if wanted and unbound and machine.text(autoprobe_path) not in ("", "0"):
        steps.append(_make_autoprobe_step(address, "0", machine.text(autoprobe_path)))
    if wanted:
        steps.append(_make_count_step(machine, address, 0, wanted))
    return steps


def plan_virtual_functions_restore(view: HostUsage, address: str, first: Mapping[str, str]) -> list[Step]:
    """Return the steps that restore the first number of virtual functions and the first autoprobe setting.

    `first` is `Ask.first`; values that are not in it are left unchanged. If existing functions must be removed, raises
    Busy if the host or a guest uses the card or one of them, and Unsupported if the card's kernel driver cannot do it.
    """
    machine, path = view.machine, f"{PCI_DEVICES}/{address}"
    wanted, current_count = first.get(f"{path}/sriov_numvfs", ""), machine.read_int(f"{path}/sriov_numvfs", 0)
    steps = []
    if current_count and wanted.isdecimal() and int(wanted) != current_count:
        _refuse_without_driver(machine, address)
        _refuse_if_used(view, address, list_virtual_functions(machine, address))
        steps.append(_make_count_step(machine, address, current_count, 0))
    autoprobe_path, autoprobe_before = (
        f"{path}/sriov_drivers_autoprobe",
        machine.text(f"{path}/sriov_drivers_autoprobe"),
    )
    if first.get(autoprobe_path, autoprobe_before) != autoprobe_before:
        steps.append(_make_autoprobe_step(address, first[autoprobe_path], autoprobe_before))
    if wanted.isdecimal() and int(wanted) not in (0, current_count):
        steps.append(_make_count_step(machine, address, 0, int(wanted)))
    return steps


def explain_permission(address: str, reason: str) -> str:
    """Return the end of a sentence that says how an operator allows virtual functions of a card that the host uses.

    `reason` is the beginning of the sentence; if it says that the use is unknown, or something else, '' is returned.
    """
    if not reason.startswith(USED):
        return ""
    return f'; to let it have virtual functions beside that use, add vfs_beside_host = ["{address}"] to its rule'


def _refuse_if_used(view: HostUsage, address: str, virtual_functions: list[str]) -> None:
    """Raise Busy if the host or a guest uses the card or one of its virtual functions; see `HostUsage`."""
    if reason := view.in_use.get(address):
        raise Busy(f"{address} cannot be changed: {reason}{explain_permission(address, reason)}")
    view.refuse_if_used([address, *virtual_functions])


def _refuse_without_driver(machine: Machine, address: str) -> None:
    """Raise Unsupported if the card is bound to no driver or to one of VFIO, because neither creates virtual
    functions."""
    driver = read_bound_driver(machine, address)
    if driver == "" or is_vfio_driver(driver):
        raise Unsupported(
            f"{address} is bound to {driver or 'no kernel driver'}, which cannot create virtual functions: bind its "
            "own driver to it, or pci-pf-stub"
        )


def _make_autoprobe_step(address: str, value: str, before: str) -> Step:
    """Return a step that sets whether the kernel binds drivers to new virtual functions (`sriov_drivers_autoprobe`)."""
    path = f"{PCI_DEVICES}/{address}/sriov_drivers_autoprobe"
    return Step(
        does=f"{'bind drivers' if value == '1' else 'bind no drivers'} to new virtual functions of {address}",
        write=Write(path, value),
        seen=(Check(path, value),),
        undo=(Write(path, before),),
    )


def _make_count_step(machine: Machine, address: str, before: int, wanted: int) -> Step:
    """Return a step that changes the number of virtual functions; one of `before` and `wanted` must be 0."""
    path = f"{PCI_DEVICES}/{address}"
    checked_numbers = dict.fromkeys([*range(min(wanted, MAX_CHECKED_LINKS)), wanted - 1] if wanted else [])
    links = (Check(f"{path}/virtfn{number}/physfn", address, link=True) for number in checked_numbers)
    return Step(
        does=f"make {wanted} virtual function{'s' if wanted > 1 else ''} of {address}"
        if wanted
        else f"remove the virtual functions of {address}",
        write=Write(f"{path}/sriov_numvfs", str(wanted)),
        expect=(
            Check(f"{path}/sriov_numvfs", str(before)),
            Check(f"{path}/driver", read_bound_driver(machine, address), link=True),
        ),
        seen=(Check(f"{path}/sriov_numvfs", str(wanted)), *links),
        undo=(Write(f"{path}/sriov_numvfs", str(before)),),
        timeout_s=min(CREATE_S + PER_FUNCTION_S * max(wanted, before), 600.0),
    )
