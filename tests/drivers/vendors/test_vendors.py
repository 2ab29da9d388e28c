"""Each vendor's driver on a host made of files: which cards it offers without any rule, and as what."""

from __future__ import annotations

import json

import pytest

from drivers.base import Findings
from drivers.inventory import Device
from drivers.pci.functions import PciDriver
from drivers.plan import Ask
from drivers.vendors.amd_gpu import AmdGpuDriver
from drivers.vendors.ascend import AscendDriver
from drivers.vendors.gaudi import GaudiDriver
from drivers.vendors.intel_gpu import IntelGpuDriver
from drivers.vendors.nvidia import NvidiaGpuDriver
from tests.drivers.tree import FakeHost

CARD = "0000:3b:00.0"
DRIVERS = (NvidiaGpuDriver, AmdGpuDriver, IntelGpuDriver, GaudiDriver, AscendDriver)
CARDS = [
    (NvidiaGpuDriver, "0x10de", "0x1eb8", "0x030200", "GPU", "PGPU", {"CUSTOM_NVIDIA_1EB8"}),  # Tesla T4
    (NvidiaGpuDriver, "0x10de", "0x20b5", "0x030200", "GPU", "PGPU", {"CUSTOM_NVIDIA_20B5"}),  # A100 80GB PCIe
    (AmdGpuDriver, "0x1002", "0x740f", "0x038000", "GPU", "PGPU", {"CUSTOM_AMD_740F"}),  # Instinct MI210
    (AmdGpuDriver, "0x1002", "0x74a5", "0x120000", "GPU", "PGPU", {"CUSTOM_AMD_74A5"}),  # Instinct MI325X
    (IntelGpuDriver, "0x8086", "0x56c0", "0x038000", "GPU", "PGPU", {"CUSTOM_INTEL_56C0", "CUSTOM_INTEL_FLEX_170"}),
    (IntelGpuDriver, "0x8086", "0xe211", "0x030000", "GPU", "PGPU", {"CUSTOM_INTEL_E211", "CUSTOM_INTEL_ARC_PRO_B60"}),
    (
        GaudiDriver,
        "0x1da3",
        "0x1020",
        "0x120000",
        "AICHIP",
        "CUSTOM_GAUDI",
        {"CUSTOM_HABANA_1020", "CUSTOM_HABANA_GAUDI2"},
    ),
    (
        GaudiDriver,
        "0x1da3",
        "0x1060",
        "0x120000",
        "AICHIP",
        "CUSTOM_GAUDI",
        {"CUSTOM_HABANA_1060", "CUSTOM_HABANA_GAUDI3"},
    ),
    (
        AscendDriver,
        "0x19e5",
        "0xd100",
        "0x120000",
        "AICHIP",
        "CUSTOM_ASCEND",
        {"CUSTOM_ASCEND_D100", "CUSTOM_ASCEND_310"},
    ),
    (
        AscendDriver,
        "0x19e5",
        "0xd802",
        "0x120000",
        "AICHIP",
        "CUSTOM_ASCEND",
        {"CUSTOM_ASCEND_D802", "CUSTOM_ASCEND_910B"},
    ),
]
OTHERS = [
    ("0x10de", "0x1af1", "0x068000"),  # NVSwitch
    ("0x10de", "0x10f8", "0x040300"),  # the audio function of a GPU
    ("0x8086", "0x4680", "0x030000"),  # graphics of a CPU
    ("0x1002", "0xab28", "0x040300"),  # the audio function of a GPU
    ("0x19e5", "0x1822", "0x020000"),  # a network card
    ("0x1da3", "0x0001", "0x120000"),  # Goya
]


def discover(driver: type[PciDriver], host: FakeHost, **settings: object) -> Findings:
    return driver().discover(host.machine, dict(settings))


def read_attributes(device: Device) -> tuple[str, set[str]]:
    (part,) = device.deployables
    values = {one.key: one.value for one in part.attributes}
    return values.pop("rc"), set(values.values())


@pytest.mark.parametrize(("driver", "vendor", "product", "pci_class", "kind", "resource_class", "traits"), CARDS)
def test_a_driver_offers_its_cards_without_any_rule(
    host: FakeHost,
    driver: type[PciDriver],
    vendor: str,
    product: str,
    pci_class: str,
    kind: str,
    resource_class: str,
    traits: set[str],
) -> None:
    host.pci(CARD, vendor, product, pci_class)
    findings = discover(driver, host)
    (device,) = findings.devices
    assert findings.faults == ()
    assert (device.type, device.vendor, device.model) == (kind, vendor[2:], product[2:])
    assert read_attributes(device) == (resource_class, {"OWNER_CYBORG", *traits})
    (handle,) = device.deployables[0].handles
    assert (handle.attach_type, json.loads(handle.info)["bus"]) == ("PCI", "3b")
    assert json.loads(device.std_board_info)["product_id"] == product[2:]


@pytest.mark.parametrize(("vendor", "product", "pci_class"), OTHERS)
def test_nothing_else_of_the_vendor_is_offered(host: FakeHost, vendor: str, product: str, pci_class: str) -> None:
    host.pci(CARD, vendor, product, pci_class)
    assert all(discover(driver, host) == Findings() for driver in DRIVERS)


@pytest.mark.parametrize(("driver", "vendor", "product", "pci_class"), [card[:4] for card in CARDS])
def test_the_declared_modaliases_cover_the_cards(
    driver: type[PciDriver], vendor: str, product: str, pci_class: str
) -> None:
    from fnmatch import fnmatchcase

    base, sub, interface = (pci_class[index : index + 2].upper() for index in (2, 4, 6))
    alias = f"pci:v0000{vendor[2:].upper()}d0000{product[2:].upper()}sv00000000sd00000000bc{base}sc{sub}i{interface}"
    assert any(fnmatchcase(alias, pattern) for pattern in driver.matches)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_host_without_such_cards_has_neither_devices_nor_faults(host: FakeHost, driver: type[PciDriver]) -> None:
    host.pci(CARD, "0x1af4", "0x1041", "0x020000")
    assert discover(driver, host) == Findings()


def test_rules_narrow_down_the_cards_and_say_how_each_is_offered(host: FakeHost) -> None:
    for bus in ("3b", "5e"):
        host.pci(f"0000:{bus}:00.0", "0x10de", "0x1eb8", "0x030200")
    rule = {"address": "0000:5e:*", "offer": {"resource_class": "CUSTOM_LAB_GPU"}}
    (device,) = discover(NvidiaGpuDriver, host, rules=[rule]).devices
    assert device.address == "0000:5e:00.0"
    assert read_attributes(device)[0] == "CUSTOM_LAB_GPU"
    every = {"offer": {"traits": ["CUSTOM_RACK_7"]}}  # it selects every card of the driver
    assert len(discover(NvidiaGpuDriver, host, rules=[every]).devices) == 2


def test_a_rule_for_another_vendors_card_never_makes_a_driver_offer_it(host: FakeHost) -> None:
    host.pci(CARD, "0x10de", "0x1eb8", "0x030200")
    assert discover(AmdGpuDriver, host, rules=[{"vendor": "10de"}]) == Findings()


def test_virtual_functions_of_nvidia_are_shown_and_not_offered(host: FakeHost) -> None:
    card = host.pci(CARD, "0x10de", "0x2bb5", "0x030200", sriov_totalvfs="48", sriov_numvfs="1")
    function = host.pci("0000:3b:00.4", "0x10de", "0x2bb5", "0x030200")
    host.link(card / "virtfn0", function)
    host.link(function / "physfn", card)
    findings = discover(NvidiaGpuDriver, host)
    (device,) = findings.devices
    assert device.address == CARD
    assert device.deployables[0].num_accelerators == 0
    (fault,) = findings.faults
    assert fault.subject == CARD
    assert "sriov-manage -d" in fault.reason


def test_a_virtual_function_of_nvidia_that_a_rule_selects_alone_is_not_offered_either(host: FakeHost) -> None:
    card = host.pci(CARD, "0x10de", "0x2bb5", "0x030200", sriov_totalvfs="48", sriov_numvfs="1")
    function = host.pci("0000:3b:00.4", "0x10de", "0x2bb5", "0x030200")
    host.link(card / "virtfn0", function)
    host.link(function / "physfn", card)
    findings = discover(NvidiaGpuDriver, host, rules=[{"address": "0000:3b:00.4"}])
    (device,) = findings.devices
    assert device.address == "0000:3b:00.4"
    assert device.deployables[0].handles == ()
    assert ["sriov-manage" in fault.reason for fault in findings.faults] == [True]


def test_virtual_functions_of_other_gpus_are_vgpus(host: FakeHost) -> None:
    card = host.pci(CARD, "0x8086", "0x56c0", "0x038000", sriov_totalvfs="31", sriov_numvfs="1")
    function = host.pci("0000:3b:00.1", "0x8086", "0x56c0", "0x038000")
    host.link(card / "virtfn0", function)
    host.link(function / "physfn", card)
    (device,) = discover(IntelGpuDriver, host).devices
    assert read_attributes(device)[0] == "VGPU"
    assert [json.loads(handle.info)["function"] for handle in device.deployables[0].handles] == ["1"]


@pytest.mark.parametrize(("product", "model"), [("0x74a1", "MI300X"), ("0x75a3", "MI355X")])
def test_a_whole_card_that_does_not_survive_passthrough_is_not_offered(
    host: FakeHost, product: str, model: str
) -> None:
    host.pci(CARD, "0x1002", product, "0x120000")
    findings = discover(AmdGpuDriver, host)
    (device,) = findings.devices
    assert device.deployables[0].handles == ()
    assert [model in fault.reason for fault in findings.faults] == [True]


@pytest.mark.parametrize(
    ("files", "status", "reason"),
    [
        ({}, "ok", ""),
        ({"umc_err_count": "ue: 0\nce: 4\n"}, "ok", ""),
        ({"umc_err_count": "ue: 2\nce: 4\n", "gfx_err_count": "ue: 1\nce: 0\n"}, "degraded", "in: gfx, umc"),
        ({"gpu_vram_bad_pages": "0x0000000f : 0x00001000 : R\n0x00000010 : 0x00001000 : P\n"}, "ok", ""),
        ({"gpu_vram_bad_pages": "0x0000000f : 0x00001000 : F\n"}, "failed", "1 bad pages of its memory"),
    ],
)
def test_the_health_of_an_amd_card_follows_its_memory_errors(
    host: FakeHost, files: dict[str, str], status: str, reason: str
) -> None:
    card = host.pci(CARD, "0x1002", "0x740f", "0x038000")
    for name, text in files.items():
        host.file(card / "ras" / name, text)
    (device,) = discover(AmdGpuDriver, host).devices
    vitals = AmdGpuDriver().health(host.machine, {}, Ask(key=device.key, address=CARD))
    assert (device.status, vitals.status) == (status, status)
    assert reason in device.status_reason
    counters = {signal.name: signal.value for signal in vitals.signals if signal.name.startswith("ras ")}
    assert counters.get("ras umc ce") == ("4" if "umc_err_count" in files else None)


def test_the_file_that_resets_an_amd_card_when_it_is_read_is_never_read(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = host.pci(CARD, "0x1002", "0x74a5", "0x120000")
    host.file(card / "reset_gpu", "1\n")
    paths: list[str] = []
    read_bytes = type(host.machine).read_bytes

    def note(machine: object, path: str, *limit: int) -> bytes:
        paths.append(path)
        return read_bytes(host.machine, path, *limit)

    monkeypatch.setattr(type(host.machine), "read_bytes", note)
    (device,) = discover(AmdGpuDriver, host).devices
    ask = Ask(key=device.key, address=CARD)
    AmdGpuDriver().health(host.machine, {}, ask)
    AmdGpuDriver().stats(host.machine, {}, ask)
    assert paths
    assert not [path for path in paths if path.endswith("reset_gpu")]


@pytest.mark.parametrize(
    ("word", "status", "reason"),
    [
        ("Operational", "ok", ""),
        ("operational", "ok", ""),
        ("Needs reset", "degraded", "must be reset"),
        ("Disabled", "failed", "malfunction"),
        ("In reset", "unknown", "being reset"),
        ("In reset after device release", "unknown", "last user"),
        ("Melted", "unknown", "unknown status 'Melted'"),
    ],
)
def test_the_health_of_a_gaudi_card_is_the_word_of_its_kernel_driver(
    host: FakeHost, word: str, status: str, reason: str
) -> None:
    card = host.pci(CARD, "0x1da3", "0x1020", "0x120000")
    host.file(card / "accel/accel0/device/status", f"{word}\n")
    (device,) = discover(GaudiDriver, host).devices
    assert device.status == status
    assert reason in device.status_reason
    vitals = GaudiDriver().health(host.machine, {}, Ask(key=device.key, address=CARD))
    assert ("status", word) in [(signal.name, signal.value) for signal in vitals.signals]


def test_an_intel_card_without_usable_firmware_has_failed(host: FakeHost) -> None:
    card = host.pci(CARD, "0x8086", "0xe211", "0x030000")
    host.file(card / "survivability_mode", "Capability Info: 0x0 - 0x0\n")
    (device,) = discover(IntelGpuDriver, host).devices
    assert device.status == "failed"
    assert "update the firmware" in device.status_reason


def test_the_worse_of_two_signs_decides_and_equal_ones_give_both_reasons(host: FakeHost) -> None:
    card = host.pci(CARD, "0x1002", "0x740f", "0x038000", current_link_width="8", max_link_width="16")
    host.file(card / "ras/umc_err_count", "ue: 2\nce: 0\n")
    (device,) = discover(AmdGpuDriver, host).devices
    assert device.status == "degraded"
    assert "x8" in device.status_reason
    assert "uncorrectable" in device.status_reason
