"""Find the PCI functions that the host itself needs: for its disks in use, and for its default routes.

A driver must not offer such a function, because handing it out would break the host. Therefore an unreadable mount,
swap or route table is an error and never counts as unused. Sources: proc(5),
Documentation/ABI/testing/sysfs-{block,class-net}.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from drivers.machine import MAX_TABLE, PCI_ADDRESS, Machine

RTF_UP, RTF_REJECT = 0x1, 0x200


def find_functions_used_by_host(machine: Machine) -> dict[str, str]:
    """Return the PCI functions that the host needs: address → reason. Raises DriverError if a table is unreadable.

    The text of a reason changes only if the use changes; at most four reasons are joined for one address. The result
    includes the bridges above a device and the physical function of a virtual one.
    """
    reasons: dict[str, set[str]] = {}
    for node, reason in (*_iterate_block_uses(machine), *_iterate_network_uses(machine)):
        for address in _find_functions_on_path(machine, node):
            reasons.setdefault(address, set()).add(reason)
    return {address: "; ".join(sorted(why)[:4]) for address, why in reasons.items()}


def _find_functions_on_path(machine: Machine, node: str) -> set[str]:
    """Return all PCI functions on the path to a device, and the physical functions of those that are virtual."""
    addresses = {part for part in machine.resolve(node).split("/") if PCI_ADDRESS.fullmatch(part)}
    parents = {machine.link(f"/sys/bus/pci/devices/{address}/physfn") for address in addresses}
    return addresses | (parents - {""})


def _iterate_block_uses(machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield (sysfs path, reason) for each block device in use, and for the devices below it."""
    for name, reason in _explain_used_block_devices(machine).items():
        for lower_path in _walk_lower_block_devices(machine, name, set()):
            yield lower_path, f"the host uses it: {reason}"


def _explain_used_block_devices(machine: Machine) -> dict[str, str]:
    """Return the block devices in use: name → reason.

    Each has only its most telling reason, so that the text does not change when other uses come and go.
    """
    uses = {name: f"{name} is part of {machine.names(_holders_folder(name))[0]}" for name in _list_held_disks(machine)}
    uses |= {name: f"{name} is in a btrfs file system" for name in _list_btrfs_disks(machine)}
    uses |= {name: f"{name} is swap space" for name in _read_swap_devices(machine)}
    return uses | {
        name: f"{name} is mounted at {mount_point}" for name, mount_point in _read_mount_points(machine).items()
    }


def _read_mount_points(machine: Machine) -> dict[str, str]:
    """Return the mounted block devices: name → shortest mount point.

    A device is found by its number and by its path, because btrfs hides the number and other file systems the path.
    Raises DriverError if the mount table is unreadable.
    """
    mount_points: dict[str, str] = {}
    for line in machine.read("/proc/self/mountinfo", MAX_TABLE).splitlines():
        before, _, after = line.partition(" - ")
        fields, source = before.split(), after.split()[1:2]
        if len(fields) < 5:
            continue
        mount_point = _unescape_octal(fields[4])
        for name in {
            machine.link(f"/sys/dev/block/{fields[2]}"),
            *(_get_device_name(machine, path) for path in source),
        }:
            mount_points[name] = min(mount_points.get(name, mount_point), mount_point, key=lambda p: (len(p), p))
    return {name: place for name, place in mount_points.items() if name and machine.exists(f"/sys/class/block/{name}")}


def _read_swap_devices(machine: Machine) -> list[str]:
    """Return the kernel's names of the devices in use as swap space; '' for each swap file outside /dev.

    Raises DriverError if the list of swap spaces cannot be read.
    """
    return [_get_device_name(machine, row[0]) for row in _read_table(machine, "/proc/swaps")[1:] if row]


def _list_btrfs_disks(machine: Machine) -> list[str]:
    """Return all disks of btrfs file systems, because the mount table names only one disk of each file system."""
    systems = machine.names("/sys/fs/btrfs", "*-*")  # named by UUID
    return [name for uuid in systems for name in machine.names(f"/sys/fs/btrfs/{uuid}/devices")]


def _list_held_disks(machine: Machine) -> list[str]:
    """Return the disks below LVM, RAID, bcache …: the kernel holds them, mounted or not."""
    return [name for name in machine.names("/sys/class/block") if machine.names(_holders_folder(name))]


def _holders_folder(name: str) -> str:
    """Return the sysfs directory that lists the devices above a block device, such as a RAID."""
    return f"/sys/class/block/{name}/holders"


def _walk_lower_block_devices(machine: Machine, name: str, seen: set[str]) -> Iterator[str]:
    """Yield the sysfs paths of a block device and of all devices below it.

    It follows device mapper, RAID and NVMe multipath. `seen` prevents endless recursion.
    """
    if name in seen:
        return
    seen.add(name)
    node = f"/sys/class/block/{name}"
    yield node
    for slave in machine.names(f"{node}/slaves"):
        yield from _walk_lower_block_devices(machine, slave, seen)
    if multipath := re.match(r".*/nvme-subsys\d+(?=/)", machine.resolve(node)):
        for controller in machine.names(multipath[0], "nvme*"):
            yield f"{multipath[0]}/{controller}"


def _iterate_network_uses(machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield (sysfs path, reason) for each interface that a default route uses, and for the interfaces below it."""
    for interface in sorted({*_iterate_ipv4_default_interfaces(machine), *_iterate_ipv6_default_interfaces(machine)}):
        for lower_interface in _walk_lower_interfaces(machine, interface, set()):
            yield (
                f"/sys/class/net/{lower_interface}",
                f"the host uses it: {_describe_route_use(lower_interface, interface)}",
            )


def _describe_route_use(port: str, interface: str) -> str:
    """Return the text that `port` carries the default route.

    If `port` is not `interface`, the text also names `interface`, to which the route belongs.
    """
    return f"{port} carries the default route" + ("" if port == interface else f" of {interface}")


def _iterate_ipv4_default_interfaces(machine: Machine) -> Iterator[str]:
    """Yield the interface of each usable IPv4 default route. Raises DriverError if the route table cannot be read."""
    for row in _read_table(machine, "/proc/net/route")[1:]:
        if len(row) > 7 and int(row[1], 16) == int(row[7], 16) == 0 and _is_usable_route(row[3]):
            yield row[0]


def _iterate_ipv6_default_interfaces(machine: Machine) -> Iterator[str]:
    """Yield the interface, unless it is lo, of each usable IPv6 default route.

    Raises DriverError if the route table cannot be read.
    """
    for row in _read_table(machine, "/proc/net/ipv6_route"):
        if len(row) == 10 and int(row[0], 16) == int(row[1], 16) == 0 and _is_usable_route(row[8]) and row[9] != "lo":
            yield row[9]


def _read_table(machine: Machine, path: str) -> list[list[str]]:
    """Return a table of /proc as rows of words; no rows if the file does not exist (a host without IPv6 or swap).

    The limit is MAX_TABLE because a full routing table is long. Raises DriverError if the file cannot be read.
    """
    return [line.split() for line in machine.read(path, MAX_TABLE).splitlines()] if machine.exists(path) else []


def _is_usable_route(flags: str) -> bool:
    """Return whether a route with these flags is up and does not reject packets."""
    return int(flags, 16) & (RTF_UP | RTF_REJECT) == RTF_UP


def _walk_lower_interfaces(machine: Machine, interface: str, seen: set[str]) -> Iterator[str]:
    """Yield the interface and all interfaces below it: bond, bridge, VLAN, macvlan, team, Open vSwitch."""
    if interface in seen:
        return
    seen.add(interface)
    yield interface
    node = f"/sys/class/net/{interface}"
    lower = {name.removeprefix("lower_") for name in machine.names(node, "lower_*")} | set(
        machine.names(f"{node}/brif")
    )
    if not lower and "/virtual/" in machine.resolve(node):
        lower = _list_open_vswitch_ports(machine)
    for name in sorted(lower):
        yield from _walk_lower_interfaces(machine, name, seen)


def _list_open_vswitch_ports(machine: Machine) -> set[str]:
    """Return the ports of all Open vSwitch bridges.

    sysfs does not link such a bridge to its ports, so a default route over a bridge may use any of them.
    """
    interfaces = machine.names("/sys/class/net")
    return {name for name in interfaces if machine.link(f"/sys/class/net/{name}/master") == "ovs-system"}


def _get_device_name(machine: Machine, source: str) -> str:
    """Return the kernel's name of a device file (`/dev/mapper/root` → `dm-0`); '' if the path is not in /dev."""
    path = _unescape_octal(source)
    return machine.resolve(path).rpartition("/")[2] if path.startswith("/dev/") else ""


def _unescape_octal(text: str) -> str:
    r"""Return the text with octal escapes (`\040` for a blank), as /proc writes them, replaced by their characters."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
