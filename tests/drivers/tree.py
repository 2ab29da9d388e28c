"""A host made of files: the parts of /sys, /proc and /dev that drivers read."""

from __future__ import annotations

import os
from pathlib import Path

from drivers.errors import Gone
from drivers.machine import FIRST_PID_NAMESPACE, Machine

OWN_GROUP = -1
ROUTES = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"


class TreeMachine(Machine):
    """A `Machine` whose device nodes are files: a node contains its number (`c226:0`), because tests cannot make real
    ones. `claimed` are the block devices that somebody has claimed, by path.
    """

    look_again_s = 0.0

    def __init__(self, node: str, **roots: str) -> None:
        super().__init__(node, **roots)
        self.claimed: set[str] = set()

    def is_claimed(self, path: str, number: str) -> bool:
        """As `Machine.is_claimed`, answered from `claimed`."""
        if self.read_node_number(path) != f"b{number}":
            raise Gone(f"{path}: No such file or directory")
        return path in self.claimed

    def read_node_number(self, path: str) -> str:
        """As `Machine.read_node_number`, read from the file that stands for the node."""
        text = self._read_or_empty(path)
        return text if text[:1] in ("b", "c") and ":" in text else ""


class FakeHost:
    """Builds the files below a directory; `machine` reads them."""

    machine: Machine

    def __init__(self, root: Path) -> None:
        self.sys, self.proc, self.dev = root / "sys", root / "proc", root / "dev"
        (self.sys / "bus/pci/devices").mkdir(parents=True)
        self.file(self.proc / "self/mountinfo", "")
        (self.proc / "1/fd").mkdir(parents=True)
        (self.proc / "self/ns").mkdir()
        (self.proc / "self/ns/pid").symlink_to(FIRST_PID_NAMESPACE)
        roots = {"sys_root": self.sys, "proc_root": self.proc, "dev_root": self.dev}
        self.tree_machine = TreeMachine("node-1", **{name: str(path) for name, path in roots.items()})
        self.machine = self.tree_machine

    @staticmethod
    def file(path: Path, text: str | bytes) -> None:
        """Write a file and make its folders."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    @staticmethod
    def link(path: Path, target: Path) -> None:
        """Make a relative link, as sysfs has them."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(target, path.parent))

    def pci(
        self,
        address: str,
        vendor: str,
        device: str,
        pci_class: str,
        *,
        bus: str = "pci0000:00",
        group: int | None = OWN_GROUP,
        **more: str,
    ) -> Path:
        """Add a PCI function, whose configuration space has only its ids; `more` are additional attributes.

        `group` is its IOMMU group, which is one of its own by default; None means that it has no IOMMU. Return its
        directory.
        """
        path = self.sys / "devices" / bus / address
        for name, value in {"vendor": vendor, "device": device, "class": pci_class, **more}.items():
            self.file(path / name, f"{value}\n")
        self.file(path / "config", b"".join(int(word, 16).to_bytes(2, "little") for word in (vendor, device)))
        self.link(self.sys / "bus/pci/devices" / address, path)
        if group is not None:
            groups = self.sys / "kernel/iommu_groups"
            number = len(list(groups.glob("*"))) if group == OWN_GROUP else group
            self.link(groups / str(number) / "devices" / address, path)
            self.link(path / "iommu_group", groups / str(number))
        return path

    def block(self, name: str, number: str, below: Path, *, slaves: tuple[str, ...] = ()) -> Path:
        """Add a block device below its hardware; `slaves` are the devices that it is built of. Return its directory."""
        path = below / name
        path.mkdir(parents=True)
        self.link(self.sys / "class/block" / name, path)
        self.link(self.sys / "dev/block" / number, path)
        self.file(path / "dev", f"{number}\n")
        self.file(self.dev / name, f"b{number}")
        for slave in slaves:
            real = (self.sys / "class/block" / slave).resolve()
            self.link(path / "slaves" / slave, real)
            self.link(real / "holders" / name, path)
        return path

    def net(self, name: str, below: Path | None = None, *, lower: tuple[str, ...] = ()) -> Path:
        """Add a network interface, which is virtual if no hardware is given. Return its directory."""
        path = (below / "net" if below else self.sys / "devices/virtual/net") / name
        path.mkdir(parents=True)
        self.link(self.sys / "class/net" / name, path)
        for other in lower:
            self.link(path / f"lower_{other}", (self.sys / "class/net" / other).resolve())
            self.link((self.sys / "class/net" / other).resolve() / f"upper_{name}", path)
        return path

    def char(self, node: str, number: str, below: Path) -> Path:
        """Add a character device with the node `/dev/NODE` in the directory `below`. Return its directory."""
        path = below / node.rpartition("/")[2]
        path.mkdir(parents=True)
        self.link(self.sys / "dev/char" / number, path)
        self.file(path / "dev", f"{number}\n")
        self.file(self.dev / node, f"c{number}")
        return path

    def opened(self, pid: int, name: str, node: str) -> None:
        """Add a process that has the node `/dev/NODE` open."""
        process = self.proc / str(pid)
        self.file(process / "comm", f"{name}\n")
        self.file(process / "stat", f"{pid} ({name}) S 1 {pid}\n")
        number = len(list((process / "fd").iterdir())) if (process / "fd").exists() else 0
        (process / "fd").mkdir(exist_ok=True)
        (process / f"fd/{number}").symlink_to(self.dev / node)

    def mount(self, number: str, place: str, source: str) -> None:
        """Add a line to mountinfo."""
        with (self.proc / "self/mountinfo").open("a") as file:
            file.write(f"30 1 {number} / {place} rw,relatime shared:1 - ext4 {source} rw\n")

    def default_route(self, interface: str) -> None:
        """Write an IPv4 default route."""
        self.file(self.proc / "net/route", f"{ROUTES}{interface} 00000000 0102000A 0003 0 0 0 00000000 0 0 0\n")

    def route(self, interface: str, destination: str) -> None:
        """Write an IPv4 route to a network with 24 bits; `destination` is hexadecimal, with its bytes reversed."""
        self.file(self.proc / "net/route", f"{ROUTES}{interface} {destination} 00000000 0001 0 0 0 00FFFFFF 0 0 0\n")

    def default_route6(self, interface: str) -> None:
        """Write an IPv6 default route, and the reject route that the kernel adds."""
        nothing, gateway = "0" * 32, "fe80" + "0" * 27 + "1"
        rows = (
            f"{nothing} 00 {nothing} 00 {gateway} 00000400 00000002 00000000 00000003 {interface}",
            f"{nothing} 00 {nothing} 00 {nothing} ffffffff 00000001 00000000 00200200 lo",
        )
        self.file(self.proc / "net/ipv6_route", "\n".join(rows) + "\n")
