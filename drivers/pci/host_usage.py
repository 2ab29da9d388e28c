"""Find the PCI functions that the host itself uses: for its disks, its network, its display, or by one of its programs.

A driver must not offer such a function, because handing it out would break the host. The kernel is asked rather than a
list of file systems: a user that needs a block device exclusively claims it, and then another attempt to claim it
fails. A function whose use cannot be found out counts as used, with the reason; an unreadable mount, swap or route
table is an error. Sources: proc(5), block/bdev.c, Documentation/ABI/testing/sysfs-{block,bus-pci,class-net},
Documentation/fb/fbcon.rst.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from itertools import islice

from drivers.errors import DriverError
from drivers.machine import MAX_TABLE, NVIDIA_MAJOR, PCI_ADDRESS, PCI_DEVICES, Machine
from drivers.pci.guest_usage import is_bound_to_vfio

USED, UNKNOWN = "the host uses it: ", "it cannot be found out whether the host uses it: "
RTF_UP, RTF_REJECT = 0x1, 0x200
IPV4_LINK_LOCAL = "FEA9"
"""The end of 169.254.0.0 in /proc/net/route, which has the bytes of an address in reverse order."""
IPV6_UNROUTED = ("fe8", "fe9", "fea", "feb", "ff")
"""How link-local and multicast destinations begin; every interface that is up has such routes."""
ETHERNET_CLASS, FABRIC_CLASSES = "0x0200", ("0x0207", "0x0208")
"""PCI classes of network cards: Ethernet; InfiniBand and other fabrics. A fabric card has a network interface only if
its kernel driver made an RDMA device of it."""
IDLE_DRIVERS = frozenset({"", "pci-stub", "pci-pf-stub"})
"""Kernel drivers that create no network interface and no device node, so no program of the host uses the function."""
NVME_TARGETS, SCSI_TARGETS = "/sys/kernel/config/nvmet/subsystems", "/sys/kernel/config/target/core"
"""The directories of configfs that list the disks which the kernel exports to other hosts."""
TARGET_MODULES = (("nvmet", NVME_TARGETS), ("target_core_mod", SCSI_TARGETS))
"""The kernel modules that export disks, each with its directory."""
NVIDIA_CARDS = "/proc/driver/nvidia/gpus"
MAX_NVIDIA_CARD = 253
"""The largest minor number of a card; those above it are `nvidia-modeset` and `nvidiactl`, which stand for no card."""


def find_functions_used_by_host(
    machine: Machine, candidates: Collection[str], *, shared: bool = False, open_disks: bool = True
) -> dict[str, str]:
    """Return the PCI functions that the host uses: address → reason. Raises DriverError if a table is unreadable.

    `candidates` are the functions that the caller wants to offer or to change. Only their disks are opened, and only if
    nothing else shows that they are used: a program that claims a disk at the same moment would find it busy. Without
    `open_disks` no disk is opened, so a claim that only the kernel knows (such as that of ZFS) is not found. `shared`
    leaves out displays and programs, for functions that stay bound to their kernel driver when they are handed out.
    The text of a reason changes only if the use changes; at most four reasons are joined for one address. The result
    includes the bridges above a device and the physical function of a virtual one.
    """
    reasons: dict[str, set[str]] = {}

    def add(path: str, reason: str) -> None:
        """Add the reason to all functions on the path to a device."""
        for address in _find_functions_on_path(machine, path):
            reasons.setdefault(address, set()).add(reason)

    for path, use in (*_iterate_block_uses(machine), *_iterate_network_uses(machine)):
        add(path, f"{USED}{use}")
    if not shared:
        for path, use in _iterate_display_uses(machine, candidates):
            add(path, f"{USED}{use}")
        for address, use in _find_program_uses(machine).items():
            reasons.setdefault(address, {f"{USED}{use}"})
    for path, reason in _iterate_claimed_disks(machine, {*candidates} - reasons.keys()) if open_disks else ():
        add(path, reason)
    for address in {*candidates} - reasons.keys():
        if unknown := _explain_unknown_use(machine, address, shared):
            reasons[address] = {f"{UNKNOWN}{unknown}"}
    return {address: "; ".join(sorted(why)[:4]) for address, why in reasons.items()}


def list_interfaces(machine: Machine, address: str) -> list[str]:
    """Return the network interfaces of a function that this network namespace shows."""
    interfaces = machine.names("/sys/class/net")
    return [name for name in interfaces if address in machine.resolve(f"/sys/class/net/{name}").split("/")]


def _find_functions_on_path(machine: Machine, node: str) -> set[str]:
    """Return all PCI functions on the path to a device, and the physical functions of those that are virtual."""
    addresses = {part for part in machine.resolve(node).split("/") if PCI_ADDRESS.fullmatch(part)}
    parents = {machine.link(f"{PCI_DEVICES}/{address}/physfn") for address in addresses}
    return addresses | (parents - {""})


def _explain_unknown_use(machine: Machine, address: str, shared: bool) -> str:
    """Return why it is unknown whether the host uses a function of which no use was found; '' if it is known."""
    path = f"{PCI_DEVICES}/{address}"
    driver = machine.link(f"{path}/driver")
    if driver in IDLE_DRIVERS or is_bound_to_vfio(machine, path):
        return ""
    pci_class = machine.text(f"{path}/class")
    is_network_card = pci_class.startswith(ETHERNET_CLASS) or (
        pci_class.startswith(FABRIC_CLASSES) and machine.exists(f"{path}/infiniband")
    )
    if is_network_card and not list_interfaces(machine, address):
        return (
            f"it is bound to {driver}, but its network interface is not here: it may be in another network namespace, "
            "of a container or of the agent itself, or a user-space driver has it"
        )
    return "" if shared else machine.list_open_nodes().unseen


def _iterate_block_uses(machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield (sysfs path, use) for each block device in use, and for the devices below it."""
    for name, use in _explain_used_block_devices(machine).items():
        for lower_path in _walk_lower_block_devices(machine, name, set()):
            yield lower_path, use


def _explain_used_block_devices(machine: Machine) -> dict[str, str]:
    """Return the block devices in use: name → use.

    Each has only its most telling use, so that the text does not change when other uses come and go.
    """
    uses = {name: f"{name} is part of {machine.names(_holders_folder(name))[0]}" for name in _list_held_disks(machine)}
    uses |= {name: f"{name} is in a btrfs file system" for name in _list_btrfs_disks(machine)}
    uses |= {name: f"{name} is behind {user}" for name, user in _iterate_backing_disks(machine)}
    uses |= {name: f"{name} is swap space" for name in _read_swap_devices(machine)}
    return uses | {
        name: f"{name} is mounted at {mount_point}" for name, mount_point in _read_mount_points(machine).items()
    }


def _read_mount_points(machine: Machine) -> dict[str, str]:
    """Return the mounted block devices: name → shortest mount point.

    The mounts of the host's first process are read, too: the agent may have a mount namespace of its own. A device is
    found by its number and by its path, because btrfs hides the number and other file systems the path. bcachefs names
    several paths, joined by colons. Raises DriverError if the mount table is unreadable.
    """
    tables = [machine.read("/proc/self/mountinfo", MAX_TABLE)]
    if machine.exists("/proc/1/mountinfo"):
        tables.append(machine.read("/proc/1/mountinfo", MAX_TABLE))
    mount_points: dict[str, str] = {}
    for line in "\n".join(tables).splitlines():
        before, _, after = line.partition(" - ")
        fields, source = before.split(), after.split()[1:2]
        if len(fields) < 5:
            continue
        mount_point = _unescape_octal(fields[4])
        paths = {part for path in source for part in (path, *re.split(":(?=/dev/)", path))}
        for name in {machine.link(f"/sys/dev/block/{fields[2]}"), *(_get_device_name(machine, path) for path in paths)}:
            mount_points[name] = min(mount_points.get(name, mount_point), mount_point, key=lambda p: (len(p), p))
    return {name: place for name, place in mount_points.items() if name and machine.exists(f"/sys/class/block/{name}")}


def _read_swap_devices(machine: Machine) -> list[str]:
    """Return the kernel's names of the devices in use as swap space; '' for each swap file outside /dev.

    Raises DriverError if the list of swap spaces cannot be read.
    """
    rows = islice(_iterate_table_rows(machine, "/proc/swaps"), 1, None)
    return [_get_device_name(machine, row[0]) for row in rows if row]


def _list_btrfs_disks(machine: Machine) -> list[str]:
    """Return all disks of btrfs file systems, because the mount table names only one disk of each file system."""
    systems = machine.names("/sys/fs/btrfs", "*-*")  # named by UUID
    return [name for uuid in systems for name in machine.names(f"/sys/fs/btrfs/{uuid}/devices")]


def _iterate_backing_disks(machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield (name, user) for each disk that the kernel uses without claiming it.

    They are the disks behind loop devices, and those that the kernel's NVMe and SCSI targets export to other hosts
    (drivers/block/loop.c, drivers/nvme/target/io-cmd-bdev.c, drivers/target/target_core_file.c).
    """
    files = [
        (f"/sys/class/block/{name}/loop/backing_file", name) for name in machine.names("/sys/class/block", "loop*")
    ]
    for subsystem in machine.names(NVME_TARGETS):
        folder = f"{NVME_TARGETS}/{subsystem}/namespaces"
        files += [(f"{folder}/{one}/device_path", f"the NVMe target {subsystem}") for one in machine.names(folder)]
    for backend in machine.names(SCSI_TARGETS):
        folder = f"{SCSI_TARGETS}/{backend}"
        files += [(f"{folder}/{one}/udev_path", f"the SCSI target {one}") for one in machine.names(folder)]
    for path, user in files:
        if name := _get_device_name(machine, machine.text(path)):
            yield name, user


def _explain_unseen_targets(machine: Machine) -> str:
    """Return why it is unknown which disks the kernel exports to other hosts; '' if it is known."""
    for module, folder in TARGET_MODULES:
        if not machine.exists(f"/sys/module/{module}"):
            continue
        try:
            machine.list_entries(folder)
            is_visible = machine.exists(folder)
        except DriverError:
            is_visible = False
        if not is_visible:
            return (
                f"the kernel module {module} may export its disk, and the agent cannot read {folder}: run it as root, "
                "with the host's configfs at /sys/kernel/config"
            )
    return ""


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
    yield from _list_nvme_controllers(machine, node)


def _list_nvme_controllers(machine: Machine, node: str) -> list[str]:
    """Return the sysfs paths of all controllers that lead to a device of an NVMe subsystem; none for other devices."""
    subsystem = re.match(r".*/nvme-subsys\d+(?=/)", machine.resolve(node))
    return [f"{subsystem[0]}/{name}" for name in machine.names(subsystem[0], "nvme*")] if subsystem else []


def _iterate_claimed_disks(machine: Machine, candidates: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield (sysfs path, reason) for each disk of the candidates that is claimed, or whose use is unknown.

    The use is unknown if the disk cannot be opened, and if it is not visible which disks the kernel exports.
    A claim of a partition counts for its disk, so partitions are not opened (bd_may_claim in block/bdev.c). A hidden
    disk is one path to an NVMe namespace and has no node; the namespace itself is asked.
    """
    unseen_targets = _explain_unseen_targets(machine) if candidates else ""
    for name in machine.names("/sys/class/block") if candidates else ():
        node = f"/sys/class/block/{name}"
        if machine.exists(f"{node}/partition") or machine.read_int(f"{node}/hidden", 0):
            continue
        paths = list(_walk_lower_block_devices(machine, name, set()))
        if not any(_find_functions_on_path(machine, path) & {*candidates} for path in paths):
            continue
        try:
            if machine.is_claimed(f"/dev/{name.replace('!', '/')}", machine.read(f"{node}/dev")):
                reason = f"{USED}{name} is claimed, for a file system, a RAID or a program"
            elif unseen_targets:
                reason = f"{UNKNOWN}{unseen_targets}"
            else:
                continue
        except DriverError as error:
            reason = f"{UNKNOWN}its disk cannot be opened ({error}): run the agent as root, with the host's /dev"
        yield from ((path, reason) for path in paths)


def _iterate_display_uses(machine: Machine, candidates: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield (sysfs path, use) for the display that the machine started with, and for those that show the console.

    A boot display that was bound to a VFIO driver is no longer the host's.
    """
    for address in candidates:
        path = f"{PCI_DEVICES}/{address}"
        is_boot_display = "1" in (machine.text(f"{path}/boot_vga"), machine.text(f"{path}/boot_display"))
        if is_boot_display and not is_bound_to_vfio(machine, path):
            yield path, "it is the display that the machine started with"
    consoles = (f"/sys/class/vtconsole/{name}" for name in machine.names("/sys/class/vtconsole"))
    if any("frame buffer" in machine.text(f"{path}/name") and machine.text(f"{path}/bind") == "1" for path in consoles):
        for name in machine.names("/sys/class/graphics", "fb[0-9]*"):
            yield f"/sys/class/graphics/{name}", f"{name} may show the host's console"


def _find_program_uses(machine: Machine) -> dict[str, str]:
    """Return the functions of which a program of the host has a device node open: address → one of these uses.

    Such nodes are those of disks, of GPUs (drm), of accelerators (accel), of clocks and of RDMA devices, and the files
    in sysfs through which a program maps a function's memory. VFIO's nodes are left out, because they belong to guests.
    """
    uses: dict[str, set[str]] = {}
    for number, programs in machine.list_open_nodes().users.items():
        kind, major_minor = "block" if number[0] == "b" else "char", number[1:]
        path = machine.resolve(number if number.startswith("/") else f"/sys/dev/{kind}/{major_minor}")
        name = path.rpartition("/")[2]
        addresses: set[str] = set()
        if number.startswith(f"c{NVIDIA_MAJOR}:"):
            minor = int(major_minor.partition(":")[2])
            name, addresses = f"nvidia{minor}", {*_find_nvidia_cards(machine, minor)}
        elif "/vfio-dev/" not in path:
            block_paths = _walk_lower_block_devices(machine, name, set()) if kind == "block" else ()
            for one in (path, *_list_nvme_controllers(machine, path), *block_paths):
                addresses |= _find_functions_on_path(machine, one)
        for address in addresses:
            uses.setdefault(address, set()).add(f"{programs[0]} has {name} open")
    return {address: min(texts) for address, texts in uses.items()}


def _find_nvidia_cards(machine: Machine, minor: int) -> list[str]:
    """Return the PCI address of the card with this node; if the driver does not tell, those of all its cards.

    Nodes that stand for no card have none.
    """
    if minor > MAX_NVIDIA_CARD:
        return []
    for address in machine.names(NVIDIA_CARDS):
        if re.search(rf"^Device Minor:\s+{minor}\s*$", machine.text(f"{NVIDIA_CARDS}/{address}/information"), re.M):
            return [address]
    return machine.names("/sys/bus/pci/drivers/nvidia", "*:*:*.*")


def _iterate_network_uses(machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield (sysfs path, use) for each interface that carries a route of the host or is part of another interface.

    A route concerns all interfaces below the one that it names. An interface that is part of a bond, a bridge, a VRF,
    Open vSwitch, a VLAN or a macvlan is used without a route, too: its routes may be in other tables than the main one.
    """
    lower = _map_lower_interfaces(machine)
    uses = {port: f"{port} is part of {upper}" for upper in sorted(lower, reverse=True) for port in lower[upper]}
    routes = {*_iterate_ipv4_routes(machine), *_iterate_ipv6_routes(machine)}
    for carried, is_default in (("a route", False), ("the default route", True)):
        for interface in sorted(
            (name for name, is_its_default in routes if is_its_default is is_default), reverse=True
        ):
            for port in _walk_lower_interfaces(lower, interface, set()):
                uses[port] = f"{port} carries {carried}" + ("" if port == interface else f" of {interface}")
    for port, use in uses.items():
        yield f"/sys/class/net/{port}", use


def _iterate_ipv4_routes(machine: Machine) -> Iterator[tuple[str, bool]]:
    """Yield the interface of each usable IPv4 route, and whether it is a default route.

    Link-local routes are left out. Raises DriverError if the route table cannot be read.
    """
    for row in islice(_iterate_table_rows(machine, "/proc/net/route"), 1, None):
        if len(row) < 8 or not _is_usable_route(row[3]) or row[1].endswith(IPV4_LINK_LOCAL):
            continue
        yield row[0], int(row[1], 16) == int(row[7], 16) == 0


def _iterate_ipv6_routes(machine: Machine) -> Iterator[tuple[str, bool]]:
    """Yield the interface, unless it is lo, of each usable IPv6 route, and whether it is a default route.

    Link-local and multicast routes are left out. Raises DriverError if the route table cannot be read.
    """
    for row in _iterate_table_rows(machine, "/proc/net/ipv6_route"):
        if len(row) != 10 or row[9] == "lo" or not _is_usable_route(row[8]) or row[0].startswith(IPV6_UNROUTED):
            continue
        yield row[9], int(row[0], 16) == int(row[1], 16) == 0


def _iterate_table_rows(machine: Machine, path: str) -> Iterator[list[str]]:
    """Yield the rows of a table of /proc as words; no rows if the file does not exist (a host without IPv6 or swap).

    The table may have any length, because a routing table may have a million rows. Raises DriverError if the file
    cannot be read.
    """
    if machine.exists(path):
        yield from map(str.split, machine.iterate_lines(path))


def _is_usable_route(flags: str) -> bool:
    """Return whether a route with these flags is up and does not reject packets."""
    return int(flags, 16) & (RTF_UP | RTF_REJECT) == RTF_UP


def _map_lower_interfaces(machine: Machine) -> dict[str, set[str]]:
    """Return the interfaces that are directly below others: upper interface → its parts.

    The kernel links both directions, and each port to its `master`, such as a bond, a bridge, a VRF or `ovs-system`,
    which stands for all bridges of Open vSwitch.
    """
    lower: dict[str, set[str]] = {}
    for name in machine.names("/sys/class/net"):
        node = f"/sys/class/net/{name}"
        uppers = [link.removeprefix("upper_") for link in machine.names(node, "upper_*")]
        for upper in filter(None, (*uppers, machine.link(f"{node}/master"))):
            lower.setdefault(upper, set()).add(name)
        parts = [link.removeprefix("lower_") for link in machine.names(node, "lower_*")]
        if parts := [*parts, *machine.names(f"{node}/brif")]:
            lower.setdefault(name, set()).update(parts)
    return lower


def _walk_lower_interfaces(lower: dict[str, set[str]], interface: str, seen: set[str]) -> Iterator[str]:
    """Yield the interface and all interfaces below it; `seen` prevents endless recursion."""
    if interface in seen:
        return
    seen.add(interface)
    yield interface
    for name in sorted(lower.get(interface, ())):
        yield from _walk_lower_interfaces(lower, name, seen)


def _get_device_name(machine: Machine, source: str) -> str:
    """Return the kernel's name of a device file (`/dev/mapper/root` → `dm-0`); '' if the path is not in /dev."""
    path = _unescape_octal(source)
    return machine.resolve(path).rpartition("/")[2] if path.startswith("/dev/") else ""


def _unescape_octal(text: str) -> str:
    r"""Return the text with octal escapes (`\040` for a blank), as /proc writes them, replaced by their characters."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
