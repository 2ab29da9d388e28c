"""The generic driver on a host whose /sys answers as the kernel does: every kind, its services, its limits."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drivers.base import Findings
from drivers.errors import Busy, DriverError, Failed, Gone, Invalid, Unsupported
from drivers.generic import GenericDriver
from drivers.generic.backend import Kind
from drivers.generic.driver import Look
from drivers.inventory import Device, DriverReport, Service
from drivers.machine import Machine
from drivers.pci.ownership import settle
from drivers.plan import Ask, Image
from tests.drivers.doing import Doer
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
    """A disk controller with SR-IOV, a GPU with mediated devices, an accelerator with a node, an FPGA card."""
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


def doer(host: ModelMachine, **backends: dict[str, object]) -> Doer:
    return Doer(host, GenericDriver(), backends=backends)


def look(work: Doer) -> Findings:
    return work.driver.discover(work.host.machine, work.settings)


def only(work: Doer) -> Device:
    (device,) = look(work).devices
    return device


def services(work: Doer) -> dict[str, Service]:
    (backend,) = look(work).backends
    assert not backend.error
    return {service.name: service for service in backend.services}


def handles(device: Device) -> list[dict[str, str]]:
    return [json.loads(handle.info) for part in device.deployables for handle in part.handles]


def ask(work: Doer, number: int, consumer: str = ALICE) -> Ask:
    device = only(work)
    return Ask(device.key, handle=device.deployables[0].handles[0], uuid=UUIDS[number], consumer=consumer)


def test_pci_makes_virtual_functions_and_takes_them_away(host: ModelMachine) -> None:
    work = doer(host, disks=PCI)
    device = only(work)
    assert (device.backend, device.changeable, device.sized_by) == ("disks", "bind vfs", "vfs")
    found = services(work)
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
    work.do("partition", Ask(device.key, layout={"vfs": "3", "bind": "vfio-pci"}))
    assert len(handles(only(work))) == 3
    work.do("partition", Ask(device.key, layout={"vfs": "1", "bind": "vfio-pci"}))
    assert len(handles(only(work))) == 1
    work.do("uninstall", Ask(device.key, first=work.first))
    assert handles(only(work)) == [{"bus": "01", "device": "00", "domain": "0000", "function": "0"}]


def test_desired_is_what_install_makes(host: ModelMachine) -> None:
    work = doer(host, disks=PCI | {"desired": {"vfs": 2, "bind": "vfio-pci"}})
    assert "make 2 virtual functions" in only(work).to_install
    work.do("install", Ask(only(work).key))
    assert len(handles(only(work))) == 2 and only(work).to_install == ""


def test_mediated_devices_come_with_a_consumer_and_go_with_it(host: ModelMachine) -> None:
    work = doer(host, vgpus=MDEV)
    device = only(work)
    assert {attribute.key: attribute.value for attribute in device.deployables[0].attributes}["rc"] == "VGPU"
    assert handles(device)[1] == {
        "asked_type": "nvidia-223",
        **{"bus": "02", "device": "00", "domain": "0000", "function": "0"},
        "vgpu_mark": "nvidia-223_1",
    }
    limits = {"type": "nvidia-223", "types": "nvidia-222 nvidia-223", "available": "2"}
    assert services(work)["mdev"].limits == limits
    first = ask(work, 0)
    assert [work.do("attach", first) for _ in range(2)] == [1, 0]
    assert host.machine.link(f"/sys/bus/mdev/devices/{UUIDS[0]}/mdev_type") == "nvidia-223"
    assert handles(only(work)) == handles(device)
    with pytest.raises(Busy, match=f"belongs to {ALICE}"):
        work.plan("attach", ask(work, 0, BOB))
    assert not work.plan("detach", ask(work, 0, BOB)).steps
    assert [work.do("detach", first) for _ in range(2)] == [1, 0]
    assert not host.machine.names("/sys/bus/mdev/devices") and not host.machine.names("/state/mdev")


def test_what_others_made_on_the_card_is_not_handed_out(host: ModelMachine) -> None:
    work = doer(host, vgpus=MDEV)
    host.write(f"/sys/bus/pci/devices/{GPU}/mdev_supported_types/nvidia-223/create", UUIDS[3])
    assert len(handles(only(work))) == 1
    work.do("attach", ask(work, 0))
    with pytest.raises(Busy, match="no room"):
        work.plan("attach", ask(work, 1))


def test_a_mediated_device_that_a_guest_has_open_is_not_taken_away(host: ModelMachine) -> None:
    work = doer(host, vgpus=MDEV)
    work.do("attach", ask(work, 0))
    host.link(host.real(f"/sys/bus/pci/devices/{GPU}/{UUIDS[0]}/iommu_group"), host.sys / "kernel/iommu_groups/20")
    with host.holding("/dev/vfio/20"), pytest.raises(Busy, match="a guest uses it"):
        work.plan("detach", ask(work, 0))


def test_a_card_without_the_wanted_type_is_a_fault_that_names_what_it_has(host: ModelMachine) -> None:
    work = doer(host, vgpus=MDEV | {"desired": {"mdev_type": "nvidia-9"}})
    found = look(work)
    assert not found.devices and {service.state for service in found.backends[0].services} == {"unavailable"}
    assert [fault.reason for fault in found.faults] == ["it has no mdev type nvidia-9; it has nvidia-222, nvidia-223"]


def test_an_accelerator_is_its_node_and_nothing_is_touched(host: ModelMachine) -> None:
    work = doer(host, npus=ACCEL | {"desired": {"permissions": "r"}})
    device = only(work)
    assert device.address == NPU and device.deployables[0].handles[0].attach_type == "DEV"
    assert handles(device) == [{"path": "/dev/accel/accel0", "permissions": "r"}]
    assert "rc" not in {attribute.key for attribute in device.deployables[0].attributes}
    assert "not offered to Nova" in services(work)["passthrough"].reason
    wanted = ask(work, 0)
    assert work.do("attach", wanted) == 0 and work.do("detach", wanted) == 0
    (host.dev / "accel/accel0").unlink()
    with pytest.raises(Gone, match="no such node"):
        work.plan("attach", wanted)
    assert "no node" in look(work).faults[0].reason


def test_firmware_is_loaded_by_the_kernels_upload_class(host: ModelMachine, tmp_path: Path) -> None:
    work = doer(host, cards=FIRMWARE)
    device = only(work)
    assert (device.acts, handles(device)) == ("health program", [])
    assert services(work)["firmware"].limits == {"loaders": "secure-update0"}
    (tmp_path / "image").write_bytes(b"\xff\x00firmware\n")
    image = Image(str(tmp_path / "image"), 11, "0" * 64, "shell")
    (step,) = work.plan("program", Ask(device.key, image=image)).steps
    assert step.does == "load shell into 0000:04:00.0" and step.image == "firmware"
    asyncio.run(host.hand().upload(step.write.path, step.image, image, 5, lambda percent: None))
    assert (host.real(step.write.path) / "data").read_bytes() == b"\xff\x00firmware\n"
    with pytest.raises(Unsupported, match="cannot reset"):
        work.plan("reset", Ask(device.key))


def test_what_a_guest_uses_is_not_programmed(host: ModelMachine) -> None:
    work = doer(host, cards=FIRMWARE | {"kind": "pci", "desired": {"bind": "vfio-pci"}})
    device = only(work)
    assert "program" in device.acts.split() and services(work)["firmware"].state == "ready"
    work.do("install", Ask(device.key))
    with host.holding("/dev/vfio/10"), pytest.raises(Busy, match="a guest uses it"):
        work.plan("program", Ask(device.key))


def test_remote_devices_are_as_a_file_says(host: ModelMachine) -> None:
    work = doer(host, far=REMOTE)
    assert (only(work).key, only(work).status) == ("remote:far", "unknown")
    assert "no status file" in services(work)["health"].reason
    host.file(host.state / "far.json", '{"far": {"status": "degraded", "reason": "hot"}}')
    assert (only(work).status, only(work).status_reason) == ("degraded", "hot")
    assert work.driver.health(host.machine, work.settings, Ask("remote:far")).reason == "hot"
    assert work.driver.stats(host.machine, work.settings, Ask("remote:far")) == ()
    host.file(host.state / "far.json", '{"far": {"status": "ok", "load": {"utilization_percent": 12.5}}}')
    (sample,) = work.driver.stats(host.machine, work.settings, Ask("remote:far", backend="far"))
    assert (sample.key, sample.metric, sample.value) == ("remote:far", "utilization_percent", 12.5)
    with pytest.raises(Unsupported, match="cannot partition"):
        work.plan("partition", Ask("remote:far", layout={"vfs": "1"}))
    assert not host.writes


def test_what_is_over_the_limits_is_said(host: ModelMachine) -> None:
    host.pci("0000:11:00.0", "0x1b36", "0x0010", "0x010802", group=11, vfs=4)
    work = doer(host, disks=PCI | {"limits": {"max_devices": 1, "max_handles": 2}})
    key = only(work).key
    with pytest.raises(Invalid, match="at most 2"):
        work.plan("partition", Ask(key, layout={"vfs": "3"}))
    for number in range(3):
        host.write(f"/sys/bus/pci/devices/{DISK}/sriov_numvfs", "0" if number == 1 else "3")
    found = look(work)
    assert len(handles(found.devices[0])) == found.devices[0].deployables[0].num_accelerators == 2
    assert [(fault.subject, fault.reason.partition(":")[0]) for fault in found.faults] == [
        ("0000:11:00.0", "left out"),
        (f"node-1_{DISK}", "1 of its handles are left out"),
    ]
    host.pci("0000:00:01.0", "0x1b36", "0x0010", "0x010802", group=12)
    assert only(work).key == key, "what comes later takes no known device's place"


@pytest.fixture
def hanging(host: ModelMachine) -> Iterator[Path]:
    """A status file whose opening ends only when somebody writes."""
    path = host.state / "stuck"
    host.state.mkdir(exist_ok=True)
    os.mkfifo(path)
    yield path
    os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


def test_of_three_backends_one_hangs_and_one_fails_and_the_third_answers(host: ModelMachine, hanging: Path) -> None:
    host.file(host.state / "far.json", "no JSON")
    stuck = REMOTE | {"status_file": "/state/stuck", "devices": [{**REMOTE["devices"][0], "name": "stuck"}]}
    work = doer(host, stuck=stuck, rubbish=REMOTE, disks=PCI)
    host.machine.deadline_s = 2.0
    for _ in range(2):
        found = look(work)
        errors = {backend.name: backend.error for backend in found.backends}
        assert (
            "its share of CYBORG_DRIVER_DEADLINE_S" in errors["stuck"] and "far.json is not usable" in errors["rubbish"]
        )
        assert errors["disks"] == "" and [device.backend for device in found.devices] == ["disks"]
    work.do("partition", Ask(found.devices[0].key, layout={"vfs": "2"}))
    with pytest.raises(Gone, match="no backend"):
        work.plan("install", Ask("remote:stuck"))


class Broken(Kind, tag="broken"):
    """A kind as its author left it."""

    kind = "pci"
    fails: Callable[[], object]

    def discover(self, machine: Machine) -> Findings:
        return self.fails()  # type: ignore[return-value]


def throw(error: Exception) -> object:
    raise error


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        (lambda: throw(KeyError("x")), "it raised KeyError: 'x'"),
        (lambda: throw(Failed("")), "it gave no reason"),
        (lambda: None, "it raised AttributeError"),
        (lambda: Findings((1,)), "it raised AttributeError"),  # type: ignore[arg-type]
    ],
)
def test_whatever_a_kind_does_is_its_backends_error(host: ModelMachine, fails: Callable[[], object], says: str) -> None:
    look = Look(Broken(fails=fails), host.machine)
    look.run()
    assert says in look.error and look.findings == Findings()


def test_the_first_backend_that_takes_a_card_has_it(host: ModelMachine) -> None:
    found = look(doer(host, disks=PCI, all=PCI | {"match": [{"class": "0108*"}, {"class": "03*"}]}))
    (settled,) = settle([DriverReport("generic_driver", "", found.devices, found.faults, found.backends)])
    assert {device.address: device.backend for device in settled.devices} == {DISK: "disks", GPU: "all"}
    assert [fault.reason for fault in settled.faults] == [f"{DISK} already belongs to generic_driver:disks"]


def test_an_act_is_planned_by_the_backend_that_has_the_device(host: ModelMachine) -> None:
    work = doer(host, few=PCI | {"limits": {"max_handles": 1}}, many=PCI)
    key = look(work).devices[0].key
    assert work.plan("partition", Ask(key, layout={"vfs": "3"}, backend="many")).steps
    with pytest.raises(Invalid, match="at most 1"):
        work.plan("partition", Ask(key, layout={"vfs": "3"}, backend="few"))


def test_a_fresh_process_finds_the_backend_of_a_device(host: ModelMachine) -> None:
    key = only(doer(host, vgpus=MDEV)).key
    assert doer(host, disks=PCI, vgpus=MDEV).driver.health(host.machine, {"backends": {"v": MDEV}}, Ask(key))


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
def test_every_mistake_in_a_section_is_said_in_a_sentence(host: ModelMachine, section: object, says: str) -> None:
    with pytest.raises(Invalid, match=says) as caught:
        look(Doer(host, GenericDriver(), backends={"mine": section}))
    assert "backend mine of generic_driver" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"backend": {}}, "no setting 'backend'"),
        ({"backends": []}, "must be a table"),
        ({"backends": {"a b": PCI}}, "cannot be called 'a b'"),
    ],
)
def test_every_mistake_around_them_too(host: ModelMachine, settings: dict[str, object], says: str) -> None:
    with pytest.raises(DriverError, match=says):
        GenericDriver().discover(host.machine, settings)


def test_without_a_backend_it_says_what_to_do(host: ModelMachine) -> None:
    found = look(doer(host))
    assert not found.devices and "describe in `backends`" in found.faults[0].reason
