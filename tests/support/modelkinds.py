"""Simulate how Linux answers writes to mediated devices, firmware uploads and QAT devices.

A `ModelMachine` calls these rules. Sources: drivers/vfio/mdev, drivers/base/firmware_loader/sysfs_upload.c,
drivers/crypto/intel/qat of Linux 6.12; Documentation/ABI/testing/sysfs-{bus-vfio-mdev,class-firmware,driver-qat}.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

from tests.support.modelpci import Rule, read, refuse

if TYPE_CHECKING:
    from tests.support.modelmachine import ModelMachine

SERVICES = ("sym;asym", "asym;sym", "dc", "dcc", "sym", "asym", "asym;dc", "dc;asym", "sym;dc", "dc;sym")
STAGES = ("receiving", "preparing", "transferring", "programming", "idle")
UPLOADS = "class/firmware"


def mdev_types(host: ModelMachine, card: Path, types: dict[str, int], exclusive: bool = False) -> None:
    """Make the card a parent of mediated devices. `types` maps each type to the number of its instances that fit.

    With `exclusive` all instances that exist at one time must be of the same type.
    """
    for kind, count in types.items():
        folder = card / "mdev_supported_types" / kind
        texts = {"name": kind, "device_api": "vfio-pci", "available_instances": str(count), "create": ""}
        for name, text in texts.items():
            host.file(folder / name, f"{text}\n")
        (folder / "devices").mkdir()
        host.mdev_rooms[folder] = count
    host.link(host.sys / "class/mdev_bus" / card.name, card)
    if exclusive:
        host.exclusive.add(card)


def uploader(host: ModelMachine, name: str, fails: str = "", below: Path | None = None) -> str:
    """Add a device that accepts firmware uploads, and return its path on the host.

    `below` is the parent device, if any. `fails`, such as `programming:hw-error`, is the stage and error with which
    uploads end; '' means that they succeed.
    """
    folder = (below / "firmware" if below else host.sys / UPLOADS) / name
    if below:
        host.link(host.sys / UPLOADS / name, folder)
    texts = {"loading": "0", "data": "", "status": "idle", "remaining_size": "0", "error": "", "cancel": ""}
    for file, text in texts.items():
        host.file(folder / file, f"{text}\n" if text else "")
    host.uploads[name] = fails
    return f"/sys/{UPLOADS}/{name}"


def qat(host: ModelMachine, card: Path, services: str = "sym;asym") -> None:
    """Make the card a QAT device of generation 4 in state `up`, configured with these services."""
    host.file(card / "qat/state", "up\n")
    host.file(card / "qat/cfg_services", f"{services}\n")


def advance(folder: Path, fails: str) -> str:
    """Move a running upload to its next stage and return that stage; an idle upload stays idle.

    A stage ends when this function is called, not after some time, so that tests need not wait.
    """
    stage, _, _ = fails.partition(":")
    before = read(folder / "status")
    if before == "idle":
        return before
    after = STAGES[STAGES.index(before) + 1]
    if before == stage:
        (folder / "error").write_text(f"{fails}\n")
        after = "idle"
    (folder / "status").write_text(f"{after}\n")
    if after == "idle":
        (folder / "remaining_size").write_text("0\n")
    return after


def uploaded(host: ModelMachine, path: str, data: bytes) -> str:
    """Upload `data` completely, as a program does; return the error, or '' on success.

    Raises OSError (EBUSY) while another upload runs.
    """
    folder = host.real(path)
    if read(folder / "status") != "idle":
        raise refuse(errno.EBUSY, path)
    host.write(f"{path}/loading", "1")
    host.write(f"{path}/data", data.decode("latin-1"))
    host.write(f"{path}/loading", "0")
    while advance(folder, host.uploads[folder.name]) != "idle":
        pass
    return read(folder / "error")


def _create(host: ModelMachine, file: Path, value: str) -> None:
    folder = file.parent
    card = folder.parents[1]
    try:
        uuid = str(UUID(value))
    except ValueError:
        raise refuse(errno.EINVAL, value) from None
    if (host.sys / "bus/mdev/devices" / uuid).exists():
        raise refuse(errno.EEXIST, value)
    if read(folder / "available_instances") == "0":
        raise refuse(errno.ENOSPC, value)
    device = card / uuid
    host.file(device / "remove", "")
    host.link(device / "mdev_type", folder)
    host.link(folder / "devices" / uuid, device)
    host.link(host.sys / "bus/mdev/devices" / uuid, device)
    host.event("add", str(device))
    _count(host, card)


def _take_away(host: ModelMachine, file: Path, value: str) -> None:
    device = file.parent
    if value != "1":
        raise refuse(errno.EINVAL, file)
    if device.name in host.held:
        raise refuse(errno.EBUSY, file)
    ((device / "mdev_type").resolve() / "devices" / device.name).unlink()
    host.unlink(device)
    host.event("remove", str(device))
    shutil.rmtree(device)
    _count(host, device.parent)


def _count(host: ModelMachine, card: Path) -> None:
    folders = sorted((card / "mdev_supported_types").iterdir())
    used = {folder: len(list((folder / "devices").iterdir())) for folder in folders}
    for folder in folders:
        others = card in host.exclusive and any(used[other] for other in folders if other != folder)
        left = 0 if others else host.mdev_rooms[folder] - used[folder]
        (folder / "available_instances").write_text(f"{left}\n")


def _loading(host: ModelMachine, file: Path, value: str) -> None:
    folder = file.parent
    if value not in ("1", "0", "-1"):
        raise refuse(errno.EINVAL, file)
    if value == "1":
        (folder / "data").write_bytes(b"")
        (folder / "error").write_bytes(b"")
    elif value == "0" and read(file) == "1":
        (folder / "status").write_text(f"{STAGES[0]}\n")
        (folder / "remaining_size").write_text(f"{(folder / 'data').stat().st_size}\n")
    file.write_text("1\n" if value == "1" else "0\n")


def _data(_: ModelMachine, file: Path, value: str) -> None:
    if read(file.parent / "loading") != "1":
        raise refuse(errno.ENODEV, file)
    with file.open("ab") as data:
        data.write(value.encode("latin-1"))


def _cancel(_: ModelMachine, file: Path, value: str) -> None:
    status = file.parent / "status"
    if value != "1":
        raise refuse(errno.EINVAL, file)
    if read(status) == "idle":
        raise refuse(errno.ENODEV, file)
    if read(status) == "programming":
        raise refuse(errno.EBUSY, file)
    (file.parent / "error").write_text(f"{read(status)}:user-abort\n")
    status.write_text("idle\n")


def _state(_: ModelMachine, file: Path, value: str) -> None:
    if value not in ("up", "down"):
        raise refuse(errno.EINVAL, file)
    numvfs = file.parents[1] / "sriov_numvfs"
    if value == "down" and numvfs.exists() and read(numvfs) != "0":
        raise refuse(errno.EBUSY, file)
    file.write_text(f"{value}\n")


def _services(_: ModelMachine, file: Path, value: str) -> None:
    if value not in SERVICES or read(file.parent / "state") == "up":
        raise refuse(errno.EINVAL, file)
    file.write_text(f"{value}\n")


RULES: dict[str, Rule] = {
    "devices/*/mdev_supported_types/*/create": _create,
    "devices/*-*-*-*-*/remove": _take_away,
    "*/firmware/*/loading": _loading,
    "*/firmware/*/data": _data,
    "*/firmware/*/cancel": _cancel,
    "devices/*/qat/state": _state,
    "devices/*/qat/cfg_services": _services,
}
