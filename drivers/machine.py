"""Read-only access to the host. Drivers read through a `Machine`, never directly.

Paths are written as on a host: `/sys/…`, `/proc/…`, `/dev/…`, and `/state/…` for the driver's own directory in the
agent's state. The directories behind them are arguments, so a driver runs unchanged on a directory tree, under umockdev
and on the real kernel. Nothing is cached, because attributes may change at any time.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Iterator
from fnmatch import fnmatchcase

from msgspec import Struct

from drivers.errors import DriverError, Failed, Gone, from_os

PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
"""The address of a PCI function: domain (five digits with VMD), bus, device, function."""
MAX_READ = 64 * 1024
MAX_TABLE = 8 * 1024 * 1024
"""Maximum bytes of one attribute (MAX_READ), and of one kernel table such as the list of mounts (MAX_TABLE)."""
PCI_DEVICES = "/sys/bus/pci/devices"
_BAR_FILE = re.compile(rf"/sys/(?:.*/)?({PCI_ADDRESS.pattern}/resource\d+(?:_wc)?)\Z")
"""The path of a file of sysfs through which a program maps the memory of a PCI function (sysfs-bus-pci)."""
FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""The process namespace with which the kernel starts (PROC_PID_INIT_INO of include/linux/proc_ns.h)."""
NVIDIA_MAJOR = 195
"""The major number of NVIDIA's character devices. Unlike other drivers, NVIDIA's does not show in /sys to which PCI
function its device nodes belong."""


SYS_KEY = "sys:"
"""The key of a device that is not on PCI begins with this; its directory below /sys/devices follows."""


def get_sys_path(key: str) -> str:
    """Return the directory in /sys/devices that a device key names; '' if it names none."""
    return f"/sys/devices/{key.removeprefix(SYS_KEY)}" if key.startswith(SYS_KEY) else ""


class OpenNodes(Struct, frozen=True, omit_defaults=True):
    """The device nodes that processes of the host have open, without those that cannot belong to PCI hardware.

    `users` maps a node's number, such as `c226:0` (character) or `b259:0` (block), to the names of the processes. The
    memory of a PCI function, which a program can map, has its path in sysfs instead, such as `…/resource0`.
    `unseen` is the reason why processes may be missing in `users`; '' if every process of the host was looked at.
    """

    users: dict[str, tuple[str, ...]] = {}
    unseen: str = ""


class Machine:
    """Reads files, links and directories of one host; `node` is the host's name in deployable names."""

    deadline_s: float = 20.0
    """How long the caller of the driver waits for its answer, in seconds."""
    open_nodes: OpenNodes | None = None
    """The result of `list_open_nodes` in the agent, for a driver's process, which may not look at other processes."""
    look_again_s: float = 0.3
    """How long a process must have a node open in order to count, in seconds: udev and monitoring open nodes briefly.
    """
    open_again_s: float = 0.05
    """How long a node that allows one opener must be open in order to count, in seconds: another process of the agent
    that asks the same question (`is_open`, `is_claimed`), udev, and programs that list hardware open it for a moment.
    """

    def __init__(
        self,
        node: str,
        *,
        sys_root: str = "/sys",
        proc_root: str = "/proc",
        dev_root: str = "/dev",
        state_root: str = "/state",
        etc_root: str = "/etc",
    ) -> None:
        self.node = node
        roots = {"/sys": sys_root, "/proc": proc_root, "/dev": dev_root, "/state": state_root, "/etc": etc_root}
        self._roots = {name: root.rstrip("/") for name, root in roots.items()}

    def read_bytes(self, path: str, limit: int = MAX_READ) -> bytes:
        """Return the whole content of a file.

        Raises Failed if it is longer than `limit` bytes, and Gone, Denied … as `errors.from_os` converts an OSError.
        """
        try:
            with open(self._host_path(path), "rb", buffering=0) as file:
                return _read_to_end(file.fileno(), path, limit)
        except OSError as error:
            raise from_os(error, path) from None

    def read_start(self, path: str, count: int) -> bytes:
        """Return the first `count` bytes of a file, or all if it is shorter. Nothing beyond them is read from the host.

        Raises Gone, Denied … as `errors.from_os` converts an OSError.
        """
        try:
            with open(self._host_path(path), "rb", buffering=0) as file:
                return file.read(count)
        except OSError as error:
            raise from_os(error, path) from None

    def iterate_lines(self, path: str) -> Iterator[str]:
        """Yield the lines of a text file of any length; only a part of the file is in memory at a time.

        Raises Gone, Denied … as `errors.from_os` converts an OSError.
        """
        try:
            with open(self._host_path(path), encoding="utf-8", errors="replace") as file:
                yield from file
        except OSError as error:
            raise from_os(error, path) from None

    def read(self, path: str, limit: int = MAX_READ) -> str:
        """Return the text of a file without surrounding white space. Raises the same errors as `read_bytes`."""
        return self.read_bytes(path, limit).decode(errors="replace").strip()

    def read_int(self, path: str, default: int) -> int:
        """Return a number, decimal or 0x…; return `default` if the attribute cannot be read or is not a number."""
        try:
            return int(self.read(path), 0)
        except (DriverError, ValueError):
            return default

    def text(self, path: str, default: str = "") -> str:
        """Return the text of an optional attribute, or `default` if it is absent. Raises all other errors of `read`."""
        try:
            return self.read(path)
        except Gone:
            return default

    def exists(self, path: str) -> bool:
        """Return whether the path exists; False for a broken symbolic link."""
        return os.path.exists(self._host_path(path))

    def link(self, path: str) -> str:
        """Return the last component of a symbolic link's target (`driver` → `vfio-pci`); '' if there is no link."""
        try:
            return os.path.basename(os.readlink(self._host_path(path)))
        except OSError:
            return ""

    def resolve(self, path: str) -> str:
        """Return the path with all links resolved, again written as on a host if it leads into one of the roots.

        For a device in /sys this is its position in the tree of buses. The path need not exist.
        """
        real = os.path.realpath(self._host_path(path))
        for name, root in self._roots.items():
            top = os.path.realpath(root)
            if real == top or real.startswith(top + "/"):
                return name + real[len(top) :]
        return real

    def names(self, path: str, pattern: str = "*") -> list[str]:
        """Return the sorted names in a directory that match a glob; an empty list if the directory cannot be read."""
        try:
            return sorted(name for name in os.listdir(self._host_path(path)) if fnmatchcase(name, pattern))
        except OSError:
            return []

    def list_entries(self, path: str) -> list[str]:
        """Return the sorted names in a directory, none if it does not exist.

        Unlike `names`, raises DriverError if the directory exists and cannot be read.
        """
        try:
            return sorted(os.listdir(self._host_path(path)))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise from_os(error, path) from None

    def is_open(self, path: str) -> bool:
        """Return whether a process has opened a device node that allows only one opener, such as `/dev/vfio/12`.

        It opens the node itself for a moment (`_open_unless_busy`). Returns False for a node that does not exist.
        Raises Denied or another DriverError if the node cannot be opened for a different reason.
        """
        try:
            fd = self._open_unless_busy(path, os.O_RDONLY)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV, errno.ENXIO):
                raise from_os(error, path) from None
            return False
        if fd is not None:
            os.close(fd)
        return fd is None

    def is_claimed(self, path: str, number: str) -> bool:
        """Return whether the kernel or a program has claimed a block device or one of its partitions for itself.

        Mounts in any namespace, swap, RAID, LVM, multipath, bcache and ZFS claim their devices (block/bdev.c). The
        device is opened for a moment with O_RDONLY and O_EXCL, which fails with EBUSY if it is claimed; this reads and
        changes nothing. `number` is the device's `dev` in sysfs. Raises Gone if this process has no such node, Failed
        if the node is another device, and Denied or another DriverError if it cannot be opened.
        """
        try:
            fd = self._open_unless_busy(path, os.O_RDONLY | os.O_EXCL)
        except OSError as error:
            raise from_os(error, path) from None
        if fd is None:
            return True
        try:
            if _format_number(os.fstat(fd)) != f"b{number}":
                raise Failed(f"{path} is not the block device {number}")
        finally:
            os.close(fd)
        return False

    def _open_unless_busy(self, path: str, flags: int) -> int | None:
        """Open a device node and return its descriptor; None if it is busy (EBUSY), now and again after `open_again_s`.

        Raises OSError if it cannot be opened for a different reason.
        """
        for pause_s in (self.open_again_s, 0.0):
            try:
                return os.open(self._host_path(path), flags | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
            time.sleep(pause_s)
        return None

    def list_open_nodes(self) -> OpenNodes:
        """Return which processes have device nodes of PCI hardware open, and whether all processes could be looked at.

        This process and its children are left out, and so is a node that is closed again within `look_again_s`. It
        needs CAP_SYS_PTRACE and the host's process namespace (proc(5)); a driver's process has neither, so the agent
        looks for it and sends the result (`open_nodes`). It may wait for a file system that does not answer, so it
        belongs in a thread with a time-out.
        """
        if self.open_nodes is not None:
            return self.open_nodes
        unseen = set()
        if self.link("/proc/self/ns/pid") != FIRST_PID_NAMESPACE:
            unseen.add("the agent does not run in the host's process namespace (a container without hostPID?)")
        found = dict(self._iterate_open_nodes(unseen))
        if found:
            time.sleep(self.look_again_s)
        users: dict[str, set[str]] = {}
        for path, number in found.items():
            if self._identify_descriptor(path) == number:
                users.setdefault(number, set()).add(self._read_process_name(path.split("/")[2]))
        return OpenNodes({number: tuple(sorted(names)) for number, names in users.items()}, "; ".join(sorted(unseen)))

    def read_node_number(self, path: str) -> str:
        """Return the number of a device node, such as `c226:0` or `b259:0`; '' if the path is no such node (any more).

        `path` may be a descriptor in /proc. A process that no longer exists has none.
        """
        try:
            return _format_number(os.stat(self._host_path(path)))
        except OSError:
            return ""

    def _iterate_open_nodes(self, unseen: set[str]) -> Iterator[tuple[str, str]]:
        """Yield (descriptor in /proc, number) for each open node of PCI hardware.

        If a process may not be looked at, a sentence about it is added to `unseen`. The first process always exists, so
        without it /proc hides the processes of others.
        """
        relevance: dict[str, bool] = {}
        own_pid = str(os.getpid())
        pids = self.names("/proc", "[0-9]*")
        if "1" not in pids:
            unseen.add(
                "the agent may not see all processes (hidepid= of /proc or ProtectProc=): run it as root with"
                " CAP_SYS_PTRACE"
            )
        for pid in pids:
            if own_pid in (pid, self._read_parent_pid(pid)):
                continue
            try:
                for path in self._list_node_descriptors(f"/proc/{pid}/fd"):
                    number = self._identify_descriptor(path)
                    if number and number not in relevance:
                        relevance[number] = self._is_pci_node(number)
                    if number and relevance[number]:
                        yield path, number
            except PermissionError:
                unseen.add(  # without the process id: a text that changes makes a new report
                    "the agent may not see what some processes have open: run it as root with CAP_SYS_PTRACE in the "
                    "host's user namespace; if it has that, look at AppArmor or SELinux"
                )
            except OSError as error:
                unseen.add(f"the open files of a process cannot be listed: {error.strerror}")

    def _list_node_descriptors(self, folder: str) -> list[str]:
        """Return the descriptors of a process that may be device nodes; none if the process has ended.

        The decision is made by the path to which each descriptor leads (readlink). Reading that path never waits for a
        file system, as reading the status of a file on NFS may. Raises PermissionError and other errors of the
        operating system if the descriptors cannot be listed.
        """
        paths = []
        try:
            names = os.listdir(self._host_path(folder))
        except (FileNotFoundError, ProcessLookupError):
            return []
        for path in (f"{folder}/{name}" for name in names):
            try:
                if self._may_be_node(os.readlink(self._host_path(path))):
                    paths.append(path)
            except PermissionError:
                raise
            except OSError:
                continue  # it was closed meanwhile, or its path is longer than the kernel can return
        return paths

    def _identify_descriptor(self, path: str) -> str:
        """Return the key that an open descriptor in /proc has in `OpenNodes.users`; '' if it is no node (any more).

        Anybody can make a file whose path looks like that of a function's memory, so it must have the owner and the
        inode of the file in sysfs; every mount of sysfs shows the same inodes.
        """
        if number := self.read_node_number(path):
            return number
        try:
            match = _BAR_FILE.search(os.readlink(self._host_path(path)))
            if match:
                file = f"{PCI_DEVICES}/{match[1]}"
                seen, real = os.stat(self._host_path(path)), os.stat(self._host_path(file))
                return file if (seen.st_ino, seen.st_uid) == (real.st_ino, real.st_uid) else ""
        except OSError:
            pass  # it was closed meanwhile, or this host has no such function
        return ""

    def _may_be_node(self, text: str) -> bool:
        """Return whether the file with this path may be a device node: it is below /dev, or below the /dev of another
        root directory, such as `/host/dev/sda` in a container, and this host has a node of the same name. The memory of
        a PCI function (_BAR_FILE) counts as a node.
        """
        if _BAR_FILE.search(text):
            return True
        top, folder, name = text.rpartition("/dev/")
        return text.startswith("/dev/") or bool(folder and top and self.read_node_number(f"/dev/{name}"))

    def _is_pci_node(self, number: str) -> bool:
        """Return whether a node may belong to PCI hardware: every block device, NVIDIA's nodes, and the other character
        devices whose place in /sys/devices is below a PCI function or an NVMe subsystem, which may have several.
        """
        if number.startswith(("b", f"c{NVIDIA_MAJOR}:", "/")):
            return True
        folder = self.resolve(f"/sys/dev/char/{number[1:]}")
        return "/nvme-subsys" in folder or any(map(PCI_ADDRESS.fullmatch, folder.split("/")))

    def _read_parent_pid(self, pid: str) -> str:
        """Return the process id of a process's parent; '' if the process has ended."""
        fields = self._read_or_empty(f"/proc/{pid}/stat").rpartition(")")[2].split()
        return fields[1] if len(fields) > 1 else ""

    def _read_process_name(self, pid: str) -> str:
        """Return the name of a process, else its id."""
        return self._read_or_empty(f"/proc/{pid}/comm") or f"process {pid}"

    def _read_or_empty(self, path: str) -> str:
        """Return the text of a file; '' if it cannot be read."""
        try:
            return self.read(path)
        except DriverError:
            return ""

    def find_bus_device(self, path: str) -> str:
        """Return the directory of the nearest device on a bus (pci, platform …) that a path belongs to; '' if none.

        Links are followed. Devices of a class, such as accel0 or fpga0, belong to the device on a bus that is above
        them in /sys/devices.
        """
        folder = self.resolve(path)
        while folder.startswith("/sys/devices/"):
            if self.resolve(f"{folder}/subsystem").startswith("/sys/bus/"):
                return folder
            folder = folder.rpartition("/")[0]
        return ""

    def pci_functions(self) -> list[str]:
        """Return the addresses of all PCI functions, sorted.

        libudev is used for the real /sys only, because it knows no other tree; any other tree is listed as a directory.
        """
        if self._roots["/sys"] != "/sys":
            names = self.names(PCI_DEVICES)
        else:
            import pyudev  # imported here because it takes megabytes and most drivers do not need it

            names = [device.sys_name for device in pyudev.Context().list_devices(subsystem="pci")]
        return sorted(name for name in names if PCI_ADDRESS.fullmatch(name))

    def _host_path(self, path: str) -> str:
        """Return the real path behind a path as written on a host; a path below no root is returned unchanged."""
        for name, root in self._roots.items():
            if path == name or path.startswith(name + "/"):
                return root + path[len(name) :]
        return path


def _format_number(status: os.stat_result) -> str:
    """Return the number of the device node with this status, such as `c226:0`; '' if it is no device node."""
    kind = "b" if stat.S_ISBLK(status.st_mode) else "c" if stat.S_ISCHR(status.st_mode) else ""
    return f"{kind}{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}" if kind else ""


def _read_to_end(fd: int, path: str, limit: int) -> bytes:
    """Return everything that can be read from `fd`.

    Raises Failed, with `path` in the text, for more than `limit` bytes, and OSError.
    """
    data = b""
    while piece := os.read(fd, min(limit + 1 - len(data), MAX_TABLE)):
        data += piece
        if len(data) > limit:
            raise Failed(f"{path}: longer than {limit} bytes")
    return data
