"""List the virtual functions of a PCI card (SR-IOV), and plan the steps to another number of them.

This module only reads and plans. The kernel accepts a new number only while there are no virtual functions, and it may
create fewer than requested without an error; therefore each step checks the result. Sources: drivers/pci/iov.c,
Documentation/ABI/testing/sysfs-bus-pci.
"""

from __future__ import annotations

from collections.abc import Mapping

from drivers.errors import Invalid, Unsupported
from drivers.machine import PCI_DEVICES, Machine
from drivers.pci.binding import VFIO, Look, driver_of, nodes
from drivers.plan import Check, Step, Write

MAKE_S, EACH_S = 10.0, 1.0
"""Timeout in seconds of the write that changes the number, and the seconds added for each virtual function: the write
returns only when all of them exist."""
LOOKED_AT = 62
"""Number of links that are checked after the write, plus the last one and the count; a Step has room for 64 checks."""


def virtual(machine: Machine, address: str) -> list[str]:
    """Return the addresses of a card's virtual functions, sorted."""
    path = f"{PCI_DEVICES}/{address}"
    return sorted(filter(None, (machine.link(f"{path}/{name}") for name in machine.names(path, "virtfn*"))))


def able(machine: Machine, address: str) -> bool:
    """Return whether the function supports virtual functions."""
    return machine.read_int(f"{PCI_DEVICES}/{address}/sriov_totalvfs", 0) > 0


def plan(look: Look, address: str, wanted: int, *, unbound: bool) -> list[Step]:
    """Return the steps to exactly `wanted` virtual functions; no steps if there are that many.

    With `unbound`, the kernel does not bind drivers to the new functions. Raises Busy if the host or a guest uses the
    card or one of its virtual functions, Invalid if `wanted` exceeds the card's maximum, and Unsupported if the card or
    its kernel driver has no SR-IOV.
    """
    machine, path = look.machine, f"{PCI_DEVICES}/{address}"
    there = virtual(machine, address)
    if len(there) == wanted:
        return []
    total = machine.read_int(f"{path}/sriov_totalvfs", 0)
    if total == 0:
        raise Unsupported(
            f"{address} cannot have virtual functions: remove vfs from its rule, or enable SR-IOV in its firmware"
        )
    if wanted > total:
        raise Invalid(f"{address} can have at most {total} virtual functions, not {wanted}: change vfs")
    _refuse_without_driver(machine, address)
    look.refuse([address, *there])
    number = machine.read_int(f"{path}/sriov_numvfs", 0) if look.acting else len(there)
    steps = [_number(machine, address, number, 0)] if number else []
    probing = f"{path}/sriov_drivers_autoprobe"
    if wanted and unbound and machine.text(probing) not in ("", "0"):
        steps.append(_probing(address, "0", machine.text(probing)))
    if wanted:
        steps.append(_number(machine, address, 0, wanted))
    return steps


def back(look: Look, address: str, first: Mapping[str, str]) -> list[Step]:
    """Return the steps that restore the first number of virtual functions and the first autoprobe setting.

    `first` is `Ask.first`; values that are not in it are left unchanged. Raises Busy and Unsupported.
    """
    machine, path = look.machine, f"{PCI_DEVICES}/{address}"
    wanted, there = first.get(f"{path}/sriov_numvfs", ""), machine.read_int(f"{path}/sriov_numvfs", 0)
    steps = []
    if there and wanted.isdecimal() and int(wanted) != there:
        _refuse_without_driver(machine, address)
        look.refuse([address, *virtual(machine, address)])
        steps.append(_number(machine, address, there, 0))
    probing, before = f"{path}/sriov_drivers_autoprobe", machine.text(f"{path}/sriov_drivers_autoprobe")
    if first.get(probing, before) != before:
        steps.append(_probing(address, first[probing], before))
    if wanted.isdecimal() and int(wanted) not in (0, there):
        steps.append(_number(machine, address, 0, int(wanted)))
    return steps


def _refuse_without_driver(machine: Machine, address: str) -> None:
    """Raise Unsupported if the card is bound to no driver or to vfio-pci: neither can create virtual functions."""
    driver = driver_of(machine, address)
    if driver in ("", VFIO):
        raise Unsupported(
            f"{address} is bound to {driver or 'no kernel driver'}, which cannot create virtual functions: bind its "
            "own driver to it, or pci-pf-stub"
        )


def _probing(address: str, value: str, before: str) -> Step:
    """Return a step that sets whether the kernel binds drivers to new virtual functions (`sriov_drivers_autoprobe`)."""
    path = f"{PCI_DEVICES}/{address}/sriov_drivers_autoprobe"
    return Step(
        does=f"{'bind drivers' if value == '1' else 'bind no drivers'} to new virtual functions of {address}",
        write=Write(path, value),
        seen=(Check(path, value),),
        undo=(Write(path, before),),
    )


def _number(machine: Machine, address: str, before: int, wanted: int) -> Step:
    """Return a step that changes the number of virtual functions; one of `before` and `wanted` must be 0."""
    path = f"{PCI_DEVICES}/{address}"
    looked_at = dict.fromkeys([*range(min(wanted, LOOKED_AT)), wanted - 1] if wanted else [])
    links = (Check(f"{path}/virtfn{number}/physfn", address, link=True) for number in looked_at)
    return Step(
        does=f"make {wanted} virtual function{'s' if wanted > 1 else ''} of {address}"
        if wanted
        else f"remove the virtual functions of {address}",
        write=Write(f"{path}/sriov_numvfs", str(wanted)),
        expect=(
            Check(f"{path}/sriov_numvfs", str(before)),
            Check(f"{path}/driver", driver_of(machine, address), link=True),
        ),
        idle=nodes(machine, virtual(machine, address)) if before else (),
        seen=(Check(f"{path}/sriov_numvfs", str(wanted)), *links),
        undo=(Write(f"{path}/sriov_numvfs", str(before)),),
        timeout_s=min(MAKE_S + EACH_S * max(wanted, before), 600.0),
    )
