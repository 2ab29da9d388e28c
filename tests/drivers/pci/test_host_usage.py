"""Tests of what counts as used by the host, through all layers between a mount or a route and the hardware (S3)."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from drivers.errors import DriverError
from drivers.machine import MAX_TABLE, Machine
from drivers.pci import host_usage
from tests.drivers.tree import FakeHost
from tests.support.clocks import replace_sleep

DISK, OTHER_ADDRESS = "0000:00:02.0", "0000:00:05.0"


def find_functions_used_by_host(machine: Machine, *, shared: bool = False) -> dict[str, str]:
    """Return what the host uses, where all functions are candidates."""
    return host_usage.find_functions_used_by_host(machine, machine.pci_functions(), shared=shared)


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


def test_block_devices_that_name_each_other_as_parts_are_searched_once(host: FakeHost) -> None:
    host.block("sda", "8:0", host.pci(DISK, "0x1000", "0x0097", "0x010700"))
    virtual = host.sys / "devices/virtual/block"
    md = host.block("md0", "9:0", virtual, slaves=("sda",))
    host.link(md / "slaves/dm-0", host.block("dm-0", "253:0", virtual, slaves=("md0",)))
    host.mount("253:0", "/", "/dev/mapper/root")
    assert "dm-0 is mounted at /" in find_functions_used_by_host(host.machine)[DISK]


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


def find_use(host: FakeHost, address: str = DISK, *, shared: bool = False) -> str:
    """Return why the host uses a function; '' if it does not."""
    return find_functions_used_by_host(host.machine, shared=shared).get(address, "")


def make_disk(host: FakeHost, name: str = "nvme0n1", address: str = DISK, number: str = "259:0") -> Path:
    """Add an NVMe disk that is bound to its kernel driver, with a partition; return the disk's directory."""
    function = host.pci(address, "0x144d", "0xa824", "0x010802")
    host.link(function / "driver", host.sys / "bus/pci/drivers/nvme")
    disk = host.block(name, number, function / "nvme/nvme0")
    major, minor = number.split(":")
    host.file(host.block(f"{name}p1", f"{major}:{int(minor) + 100}", disk) / "partition", "1\n")
    return disk


def test_a_disk_that_only_the_kernel_knows_to_be_claimed_is_used(host: FakeHost) -> None:
    """ZFS, multi-device bcachefs and a RAID in another namespace are in no table; the kernel refuses a second claim."""
    make_disk(host)
    assert find_use(host) == ""
    host.mount("0:40", "/", "rpool/ROOT/debian")
    host.tree_machine.claimed.add("/dev/nvme0n1")
    assert find_use(host) == "the host uses it: nvme0n1 is claimed, for a file system, a RAID or a program"


def test_all_disks_of_a_mount_with_several_sources_are_used(host: FakeHost) -> None:
    make_disk(host)
    make_disk(host, "nvme1n1", OTHER_ADDRESS, "259:1")
    host.mount("0:41", "/", "/dev/nvme0n1p1:/dev/nvme1n1")
    assert find_use(host) == "the host uses it: nvme0n1p1 is mounted at /"
    assert find_use(host, OTHER_ADDRESS) == "the host uses it: nvme1n1 is mounted at /"


def test_a_mount_of_the_hosts_first_process_counts_when_the_agent_has_mounts_of_its_own(host: FakeHost) -> None:
    make_disk(host)
    host.file(host.proc / "1/mountinfo", "30 1 259:0 / /srv rw - ext4 /dev/nvme0n1 rw\n")
    assert find_use(host) == "the host uses it: nvme0n1 is mounted at /srv"


def test_a_multipath_device_above_a_partition_marks_the_disk_as_used(host: FakeHost) -> None:
    make_disk(host)
    virtual = host.sys / "devices/virtual/block"
    host.block("dm-0", "253:0", virtual, slaves=("nvme0n1p1",))
    host.block("dm-1", "253:1", virtual, slaves=("dm-0",))
    assert "nvme0n1p1 is part of dm-0" in find_use(host)


@pytest.mark.parametrize("program", ["ceph-osd", "qemu-system-x86"])
def test_a_raw_disk_that_a_program_has_open_is_used(host: FakeHost, program: str) -> None:
    make_disk(host)
    host.opened(77, program, "nvme0n1")
    assert find_use(host) == f"the host uses it: {program} has nvme0n1 open"
    assert find_use(host, shared=True) == ""


@pytest.mark.parametrize("node", ["nvme0n1", "ng0n1"])
def test_a_multipath_namespace_that_a_program_has_open_marks_every_controller_as_used(
    host: FakeHost, node: str
) -> None:
    subsystem = host.sys / "devices/virtual/nvme-subsystem/nvme-subsys0"
    for number, address in enumerate((DISK, OTHER_ADDRESS)):
        controller = host.pci(address, "0x144d", "0xa824", "0x010802") / f"nvme/nvme{number}"
        controller.mkdir(parents=True)
        host.link(subsystem / f"nvme{number}", controller)
    host.block("nvme0n1", "259:0", subsystem)
    host.char("ng0n1", "241:0", subsystem)
    host.opened(77, "ceph-osd", node)
    text = f"the host uses it: ceph-osd has {node} open"
    assert find_functions_used_by_host(host.machine) == {DISK: text, OTHER_ADDRESS: text}


def test_a_program_that_opens_a_logical_volume_does_not_change_the_reason_of_its_disk(host: FakeHost) -> None:
    make_disk(host)
    host.block("dm-0", "253:0", host.sys / "devices/virtual/block", slaves=("nvme0n1p1",))
    before = find_use(host)
    host.opened(77, "qemu-system-x86", "dm-0")
    assert find_use(host) == before


def test_a_disk_that_the_kernel_uses_for_a_loop_device_or_a_target_is_used(host: FakeHost) -> None:
    make_disk(host)
    loop = host.block("loop3", "7:3", host.sys / "devices/virtual/block")
    host.file(loop / "loop/backing_file", "/dev/nvme0n1\n")
    assert find_use(host) == "the host uses it: nvme0n1 is behind loop3"
    host.file(loop / "loop/backing_file", "/var/lib/image\n")
    assert find_use(host) == ""
    host.file(host.sys / "kernel/config/nvmet/subsystems/store/namespaces/1/device_path", "/dev/nvme0n1p1\n")
    assert find_use(host) == "the host uses it: nvme0n1p1 is behind the NVMe target store"


@pytest.mark.parametrize(
    ("module", "folder"), [("nvmet", "nvmet/subsystems"), ("target_core_mod", "target/core")], ids=["NVMe", "SCSI"]
)
def test_a_disk_is_never_free_while_the_agent_cannot_see_what_the_kernel_exports(
    host: FakeHost, module: str, folder: str
) -> None:
    make_disk(host)
    (host.sys / "module" / module).mkdir(parents=True)
    assert f"the kernel module {module} may export its disk" in find_use(host)
    targets = host.sys / "kernel/config" / folder
    host.file(targets, "a file, which cannot be listed")
    assert find_use(host).startswith("it cannot be found out whether the host uses it: ")
    targets.unlink()
    targets.mkdir()
    assert find_use(host) == ""


def test_a_disk_whose_node_the_agent_does_not_see_is_never_free(host: FakeHost) -> None:
    make_disk(host)
    (host.dev / "nvme0n1").unlink()
    assert find_use(host).startswith("it cannot be found out whether the host uses it: its disk cannot be opened")


def test_a_function_is_never_free_while_the_agent_cannot_see_all_processes(host: FakeHost) -> None:
    make_disk(host)
    given = host.pci(OTHER_ADDRESS, "0x144d", "0xa824", "0x010802")
    host.link(given / "driver", host.sys / "bus/pci/drivers/vfio-pci")
    host.pci("0000:00:06.0", "0x144d", "0xa824", "0x010802")
    (host.proc / "self/ns/pid").unlink()
    (host.proc / "self/ns/pid").symlink_to("pid:[4026532001]")
    used = find_functions_used_by_host(host.machine)
    assert used.keys() == {DISK}, "no program of the host can use a function without a driver of the host"
    assert "the agent does not run in the host's process namespace" in used[DISK]


def test_a_function_is_never_free_while_proc_hides_the_processes_of_others(host: FakeHost) -> None:
    make_disk(host)
    assert find_use(host) == ""
    (host.proc / "1/fd").rmdir()
    (host.proc / "1").rmdir()
    assert "may not see all processes" in find_use(host)


def test_only_disks_of_candidates_are_opened(host: FakeHost) -> None:
    make_disk(host)
    host.tree_machine.claimed.add("/dev/nvme0n1")
    assert host_usage.find_functions_used_by_host(host.machine, [OTHER_ADDRESS]) == {}
    assert host_usage.find_functions_used_by_host(host.machine, [DISK], open_disks=False) == {}
    assert DISK in host_usage.find_functions_used_by_host(host.machine, [DISK])


def make_gpu(host: FakeHost, address: str = DISK, driver: str = "amdgpu", **more: str) -> Path:
    """Add a GPU that is bound to a kernel driver of the host; return its directory."""
    gpu = host.pci(address, "0x1002", "0x744c", "0x030000", **more)
    host.link(gpu / "driver", host.sys / "bus/pci/drivers" / driver)
    return gpu


def test_the_boot_display_is_used_until_it_is_bound_to_vfio(host: FakeHost) -> None:
    gpu = make_gpu(host, boot_vga="1")
    make_gpu(host, OTHER_ADDRESS, boot_vga="0")
    assert find_functions_used_by_host(host.machine) == {
        DISK: "the host uses it: it is the display that the machine started with"
    }
    assert find_use(host, shared=True) == ""
    (gpu / "driver").unlink()
    host.link(gpu / "driver", host.sys / "bus/pci/drivers/vfio-pci")
    assert find_use(host) == ""


def test_a_card_with_a_framebuffer_is_used_while_consoles_are_on_framebuffers(host: FakeHost) -> None:
    host.link(host.sys / "class/graphics/fb1", make_gpu(host) / "graphics/fb1")
    (host.sys / "class/graphics/fb1").resolve().mkdir(parents=True)
    assert find_use(host) == ""
    host.file(host.sys / "class/vtconsole/vtcon1/name", "(M) frame buffer device\n")
    host.file(host.sys / "class/vtconsole/vtcon1/bind", "1\n")
    assert find_use(host) == "the host uses it: fb1 may show the host's console"


def test_a_gpu_whose_drm_node_a_program_has_open_is_used(host: FakeHost) -> None:
    host.char("dri/card0", "226:0", make_gpu(host) / "drm")
    host.char("dri/card1", "226:1", make_gpu(host, OTHER_ADDRESS) / "drm")
    host.opened(900, "Xorg", "dri/card1")
    assert find_functions_used_by_host(host.machine) == {OTHER_ADDRESS: "the host uses it: Xorg has card1 open"}


@pytest.mark.parametrize("is_told", [True, False])
def test_an_nvidia_gpu_is_found_by_its_node_else_all_of_them_count(host: FakeHost, is_told: bool) -> None:
    for minor, address in enumerate((DISK, OTHER_ADDRESS)):
        host.link(host.sys / "bus/pci/drivers/nvidia" / address, make_gpu(host, address, "nvidia"))
        if is_told:
            host.file(host.proc / f"driver/nvidia/gpus/{address}/information", f"Device Minor: \t {minor}\n")
    host.file(host.dev / "nvidiactl", "c195:255")
    host.opened(40, "nvidia-smi", "nvidiactl")
    assert find_functions_used_by_host(host.machine) == {}, "that node belongs to no card"
    host.file(host.dev / "nvidia1", "c195:1")
    host.opened(41, "nvidia-persistenced", "nvidia1")
    used = find_functions_used_by_host(host.machine)
    assert used.keys() == ({OTHER_ADDRESS} if is_told else {DISK, OTHER_ADDRESS})
    assert used[OTHER_ADDRESS] == "the host uses it: nvidia-persistenced has nvidia1 open"


def test_a_guest_that_has_a_vfio_node_open_is_no_use_by_the_host(host: FakeHost) -> None:
    host.char("vfio/devices/vfio0", "511:0", make_gpu(host, driver="mlx5_vfio_pci") / "vfio-dev")
    host.opened(50, "qemu-system-x86", "vfio/devices/vfio0")
    assert find_functions_used_by_host(host.machine) == {}


def test_nodes_that_are_open_only_briefly_and_those_of_the_agent_do_not_count(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_disk(host)
    host.opened(60, "blkid", "nvme0n1")
    host.opened(61, "driver", "nvme0n1")
    host.file(host.proc / "61/stat", f"61 (driver) S {os.getpid()} 61\n")
    host.opened(os.getpid(), "cyborg-agent", "nvme0n1")
    assert find_use(host) == "the host uses it: blkid has nvme0n1 open"
    replace_sleep(monkeypatch, lambda _: (host.proc / "60/fd/0").unlink(missing_ok=True))
    assert find_use(host) == ""


def make_port(host: FakeHost, name: str = "eth0", address: str = DISK) -> Path:
    """Add a network card that is bound to its kernel driver; return the directory of its interface."""
    card = host.pci(address, "0x8086", "0x1572", "0x020000")
    host.link(card / "driver", host.sys / "bus/pci/drivers/ice")
    return host.net(name, card)


@pytest.mark.parametrize("upper", ["vrf-blue", "bond0", "br0", "eth0.7", "macvtap0"])
def test_a_port_of_another_interface_is_used_whatever_routes_the_main_table_has(host: FakeHost, upper: str) -> None:
    make_port(host)
    assert find_use(host) == ""
    host.net(upper, lower=("eth0",))
    assert find_use(host) == f"the host uses it: eth0 is part of {upper}"


@pytest.mark.parametrize("kind", ["upper", "master", "lower", "brif"])
def test_a_port_is_found_by_each_one_of_the_kernels_links(host: FakeHost, kind: str) -> None:
    """The agent may read while the kernel is making the links, and finds a port by the first of them."""
    port, bridge = make_port(host), host.net("br0")
    links = {
        "upper": (port / "upper_br0", bridge),
        "master": (port / "master", bridge),
        "lower": (bridge / "lower_eth0", port),
        "brif": (bridge / "brif/eth0", port),
    }
    host.link(*links[kind])
    assert find_use(host) == "the host uses it: eth0 is part of br0"


def test_a_port_of_open_vswitch_is_used_without_any_route(host: FakeHost) -> None:
    host.link(make_port(host) / "master", host.net("ovs-system"))
    assert find_use(host) == "the host uses it: eth0 is part of ovs-system"


def test_a_card_with_any_route_is_used_but_not_one_with_link_local_addresses_only(host: FakeHost) -> None:
    make_port(host)
    host.route("eth0", "0000FEA9")
    link_local, nothing = "fe80" + "0" * 28, "0" * 32
    host.file(host.proc / "net/ipv6_route", f"{link_local} 40 {nothing} 00 {nothing} 100 1 0 00000001 eth0\n")
    assert find_use(host) == ""
    host.route("eth0", "0000000A")
    assert find_use(host) == "the host uses it: eth0 carries a route"
    host.default_route("eth0")
    assert find_use(host) == "the host uses it: eth0 carries the default route"


def test_a_routing_table_of_any_length_is_read(host: FakeHost) -> None:
    make_port(host)
    host.default_route("eth0")
    with (host.proc / "net/route").open("a") as file:
        file.write(f"{'eth1 0000000A 00000000 0001 0 0 0 00FFFFFF 0 0 0':127}\n" * (MAX_TABLE // 128 + 1))
    assert (host.proc / "net/route").stat().st_size > MAX_TABLE
    assert find_use(host) == "the host uses it: eth0 carries the default route"


@pytest.mark.parametrize("pci_class", ["0x020700", "0x020800"])
def test_an_infiniband_card_whose_interface_is_in_another_namespace_is_never_free(
    host: FakeHost, pci_class: str
) -> None:
    card = host.pci(DISK, "0x15b3", "0x101b", pci_class)
    host.link(card / "driver", host.sys / "bus/pci/drivers/mlx5_core")
    assert find_use(host) == ""
    (card / "infiniband/mlx5_0").mkdir(parents=True)
    assert "its network interface is not here" in find_use(host)
    host.net("ib0", card)
    assert find_use(host) == ""


def test_a_network_card_whose_interface_is_in_another_namespace_is_never_free(host: FakeHost) -> None:
    card = host.pci(DISK, "0x8086", "0x1572", "0x020000")
    assert find_use(host) == ""
    host.link(card / "driver", host.sys / "bus/pci/drivers/ice")
    assert "its network interface is not here: it may be in another network namespace" in find_use(host)


@pytest.mark.parametrize("driver", ["pci-stub", "pci-pf-stub", "vfio-pci"])
def test_a_network_card_whose_driver_makes_no_interface_is_free(host: FakeHost, driver: str) -> None:
    card = host.pci(DISK, "0x8086", "0x1572", "0x020000")
    host.link(card / "driver", host.sys / "bus/pci/drivers" / driver)
    assert find_use(host) == ""


def test_a_descriptor_whose_path_is_too_long_hides_no_other_descriptor(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_disk(host)
    host.opened(60, "editor", "long")
    host.opened(60, "editor", "nvme0n1")
    read_link = os.readlink

    def refuse_long_path(path: str) -> str:
        if str(path).endswith("/60/fd/0"):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        return read_link(path)

    monkeypatch.setattr("drivers.machine.os.readlink", refuse_long_path)
    found = host.machine.list_open_nodes()
    assert [*found.users.values()] == [("editor",)] and not found.unseen


def test_only_descriptors_that_may_be_device_nodes_are_asked_for_their_status(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_disk(host)
    host.opened(60, "lsblk", "nvme0n1")
    descriptors = host.proc / "60/fd"
    for number, text in enumerate(
        ("/mnt/nfs/dev/log", "/mnt/nfs/dev/a.py", "/mnt/nfs/a", "/dev/sdz", "/host/dev/nvme0n1")
    ):
        (descriptors / f"{number + 1}").symlink_to(text)
    host.file(host.dev / "log", "")
    asked: list[str] = []
    read_number = host.machine.read_node_number

    def record(path: str) -> str:
        asked.append(path)
        return read_number(path)

    monkeypatch.setattr(host.machine, "read_node_number", record)
    assert [*host.machine.list_open_nodes().users.values()] == [("lsblk",)]
    assert {path for path in asked if path.startswith("/proc")} == {f"/proc/60/fd/{number}" for number in (0, 4, 5)}


@pytest.mark.parametrize("name", ["resource0", "resource2_wc"])
def test_a_function_whose_memory_a_program_has_open_is_used(host: FakeHost, name: str, tmp_path: Path) -> None:
    card = host.pci(DISK, "0x10ee", "0x5005", "0x120000")
    host.file(card / name, "")
    host.file(tmp_path / f"fake/sys/{OTHER_ADDRESS}/{name}", "")
    host.file(host.pci(OTHER_ADDRESS, "0x10ee", "0x5005", "0x120000") / name, "")
    host.opened(60, "fpgad", "null")
    (host.proc / "60/fd/1").symlink_to(card.resolve() / name)
    (host.proc / "60/fd/2").symlink_to(tmp_path / f"fake/sys/{OTHER_ADDRESS}/{name}")
    assert find_functions_used_by_host(host.machine) == {DISK: f"the host uses it: fpgad has {name} open"}
