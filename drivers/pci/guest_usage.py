"""Find out whether a guest uses a PCI function or a mediated device through VFIO, under any kernel driver.

A driver of the VFIO family (vfio-pci, or a variant such as mlx5_vfio_pci or xe_vfio_pci) registers its device with the
VFIO core, which shows the device in sysfs. A guest then opens the node of the device's group, `/dev/vfio/N`, or with
iommufd the device's own node, `/dev/vfio/devices/vfioN`. If a function is removed or unbound while a guest has it open,
the write to sysfs does not fail: the process that writes waits in the kernel until the guest ends, and cannot be
killed. Therefore the use is `unknown`, never `free`, if it cannot be found out. Sources:
drivers/vfio/{group,device_cdev,vfio_main}.c of Linux 6.12; Documentation/ABI/testing/sysfs-devices-vfio-dev.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from drivers.errors import Busy, Denied, DriverError
from drivers.machine import Machine, OpenNodes

VFIO_GROUPS = "/sys/class/vfio"


class GuestUse(NamedTuple):
    """The answer to the question whether a guest uses a device. `reason` says for `used` which node is open, and for
    `unknown` why the use is unknown and what to do; '' for `free`.
    """

    state: Literal["free", "used", "unknown"]
    reason: str = ""


FREE = GuestUse("free")
SEVERITY = ("free", "unknown", "used")
"""The states from the least to the most severe. A device with several parts has the most severe state of its parts."""


def is_bound_to_vfio(machine: Machine, folder: str) -> bool:
    """Return whether a device is bound to a driver of the VFIO family. `folder` is the device's directory in sysfs."""
    return "vfio" in machine.link(f"{folder}/driver") or bool(machine.names(f"{folder}/vfio-dev"))


def is_registered_with_vfio(machine: Machine, folder: str) -> bool:
    """Return whether a guest may have a device open: it is bound to a driver of the VFIO family, or its group still
    exists.

    When a card is pulled while a guest has it open, the kernel removes the link to the driver and the device's own node
    at once, and the group only when the guest has closed it (`vfio_unregister_group_dev`).
    """
    return is_bound_to_vfio(machine, folder) or bool(_list_groups(machine, folder))


def find_guest_uses(machine: Machine, folders: Iterable[str]) -> dict[str, GuestUse]:
    """Return whether a guest uses each of the PCI functions or mediated devices: directory in sysfs → GuestUse.

    See `iterate_guest_uses`.
    """
    return dict(iterate_guest_uses(machine, folders))


def iterate_guest_uses(machine: Machine, folders: Iterable[str]) -> Iterator[tuple[str, GuestUse]]:
    """Yield (directory in sysfs, GuestUse) for each of the PCI functions or mediated devices.

    A function also counts as used if a guest uses one of its mediated devices, because they vanish when the function is
    unbound from its driver. The node of each VFIO group is opened for a moment: while a guest has it open, the kernel
    refuses a second opener, also if the guest uses the device's own node. Only on a kernel without groups
    (CONFIG_VFIO_GROUP=n) this is not possible; there the open file descriptors of all processes are read, once for all
    devices. If something cannot be read, the state is `unknown`; no DriverError is raised for it.
    """
    list_open_nodes = functools.cache(machine.list_open_nodes)
    for folder in folders:
        parts = (folder, *_list_mediated_devices(machine, folder))
        yield (
            folder,
            _choose_worst(
                [_read_group_use(machine, part) or _find_cdev_use(machine, part, list_open_nodes()) for part in parts]
            ),
        )


def _choose_worst(uses: list[GuestUse]) -> GuestUse:
    """Return the first use with the most severe state (`SEVERITY`)."""
    return max(uses, key=lambda use: SEVERITY.index(use.state))


def _list_mediated_devices(machine: Machine, folder: str) -> list[str]:
    """Return the directories in sysfs of the mediated devices of a PCI function; empty if it has none."""
    children = (f"{folder}/{name}" for name in machine.names(folder, "*-*-*-*-*"))
    return [child for child in children if machine.link(f"{child}/mdev_type")]


def refuse_if_guest_uses(machine: Machine, folders: Iterable[str]) -> None:
    """Raise Busy if a guest uses one of the devices, and Denied if the use of one is unknown.

    `folders` are directories in sysfs. The devices after the first such one are not asked about.
    """
    for folder, use in iterate_guest_uses(machine, folders):
        name = folder.rpartition("/")[2]
        if use.state == "used":
            raise Busy(f"{name} cannot be changed: a guest uses it ({use.reason})")
        if use.state == "unknown":
            raise Denied(f"{name} cannot be changed: it is not known whether a guest uses it, because {use.reason}")


def _read_group_use(machine: Machine, folder: str) -> GuestUse | None:
    """Return whether the node of the device's VFIO group is open; FREE if the device is not registered with VFIO.

    Returns None if the device is registered without a group, so that `_find_cdev_use` has to find out.
    """
    names = _list_groups(machine, folder)
    for name in names:
        node = f"/dev/vfio/{name}"
        if not machine.exists(node):
            return GuestUse(
                "unknown", f"the agent does not see {node}: run it with the host's /dev (a container needs /dev/vfio)"
            )
        try:
            if machine.is_open(node):
                return GuestUse("used", f"{node} is open")
        except DriverError as error:
            return GuestUse("unknown", f"the agent may not open {node} ({error}): run it as root")
    return None if not names and is_bound_to_vfio(machine, folder) else FREE


def _list_groups(machine: Machine, folder: str) -> list[str]:
    """Return the names of the device's group in VFIO; empty if no device of its IOMMU group is registered with VFIO."""
    group = machine.link(f"{folder}/iommu_group")
    return [name for name in (group, f"noiommu-{group}") if group and machine.exists(f"{VFIO_GROUPS}/{name}")]


def _find_cdev_use(machine: Machine, folder: str, open_nodes: OpenNodes) -> GuestUse:
    """Return whether a process has the VFIO node of the device itself open, for a device that is registered without a
    group."""
    for name in machine.names(f"{folder}/vfio-dev"):
        try:
            number = machine.text(f"{folder}/vfio-dev/{name}/dev")
        except DriverError as error:
            return GuestUse("unknown", f"its node has no readable number ({error}): run the agent as root")
        if not number:
            continue
        if users := open_nodes.users.get(f"c{number}"):
            return GuestUse("used", f"{users[0]} has /dev/vfio/devices/{name} open")
        return GuestUse("unknown", open_nodes.unseen) if open_nodes.unseen else FREE
    return GuestUse(
        "unknown",
        "it is bound to a VFIO driver, but the kernel shows neither its group nor its node: stop the guests that may "
        "have it, and unbind it by hand",
    )
