"""Simulate how Linux answers writes to the PCI core: binding, reset, remove, rescan, virtual functions.

A `ModelMachine` calls these rules. Sources: drivers/pci/{pci-driver,pci-sysfs,iov}.c, drivers/base/{bus,dd}.c,
drivers/vfio of Linux 6.12; Documentation/ABI/testing/sysfs-bus-pci.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tests.support.modelmachine import ModelMachine

Rule = Callable[["ModelMachine", Path, str], None]
"""A function that carries out the write of a value to a file of the model. It raises OSError (made by `refuse`)."""
DEVICES = "bus/pci/devices"
IDS = ("vendor", "device", "class")
PULLED = "pulled"
"""Folder beside /sys with functions that were removed but are still plugged in; a rescan finds them."""


@dataclass
class KernelDriver:
    """A PCI driver of the kernel.

    `takes` are globs over `vendor:device`; without any the driver binds by `driver_override` only. `gives` is the
    largest number of virtual functions that the driver creates; the rest of a larger request is ignored without an
    error. Without `sriov` it creates none, and writing sriov_numvfs fails with ENOENT. `refuses` is the errno with
    which its probe fails, or 0. `vfio` is set for a driver that hands functions to guests (vfio-pci or a variant): its
    functions have a group node, or on a kernel without groups only nodes of their own.
    """

    name: str
    takes: tuple[str, ...] = ()
    sriov: bool = True
    gives: int = 65535
    refuses: int = 0
    vfio: Literal["", "group", "cdev"] = ""


def refuse(code: int, subject: object) -> OSError:
    """Return the OSError with which the kernel refuses a write; the caller raises it."""
    return OSError(code, os.strerror(code), str(subject))


def read(path: Path) -> str:
    """Return the content of an attribute without its newline."""
    return path.read_text().strip()


def link_function(host: ModelMachine, path: Path) -> None:
    """Register a function's directory as a device of the PCI bus: links, attributes, and the uevent `add`."""
    host.relink(host.sys / DEVICES / path.name, path)
    host.relink(path / "subsystem", host.sys / "bus/pci")
    host.file(path / "uevent", f"PCI_SLOT_NAME={path.name}\n")
    host.file(path / "driver_override", "(null)\n")
    host.file(path / "remove", "")
    host.event("add", str(path))


def join_group(host: ModelMachine, path: Path, group: int) -> None:
    """Put a function into an IOMMU group, creating the group if needed."""
    folder = host.sys / "kernel/iommu_groups" / str(group)
    host.file(folder / "type", "DMA-FQ\n")
    host.link(folder / "devices" / path.name, path)
    host.link(path / "iommu_group", folder)


def make_physical(host: ModelMachine, path: Path, total: int, vf_device: str, offset: int) -> None:
    """Make a function an SR-IOV physical function that can have up to `total` virtual functions."""
    values = {"totalvfs": total, "numvfs": 0, "offset": offset, "stride": 1, "drivers_autoprobe": 1}
    for name, value in {**values, "vf_device": vf_device.removeprefix("0x")}.items():
        host.file(path / f"sriov_{name}", f"{value}\n")


def attach(host: ModelMachine, path: Path, driver: KernelDriver) -> None:
    """Bind a function to a driver. Raises OSError if the driver's probe refuses it."""
    parent = path / "physfn"
    override = read(path / "driver_override") != "(null)"
    if parent.is_symlink() and read(parent.resolve() / "sriov_drivers_autoprobe") == "0" and not override:
        raise refuse(errno.ENODEV, path)  # pci_device_can_probe
    if driver.refuses:
        raise refuse(driver.refuses, path)
    if driver.vfio:
        if not (path / "iommu_group").is_symlink():
            raise refuse(errno.EINVAL, path)
        _register_with_vfio(host, path, driver)
    host.link(path / "driver", host.sys / "bus/pci/drivers" / driver.name)
    host.link(host.sys / "bus/pci/drivers" / driver.name / path.name, path)
    host.event("bind", str(path))


def detach(host: ModelMachine, path: Path) -> None:
    """Unbind a function from its driver, if it has one; blocks while a guest holds the function."""
    driver = driver_of(host, path)
    if driver is None:
        return
    host.until(lambda: not is_held(host, path))
    host.relink(path / "driver", None)
    host.relink(host.sys / "bus/pci/drivers" / driver.name / path.name, None)
    shutil.rmtree(path / "vfio-dev", ignore_errors=True)
    if driver.vfio and not any((member / "vfio-dev").exists() for member in (path / "iommu_group/devices").iterdir()):
        (host.dev / "vfio" / group_of(path)).unlink(missing_ok=True)
        shutil.rmtree(host.sys / "class/vfio" / group_of(path), ignore_errors=True)
    host.event("unbind", str(path))


def probe(host: ModelMachine, path: Path) -> None:
    """Bind an unbound function to the first matching driver whose probe succeeds; without such a driver, do nothing."""
    if driver_of(host, path) is None:
        for driver in host.drivers.values():
            if _matches(path, driver):
                try:
                    attach(host, path, driver)
                except OSError:
                    continue
                return


def driver_of(host: ModelMachine, path: Path) -> KernelDriver | None:
    """Return the driver that a function is bound to, or None."""
    link = path / "driver"
    return host.drivers[link.readlink().name] if link.is_symlink() else None


def group_of(path: Path) -> str:
    """Return the IOMMU group of a function, '' if it has none."""
    link = path / "iommu_group"
    return link.readlink().name if link.is_symlink() else ""


def is_held(host: ModelMachine, path: Path) -> bool:
    """Return True if a guest holds the function through VFIO."""
    nodes = {f"/dev/vfio/{group_of(path)}", f"/dev/vfio/devices/{vfio_name(path)}"}
    return (path / "vfio-dev").exists() and bool(nodes & host.held)


def vfio_name(path: Path) -> str:
    """Return the name of a function's own VFIO node."""
    return f"vfio{int(group_of(path) or 0)}"


def _register_with_vfio(host: ModelMachine, path: Path, driver: KernelDriver) -> None:
    """Show a function in sysfs and its node in /dev as the VFIO core does (drivers/vfio/vfio_main.c)."""
    name = vfio_name(path)
    if driver.vfio == "cdev":
        host.char(f"vfio/devices/{name}", f"511:{name.removeprefix('vfio')}", path / "vfio-dev")
    else:
        (path / "vfio-dev" / name).mkdir(parents=True)
        host.file(host.dev / "vfio" / group_of(path), "")
        host.file(host.sys / "class/vfio" / group_of(path) / "dev", f"242:{group_of(path)}\n")


def _matches(path: Path, driver: KernelDriver) -> bool:
    override = read(path / "driver_override")
    if override != "(null)":
        return override == driver.name
    ids = ":".join(read(path / name).removeprefix("0x") for name in IDS[:2])
    return any(fnmatchcase(ids, glob) for glob in driver.takes)


def take_out(host: ModelMachine, path: Path, keep: bool = True) -> None:
    """Remove a function and its virtual functions; with `keep` a physical one stays plugged in, for a later rescan."""
    for link in sorted(path.glob("virtfn*")):
        virtual = link.resolve()
        link.unlink()
        take_out(host, virtual)
    detach(host, path)
    group = (path / "iommu_group").resolve() if group_of(path) else None
    host.unlink(path)
    host.event("remove", str(path))
    if group and not any((group / "devices").iterdir()):
        shutil.rmtree(group)
    if keep and not (path / "physfn").is_symlink():
        (host.sys.parent / PULLED).mkdir(exist_ok=True)
        shutil.copytree(path, host.sys.parent / PULLED / path.name, symlinks=True)
    shutil.rmtree(path)


def _named(host: ModelMachine, address: str) -> Path:
    path = host.sys / DEVICES / address
    if not path.exists():
        raise refuse(errno.ENODEV, address)
    return path.resolve()


def _bind(host: ModelMachine, file: Path, value: str) -> None:
    path, driver = _named(host, value), host.drivers[file.parent.name]
    if not _matches(path, driver):
        raise refuse(errno.ENODEV, value)
    if driver_of(host, path):
        raise refuse(errno.EBUSY, value)
    attach(host, path, driver)


def _unbind(host: ModelMachine, file: Path, value: str) -> None:
    path = _named(host, value)
    if driver_of(host, path) is not host.drivers[file.parent.name]:
        raise refuse(errno.ENODEV, value)
    detach(host, path)


def _probe(host: ModelMachine, _: Path, value: str) -> None:
    probe(host, _named(host, value))


def _override(_: ModelMachine, file: Path, value: str) -> None:
    file.write_text(f"{value or '(null)'}\n")


def _autoprobe(_: ModelMachine, file: Path, value: str) -> None:
    if value.lower()[:1] not in ("0", "1", "y", "n"):
        raise refuse(errno.EINVAL, file)
    file.write_text(f"{int(value.lower()[0] in '1y')}\n")


def _require_one(file: Path, value: str) -> None:
    if value != "1":
        raise refuse(errno.EINVAL, file)


def _reset(host: ModelMachine, file: Path, value: str) -> None:
    _require_one(file, value)
    host.resets.append(file.parent.name)


def _remove(host: ModelMachine, file: Path, value: str) -> None:
    _require_one(file, value)
    take_out(host, file.parent)


def _rescan(host: ModelMachine, file: Path, value: str) -> None:
    _require_one(file, value)
    for kept in sorted((host.sys.parent / PULLED).glob("*")):
        place = host.sys / "devices/pci0000:00" / kept.name
        group = group_of(kept)
        shutil.move(kept, place)
        for link in ("driver", "iommu_group"):
            (place / link).unlink(missing_ok=True)
        if (place / "sriov_numvfs").exists():
            host.file(place / "sriov_numvfs", "0\n")
        link_function(host, place)
        if group:
            join_group(host, place, int(group))
        probe(host, place)


def _numvfs(host: ModelMachine, file: Path, value: str) -> None:
    path = file.parent
    if not value.isdigit():
        raise refuse(errno.EINVAL, file)
    wanted, there, driver = int(value), int(read(file)), driver_of(host, path)
    if wanted > int(read(path / "sriov_totalvfs")):
        raise refuse(errno.ERANGE, file)
    if wanted == there:
        return
    if driver is None or not driver.sriov:
        raise refuse(errno.ENOENT, file)
    if wanted and there:
        raise refuse(errno.EBUSY, file)
    if wanted:
        for number in range(min(wanted, driver.gives)):
            _add_virtual(host, path, number)
        file.write_text(f"{min(wanted, driver.gives)}\n")
        host.event("change", str(path))
    else:
        for link in sorted(path.glob("virtfn*"), key=lambda link: int(link.name.removeprefix("virtfn"))):
            virtual = link.resolve()
            link.unlink()
            take_out(host, virtual)
        file.write_text("0\n")


def _add_virtual(host: ModelMachine, path: Path, number: int) -> None:
    """Add virtual function `number`, at the address that offset and stride give (PCIe SR-IOV 2.1.2).

    If the physical function has an IOMMU group, the virtual function gets one of its own.
    """
    domain, bus, slot = path.name.split(":")
    place = (int(bus, 16) << 8) + (int(slot[:2], 16) << 3) + int(slot[3])
    place += int(read(path / "sriov_offset")) + number * int(read(path / "sriov_stride"))
    address = f"{domain}:{place >> 8:02x}:{place >> 3 & 31:02x}.{place & 7}"
    virtual = path.parent / address
    ids = {**{name: read(path / name) for name in IDS}, "device": f"0x{read(path / 'sriov_vf_device')}"}
    for name, text in {**ids, "reset": ""}.items():
        host.file(virtual / name, f"{text}\n")
    host.link(virtual / "physfn", path)
    host.link(path / f"virtfn{number}", virtual)
    link_function(host, virtual)
    if group := group_of(path):
        join_group(host, virtual, 1000 * (int(group) + 1) + number)
    probe(host, virtual)


RULES: dict[str, Rule] = {
    "bus/pci/drivers/*/bind": _bind,
    "bus/pci/drivers/*/unbind": _unbind,
    "bus/pci/drivers_probe": _probe,
    "bus/pci/rescan": _rescan,
    "devices/*/driver_override": _override,
    "devices/*/sriov_drivers_autoprobe": _autoprobe,
    "devices/*/sriov_numvfs": _numvfs,
    "devices/*.[0-7]/reset": _reset,
    "devices/*.[0-7]/remove": _remove,
}
