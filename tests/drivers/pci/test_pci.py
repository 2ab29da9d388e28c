"""Tests of pci_driver's rules and discovery, on a host made of files and on the real bus of this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from drivers.base import Findings
from drivers.errors import Busy, Gone, Invalid
from drivers.inventory import Attribute, Device, Fault
from drivers.machine import Machine
from drivers.pci import functions
from drivers.pci.functions import PciDriver
from drivers.pci.host_usage import find_functions_used_by_host
from drivers.pci.iommu import find_main_function
from drivers.plan import Ask
from tests.drivers.tree import FakeHost

T4 = "0000:3b:00.0"


def discover(host: FakeHost, *rules: dict[str, str]) -> Findings:
    return PciDriver().discover(host.machine, {"rules": list(rules)})


def only_device(findings: Findings) -> Device:
    assert findings.faults == ()
    (device,) = findings.devices
    return device


def only_fault_reason(findings: Findings) -> str:
    assert findings.devices == ()
    (fault,) = findings.faults
    return fault.reason


def make_config_space(serial: bytes) -> bytes:
    """Return 4096 bytes of configuration space, with an AER capability before the serial number."""
    space = bytearray(4096)
    space[:4] = b"\xde\x10\xb8\x1e"
    space[0x100:0x104] = (0x0001 | 1 << 16 | 0x148 << 20).to_bytes(4, "little")
    space[0x148:0x14C] = (0x0003 | 1 << 16).to_bytes(4, "little")
    space[0x14C:0x154] = serial[::-1]
    return bytes(space)


def test_a_card_is_reported_exactly_as_by_upstream(host: FakeHost) -> None:
    card = host.pci(T4, "0x10de", "0x1eb8", "0x030200", numa_node="1")
    host.link(card / "driver", host.sys / "bus/pci/drivers/vfio-pci")
    device = only_device(discover(host, {"vendor": "10de"}))
    assert (device.key, device.type, device.vendor, device.model) == (f"pci:{T4}", "GPU", "10de", "1eb8")
    assert (device.address, device.numa_node, device.kernel_driver) == (T4, 1, "vfio-pci")
    assert device.std_board_info == '{"product_id": "1eb8", "controller": null}'
    (deployable,) = device.deployables
    assert (deployable.name, deployable.num_accelerators, deployable.driver_name) == (f"node-1_{T4}", 1, "NVIDIA")
    assert deployable.attributes == (
        Attribute("rc", "CUSTOM_PCI"),
        Attribute("trait0", "OWNER_CYBORG"),
        Attribute("trait1", "CUSTOM_PCI_NVIDIA"),
        Attribute("trait2", "CUSTOM_PCI_PRODUCT_ID_1EB8"),
    )
    (handle,) = deployable.handles
    assert handle.info == '{"bus": "3b", "device": "00", "domain": "0000", "function": "0"}'


@pytest.mark.parametrize(
    ("files", "subsystem"),
    [
        ({"subsystem_vendor": "0x10de", "subsystem_device": "0x1533"}, "10de:1533"),
        ({"subsystem_vendor": "0x0000", "subsystem_device": "0x0000"}, ""),
        ({"subsystem_vendor": "0x10de"}, ""),
        ({"subsystem_vendor": "broken", "subsystem_device": "0x1533"}, ""),
        ({}, ""),
    ],
)
def test_the_subsystem_is_reported_if_sysfs_shows_it(host: FakeHost, files: dict[str, str], subsystem: str) -> None:
    host.pci(T4, "0x10de", "0x1eb8", "0x030200", **files)
    assert only_device(discover(host, {"vendor": "10de"})).subsystem == subsystem


def test_a_vendor_without_a_name_in_upstream_is_reported_by_its_number(host: FakeHost) -> None:
    host.pci("10000:e1:00.0", "0x1af4", "0x1045", "0xffff00")
    device = only_device(discover(host, {"vendor": "1af4", "type": "FPGA"}))
    (deployable,) = device.deployables
    assert deployable.driver_name == "1AF4"
    assert [attribute.value for attribute in deployable.attributes] == [
        "CUSTOM_PCI",
        "OWNER_CYBORG",
        "CUSTOM_PCI_PRODUCT_ID_1045",
    ]
    assert json.loads(deployable.handles[0].info)["domain"] == "10000"


@pytest.mark.parametrize(
    ("rule", "taken"),
    [
        ({"vendor": "10de"}, True),
        ({"vendor": "1*", "product": "1eb?"}, True),
        ({"vendor": "10de", "product": "2235"}, False),
        ({"class": "0302"}, True),
        ({"class": "030200"}, True),
        ({"class": "03*"}, True),
        ({"class": "0300"}, False),
        ({"address": "0000:3b:*"}, True),
        ({"address": "0000:3c:*"}, False),
    ],
)
def test_a_rule_takes_a_card_only_if_every_field_matches(host: FakeHost, rule: dict[str, str], taken: bool) -> None:
    host.pci(T4, "0x10de", "0x1eb8", "0x030200")
    assert bool(discover(host, rule).devices) is taken


@pytest.mark.parametrize(
    ("vendor", "pci_class", "type_"),
    [
        ("0x1002", "0x038000", "GPU"),
        ("0x8086", "0x0b4000", "QAT"),
        ("0x144d", "0x010802", "SSD"),
        ("0x8086", "0x020000", "NIC"),
        ("0x10ee", "0x120000", None),
        ("0x1dd8", "0x0b4000", None),
        ("0x1af4", "0xffff00", None),
    ],
)
def test_the_type_follows_from_the_pci_class_else_a_fault_asks_for_it(
    host: FakeHost, vendor: str, pci_class: str, type_: str | None
) -> None:
    host.pci(T4, vendor, "0x1234", pci_class)
    found = discover(host, {"address": "0000:3b:*"})
    if type_:
        assert only_device(found).type == type_
    else:
        assert "set `type` in the rule" in only_fault_reason(found)


def test_the_first_matching_rule_determines_the_type(host: FakeHost) -> None:
    host.pci(T4, "0x10ee", "0x5000", "0x120000")
    assert (
        only_device(discover(host, {"vendor": "10ee", "type": "AICHIP"}, {"class": "12*", "type": "FPGA"})).type
        == "AICHIP"
    )


def test_bridges_are_never_offered(host: FakeHost) -> None:
    host.pci("0000:00:1c.0", "0x8086", "0xa110", "0x060400")
    assert discover(host, {"vendor": "8086", "type": "FPGA"}).devices == ()


def test_S3_devices_that_the_host_uses_are_never_offered_and_every_act_on_them_is_refused(host: FakeHost) -> None:
    disk, port, free = "0000:3b:00.0", "0000:3c:00.0", "0000:3d:00.0"
    host.block("nvme0n1", "259:0", host.pci(disk, "0x144d", "0xa824", "0x010802"))
    host.mount("259:0", "/", "/dev/nvme0n1")
    host.net("eth0", host.pci(port, "0x144d", "0x1572", "0x020000"))
    host.default_route("eth0")
    second = host.pci(free, "0x144d", "0xa824", "0x010802", reset="")
    host.block("nvme1n1", "259:1", second)
    rule = {"vendor": "144d", "type": "SSD"}
    found = discover(host, rule)
    assert [device.address for device in found.devices] == [free]
    assert {fault.subject for fault in found.faults} == {disk, port}
    ask = Ask(key=found.devices[0].key)
    assert PciDriver().reset(host.machine, {"rules": [rule]}, ask).steps, "it can be reset while nobody uses it"
    host.mount("259:1", "/srv", "/dev/nvme1n1")  # The host begins to use the device that was offered.
    found = discover(host, rule)
    assert found.devices == () and {fault.subject for fault in found.faults} == {disk, port, free}
    for act in (PciDriver().reset, PciDriver().install, PciDriver().partition):
        with pytest.raises(Busy, match="the host uses it: nvme1n1 is mounted at /srv"):
            act(host.machine, {"rules": [{"vendor": "144d", "type": "SSD", "bind": "vfio-pci"}]}, ask)


def test_a_device_that_the_host_uses_is_a_fault_that_names_the_use(host: FakeHost) -> None:
    host.block("nvme0n1", "259:0", host.pci(T4, "0x144d", "0xa824", "0x010802"))
    host.mount("259:0", "/", "/dev/nvme0n1")
    assert only_fault_reason(discover(host, {"vendor": "144d"})) == "the host uses it: nvme0n1 is mounted at /"


def test_the_key_of_a_card_is_its_serial_number_whatever_its_address(host: FakeHost) -> None:
    serial = bytes.fromhex("000a1b2c3d4e5f60")
    for address in (T4, "0000:5e:00.0"):
        host.file(host.pci(address, "0x10de", "0x1eb8", "0x030200") / "config", make_config_space(serial))
    first, second = discover(host, {"vendor": "10de"}).devices
    assert first.key == second.key == "serial:10de:000a1b2c3d4e5f60:0"


@pytest.mark.parametrize(
    "space",
    [
        make_config_space(bytes(8)),
        make_config_space(b"\xff" * 8),
        make_config_space(bytes(8))[:64],
        b"",
        b"\x10" * 4096,
    ],
)
def test_a_card_with_a_blank_or_unreadable_serial_number_is_keyed_by_its_address(host: FakeHost, space: bytes) -> None:
    host.file(host.pci(T4, "0x10de", "0x1eb8", "0x030200") / "config", space)
    assert only_device(discover(host, {"vendor": "10de"})).key == f"pci:{T4}"


def test_a_narrow_link_is_degraded_and_a_dead_card_failed(host: FakeHost) -> None:
    host.pci(T4, "0x10de", "0x1eb8", "0x030200", current_link_width="4", max_link_width="16")
    host.pci("0000:5e:00.0", "0x10de", "0x1eb8", "0x030200", power_state="error")
    host.pci("0000:5f:00.0", "0x10de", "0x1eb8", "0x030200", current_link_width="0", max_link_width="255")
    narrow, dead, idle = discover(host, {"vendor": "10de"}).devices
    assert (narrow.status, narrow.status_reason) == ("degraded", "its PCIe link is x4, it could be x16")
    assert dead.status == "failed"
    assert idle.status == "ok"


@pytest.mark.parametrize(
    ("ids", "more", "status", "says"),
    [
        (b"\xff\xff\xff\xff", {}, "failed", "does not answer on the bus"),
        (b"\xff\xff\x00\x00", {}, "failed", "does not answer on the bus"),
        (b"\x01\x00\xff\xff", {}, "failed", "not ready after a reset"),
        (b"\xff\xff\xff\xff", {"power_state": "D3cold"}, "failed", "does not answer on the bus"),
        (None, {"current_link_width": "63", "max_link_width": "63"}, "failed", "link is down"),
        (None, {"current_link_width": "63", "max_link_width": "16"}, "failed", "link is down"),
        (None, {"power_state": "error"}, "failed", "cannot set its power state"),
        (None, {"aer_dev_fatal": "DLP 1\nTOTAL_ERR_FATAL 2"}, "degraded", "fatal PCIe errors since it was found: 2"),
        (b"", {}, "unknown", "configuration space cannot be read"),
        (None, {"power_state": "D3hot"}, "ok", ""),
    ],
)
def test_dead_hardware_is_failed_although_its_cached_vendor_id_is_unchanged(
    host: FakeHost, ids: bytes | None, more: dict[str, str], status: str, says: str
) -> None:
    path = host.pci(T4, "0x10de", "0x1eb8", "0x030200", **more)
    if ids is not None:
        host.file(path / "config", ids)
    device = only_device(discover(host, {"vendor": "10de"}))
    assert device.status == status
    assert says in device.status_reason
    assert PciDriver().health(host.machine, {}, Ask(device.key)).status == status


def test_a_card_that_is_powered_off_to_save_energy_is_unknown_and_not_woken_for_its_health(host: FakeHost) -> None:
    asleep = {"power_state": "D3cold", "current_link_width": "63", "max_link_width": "63"}
    path = host.pci(T4, "0x10de", "0x1eb8", "0x030200", **asleep)
    host.file(path / "power/runtime_status", "suspended\n")
    host.file(path / "config", b"\xff" * 64)
    vitals = PciDriver().health(host.machine, {}, Ask(f"pci:{T4}"))
    assert (vitals.status, "powered off while nobody uses it" in vitals.reason) == ("unknown", True)
    assert {signal.name for signal in vitals.signals} == {"driver", "power_state"}, "reading the link would wake it"
    host.file(path / "power/runtime_status", "error\n")
    assert PciDriver().health(host.machine, {}, Ask(f"pci:{T4}")).status == "failed", "it could not be powered on"


def test_a_virtual_function_is_alive_while_its_card_is_because_its_own_ids_always_read_as_ones(host: FakeHost) -> None:
    card = host.pci(T4, "0x8086", "0x1572", "0x020000", current_link_width="8", max_link_width="8")
    widths = {"current_link_width": "0", "max_link_width": "8"}
    virtual = host.pci("0000:3b:02.0", "0x8086", "0x154c", "0x020000", **widths)
    host.link(virtual / "physfn", card)
    host.file(virtual / "config", b"\xff" * 4)
    ask = Ask("pci:0000:3b:02.0")
    assert PciDriver().health(host.machine, {}, ask).status == "ok"
    host.file(card / "config", b"\xff" * 4)
    assert PciDriver().health(host.machine, {}, ask).status == "failed"


def test_a_fatal_error_that_the_port_counted_makes_the_card_below_it_degraded(host: FakeHost) -> None:
    port = host.pci("0000:00:1c.0", "0x8086", "0xa110", "0x060400", aer_dev_fatal="FCP 1\nTOTAL_ERR_FATAL 1")
    host.pci(T4, "0x10de", "0x1eb8", "0x030200", bus=f"pci0000:00/{port.name}")
    device = only_device(discover(host, {"vendor": "10de"}))
    assert (device.status, device.status_reason) == ("degraded", "fatal PCIe errors since it was found: 1")


def test_health_has_a_signal_for_each_reading_of_the_card(host: FakeHost) -> None:
    port = host.pci("0000:00:1c.0", "0x8086", "0xa110", "0x060400", aer_dev_fatal="FCP 0\nTOTAL_ERR_FATAL 0")
    errors = {"aer_dev_correctable": "RxErr 3\nBadTLP 4\nTOTAL_ERR_COR 7"}
    widths = {"current_link_width": "4", "max_link_width": "16", "power_state": "D0"}
    card = host.pci(T4, "0x10de", "0x1eb8", "0x030200", bus=f"pci0000:00/{port.name}", **errors, **widths)
    sensor = card / "nvme/nvme0/hwmon3"
    for name, text in {"temp1_input": "45850", "temp1_crit": "84850", "temp1_label": "Composite"}.items():
        host.file(sensor / name, text)
    host.link(host.sys / "class/hwmon/hwmon3", sensor)
    host.file(host.sys / "devices/platform/hwmon1/temp1_input", "99000")
    host.link(host.sys / "class/hwmon/hwmon1", host.sys / "devices/platform/hwmon1")
    driver, ask = PciDriver(), Ask(f"pci:{T4}")
    vitals = driver.health(host.machine, {}, ask)
    assert (vitals.status, vitals.reason) == ("degraded", "its PCIe link is x4, it could be x16")
    assert {(signal.name, signal.value, signal.limit) for signal in vitals.signals} == {
        ("driver", "none", ""),
        ("power_state", "D0", ""),
        ("link_width", "4", "16"),
        ("aer_correctable", "7", ""),
        ("port_aer_fatal", "0", ""),
        ("temperature Composite", "45.85", "84.85"),
    }
    assert samples_by_metric(host, ask.key) == {"errors_correctable_total": 7, "temperature_celsius": 45.85}
    with pytest.raises(Gone):
        driver.health(host.machine, {}, Ask("pci:0000:99:00.0"))


def samples_by_metric(host: FakeHost, key: str) -> dict[str, float]:
    samples = PciDriver().stats(host.machine, {}, Ask(key))
    assert {sample.key for sample in samples} <= {key}
    return {sample.metric: sample.value for sample in samples}


def make_gpu(host: FakeHost, address: str, sensors: dict[str, str], vendor: str = "0x1002", **files: str) -> Path:
    """Make a GPU with the sensors of its kernel driver; return its directory."""
    card = host.pci(address, vendor, "0x744c", "0x030000", **files)
    monitor = card / f"hwmon/hwmon{address[5:7]}"
    for name, text in sensors.items():
        host.file(monitor / name, f"{text}\n")
    host.link(host.sys / "class/hwmon" / monitor.name, monitor)
    return card


def test_samples_are_read_from_the_files_of_gpu_and_npu_kernel_drivers(host: FakeHost) -> None:
    counters = {f"aer_dev_{kind}": f"X 1\nTOTAL_ERR_{kind} {n}" for n, kind in enumerate(("correctable", "fatal"))}
    memory = {"mem_info_vram_used": "4294967296", "mem_info_vram_total": "17163091968"}
    heat = {"temp1_input": "41000", "temp2_input": "junk", "temp3_input": "52000"}
    card = make_gpu(
        host,
        T4,
        {"power1_average": "21000000", "power1_input": "99000000", **heat},
        **{"gpu_busy_percent": "37", **memory, **counters},
    )
    assert samples_by_metric(host, f"pci:{T4}") == {
        "utilization_percent": 37,
        "memory_used_bytes": 4294967296,
        "memory_total_bytes": 17163091968,
        "power_watts": 21,
        "temperature_celsius": 41,
        "temperature_celsius_1": 52,
        "errors_correctable_total": 0,
        "errors_fatal_total": 1,
    }
    (card / "hwmon/hwmon3b/power1_average").unlink()
    assert samples_by_metric(host, f"pci:{T4}")["power_watts"] == 99
    host.file(card / "power/runtime_status", "suspended\n")
    assert samples_by_metric(host, f"pci:{T4}").keys() == {"errors_correctable_total", "errors_fatal_total"}, (
        "it is not woken"
    )
    make_gpu(host, "0000:03:00.0", {"energy1_input": "1500000", "temp2_input": "30000"}, vendor="0x8086")
    assert samples_by_metric(host, "pci:0000:03:00.0") == {"energy_joules_total": 1.5, "temperature_celsius": 30}
    npu = {"npu_busy_time_us": "2500000", "npu_memory_utilization": "4096"}
    host.pci("0000:00:0b.0", "0x8086", "0x643e", "0x120000", **npu)
    assert samples_by_metric(host, "pci:0000:00:0b.0") == {"busy_seconds_total": 2.5, "memory_used_bytes": 4096}
    host.pci("0000:04:00.0", "0x10de", "0x1eb8", "0x030200")
    assert samples_by_metric(host, "pci:0000:04:00.0") == {}


def test_a_device_with_a_serial_number_is_found_by_it(host: FakeHost) -> None:
    serial = bytes.fromhex("000a1b2c3d4e5f60")
    host.file(host.pci(T4, "0x10de", "0x1eb8", "0x030200", power_state="error") / "config", make_config_space(serial))
    host.pci("0000:5e:00.0", "0x10de", "0x1eb8", "0x030200")
    host.pci("0000:00:01.0", "0x8086", "0x1234", "0x020000")
    assert PciDriver().health(host.machine, {}, Ask("serial:10de:000a1b2c3d4e5f60:0")).status == "failed"
    with pytest.raises(Gone):
        PciDriver().health(host.machine, {}, Ask("serial:8086:000a1b2c3d4e5f60:0"))


def test_an_act_is_done_to_the_reported_function_although_another_has_its_serial_number(
    host: FakeHost,
) -> None:
    key, twin = "serial:10de:000a1b2c3d4e5f60:0", "0000:00:01.0"
    space = make_config_space(bytes.fromhex("000a1b2c3d4e5f60"))
    host.file(host.pci(twin, "0x10de", "0x1eb8", "0x030200") / "config", space)
    card = host.pci(T4, "0x10de", "0x1eb8", "0x030200", power_state="error")
    host.file(card / "config", space)
    driver = PciDriver()
    assert driver.health(host.machine, {}, Ask(key, address=T4)).status == "failed"
    with pytest.raises(Invalid, match=f"{twin} and {T4} have the same serial number"):
        driver.health(host.machine, {}, Ask(key))
    host.file(card / "config", space[:64])
    assert driver.health(host.machine, {}, Ask(key, address=T4)).status == "failed", "unreadable proves nothing"
    host.file(card / "config", make_config_space(b"otherone"))
    with pytest.raises(Gone, match="is not serial:10de:000a1b2c3d4e5f60:0 any more"):
        driver.health(host.machine, {}, Ask(key, address=T4))


def test_a_card_that_is_powered_off_is_not_woken_again_for_its_serial_number(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "_last_serial_numbers", {})
    path = host.pci(T4, "0x10de", "0x1eb8", "0x030200", power_state="D3cold")
    host.file(path / "config", make_config_space(bytes.fromhex("000a1b2c3d4e5f60")))
    host.file(path / "power/runtime_status", "suspended\n")
    reads: list[str] = []
    read_start = Machine.read_start

    def record_read(machine: Machine, name: str, count: int) -> bytes:
        reads.extend([name] * name.endswith("/config"))
        return read_start(machine, name, count)

    monkeypatch.setattr(Machine, "read_start", record_read)
    key = only_device(discover(host, {"vendor": "10de"})).key
    assert (key, len(reads)) == ("serial:10de:000a1b2c3d4e5f60:0", 1), "its identity is known before a guest wakes it"
    for ask in (Ask(key, address=T4), Ask(key)):
        assert PciDriver().health(host.machine, {}, ask).status == "unknown"
        PciDriver().stats(host.machine, {}, ask)
    assert only_device(discover(host, {"vendor": "10de"})).key == key
    assert len(reads) == 1
    host.file(path / "power_state", "D0\n")
    host.file(path / "config", make_config_space(b"otherone"))
    assert only_device(discover(host, {"vendor": "10de"})).key != key


def test_the_probe_names_what_the_host_lacks_and_the_remedy(host: FakeHost) -> None:
    rules = {"rules": [{"vendor": "10de", "bind": "vfio-pci"}]}
    host.file(host.proc / "self/status", "Name:\tx\nUid:\t1000\t1000\t1000\t1000\nCapEff:\t0000000000000000\n")
    host.file(host.proc / "self/mountinfo", "21 1 0:20 / /sys ro,nosuid - sysfs sysfs ro\n")
    (host.proc / "self/ns/pid").rename(host.proc / "pid")
    lacks = "\n".join(PciDriver().probe(host.machine, rules))
    (host.proc / "pid").rename(host.proc / "self/ns/pid")
    for words in ("CAP_DAC_OVERRIDE", "process namespace", "mounted read-only", "no IOMMU", "modprobe vfio-pci"):
        assert words in lacks
    host.file(host.proc / "self/status", "Uid:\t1000\nCapEff:\t0000000000000002\n")
    host.file(host.proc / "self/mountinfo", "21 1 0:20 / /sys rw,nosuid - sysfs sysfs rw\n")
    host.file(host.sys / "kernel/iommu_groups/0/type", "DMA")
    host.file(host.sys / "bus/pci/drivers/vfio-pci/bind", "")
    assert PciDriver().probe(host.machine, rules) == ()


def test_an_unreadable_function_does_not_affect_other_functions(host: FakeHost) -> None:
    host.pci(T4, "0x10de", "0x1eb8", "0x030200")
    bad = host.pci("0000:5e:00.0", "0x10de", "0x1eb8", "0x030200")
    (bad / "class").write_bytes(b"x" * 70_000)
    gone = host.pci("0000:5f:00.0", "0x10de", "0x1eb8", "0x030200")
    (gone / "vendor").unlink()
    found = discover(host, {"vendor": "10de"})
    assert [device.address for device in found.devices] == [T4]
    assert [fault.subject for fault in found.faults] == ["0000:5e:00.0"]


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ([{"vendor": "0x10de"}], "without 0x"),
        ([{"vendor": "10DE"}], "lower case"),
        ([{"vendr": "10de"}], "vendr"),
        ([{"vendor": "10de", "type": "TPU"}], "TPU"),
        ([{"vendor": "10de"}, {"type": "GPU"}], "rule 2 of pci_driver selects every function"),
        ([{"vfs": 4, "bind": "vfio-pci"}], "rule 1 of pci_driver selects every function"),
        ([{"vendor": "10de", "vfs": -1}], "vfs"),
        ([{"vendor": "10de", "bind": "../x"}], "bind"),
        ("10de", "array"),
    ],
)
def test_unusable_rules_are_refused_with_rule_and_reason(host: FakeHost, rules: object, says: str) -> None:
    with pytest.raises(Invalid, match=says):
        PciDriver().discover(host.machine, {"rules": rules})


def discover_real_bus() -> Findings:
    if not list(Path("/sys/bus/pci/devices").glob("*")):
        pytest.skip("this machine has no PCI bus")
    return PciDriver().discover(Machine("here"), {"rules": [{"address": "*:*", "vendor": "????", "type": "FPGA"}]})


def test_every_function_of_this_machine_is_offered_or_refused_with_a_reason() -> None:
    found = discover_real_bus()
    seen = {device.address for device in found.devices} | {fault.subject for fault in found.faults}
    classes = {
        name: Path(f"/sys/bus/pci/devices/{name}/class").read_text().strip()
        for name in os.listdir("/sys/bus/pci/devices")
    }
    companions = {name for name in classes if find_main_function(Machine("here"), name)}
    assert seen == {name for name, pci_class in classes.items() if not pci_class.startswith("0x06")} - companions


@pytest.mark.slow
def test_no_function_that_this_machine_uses_is_offered() -> None:
    found = discover_real_bus()
    used = find_functions_used_by_host(Machine("here"), Machine("here").pci_functions())
    root = os.stat("/").st_dev
    disk = Path(f"/sys/dev/block/{os.major(root)}:{os.minor(root)}")
    if disk.exists() and "/virtual/" not in str(disk.resolve()) and "/pci" in str(disk.resolve()):
        assert used
    assert not used.keys() & {device.address for device in found.devices}
    refused = {fault.subject: fault for fault in found.faults}
    for address in used.keys() & refused.keys():
        assert isinstance(refused[address], Fault)
        assert "the host uses it" in refused[address].reason


def test_bridges_above_a_function_are_reported_root_first_and_cut_to_the_nearest_19(host: FakeHost) -> None:
    behind = ["0000:16:02.0", "0000:17:00.0", "0000:18:04.0"]
    host.pci("0000:19:00.0", "0x10de", "0x2331", "0x030200", bus="/".join(["pci0000:16", *behind]))
    host.pci("0000:05:00.0", "0x10de", "0x2331", "0x030200")
    many = [f"0000:{n:02x}:00.0" for n in range(0x40, 0x60)]
    host.pci("0000:60:00.0", "0x10de", "0x2331", "0x030200", bus="/".join(["pci0000:40", *many]))
    told = {device.address: device.bridges.split() for device in discover(host, {"vendor": "10de"}).devices}
    assert told == {"0000:19:00.0": behind, "0000:05:00.0": [], "0000:60:00.0": many[-19:]}
