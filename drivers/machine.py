"""Read-only access to the host. Drivers read through a `Machine`, never directly.

Paths are written as on a host: `/sys/…`, `/proc/…`, `/dev/…`, and `/state/…` for the driver's own directory in the
agent's state. The directories behind them are arguments, so a driver runs unchanged on a directory tree, under umockdev
and on the real kernel. Nothing is cached, because attributes may change at any time.
"""

from __future__ import annotations

import errno
import os
import re
from fnmatch import fnmatchcase

from drivers.errors import DriverError, Failed, Gone, from_os

PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
"""The address of a PCI function: domain (five digits with VMD), bus, device, function."""
MAX_READ = 64 * 1024
MAX_TABLE = 8 * 1024 * 1024
"""Maximum bytes of one attribute (MAX_READ), and of one kernel table such as the list of mounts (MAX_TABLE)."""
PCI_DEVICES = "/sys/bus/pci/devices"


class Machine:
    """Reads files, links and directories of one host; `node` is the host's name in deployable names."""

    deadline_s: float = 20.0
    """How long the caller of the driver waits for its answer, in seconds."""

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

        It opens the node itself for a moment and checks for EBUSY. Returns False for a node that does not exist. Raises
        Denied or another DriverError if the node cannot be opened for a different reason.
        """
        try:
            os.close(os.open(self._host_path(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError as error:
            if error.errno == errno.EBUSY:
                return True
            if error.errno not in (errno.ENOENT, errno.ENODEV, errno.ENXIO):
                raise from_os(error, path) from None
        return False

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
