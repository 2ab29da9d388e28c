"""Tests of what counts as used by the host, through all layers between a mount or a route and the hardware (S3)."""

from __future__ import annotations

import pytest

from drivers.errors import DriverError
from drivers.pci.host_usage import find_functions_used_by_host
from tests.drivers.tree import FakeHost

DISK, OTHER_ADDRESS = "0000:00:02.0", "0000:00:05.0"


def test_a_mounted_partition_marks_its_controller_as_used_by_the_host(host: FakeHost) -> None:
    disk = host.block("vda", "254:0", host.pci(DISK, "0x1af4", "0x1042", "0x018000") / "virtio1/block")
    host.block("vda1", "254:1", disk)
    host.mount("254:1", "/var/lib", "/dev/vda1")
    host.mount("254:1", "/", "/dev/root")
    assert find_functions_used_by_host(host.machine) == {DISK: "the host uses it: vda1 is mounted at /"}


def test_a_mounted_disk_is_found_by_its_path_where_the_mount_table_has_another_number(host: FakeHost) -> None:
    host.block("sdb", "8:16", host.pci(DISK, "0x1000", "0x0097", "0x010700"))
    host.mount("0:45", "/srv", "/dev/sdb")
    assert find_functions_used_by_host(host.machine) == {DISK: "the host uses it: sdb is mounted at /srv"}


def test_the_reason_stays_the_same_when_more_is_mounted(host: FakeHost) -> None:
    host.block("vda", "254:0", host.pci(DISK, "0x1af4", "0x1042", "0x018000"))
    host.mount("254:0", "/", "/dev/vda")
    before = find_functions_used_by_host(host.machine)
    host.mount("254:0", "/var/lib/kubelet/pods/1/volume\\040a", "/dev/vda")
    assert find_functions_used_by_host(host.machine) == before


def test_a_mounted_lvm_on_raid_marks_every_disk_as_used(host: FakeHost) -> None:
    for number, address in enumerate((DISK, OTHER_ADDRESS)):
        host.block(f"sd{number}", f"8:{number}", host.pci(address, "0x1000", "0x0097", "0x010700"))
    virtual = host.sys / "devices/virtual/block"
    host.block("md0", "9:0", virtual, slaves=("sd0", "sd1"))
    host.block("dm-0", "253:0", virtual, slaves=("md0",))
    host.mount("253:0", "/", "/dev/mapper/root")
    used = find_functions_used_by_host(host.machine)
    assert set(used) == {DISK, OTHER_ADDRESS}
    assert "dm-0 is mounted at /" in used[DISK]


def test_an_unmounted_raid_marks_its_disks_as_used(host: FakeHost) -> None:
    host.block("sda", "8:0", host.pci(DISK, "0x1000", "0x0097", "0x010700"))
    host.block("md0", "9:0", host.sys / "devices/virtual/block", slaves=("sda",))
    assert find_functions_used_by_host(host.machine) == {DISK: "the host uses it: sda is part of md0"}


def test_a_mounted_nvme_multipath_namespace_marks_every_controller_as_used(host: FakeHost) -> None:
    subsystem = host.sys / "devices/virtual/nvme-subsystem/nvme-subsys0"
    for number, address in enumerate((DISK, OTHER_ADDRESS)):
        controller = host.pci(address, "0x144d", "0xa824", "0x010802") / f"nvme/nvme{number}"
        controller.mkdir(parents=True)
        host.link(subsystem / f"nvme{number}", controller)
    namespace = host.block("nvme0n1", "259:0", subsystem)
    host.block("nvme0n1p1", "259:1", namespace)
    host.mount("259:1", "/boot", "/dev/nvme0n1p1")
    assert set(find_functions_used_by_host(host.machine)) == {DISK, OTHER_ADDRESS}


def test_swap_and_btrfs_disks_are_marked_as_used(host: FakeHost) -> None:
    host.block("zz0", "8:0", host.pci(DISK, "0x1000", "0x0097", "0x010700"))
    host.file(host.proc / "swaps", "Filename Type Size Used Priority\n/dev/zz0 partition 1 0 -2\n")
    other = host.block("zz1", "8:1", host.pci(OTHER_ADDRESS, "0x1000", "0x0097", "0x010700"))
    host.link(host.sys / "fs/btrfs/0b1a-22/devices/zz1", other)
    assert find_functions_used_by_host(host.machine) == {
        DISK: "the host uses it: zz0 is swap space",
        OTHER_ADDRESS: "the host uses it: zz1 is in a btrfs file system",
    }


@pytest.mark.parametrize("family", ["default_route", "default_route6"])
def test_a_default_route_over_vlan_and_bond_marks_both_ports_as_used(host: FakeHost, family: str) -> None:
    host.net("eth0", host.pci(DISK, "0x8086", "0x1572", "0x020000"))
    host.net("eth1", host.pci(OTHER_ADDRESS, "0x8086", "0x1572", "0x020000"))
    host.net("eth2", host.pci("0000:00:06.0", "0x8086", "0x1572", "0x020000"))
    host.net("bond0", lower=("eth0", "eth1"))
    host.net("bond0.7", lower=("bond0",))
    getattr(host, family)("bond0.7")
    used = find_functions_used_by_host(host.machine)
    assert set(used) == {DISK, OTHER_ADDRESS}
    assert used[DISK] == "the host uses it: eth0 carries the default route of bond0.7"


def test_a_default_route_over_open_vswitch_marks_the_ports_of_the_switch_as_used(host: FakeHost) -> None:
    port = host.net("eth0", host.pci(DISK, "0x8086", "0x1572", "0x020000"))
    host.link(port / "master", host.net("ovs-system"))
    host.net("eth1", host.pci(OTHER_ADDRESS, "0x8086", "0x1572", "0x020000"))
    host.net("br-ex")
    host.default_route("br-ex")
    assert set(find_functions_used_by_host(host.machine)) == {DISK}


def test_a_used_virtual_function_marks_its_physical_function_as_used(host: FakeHost) -> None:
    physical = host.pci(DISK, "0x8086", "0x1572", "0x020000")
    virtual = host.pci("0000:00:02.1", "0x8086", "0x154c", "0x020000")
    host.link(virtual / "physfn", physical)
    host.net("eth0", virtual)
    host.default_route("eth0")
    assert set(find_functions_used_by_host(host.machine)) == {DISK, "0000:00:02.1"}


def test_an_unreadable_mount_table_raises_instead_of_reporting_devices_as_free(host: FakeHost) -> None:
    (host.proc / "self/mountinfo").unlink()
    with pytest.raises(DriverError, match="mountinfo"):
        find_functions_used_by_host(host.machine)
