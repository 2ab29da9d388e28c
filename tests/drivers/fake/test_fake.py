"""Tests of the fake driver: the device that upstream reports, and the control file that an operator changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drivers.errors import Invalid
from drivers.fake.driver import FakeDriver, simulate_load
from drivers.inventory import Attribute, Device, Sample
from drivers.machine import Machine
from drivers.plan import Ask


def discover_devices(control: Path | None = None, node: str = "node-1.example") -> tuple[Device, ...]:
    return FakeDriver().discover(Machine(node), {"control_file": str(control)} if control else {}).devices


def run_fake_command(control: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "drivers.fake", "--control", str(control), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_without_a_control_file_the_fake_driver_reports_the_device_of_upstream() -> None:
    (device,) = discover_devices()
    assert (device.type, device.vendor, device.model) == ("FPGA", "0xABCD", "miss model info")
    assert device.std_board_info == '{"device_id": "0xabcd", "class": "Fake class"}'
    assert (device.address, device.vendor_board_info) == ("0000:0c:00.0", "fake_vendor_info")
    (deployable,) = device.deployables
    assert (deployable.name, deployable.num_accelerators) == ("node-1_example_FakeDevice", 16)
    assert deployable.driver_name == "fake"
    assert deployable.attributes == (Attribute("traits1", "CUSTOM_FAKE_DEVICE"), Attribute("rc", "FPGA"))
    assert {handle.attach_type for handle in deployable.handles} == {"TEST_PCI"}
    places = [json.loads(handle.info) for handle in deployable.handles]
    assert [(place["device"], place["function"]) for place in places] == [
        (str(number // 8), str(number % 8)) for number in range(1, 17)
    ]
    assert {(place["domain"], place["bus"]) for place in places} == {("0000", "0c")}


def test_the_devices_have_the_names_that_the_control_file_gives_them(tmp_path: Path) -> None:
    assert discover_devices()[0].subsystem == "17aa:402f"
    control = tmp_path / "fake.json"
    control.write_text('{"hardware": ["10ee", "7038", "17aa:402f"]}')
    (device,) = discover_devices(control)
    assert (device.vendor, device.model, device.subsystem) == ("10ee", "7038", "17aa:402f")
    control.write_text('{"hardware": ["10ee", "7038", "a board"]}')
    with pytest.raises(Invalid, match="hardware"):
        discover_devices(control)


@pytest.mark.system
def test_the_fake_command_unplugs_fails_degrades_and_restores_devices(tmp_path: Path) -> None:
    control = tmp_path / "deep/fake.json"
    assert run_fake_command(control, "count", "3").returncode == 0
    assert run_fake_command(control, "unplug", "1").returncode == 0
    assert run_fake_command(control, "fail", "2", "smoke").returncode == 0
    assert run_fake_command(control, "degrade", "0", "warm").returncode == 0
    assert [(d.address, d.status, d.status_reason) for d in discover_devices(control)] == [
        ("0000:0c:00.0", "degraded", "warm"),
        ("0000:0e:00.0", "failed", "smoke"),
    ]
    for index in "012":
        assert run_fake_command(control, "plug", index).returncode == 0
    assert [device.status for device in discover_devices(control)] == ["ok"] * 3


def test_600_fake_devices_have_distinct_names_and_addresses(tmp_path: Path) -> None:
    control = tmp_path / "fake.json"
    control.write_text('{"count": 600, "handles": 2}')
    devices = discover_devices(control)
    assert len({device.address for device in devices}) == len({device.key for device in devices}) == 600
    assert len({part.name for device in devices for part in device.deployables}) == 600
    assert {part.num_accelerators for device in devices for part in device.deployables} == {2}


def test_the_simulated_load_varies_over_time_and_by_device_within_its_bounds() -> None:
    hour = [simulate_load("fake_driver:0000:0c:00.0", float(second)) for second in range(0, 3600, 20)]
    busy = [load["utilization_percent"] for load in hour]
    assert min(busy) >= 0 and max(busy) <= 100 and max(busy) - min(busy) > 50
    assert all(0 < load["memory_used_bytes"] <= load["memory_total_bytes"] for load in hour)
    assert hour != [simulate_load("fake_driver:0000:0d:00.0", float(second)) for second in range(0, 3600, 20)]
    assert simulate_load("a", 1e9) == simulate_load("a", 1e9) != simulate_load("a", 1e9 + 30)


@pytest.mark.slow
def test_the_fake_driver_reports_the_load_of_its_control_file_else_a_simulated_one(tmp_path: Path) -> None:
    control, ask = tmp_path / "fake.json", Ask("fake_driver:0000:0c:00.0")
    assert run_fake_command(control, "set", "stats", '{"power_watts": 12.5}').returncode == 0
    settings: dict[str, object] = {"control_file": str(control)}
    assert FakeDriver().stats(Machine("n"), settings, ask) == (Sample(ask.key, "power_watts", 12.5),)
    assert run_fake_command(control, "set", "stats", "null").returncode == 0
    assert {one.metric for one in FakeDriver().stats(Machine("n"), settings, ask)} == simulate_load("a", 0.0).keys()


@pytest.mark.parametrize("text", ["{", "[]", '{"count": -1}', '{"cuont": 1}', "\xff"])
def test_an_unusable_control_file_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    control = tmp_path / "fake.json"
    control.write_text(text, encoding="latin-1")
    with pytest.raises(Invalid, match=r"fake\.json"):
        discover_devices(control)


@pytest.mark.slow
def test_the_fake_command_does_not_change_a_control_file_that_it_cannot_read(tmp_path: Path) -> None:
    control = tmp_path / "fake.json"
    control.write_text("{")
    done = run_fake_command(control, "count", "2")
    assert done.returncode == 1
    assert "fake.json is not usable" in done.stderr
    assert "Traceback" not in done.stderr
    assert control.read_text() == "{"
