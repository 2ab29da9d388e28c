"""Tests of whether a guest uses a function: by its VFIO group or its own VFIO node, under any kernel driver (S3)."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from drivers.errors import Busy, Denied
from drivers.pci.guest_usage import GuestUse, find_guest_uses, refuse_if_guest_uses
from tests.support import modelkinds
from tests.support.modelmachine import ModelMachine

CARD = "0000:01:00.0"
UUID = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1000"
FOLDER = f"/sys/bus/pci/devices/{CARD}"


@pytest.fixture
def host(tmp_path: Path) -> ModelMachine:
    """Return a host with a function in the IOMMU group 7 that has no driver."""
    machine = ModelMachine(tmp_path)
    machine.pci(CARD, "0x15b3", "0x101e", "0x020000", group=7)
    return machine


def bind(host: ModelMachine, driver: str) -> None:
    host.write(f"{FOLDER}/driver_override", driver)
    host.write(f"/sys/bus/pci/drivers/{driver}/bind", CARD)


def find_use(host: ModelMachine) -> GuestUse:
    return find_guest_uses(host.machine, [FOLDER])[FOLDER]


@pytest.mark.parametrize("driver", ["vfio-pci", "mlx5_vfio_pci", "xe_vfio_pci", "nvgrace-gpu-vfio-pci"])
def test_a_guest_is_seen_by_its_group_under_any_vfio_driver(host: ModelMachine, driver: str) -> None:
    host.load(driver, vfio="group")
    bind(host, driver)
    assert find_use(host).state == "free"
    with host.holding("/dev/vfio/7"):
        assert find_use(host) == GuestUse("used", "/dev/vfio/7 is open")
        with pytest.raises(Busy, match=f"{CARD} cannot be changed: a guest uses it"):
            refuse_if_guest_uses(host.machine, [FOLDER])


def test_a_guest_that_uses_another_function_of_the_group_counts(host: ModelMachine) -> None:
    host.load("nvme", "1b36:0010")
    host.pci("0000:01:00.1", "0x1b36", "0x0010", "0x010802", group=7)
    bind(host, "vfio-pci")
    with host.holding("/dev/vfio/7"):
        (use,) = find_guest_uses(host.machine, ["/sys/bus/pci/devices/0000:01:00.1"]).values()
    assert use.state == "used"


@pytest.mark.parametrize("driver", ["", "ice"])
def test_a_function_that_is_not_bound_to_vfio_is_free(host: ModelMachine, driver: str) -> None:
    if driver:
        host.load(driver)
        bind(host, driver)
    assert find_use(host) == GuestUse("free")


def test_a_parent_is_used_while_a_guest_uses_one_of_its_mediated_devices(host: ModelMachine) -> None:
    card = host.real(FOLDER).resolve()
    modelkinds.mdev_types(host, card, {"nvidia-223": 2})
    host.write(f"{FOLDER}/mdev_supported_types/nvidia-223/create", UUID)
    host.link(card / UUID / "iommu_group", host.sys / "kernel/iommu_groups/20")
    host.file(host.sys / "class/vfio/20/dev", "242:20\n")
    host.file(host.dev / "vfio/20", "")
    assert find_use(host).state == "free"
    with host.holding("/dev/vfio/20"):
        assert find_use(host) == GuestUse("used", "/dev/vfio/20 is open")


def test_an_agent_without_dev_vfio_does_not_know_whether_a_guest_uses_the_function(host: ModelMachine) -> None:
    bind(host, "vfio-pci")
    (host.dev / "vfio/7").unlink()
    assert find_use(host).state == "unknown" and "a container needs /dev/vfio" in find_use(host).reason
    with pytest.raises(Denied, match="not known whether a guest uses it, because the agent does not see /dev/vfio/7"):
        refuse_if_guest_uses(host.machine, [FOLDER])


def test_an_agent_that_may_not_open_the_group_does_not_know_either(
    host: ModelMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> bool:
        raise Denied(f"{path}: Permission denied")

    bind(host, "vfio-pci")
    monkeypatch.setattr(host.machine, "is_open", refuse)
    assert find_use(host) == GuestUse(
        "unknown", "the agent may not open /dev/vfio/7 (/dev/vfio/7: Permission denied): run it as root"
    )


def test_a_guest_with_iommufd_is_seen_by_its_open_node_where_the_kernel_has_no_groups(host: ModelMachine) -> None:
    host.load("qat_vfio_pci", vfio="cdev")
    bind(host, "qat_vfio_pci")
    assert find_use(host).state == "free"
    host.opened(70, "qemu-system-x86", "vfio/devices/vfio7")
    assert find_use(host) == GuestUse("used", "qemu-system-x86 has /dev/vfio/devices/vfio7 open")


def test_without_groups_a_function_is_unknown_while_the_agent_cannot_see_all_processes(host: ModelMachine) -> None:
    host.load("qat_vfio_pci", vfio="cdev")
    bind(host, "qat_vfio_pci")
    (host.proc / "self/ns/pid").unlink()
    assert find_use(host).state == "unknown" and "process namespace" in find_use(host).reason


def test_a_vfio_driver_of_which_the_kernel_shows_no_node_is_unknown(host: ModelMachine) -> None:
    host.load("vfio-other")
    bind(host, "vfio-other")
    assert find_use(host).state == "unknown" and "unbind it by hand" in find_use(host).reason


def test_a_refusal_stops_at_the_first_function_that_a_guest_uses(
    host: ModelMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind(host, "vfio-pci")
    other = "0000:02:00.0"
    host.pci(other, "0x15b3", "0x101e", "0x020000", group=8)
    host.write(f"/sys/bus/pci/devices/{other}/driver_override", "vfio-pci")
    host.write("/sys/bus/pci/drivers/vfio-pci/bind", other)
    asked: list[str] = []
    monkeypatch.setattr(host.tree_machine, "is_open", lambda node: asked.append(node) or node in host.held)
    with host.holding("/dev/vfio/7"), pytest.raises(Busy):
        refuse_if_guest_uses(host.machine, [FOLDER, f"/sys/bus/pci/devices/{other}"])
    assert asked == ["/dev/vfio/7"]


def test_the_model_removes_the_group_with_its_last_function_as_the_kernel_does(host: ModelMachine) -> None:
    host.load("xe_vfio_pci", vfio="group")
    bind(host, "xe_vfio_pci")
    with pytest.raises(OSError) as refused:
        host.write("/sys/bus/pci/drivers/vfio-pci/unbind", CARD)
    assert refused.value.errno == errno.ENODEV
    host.write("/sys/bus/pci/drivers/xe_vfio_pci/unbind", CARD)
    assert not (host.dev / "vfio/7").exists() and not (host.sys / "class/vfio/7").exists()
