"""Tests of what an IOMMU group decides: companion functions of a card, foreign functions, hosts without an IOMMU."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivers.base import Findings
from drivers.errors import Busy, Unsupported
from drivers.generic import GenericDriver
from drivers.generic.pci import PciBackend
from drivers.pci.functions import PciDriver
from drivers.pci.rules import PciMatch
from drivers.plan import Ask
from tests.drivers.plan_execution import PlanRunner
from tests.support import modelkinds
from tests.support.modelmachine import ModelMachine

GPU, AUDIO, USB, USB_C = (f"0000:01:00.{number}" for number in range(4))
OTHER_CARD, PORT = "0000:02:00.0", "0000:00:1c.0"
COMPANION_CLASSES = {AUDIO: "0x040300", USB: "0x0c0330", USB_C: "0x0c8000"}
ASK = Ask(key=f"pci:{GPU}")
INTEL, AMD = "vendor_id\t: GenuineIntel\nmodel\t: 85\n", "processor\t: 0\nvendor_id\t: AuthenticAMD\n"


def plug_gpu(host: ModelMachine, *, group: int | None = 7, companion_group: int | None = 7) -> Path:
    """Plug in a GPU whose sound, USB and USB-C functions are bound to drivers of the host; return its directory."""
    for name, ids in {"nouveau": "10de:1e30", "snd_hda_intel": "10de:10f7", "xhci_hcd": "10de:1ad6"}.items():
        host.load(name, ids)
    host.load("i2c_nvidia_gpu", "10de:1ad7")
    path = host.pci(GPU, "0x10de", "0x1e30", "0x030000", group=group)
    for (address, pci_class), device in zip(COMPANION_CLASSES.items(), ("10f7", "1ad6", "1ad7"), strict=True):
        host.pci(address, "0x10de", f"0x{device}", pci_class, group=companion_group)
    host.load("pcieport", "8086:a110")
    host.pci(PORT, "0x8086", "0xa110", "0x060400", group=group)
    return path


@pytest.fixture
def host(tmp_path: Path) -> ModelMachine:
    """Return a host without PCI functions."""
    return ModelMachine(tmp_path)


def make_runner(host: ModelMachine, **rule: object) -> PlanRunner:
    return PlanRunner(host, PciDriver(), rules=[{"vendor": "10de", "type": "GPU", **rule}])


def discover(work: PlanRunner) -> Findings:
    return work.driver.discover(work.host.machine, work.settings)


def bound_drivers(host: ModelMachine) -> list[str]:
    return [host.driver_of(address) for address in (GPU, AUDIO, USB, USB_C)]


def test_a_gpu_and_its_sound_and_usb_c_functions_in_one_group_are_bound_and_given_back_together(
    host: ModelMachine,
) -> None:
    plug_gpu(host)
    before = bound_drivers(host)
    assert before == ["nouveau", "snd_hda_intel", "xhci_hcd", "i2c_nvidia_gpu"]
    work = make_runner(host, bind="vfio-pci")
    (device,) = discover(work).devices
    assert f"bind {AUDIO} to vfio-pci" in device.to_install.splitlines()
    work.run_act("install", ASK)
    assert bound_drivers(host) == ["vfio-pci"] * 4 and host.driver_of(PORT) == "pcieport"
    (device,) = discover(work).devices
    assert device.to_install == "" and len(device.deployables[0].handles) == 1
    work.run_act("uninstall", Ask(ASK.key, first=work.first_values))
    assert bound_drivers(host) == before
    assert host.machine.read(f"/sys/bus/pci/devices/{AUDIO}/driver_override") == "(null)"


def test_a_rule_without_a_driver_for_the_card_unbinds_its_companions_too(host: ModelMachine) -> None:
    plug_gpu(host)
    make_runner(host, bind="").run_act("install", ASK)
    assert bound_drivers(host) == [""] * 4


def test_a_rule_that_leaves_the_driver_says_which_setting_lets_a_guest_get_the_card(host: ModelMachine) -> None:
    plug_gpu(host)
    work = make_runner(host)
    with pytest.raises(Busy, match=f'{AUDIO}, which is bound to the host\'s driver snd_hda_intel.*bind = "vfio-pci"'):
        work.run_act("install", ASK)
    assert discover(work).devices[0].to_install.startswith("cannot be done: ")


@pytest.mark.parametrize("driver", ["pci", "generic"])
def test_companion_functions_are_never_devices_of_their_own(host: ModelMachine, driver: str) -> None:
    plug_gpu(host)
    work = make_runner(host)
    if driver == "generic":
        section = {"kind": "pci", "match": [{"vendor": "10de"}], "type": "GPU"}
        work = PlanRunner(host, GenericDriver(), backends={"gpus": section})
    found = discover(work)
    assert [device.address for device in found.devices] == [GPU] and found.faults == ()


def test_a_rule_that_selects_only_a_companion_function_is_told_its_card(host: ModelMachine) -> None:
    plug_gpu(host)
    found = discover(make_runner(host, address=AUDIO))
    assert found.devices == ()
    assert [(fault.subject, f"select {GPU}" in fault.reason) for fault in found.faults] == [(AUDIO, True)]


def test_S3_a_card_is_not_offered_while_the_host_uses_a_companion_function_in_its_group(host: ModelMachine) -> None:
    plug_gpu(host)
    disk = host.block("sda", "8:0", (host.sys / "bus/pci/devices" / USB).resolve() / "usb1/1-1")
    host.mount("8:0", "/backup", str(disk))
    work = make_runner(host, bind="vfio-pci")
    found = discover(work)
    assert found.devices == ()
    assert [fault.subject for fault in found.faults] == [GPU] and "sda is mounted at /backup" in found.faults[0].reason
    with pytest.raises(Busy, match=f"{USB} cannot be changed: .*sda is mounted at /backup"):
        work.run_act("install", ASK)
    assert host.writes == []


def test_uninstall_is_refused_while_a_guest_uses_the_group(host: ModelMachine) -> None:
    plug_gpu(host)
    work = make_runner(host, bind="vfio-pci")
    work.run_act("install", ASK)
    with host.holding("/dev/vfio/7"), pytest.raises(Busy, match="a guest uses it"):
        work.run_act("uninstall", Ask(ASK.key, first=work.first_values))
    assert bound_drivers(host) == ["vfio-pci"] * 4


def test_companion_functions_in_groups_of_their_own_stay_with_the_host(host: ModelMachine) -> None:
    plug_gpu(host, companion_group=8)
    make_runner(host, bind="vfio-pci").run_act("install", ASK)
    assert bound_drivers(host) == ["vfio-pci", "snd_hda_intel", "xhci_hcd", "i2c_nvidia_gpu"]


def test_a_function_of_another_card_in_the_group_is_refused_with_slot_and_acs(host: ModelMachine) -> None:
    plug_gpu(host)
    host.load("ixgbe", "8086:1572")
    host.pci(OTHER_CARD, "0x8086", "0x1572", "0x020000", group=7)
    host.file(host.sys / "bus/pci/slots/4/address", "0000:02:00\n")
    work = make_runner(host, bind="vfio-pci")
    with pytest.raises(Busy, match=rf"{OTHER_CARD}.*driver ixgbe.*move .*{OTHER_CARD} \(slot 4\).* ACS "):
        work.run_act("install", ASK)
    assert host.writes == []
    host.write("/sys/bus/pci/drivers/ixgbe/unbind", OTHER_CARD)
    work.run_act("install", ASK)
    assert host.driver_of(GPU) == "vfio-pci"


def test_a_second_accelerator_on_the_same_card_is_no_companion(host: ModelMachine) -> None:
    host.load("nouveau", "10de:1e30")
    for address in (GPU, AUDIO):
        host.pci(address, "0x10de", "0x1e30", "0x030000", group=7)
    work = make_runner(host, bind="vfio-pci")
    assert [device.address for device in discover(work).devices] == [GPU, AUDIO]
    with pytest.raises(Busy, match=f"the card does not isolate its functions.*keep {AUDIO} unbound"):
        work.run_act("install", ASK)


def test_two_virtual_functions_in_one_group_do_not_block_each_other(host: ModelMachine) -> None:
    host.load("nvme", "1b36:0010")
    host.pci(GPU, "0x1b36", "0x0010", "0x010802", group=7, vfs=2)
    host.write(f"/sys/bus/pci/devices/{GPU}/sriov_numvfs", "2")
    for address in (AUDIO, USB):
        path = (host.sys / "bus/pci/devices" / address).resolve()
        host.relink(path / "iommu_group", host.sys / "kernel/iommu_groups/9")
        host.link(host.sys / "kernel/iommu_groups/9/devices" / address, path)
    make_runner(host, vendor="1b36", bind="vfio-pci").run_act("install", ASK)
    assert [host.driver_of(address) for address in (GPU, AUDIO, USB)] == ["nvme", "vfio-pci", "vfio-pci"]


@pytest.mark.parametrize("pci_class", ["0x0c0330", "0x040300", "0x060000"])
def test_functions_beside_a_usb_sound_or_bridge_function_are_no_companions(host: ModelMachine, pci_class: str) -> None:
    host.pci(GPU, "0x10de", "0x1e30", pci_class, group=7)
    host.pci(AUDIO, "0x10de", "0x10f7", "0x040300", group=7)
    assert AUDIO in {device.address for device in discover(make_runner(host)).devices}


@pytest.mark.parametrize(
    ("cpu", "command_line", "tables", "says"),
    [
        (INTEL, "quiet", ("DMAR",), "add intel_iommu=on to the kernel's command line"),
        (INTEL, "quiet", (), "add intel_iommu=on to the kernel's command line, and switch VT-d on in the firmware"),
        (INTEL, "quiet intel_iommu=on", (), "switch VT-d on in the firmware"),
        (INTEL, "intel_iommu=off", ("DMAR",), "remove intel_iommu=off from the kernel's command line"),
        (AMD, "quiet", (), "switch the IOMMU (AMD-Vi) on in the firmware; the kernel needs no parameter"),
        (AMD, "amd_iommu=off quiet", (), "remove amd_iommu=off from the kernel's command line"),
        (f"{AMD}flags\t: fpu hypervisor\n", "", (), "a virtual machine: its hypervisor has to give it a virtual IOMMU"),
        ("CPU implementer\t: 0x41\n", "quiet", (), "switch it on in the firmware"),
        ("", "", (), "switch it on in the firmware"),
    ],
    ids=["intel", "intel-firmware", "intel-on", "intel-off", "amd", "amd-off", "virtual", "arm", "unknown"],
)
def test_without_an_iommu_a_card_is_a_fault_that_names_the_missing_setting(
    host: ModelMachine, cpu: str, command_line: str, tables: tuple[str, ...], says: str
) -> None:
    plug_gpu(host, group=None, companion_group=None)
    if cpu:
        host.file(host.proc / "cpuinfo", cpu)
        host.file(host.proc / "cmdline", f"{command_line}\n")
    for name in tables:
        host.file(host.sys / "firmware/acpi/tables" / name, "")
    work = make_runner(host, bind="vfio-pci")
    found = discover(work)
    assert found.devices == ()
    ((subject, reason),) = [(fault.subject, fault.reason) for fault in found.faults]
    assert subject == GPU and reason.startswith("no guest can get it: no IOMMU: ") and says in reason
    with pytest.raises(Unsupported) as caught:
        work.run_act("install", ASK)
    assert says in str(caught.value) and host.writes == []


def test_a_function_that_the_iommu_does_not_cover_is_a_fault_too(host: ModelMachine) -> None:
    plug_gpu(host, group=None)
    assert "the IOMMU does not cover it" in discover(make_runner(host)).faults[0].reason


def test_a_group_that_vfio_made_up_without_an_iommu_does_not_count(host: ModelMachine) -> None:
    plug_gpu(host)
    host.file(host.sys / "kernel/iommu_groups/7/name", "vfio-noiommu\n")
    work = make_runner(host)
    assert discover(work).devices == ()
    assert any("no IOMMU" in lack for lack in work.driver.probe(host.machine, work.settings))
    backend = PciBackend(match=[PciMatch(vendor="10de")])
    (passthrough, *_) = backend.list_services(host.machine, ())
    assert (passthrough.name, passthrough.reason.partition(":")[0]) == ("passthrough", "no IOMMU")


@pytest.mark.parametrize("kind", ["mdev", "accel-class", "firmware"])
def test_mediated_devices_device_nodes_and_firmware_need_no_iommu(host: ModelMachine, kind: str) -> None:
    gpu = plug_gpu(host, group=None, companion_group=None)
    modelkinds.mdev_types(host, gpu, {"nvidia-223": 2})
    modelkinds.uploader(host, "update0", below=gpu / "flash")
    host.file(gpu / "accel/accel0/dev", "261:0\n")
    host.link(host.sys / "class/accel/accel0", gpu / "accel/accel0")
    host.file(host.dev / "accel/accel0", "")
    section = {"kind": kind, "match": [{"vendor": "10de"}], "type": "GPU"}
    if kind == "mdev":
        section["desired"] = {"mdev_type": "nvidia-223"}
    found = discover(PlanRunner(host, GenericDriver(), backends={"gpus": section}))
    assert ([device.address for device in found.devices], found.faults) == ([GPU], ())
