"""Tests of the generic driver on a simulated /sys that answers like the kernel: each kind, its services, its limits."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drivers.base import Findings
from drivers.errors import Busy, DriverError, Failed, Gone, Invalid, Unsupported
from drivers.generic import GenericDriver
from drivers.generic.backend import BackendBase
from drivers.generic.backend_calls import BackendCaller
from drivers.generic.driver import discover_backend
from drivers.inventory import Device, DriverReport, Service
from drivers.machine import Machine
from drivers.pci.ownership import resolve_conflicts
from drivers.plan import Ask, Image
from tests.drivers.pci.test_pci import make_config_space
from tests.drivers.plan_execution import PlanRunner
from tests.support import modelkinds
from tests.support.modelmachine import ModelMachine

DISK, GPU, NPU = "0000:01:00.0", "0000:02:00.0", "0000:03:00.0"
UUIDS = [f"83b8f4f2-509f-382f-3c1e-e6bfe0fa100{n}" for n in range(4)]
ALICE, BOB = (f"{n}0000000-0000-4000-8000-000000000000" for n in "ab")
Sections = dict[str, dict[str, object]]

PCI = {"kind": "pci", "match": [{"vendor": "1b36"}], "labels": {"rack": "r1"}}
MDEV = {"kind": "mdev", "match": [{"vendor": "10de"}], "desired": {"mdev_type": "nvidia-223"}}
ACCEL = {"kind": "accel-class", "match": [{"vendor": "1da3"}], "type": "AICHIP"}
FIRMWARE = {"kind": "firmware", "match": [{"vendor": "8086"}], "type": "FPGA"}
REMOTE = {
    "kind": "remote",
    "devices": [{"name": "far", "type": "FPGA", "vendor": "10ee", "model": "U250"}],
    "status_file": "/state/far.json",
}


@pytest.fixture
def host(tmp_path: Path) -> ModelMachine:
    """Return a host with an SR-IOV disk controller, a GPU with mediated devices, an NPU with a node, an FPGA card."""
    host = ModelMachine(tmp_path)
    host.load("nvme", "1b36:0010")
    host.pci(DISK, "0x1b36", "0x0010", "0x010802", group=7, vfs=4, reset_method="flr bus")
    gpu = host.pci(GPU, "0x10de", "0x2235", "0x030200", group=8)
    modelkinds.mdev_types(host, gpu, {"nvidia-222": 4, "nvidia-223": 2}, exclusive=True)
    npu = host.pci(NPU, "0x1da3", "0x1020", "0x120000", group=9)
    host.file(npu / "accel/accel0/dev", "261:0\n")
    host.link(host.sys / "class/accel/accel0", npu / "accel/accel0")
    host.file(host.dev / "accel/accel0", "")
    fpga = host.pci("0000:04:00.0", "0x8086", "0x0b30", "0x120000", group=10)
    modelkinds.uploader(host, "secure-update0", below=fpga / "dfl-fme.0")
    return host


def make_runner(host: ModelMachine, **backends: dict[str, object]) -> PlanRunner:
    return PlanRunner(host, GenericDriver(), backends=backends)


def discover_findings(work: PlanRunner) -> Findings:
    return work.driver.discover(work.host.machine, work.settings)


def test_a_disabled_backend_is_checked_and_not_used(host: ModelMachine) -> None:
    driver = GenericDriver()
    found = driver.discover(host.machine, {"backends": {"disks": PCI, "gpus": MDEV | {"enabled": False}}})
    assert [one.name for one in found.backends] == ["disks"]
    assert {one.backend for one in found.devices} == {"disks"} and not found.faults
    with pytest.raises(Invalid, match="backend gpus of generic_driver is not usable"):
        driver.discover(host.machine, {"backends": {"gpus": MDEV | {"enabled": False, "match": 7}}})


def only_device(work: PlanRunner) -> Device:
    (device,) = discover_findings(work).devices
    return device


def services_by_name(work: PlanRunner) -> dict[str, Service]:
    (backend,) = discover_findings(work).backends
    assert not backend.error
    return {service.name: service for service in backend.services}


def handle_infos(device: Device) -> list[dict[str, str]]:
    return [json.loads(handle.info) for part in device.deployables for handle in part.handles]


def attach_ask(work: PlanRunner, number: int, consumer: str = ALICE) -> Ask:
    device = only_device(work)
    return Ask(device.key, handle=device.deployables[0].handles[0], uuid=UUIDS[number], consumer=consumer)


def test_a_pci_backend_makes_and_removes_virtual_functions(host: ModelMachine) -> None:
    work = make_runner(host, disks=PCI)
    device = only_device(work)
    assert (device.backend, device.changeable, device.sized_by) == ("disks", "bind vfs", "vfs")
    found = services_by_name(work)
    assert found["sriov"].limits == {"total_vfs": "4"} and found["reset"].limits == {"methods": "bus flr"}
    assert [name for name, service in found.items() if service.state == "ready"] == [
        "passthrough",
        "sriov",
        "reset",
        "health",
    ]
    assert (
        "no sensor and count no errors" in found["stats"].reason and "cannot load firmware" in found["program"].reason
    )
    work.run_act("partition", Ask(device.key, layout={"vfs": "3", "bind": "vfio-pci"}))
    assert len(handle_infos(only_device(work))) == 3
    work.run_act("partition", Ask(device.key, layout={"vfs": "1", "bind": "vfio-pci"}))
    assert len(handle_infos(only_device(work))) == 1
    work.run_act("uninstall", Ask(device.key, first=work.first_values))
    assert handle_infos(only_device(work)) == [{"bus": "01", "device": "00", "domain": "0000", "function": "0"}]


SOC_NPU = "platform/fdab0000.npu"


def make_soc_npu(host: ModelMachine) -> None:
    """Add the NPU of a system on a chip, which is a platform device with a node in /dev/accel."""
    npu = host.sys / "devices" / SOC_NPU
    host.file(npu / "of_node/compatible", "rockchip,rk3588-rknn-core\0")
    (host.sys / "bus/platform").mkdir(parents=True)
    host.link(npu / "subsystem", host.sys / "bus/platform")
    host.link(npu / "driver", host.sys / "bus/platform/drivers/rocket")
    host.file(npu / "accel/accel1/dev", "261:1\n")
    host.link(npu / "accel/accel1/subsystem", host.sys / "class/accel")
    host.link(host.sys / "class/accel/accel1", npu / "accel/accel1")
    host.file(host.dev / "accel/accel1", "c261:1")


def test_an_npu_that_is_not_on_pci_is_offered_and_attached_by_its_node(host: ModelMachine) -> None:
    make_soc_npu(host)
    work = make_runner(
        host, npus={"kind": "accel-class", "type": "AICHIP", "off_pci": [{"driver": "rocket", "name": "*.npu"}]}
    )
    device = only_device(work)
    assert (device.key, device.address) == (f"sys:{SOC_NPU}", None)
    assert (device.vendor, device.model, device.kernel_driver) == ("rockchip", "rk3588-rknn-core", "rocket")
    assert handle_infos(device) == [{"path": "/dev/accel/accel1", "permissions": "rw"}]
    assert work.run_act("attach", Ask(device.key, handle=device.deployables[0].handles[0])) == 0
    assert work.driver.health(host.machine, work.settings, Ask(device.key)).status == "unknown"
    (host.dev / "accel/accel1").unlink()
    with pytest.raises(Gone):
        work.run_act("attach", Ask(device.key, handle=device.deployables[0].handles[0]))
    assert make_runner(host, npus=ACCEL).driver.discover(host.machine, {"backends": {"npus": ACCEL}}).devices


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({}, "it selects nothing"),
        ({"off_pci": [{"driver": "rocket"}]}, "set `type`"),
        ({"off_pci": [{}], "type": "AICHIP"}, "selects every device"),
    ],
)
def test_an_accel_backend_that_selects_nothing_or_everything_is_refused(
    host: ModelMachine, section: dict[str, object], says: str
) -> None:
    with pytest.raises(Invalid, match=says):
        discover_findings(make_runner(host, npus={"kind": "accel-class", **section}))


def test_install_makes_the_desired_state_of_a_pci_backend(host: ModelMachine) -> None:
    work = make_runner(host, disks=PCI | {"desired": {"vfs": 2, "bind": "vfio-pci"}})
    assert "make 2 virtual functions" in only_device(work).to_install
    work.run_act("install", Ask(only_device(work).key))
    assert len(handle_infos(only_device(work))) == 2 and only_device(work).to_install == ""


def test_a_mediated_device_is_created_by_attach_and_removed_by_detach_of_its_consumer(host: ModelMachine) -> None:
    work = make_runner(host, vgpus=MDEV)
    device = only_device(work)
    assert {attribute.key: attribute.value for attribute in device.deployables[0].attributes}["rc"] == "VGPU"
    assert handle_infos(device)[1] == {
        "asked_type": "nvidia-223",
        **{"bus": "02", "device": "00", "domain": "0000", "function": "0"},
        "vgpu_mark": "nvidia-223_1",
    }
    limits = {"type": "nvidia-223", "types": "nvidia-222 nvidia-223", "available": "2"}
    assert services_by_name(work)["mdev"].limits == limits
    first = attach_ask(work, 0)
    assert [work.run_act("attach", first) for _ in range(2)] == [1, 0]
    assert host.machine.link(f"/sys/bus/mdev/devices/{UUIDS[0]}/mdev_type") == "nvidia-223"
    assert handle_infos(only_device(work)) == handle_infos(device)
    with pytest.raises(Busy, match=f"belongs to {ALICE}"):
        work.plan("attach", attach_ask(work, 0, BOB))
    assert not work.plan("detach", attach_ask(work, 0, BOB)).steps
    assert [work.run_act("detach", first) for _ in range(2)] == [1, 0]
    assert not host.machine.names("/sys/bus/mdev/devices") and not host.machine.names("/state/mdev")


def test_a_layout_sets_how_many_mediated_devices_a_card_offers(host: ModelMachine) -> None:
    work = make_runner(host, vgpus=MDEV)
    device = only_device(work)
    assert (device.changeable, device.sized_by) == ("mdevs", "mdevs") and "partition" in device.acts.split()
    for wanted in ("1", "0", "2"):
        assert [work.run_act("partition", Ask(device.key, layout={"mdevs": wanted})) for _ in range(2)] == [1, 0]
        for runner in (work, make_runner(host, vgpus=MDEV)):  # the second one is started later
            assert len(handle_infos(only_device(runner))) == only_device(runner).deployables[0].num_accelerators
            assert len(handle_infos(only_device(runner))) == int(wanted)
    other_type = make_runner(host, vgpus=MDEV | {"desired": {"mdev_type": "nvidia-222"}})
    assert len(handle_infos(only_device(other_type))) == 4


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ({"mdevs": "3"}, "has room for 2 mediated devices of type nvidia-223, not for 3"),
        ({"mdevs": "-1"}, "one key: mdevs"),
        ({"mdevs": "1", "bind": "vfio-pci"}, "one key: mdevs"),
        ({}, "one key: mdevs"),
    ],
)
def test_an_unusable_layout_of_a_card_with_mediated_devices_is_refused(
    host: ModelMachine, layout: dict[str, str], says: str
) -> None:
    work = make_runner(host, vgpus=MDEV)
    with pytest.raises(Invalid, match=says):
        work.plan("partition", Ask(only_device(work).key, layout=layout))


def test_S1_a_layout_keeps_the_mediated_devices_that_are_attached(host: ModelMachine) -> None:
    work = make_runner(host, vgpus=MDEV)
    work.run_act("attach", attach_ask(work, 0))
    for fewer in ("0", "1"):
        with pytest.raises(Busy, match="are attached: detach them first"):
            work.plan("partition", Ask(only_device(work).key, layout={"mdevs": fewer}))


def test_a_damaged_number_of_units_is_named_as_the_error_of_its_backend(host: ModelMachine) -> None:
    host.write(f"/state/mdev_units/{GPU}-nvidia-223", "x")
    (backend,) = discover_findings(make_runner(host, vgpus=MDEV)).backends
    assert "must hold a number of units with a card, not 'x'" in backend.error


def offer_units(work: PlanRunner, number: int) -> None:
    work.run_act("partition", Ask(only_device(work).key, layout={"mdevs": str(number)}))


def test_a_new_card_in_the_slot_of_another_one_does_not_get_its_number_of_units(host: ModelMachine) -> None:
    work = make_runner(host, vgpus=MDEV)
    folder = host.sys / "bus/pci/devices" / GPU

    def count_units() -> int:
        return len(handle_infos(only_device(work)))

    host.file(folder / "subsystem_device", "0x1607\n")
    offer_units(work, 1)
    assert count_units() == 1
    host.file(folder / "subsystem_device", "0x1608\n")  # another card of the same chip, without a serial number
    assert count_units() == 2
    offer_units(work, 0)
    host.file(folder / "config", make_config_space(b"\x01" * 8))  # the serial number could not be read before
    assert count_units() == 0
    offer_units(work, 1)
    host.file(folder / "config", make_config_space(b"\x02" * 8))
    assert count_units() == 2
    host.file(folder / "config", make_config_space(b"\x01" * 8))
    assert count_units() == 1
    host.file(folder / "config", b"")
    assert count_units() == 1, "a serial number that cannot be read is no reason to doubt that it is the same card"


def test_more_units_than_the_backend_hands_out_are_refused(host: ModelMachine) -> None:
    work = make_runner(host, vgpus=MDEV | {"limits": {"max_handles": 1}})
    offer_units(work, 0)
    key = only_device(work).key
    with pytest.raises(Invalid, match=r"at most 1 handles \(its limits.max_handles\), not 2$"):
        work.plan("partition", Ask(key, layout={"mdevs": "2"}))
    offer_units(work, 1)
    other = host.pci("0000:05:00.0", "0x10de", "0x2235", "0x030200", group=11)
    modelkinds.mdev_types(host, other, {"nvidia-223": 1})
    offered = next(device for device in discover_findings(work).devices if device.address == GPU)
    offer = Ask(offered.key, address=offered.address or "", layout={"mdevs": "0"})
    work.run_act("partition", offer)
    with pytest.raises(Invalid, match="not 1 beside the 1 of its other devices"):
        work.plan("partition", Ask(offered.key, address=offered.address or "", layout={"mdevs": "1"}))


def test_units_that_are_all_offered_can_be_added_only_after_some_were_removed(host: ModelMachine) -> None:
    work = make_runner(host, vgpus=MDEV)
    with pytest.raises(Invalid, match="not for 3; it offers all of them, so units can be added only after some"):
        work.plan("partition", Ask(only_device(work).key, layout={"mdevs": "3"}))
    offer_units(work, 1)
    offer_units(work, 2)


def test_nova_finds_the_device_by_the_address_in_the_attach_info_and_creates_its_asked_type(host: ModelMachine) -> None:
    (info, _) = handle_infos(only_device(make_runner(host, vgpus=MDEV)))
    node_device = "_".join(["mdev", UUIDS[0], *(info[name] for name in ("domain", "bus", "device", "function"))])
    assert node_device == f"mdev_{UUIDS[0]}_0000_02_00_0" and info["asked_type"] == "nvidia-223"


def test_mediated_devices_made_by_others_reduce_the_handles_and_are_not_offered(host: ModelMachine) -> None:
    work = make_runner(host, vgpus=MDEV)
    host.write(f"/sys/bus/pci/devices/{GPU}/mdev_supported_types/nvidia-223/create", UUIDS[3])
    assert len(handle_infos(only_device(work))) == 1
    work.run_act("attach", attach_ask(work, 0))
    with pytest.raises(Busy, match="no room"):
        work.plan("attach", attach_ask(work, 1))


@pytest.mark.parametrize(("backend", "address"), [(PCI, DISK), (ACCEL, NPU)])
def test_a_handle_of_a_pulled_card_is_detached_also_by_a_driver_that_was_started_later(
    host: ModelMachine, backend: dict[str, object], address: str
) -> None:
    work = make_runner(host, one=backend)
    device = only_device(work)
    ask = Ask(device.key, handle=device.deployables[0].handles[0], uuid=UUIDS[0])
    assert not work.plan("detach", ask).steps
    host.unplug(address)
    for runner in (work, make_runner(host, one=backend), make_runner(host)):
        assert not runner.plan("detach", ask).steps


def test_detach_is_refused_while_a_guest_has_the_mediated_device_open(host: ModelMachine) -> None:
    work = make_runner(host, vgpus=MDEV)
    work.run_act("attach", attach_ask(work, 0))
    host.link(host.real(f"/sys/bus/pci/devices/{GPU}/{UUIDS[0]}/iommu_group"), host.sys / "kernel/iommu_groups/20")
    host.file(host.sys / "class/vfio/20/dev", "242:20\n")
    host.file(host.dev / "vfio/20", "")
    with host.holding("/dev/vfio/20"), pytest.raises(Busy, match="a guest uses it"):
        work.plan("detach", attach_ask(work, 0))


def test_a_detach_removes_what_nova_has_defined_under_the_handles_uuid_and_nothing_else(host: ModelMachine) -> None:
    work = make_runner(host, vgpus=MDEV)
    work.run_act("attach", attach_ask(work, 0))
    ours, stranger = (host.etc / "mdevctl.d" / GPU / uuid for uuid in UUIDS[:2])
    for definition in (ours, stranger):
        host.file(definition, '{"mdev_type": "nvidia-223", "start": "auto"}')
    plan = work.plan("detach", attach_ask(work, 0))
    assert [step.does for step in plan.steps] == [
        f"remove the definition of {UUIDS[0]}",
        f"remove the mediated device {UUIDS[0]}",
        f"remove the note of who has {UUIDS[0]}",
    ]
    work.run_act("detach", attach_ask(work, 0))
    assert not ours.exists() and stranger.exists()
    host.file(ours, "{}")  # It was not started.
    assert work.run_act("detach", attach_ask(work, 0)) == 1
    assert not ours.exists() and not work.plan("detach", attach_ask(work, 0)).steps


def test_a_detach_without_the_card_removes_the_definition_and_the_note(host: ModelMachine) -> None:
    work = make_runner(host, vgpus=MDEV)
    ask = attach_ask(work, 0)
    work.run_act("attach", ask)
    definition = host.etc / "mdevctl.d" / GPU / UUIDS[0]
    host.file(definition, "{}")
    host.unplug(GPU)
    later = make_runner(host, vgpus=MDEV)
    assert [step.does for step in later.plan("detach", ask).steps] == [
        f"remove the definition of {UUIDS[0]}",
        f"remove the note of who has {UUIDS[0]}",
    ]
    assert later.run_act("detach", ask) == 1
    assert not definition.exists() and not host.machine.names("/state/mdev")
    for unusable in ("../x", ""):
        with pytest.raises(Invalid):
            later.plan("detach", Ask(ask.key, handle=ask.handle, uuid=unusable))


def test_attach_takes_over_an_idle_device_that_exists_under_the_handles_uuid(host: ModelMachine) -> None:
    work = make_runner(host, vgpus=MDEV)
    wanted = attach_ask(work, 0)
    host.write(f"/sys/bus/pci/devices/{GPU}/mdev_supported_types/nvidia-223/create", UUIDS[0])
    host.link(host.real(f"/sys/bus/pci/devices/{GPU}/{UUIDS[0]}/iommu_group"), host.sys / "kernel/iommu_groups/20")
    host.file(host.sys / "class/vfio/20/dev", "242:20\n")
    host.file(host.dev / "vfio/20", "")
    with host.holding("/dev/vfio/20"), pytest.raises(Busy, match="a guest uses it"):
        work.plan("attach", wanted)
    assert work.run_act("attach", wanted) == 1
    assert host.machine.read(f"/state/mdev/{UUIDS[0]}") == ALICE
    assert len(handle_infos(only_device(work))) == 2, "it counts as ours"


def test_definitions_that_cannot_be_read_are_a_fault_and_prevent_a_detach(host: ModelMachine) -> None:
    work = make_runner(host, vgpus=MDEV)
    work.run_act("attach", attach_ask(work, 0))
    assert discover_findings(work).faults == (), "a host without libvirt has no definitions"
    host.file(host.etc / "mdevctl.d", "no directory")
    (fault,) = discover_findings(work).faults
    assert "/etc/mdevctl.d: Not a directory: let the agent read it" in fault.reason
    with pytest.raises(DriverError):
        work.plan("detach", attach_ask(work, 0))


def test_a_card_without_the_desired_mdev_type_is_a_fault_that_names_its_types(host: ModelMachine) -> None:
    work = make_runner(host, vgpus=MDEV | {"desired": {"mdev_type": "nvidia-9"}})
    found = discover_findings(work)
    assert not found.devices and {service.state for service in found.backends[0].services} == {"unavailable"}
    assert [fault.reason for fault in found.faults] == ["it has no mdev type nvidia-9; it has nvidia-222, nvidia-223"]


def test_an_accel_class_device_is_its_device_node_and_attach_needs_no_steps(host: ModelMachine) -> None:
    work = make_runner(host, npus=ACCEL | {"desired": {"permissions": "r"}})
    device = only_device(work)
    assert device.address == NPU and device.deployables[0].handles[0].attach_type == "DEV"
    assert handle_infos(device) == [{"path": "/dev/accel/accel0", "permissions": "r"}]
    assert "rc" not in {attribute.key for attribute in device.deployables[0].attributes}
    assert "not offered to Nova" in services_by_name(work)["passthrough"].reason
    wanted = attach_ask(work, 0)
    assert work.run_act("attach", wanted) == 0 and work.run_act("detach", wanted) == 0
    (host.dev / "accel/accel0").unlink()
    with pytest.raises(Gone, match="no such node"):
        work.plan("attach", wanted)
    assert "no node" in discover_findings(work).faults[0].reason


def test_a_firmware_backend_plans_an_upload_by_the_kernels_firmware_class(host: ModelMachine, tmp_path: Path) -> None:
    work = make_runner(host, cards=FIRMWARE)
    device = only_device(work)
    assert (device.acts, handle_infos(device)) == ("health program", [])
    assert services_by_name(work)["firmware"].limits == {"loaders": "secure-update0"}
    (tmp_path / "image").write_bytes(b"\xff\x00firmware\n")
    image = Image(str(tmp_path / "image"), 11, "0" * 64, "shell")
    plan = work.plan("program", Ask(device.key, image=image))
    (step,) = plan.steps
    assert plan.lifetime == "flash", "a reboot does not end it"
    assert step.does == "load shell into 0000:04:00.0" and step.image == "firmware"
    asyncio.run(host.hand().upload(step.write.path, step.image, image, 5, lambda percent: None))
    assert (host.real(step.write.path) / "data").read_bytes() == b"\xff\x00firmware\n"
    with pytest.raises(Unsupported, match="cannot reset"):
        work.plan("reset", Ask(device.key))


def test_program_is_refused_while_a_guest_uses_the_device(host: ModelMachine) -> None:
    work = make_runner(host, cards=FIRMWARE | {"kind": "pci", "desired": {"bind": "vfio-pci"}})
    device = only_device(work)
    assert "program" in device.acts.split() and services_by_name(work)["firmware"].state == "ready"
    work.run_act("install", Ask(device.key))
    with host.holding("/dev/vfio/10"), pytest.raises(Busy, match="a guest uses it"):
        work.plan("program", Ask(device.key))


def test_a_remote_device_has_the_status_and_load_of_its_status_file(host: ModelMachine) -> None:
    work = make_runner(host, far=REMOTE)
    assert (only_device(work).key, only_device(work).status) == ("remote:far", "unknown")
    assert "no status file" in services_by_name(work)["health"].reason
    host.file(host.state / "far.json", '{"far": {"status": "degraded", "reason": "hot"}}')
    assert (only_device(work).status, only_device(work).status_reason) == ("degraded", "hot")
    assert work.driver.health(host.machine, work.settings, Ask("remote:far")).reason == "hot"
    assert work.driver.stats(host.machine, work.settings, Ask("remote:far")) == ()
    host.file(host.state / "far.json", '{"far": {"status": "ok", "load": {"utilization_percent": 12.5}}}')
    (sample,) = work.driver.stats(host.machine, work.settings, Ask("remote:far", backend="far"))
    assert (sample.key, sample.metric, sample.value) == ("remote:far", "utilization_percent", 12.5)
    with pytest.raises(Unsupported, match="cannot partition"):
        work.plan("partition", Ask("remote:far", layout={"vfs": "1"}))
    assert not host.writes


def test_devices_and_handles_over_the_limits_are_left_out_with_a_fault(host: ModelMachine) -> None:
    host.pci("0000:11:00.0", "0x1b36", "0x0010", "0x010802", group=11, vfs=4)
    work = make_runner(host, disks=PCI | {"limits": {"max_devices": 1, "max_handles": 2}})
    key = only_device(work).key
    with pytest.raises(Invalid, match="at most 2"):
        work.plan("partition", Ask(key, layout={"vfs": "3"}))
    for number in range(3):
        host.write(f"/sys/bus/pci/devices/{DISK}/sriov_numvfs", "0" if number == 1 else "3")
    found = discover_findings(work)
    assert len(handle_infos(found.devices[0])) == found.devices[0].deployables[0].num_accelerators == 2
    assert [(fault.subject, fault.reason.partition(":")[0]) for fault in found.faults] == [
        ("0000:11:00.0", "left out"),
        (f"node-1_{DISK}", "1 of its handles are left out"),
    ]
    host.pci("0000:00:01.0", "0x1b36", "0x0010", "0x010802", group=12)
    assert only_device(work).key == key, "what comes later takes no known device's place"


@pytest.fixture
def hanging(host: ModelMachine) -> Iterator[Path]:
    """Return a status file that is a FIFO: opening it blocks until another process or thread opens it to write."""
    path = host.state / "stuck"
    host.state.mkdir(exist_ok=True)
    os.mkfifo(path)
    yield path
    os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


@pytest.mark.slow
def test_a_hanging_and_a_failing_backend_do_not_affect_a_third_one(host: ModelMachine, hanging: Path) -> None:
    host.file(host.state / "far.json", "no JSON")
    stuck = REMOTE | {"status_file": "/state/stuck", "devices": [{**REMOTE["devices"][0], "name": "stuck"}]}
    work = make_runner(host, stuck=stuck, rubbish=REMOTE, disks=PCI)
    host.machine.deadline_s = 2.0
    for _ in range(2):
        found = discover_findings(work)
        errors = {backend.name: backend.error for backend in found.backends}
        assert (
            "its share of CYBORG_DRIVER_DEADLINE_S" in errors["stuck"] and "far.json is not usable" in errors["rubbish"]
        )
        assert errors["disks"] == "" and [device.backend for device in found.devices] == ["disks"]
    work.run_act("partition", Ask(found.devices[0].key, layout={"vfs": "2"}))
    (fault,) = found.faults
    assert fault.subject == "backend stuck" and fault.reason == errors["stuck"]
    with pytest.raises(Failed, match=r"no backend .* that answers has remote:stuck; backend stuck: it did not"):
        work.plan("install", Ask("remote:stuck"))


@pytest.mark.slow
def test_health_load_and_plans_of_a_hung_backend_are_refused_at_once_and_the_others_are_answered(
    host: ModelMachine, hanging: Path
) -> None:
    work = make_runner(host, stuck=REMOTE | {"status_file": "/state/stuck"}, disks=PCI)
    disk = Ask(only_device(make_runner(host, disks=PCI)).key, backend="disks")
    stuck = Ask("remote:far", backend="stuck")
    host.machine.deadline_s = 1.0
    with pytest.raises(Failed, match=r"backend stuck: it did not answer the question health .* again before 20"):
        work.driver.health(host.machine, work.settings, stuck)
    assert work.driver.health(host.machine, work.settings, disk)
    began, threads = time.monotonic(), threading.active_count()
    for _ in range(3):
        with pytest.raises(Failed, match="backend stuck: it did not answer the question health"):
            work.driver.health(host.machine, work.settings, stuck)
        with pytest.raises(Failed, match="backend stuck: it did not answer the question health"):
            work.plan("install", stuck)
        with pytest.raises(Failed, match="backend stuck: it did not answer the question health"):
            work.driver.stats(host.machine, work.settings, stuck)
    assert time.monotonic() - began < 3, "each of them waited"
    assert threading.active_count() == threads, "each of them has a thread"
    assert work.plan("install", disk).steps == ()
    reasons = work.driver.probe(host.machine, work.settings)
    assert [reason for reason in reasons if reason.startswith("stuck: it did not answer the question health")]


class BrokenKind(BackendBase, tag="broken"):
    """A kind of backend whose discovery calls `fails`."""

    kind = "pci"
    fails: Callable[[], object]

    def discover(self, machine: Machine) -> Findings:
        return self.fails()  # type: ignore[return-value]


def raise_error(error: Exception) -> object:
    raise error


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        (lambda: raise_error(KeyError("x")), "it raised KeyError: 'x'"),
        (lambda: raise_error(Failed("")), "it gave no reason"),
        (lambda: None, "it raised AttributeError"),
        (lambda: Findings((1,)), "it raised AttributeError"),  # type: ignore[arg-type]
    ],
)
def test_any_exception_of_a_kind_becomes_the_error_of_its_backend(
    host: ModelMachine, fails: Callable[[], object], says: str
) -> None:
    caller, backend = BackendCaller("mine"), BrokenKind(fails=fails)
    with pytest.raises(DriverError, match=says):
        caller.call("discover", lambda: discover_backend("mine", backend, host.machine, frozenset()), 5.0)


def test_a_card_that_two_backends_match_belongs_to_the_first(host: ModelMachine) -> None:
    found = discover_findings(make_runner(host, disks=PCI, all=PCI | {"match": [{"class": "0108*"}, {"class": "03*"}]}))
    (settled,) = resolve_conflicts([DriverReport("generic_driver", "", found.devices, found.faults, found.backends)])
    assert {device.address: device.backend for device in settled.devices} == {DISK: "disks", GPU: "all"}
    assert [fault.reason for fault in settled.faults] == [f"{DISK} already belongs to generic_driver:disks"]


def test_an_act_is_planned_by_the_backend_that_the_ask_names(host: ModelMachine) -> None:
    work = make_runner(host, few=PCI | {"limits": {"max_handles": 1}}, many=PCI)
    key = discover_findings(work).devices[0].key
    assert work.plan("partition", Ask(key, layout={"vfs": "3"}, backend="many")).steps
    with pytest.raises(Invalid, match="at most 1"):
        work.plan("partition", Ask(key, layout={"vfs": "3"}, backend="few"))


def test_the_load_of_a_device_of_a_renamed_backend_is_unread_until_the_next_scan(host: ModelMachine) -> None:
    work = make_runner(host, near=REMOTE)
    ask = Ask("remote:far", backend="old")
    with pytest.raises(Busy, match="until this host is scanned again"):
        work.driver.stats(host.machine, work.settings, ask)
    only_device(work)
    assert work.driver.stats(host.machine, work.settings, ask) == ()


def test_a_fresh_process_finds_the_backend_of_a_device(host: ModelMachine) -> None:
    key = only_device(make_runner(host, vgpus=MDEV)).key
    assert make_runner(host, disks=PCI, vgpus=MDEV).driver.health(host.machine, {"backends": {"v": MDEV}}, Ask(key))


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"kind": "gpu"}, "kind is one of pci, mdev, accel-class, firmware, remote"),
        ({"match": [{"vendor": "1b36"}]}, "kind is one of"),
        (PCI | {"vfs": 4}, "unknown field `vfs`"),
        (PCI | {"match": []}, "length >= 1"),
        (PCI | {"match": [{"vendor": "0x1B36"}]}, "hex digits in lower case"),
        (PCI | {"match": [{}]}, "selects every function"),
        (PCI | {"limits": {"max_handles": -1}}, ">= 0"),
        ({key: value for key, value in MDEV.items() if key != "desired"}, "missing required field `desired`"),
        (MDEV | {"desired": {"mdev_type": "../x"}}, "regex"),
        (REMOTE | {"devices": [*REMOTE["devices"]] * 2}, "the same name"),  # type: ignore[misc]
        ("pci", "Expected `object`"),
    ],
)
def test_an_invalid_backend_section_is_refused_with_backend_and_reason(
    host: ModelMachine, section: object, says: str
) -> None:
    with pytest.raises(Invalid, match=says) as caught:
        discover_findings(PlanRunner(host, GenericDriver(), backends={"mine": section}))
    assert "backend mine of generic_driver" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"backend": {}}, "no setting 'backend'"),
        ({"backends": []}, "must be a table"),
        ({"backends": {"a b": PCI}}, "cannot be called 'a b'"),
    ],
)
def test_invalid_settings_around_the_backends_are_refused_with_the_reason(
    host: ModelMachine, settings: dict[str, object], says: str
) -> None:
    with pytest.raises(DriverError, match=says):
        GenericDriver().discover(host.machine, settings)


def test_without_a_backend_a_fault_explains_how_to_describe_one(host: ModelMachine) -> None:
    found = discover_findings(make_runner(host))
    assert not found.devices and "describe in `backends`" in found.faults[0].reason
