"""The only code that reads the host. Drivers get a Machine and touch nothing themselves; here it is read-only.

Paths are written as on a host (`/sys/…`, `/proc/…`, `/dev/…`, and `/state/…`, the driver's own directory in the agent's
state); where they lead is injected, so a driver runs unchanged on a directory tree, under umockdev and on the real
kernel. Nothing is cached: attributes change under us.
"""

from __future__ import annotations

import errno
import os
import re
from fnmatch import fnmatchcase

from drivers.errors import DriverError, Failed, Gone, from_os

PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
"""A PCI function: domain (VMD has five digits), bus, device, function."""
MAX_READ = 64 * 1024
MAX_TABLE = 8 * 1024 * 1024
"""Bytes of one attribute, and of one table of the kernel such as its mounts."""
PCI_DEVICES = "/sys/bus/pci/devices"


class Machine:
    """One look at one host. `node` is its name in deployable names."""

    deadline_s: float = 20.0
    """How long the caller waits for the driver's answer."""

    def __init__(
        self,
        node: str,
        *,
        sys_root: str = "/sys",
        proc_root: str = "/proc",
        dev_root: str = "/dev",
        state_root: str = "/state",
    ) -> None:
        self.node = node
        roots = {"/sys": sys_root, "/proc": proc_root, "/dev": dev_root, "/state": state_root}
        self._roots = {name: root.rstrip("/") for name, root in roots.items()}

    def read_bytes(self, path: str, limit: int = MAX_READ) -> bytes:
        """The whole content; raises Gone, Denied, … and Failed when it is longer than `limit` bytes."""
        try:
            with open(self._real(path), "rb", buffering=0) as file:
                return _drain(file.fileno(), path, limit)
        except OSError as error:
            raise from_os(error, path) from None

    def read(self, path: str, limit: int = MAX_READ) -> str:
        """The text without surrounding white space; raises as `read_bytes`."""
        return self.read_bytes(path, limit).decode(errors="replace").strip()

    def read_int(self, path: str, default: int) -> int:
        """A number, decimal or 0x…; `default` when the attribute cannot be read or is no number."""
        try:
            return int(self.read(path), 0)
        except (DriverError, ValueError):
            return default

    def text(self, path: str, default: str = "") -> str:
        """An optional attribute: `default` when it is absent."""
        try:
            return self.read(path)
        except Gone:
            return default

    def exists(self, path: str) -> bool:
        """Whether the path leads anywhere."""
        return os.path.exists(self._real(path))

    def link(self, path: str) -> str:
        """The last name a symbolic link points to (`driver` → `vfio-pci`), '' when there is none."""
        try:
            return os.path.basename(os.readlink(self._real(path)))
        except OSError:
            return ""

    def resolve(self, path: str) -> str:
        """The path with all links followed, again as on a host: a device's place in the tree of buses."""
        real = os.path.realpath(self._real(path))
        for name, root in self._roots.items():
            top = os.path.realpath(root)
            if real == top or real.startswith(top + "/"):
                return name + real[len(top) :]
        return real

    def names(self, path: str, pattern: str = "*") -> list[str]:
        """The names in a directory that match a glob, sorted; none when it is absent."""
        try:
            return sorted(name for name in os.listdir(self._real(path)) if fnmatchcase(name, pattern))
        except OSError:
            return []

    def is_open(self, path: str) -> bool:
        """Whether somebody holds a node that only one may open, such as `/dev/vfio/12`. Absent: False.

        Raises Denied, … when the node cannot be asked.
        """
        try:
            os.close(os.open(self._real(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError as error:
            if error.errno == errno.EBUSY:
                return True
            if error.errno not in (errno.ENOENT, errno.ENODEV, errno.ENXIO):
                raise from_os(error, path) from None
        return False

    def pci_functions(self) -> list[str]:
        """The addresses of all PCI functions, sorted. libudev knows only the real /sys; other trees are listed."""
        if self._roots["/sys"] != "/sys":
            names = self.names(PCI_DEVICES)
        else:
            import pyudev  # here: most drivers do without its megabytes

            names = [device.sys_name for device in pyudev.Context().list_devices(subsystem="pci")]
        return sorted(name for name in names if PCI_ADDRESS.fullmatch(name))

    def _real(self, path: str) -> str:
        for name, root in self._roots.items():
            if path == name or path.startswith(name + "/"):
                return root + path[len(name) :]
        return path


def _drain(fd: int, path: str, limit: int) -> bytes:
    data = b""
    while piece := os.read(fd, min(limit + 1 - len(data), MAX_TABLE)):
        data += piece
        if len(data) > limit:
            raise Failed(f"{path}: longer than {limit} bytes")
    return data
