"""A host made of files: the parts of /sys and /proc that drivers read."""

from __future__ import annotations

import os
from pathlib import Path

from drivers.machine import Machine

ROUTES = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"


class FakeHost:
    """Builds the files below a directory; `machine` reads them."""

    def __init__(self, root: Path) -> None:
        self.sys, self.proc = root / "sys", root / "proc"
        (self.sys / "bus/pci/devices").mkdir(parents=True)
        self.file(self.proc / "self/mountinfo", "")
        self.machine = Machine("node-1", sys_root=str(self.sys), proc_root=str(self.proc))

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
        self, address: str, vendor: str, device: str, pci_class: str, *, bus: str = "pci0000:00", **more: str
    ) -> Path:
        """Add a PCI function, whose configuration space has only its ids; `more` are additional attributes.

        Return its directory.
        """
        path = self.sys / "devices" / bus / address
        for name, value in {"vendor": vendor, "device": device, "class": pci_class, **more}.items():
            self.file(path / name, f"{value}\n")
        self.file(path / "config", b"".join(int(word, 16).to_bytes(2, "little") for word in (vendor, device)))
        self.link(self.sys / "bus/pci/devices" / address, path)
        return path

    def block(self, name: str, number: str, below: Path, *, slaves: tuple[str, ...] = ()) -> Path:
        """Add a block device below its hardware; `slaves` are the devices that it is built of. Return its directory."""
        path = below / name
        path.mkdir(parents=True)
        self.link(self.sys / "class/block" / name, path)
        self.link(self.sys / "dev/block" / number, path)
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
        return path

    def mount(self, number: str, place: str, source: str) -> None:
        """Add a line to mountinfo."""
        with (self.proc / "self/mountinfo").open("a") as file:
            file.write(f"30 1 {number} / {place} rw,relatime shared:1 - ext4 {source} rw\n")

    def default_route(self, interface: str) -> None:
        """Write an IPv4 default route."""
        self.file(self.proc / "net/route", f"{ROUTES}{interface} 00000000 0102000A 0003 0 0 0 00000000 0 0 0\n")

    def default_route6(self, interface: str) -> None:
        """Write an IPv6 default route, and the reject route that the kernel adds."""
        nothing, gateway = "0" * 32, "fe80" + "0" * 27 + "1"
        rows = (
            f"{nothing} 00 {nothing} 00 {gateway} 00000400 00000002 00000000 00000003 {interface}",
            f"{nothing} 00 {nothing} 00 {nothing} ffffffff 00000001 00000000 00200200 lo",
        )
        self.file(self.proc / "net/ipv6_route", "\n".join(rows) + "\n")
