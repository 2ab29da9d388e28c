"""Find out whether a guest uses a PCI function or a mediated device through VFIO, under any kernel driver.

A driver of the VFIO family (vfio-pci, or a variant such as mlx5_vfio_pci or xe_vfio_pci) registers its device with the
VFIO core, which shows it in sysfs. A guest then opens the group's node, `/dev/vfio/N`, or with iommufd the device's
own node, `/dev/vfio/devices/vfioN`. Removing a function that is open does not fail: the writer waits in the kernel
until the guest ends, and cannot be killed. Therefore an answer that cannot be found out is `unknown`, never `free`.
Sources: drivers/vfio/{group,device_cdev,vfio_main}.c of Linux 6.12; Documentation/ABI/testing/sysfs-devices-vfio-dev.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from drivers.errors import Busy, Denied, DriverError
from drivers.machine import Machine, OpenNodes

VFIO_GROUPS = "/sys/class/vfio"


class GuestUse(NamedTuple):
    """Whether a guest uses a device; `reason` names what is open, or says why it is unknown and what to do."""

    state: Literal["free", "used", "unknown"]
    reason: str = ""


FREE = GuestUse("free")
SEVERITY = ("free", "unknown", "used")
"""The states in the order in which they count when a device has several parts."""


def is_bound_to_vfio(machine: Machine, folder: str) -> bool:
    """Return whether a device, given by its directory in sysfs, is bound to a driver that hands it to guests."""
    return "vfio" in machine.link(f"{folder}/driver") or bool(machine.names(f"{folder}/vfio-dev"))


def find_guest_uses(machine: Machine, folders: Iterable[str]) -> dict[str, GuestUse]:
    """Return whether a guest uses each of the PCI functions or mediated devices, given by their directories in sysfs.

    A function is used, too, if a guest uses one of its mediated devices: they vanish with their parent's driver.
    The node of each VFIO group is opened for a moment: while a guest has it, the kernel refuses a second opener, also
    if the guest uses the device's own node. Only a kernel without groups (CONFIG_VFIO_GROUP=n) does not answer that
    way; there the open descriptors of all processes are read once.
    """
    parts = {folder: (folder, *_list_mediated_devices(machine, folder)) for folder in folders}
    group_uses = {part: _read_group_use(machine, part) for some in parts.values() for part in some}
    open_nodes = machine.list_open_nodes() if None in group_uses.values() else OpenNodes()
    uses = {part: use or _find_cdev_use(machine, part, open_nodes) for part, use in group_uses.items()}
    return {folder: _choose_worst([uses[part] for part in some]) for folder, some in parts.items()}


def _choose_worst(uses: list[GuestUse]) -> GuestUse:
    """Return the first use that is `used`, else the first that is `unknown`, else `free`."""
    return max(uses, key=lambda use: SEVERITY.index(use.state))


def _list_mediated_devices(machine: Machine, folder: str) -> list[str]:
    """Return the directories of the mediated devices of a PCI function."""
    children = (f"{folder}/{name}" for name in machine.names(folder, "*-*-*-*-*"))
    return [child for child in children if machine.link(f"{child}/mdev_type")]


def refuse_if_guest_uses(machine: Machine, folders: Iterable[str]) -> None:
    """Raise Busy if a guest uses one of the devices, and Denied if that is unknown; see `find_guest_uses`."""
    for folder, use in find_guest_uses(machine, folders).items():
        name = folder.rpartition("/")[2]
        if use.state == "used":
            raise Busy(f"{name} cannot be changed: a guest uses it ({use.reason})")
        if use.state == "unknown":
            raise Denied(f"{name} cannot be changed: it is not known whether a guest uses it, because {use.reason}")


def _read_group_use(machine: Machine, folder: str) -> GuestUse | None:
    """Return the answer of the device's VFIO group, or None if the device is registered without a group."""
    group = machine.link(f"{folder}/iommu_group")
    names = [name for name in (group, f"noiommu-{group}") if group and machine.exists(f"{VFIO_GROUPS}/{name}")]
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


def _find_cdev_use(machine: Machine, folder: str, open_nodes: OpenNodes) -> GuestUse:
    """Return whether a process has the device's own VFIO node open, for a device that is registered without a group."""
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
