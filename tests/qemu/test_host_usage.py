"""Tests on a real kernel of what counts as used by the host: a disk that is claimed, one that a program has open, every
member of a btrfs file system, and a disk below layers of device mapper.

ZFS, bcachefs, RAID and multipath are modelled in `tests/drivers/pci/test_host_usage.py`.
"""

from __future__ import annotations

import os

import pytest

from tests.qemu import prepare
from tests.qemu.conftest import DISK, PLAIN_DISKS, GuestLab

pytestmark = pytest.mark.qemu

HOLD = "import os, sys, time; os.open(sys.argv[1], int(sys.argv[2])); open('/run/held', 'w').close(); time.sleep(600)"
LOOK = (
    "from drivers.machine import Machine; from drivers.pci.host_usage import find_functions_used_by_host as find; "
    f"print(find(Machine('guest'), ['{DISK}']).get('{DISK}', 'free'))"
)


CLAIMS = (
    "from pathlib import Path; from drivers.machine import Machine; read = Machine('guest').is_claimed; "
    "print([read(f'/dev/{{one}}', Path(f'/sys/class/block/{{one}}/dev').read_text().strip()) for one in {names}])"
)


def find_disk(lab: GuestLab, address: str) -> str:
    """Return the kernel's name of the disk at a PCI address."""
    folder = f"/sys/bus/pci/devices/{address}"
    return lab.guest.run(f"cd {folder}; ls -d nvme/nvme*/nvme*n* nvme/nvme*/nvme-subsys*/nvme*n* | grep -v c").split(
        "/"
    )[-1]


def are_claimed(lab: GuestLab, *names: str) -> str:
    """Return which of the disks the kernel says are claimed, as the text of a list."""
    return lab.run_python(CLAIMS.format(names=names))


def look_while_held(lab: GuestLab, name: str, flags: int) -> list[str]:
    """Return why the host uses the disk, and whether it is claimed, while a process has its node open."""
    holder = lab.start_python(HOLD, f"/dev/{name}", str(flags))
    try:
        return lab.run_python(f"{LOOK}\n{CLAIMS.format(names=[name])}").splitlines()
    finally:
        lab.guest.run(f"kill {holder}")


@pytest.fixture(scope="module")
def file_systems(lab: GuestLab) -> None:
    """Load btrfs and device mapper into the guest's kernel."""
    lab.guest.run(f"for one in {prepare.LATER_FOLDER}/*.ko; do busybox insmod $one || exit 1; done")


def test_S3_a_disk_that_is_claimed_or_open_on_a_real_kernel_is_used_by_the_host(lab: GuestLab) -> None:
    lab.wait_for_device(DISK)
    name = lab.guest.run("cd /sys/class/block; for one in nvme0n1; do [ -e /dev/$one ] && echo $one; done; true")
    assert lab.run_python(LOOK) == "free"
    use, is_claimed = look_while_held(lab, name, os.O_RDONLY | os.O_EXCL)
    assert f"has {name} open" in use and is_claimed == "[True]"
    use, is_claimed = look_while_held(lab, name, os.O_RDWR)
    assert f"has {name} open" in use and is_claimed == "[False]", "only the open descriptor shows it"
    assert lab.run_python(LOOK) == "free"


def test_S3_every_disk_of_a_btrfs_is_refused_and_not_only_the_one_in_the_mount_table(
    lab: GuestLab, file_systems: None
) -> None:
    addresses = PLAIN_DISKS[:2]
    for address in addresses:
        lab.wait_for_device(address, state="inactive")
    named, unnamed = (find_disk(lab, address) for address in addresses)
    lab.guest.run(f"mkfs.btrfs -q /dev/{named} /dev/{unnamed} && mkdir /run/btrfs && mount /dev/{named} /run/btrfs")
    assert f"/dev/{unnamed}" not in lab.guest.run("cat /proc/mounts")
    lab.rescan()
    faults, devices = lab.read_faults(), lab.devices()
    assert faults[addresses[0]] == f"the host uses it: {named} is mounted at /run/btrfs"
    assert faults[addresses[1]] == f"the host uses it: {unnamed} is in a btrfs file system"
    assert [devices[address]["state"] for address in addresses] == ["missing", "missing"]
    assert are_claimed(lab, named, unnamed) == "[True, True]", "the kernel says it, too, whatever the file system"
    lab.guest.run("umount /run/btrfs")
    lab.rescan()
    for address in addresses:
        lab.wait_for_device(address, state="inactive")


def test_S3_a_disk_below_layers_of_device_mapper_is_refused_at_any_depth(lab: GuestLab, file_systems: None) -> None:
    address = PLAIN_DISKS[2]
    lab.wait_for_device(address, state="inactive")
    disk = find_disk(lab, address)
    create = "dmsetup create --noudevsync {} --table '0 {} linear {} 0'"
    lab.guest.run(f"addpart /dev/{disk} 1 2048 500000")
    lab.guest.run(create.format("lower", 480000, f"/dev/{disk}p1"))
    lab.guest.run(create.format("upper", 460000, "/dev/dm-0"))
    lab.guest.run("mkfs.btrfs -q /dev/dm-1 && mkdir /run/layers && mount /dev/dm-1 /run/layers")
    lab.rescan()
    uses = (f"{disk}p1 is part of dm-0", "dm-0 is part of dm-1", "dm-1 is mounted at /run/layers")
    assert sorted(lab.read_faults()[address].split("; ")) == sorted(f"the host uses it: {use}" for use in uses)
    assert lab.devices()[address]["state"] == "missing"
    assert are_claimed(lab, disk) == "[True]", "the kernel says it, too, although the partition is claimed"
    lab.guest.run("umount /run/layers && dmsetup remove --noudevsync upper")
    lab.rescan()
    assert lab.read_faults()[address] == f"the host uses it: {disk}p1 is part of dm-0", "it is not mounted any more"
    lab.guest.run(f"dmsetup remove --noudevsync lower && delpart /dev/{disk} 1")
    lab.rescan()
    lab.wait_for_device(address, state="inactive")
