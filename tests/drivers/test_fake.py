"""The fake driver: upstream's device to the byte, and a script that an operator changes while it runs."""

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


def look(control: Path | None = None, node: str = "node-1.example") -> tuple[Device, ...]:
    return FakeDriver().discover(Machine(node), {"control_file": str(control)} if control else {}).devices


def change(control: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "drivers.fake", "--control", str(control), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_without_a_script_it_is_upstreams_device() -> None:
    (device,) = look()
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


@pytest.mark.system
def test_devices_are_unplugged_and_plugged_fail_and_heal(tmp_path: Path) -> None:
    control = tmp_path / "deep/fake.json"
    assert change(control, "count", "3").returncode == 0
    assert change(control, "unplug", "1").returncode == 0
    assert change(control, "fail", "2", "smoke").returncode == 0
    assert change(control, "degrade", "0", "warm").returncode == 0
    assert [(d.address, d.status, d.status_reason) for d in look(control)] == [
        ("0000:0c:00.0", "degraded", "warm"),
        ("0000:0e:00.0", "failed", "smoke"),
    ]
    for index in "012":
        assert change(control, "plug", index).returncode == 0
    assert [device.status for device in look(control)] == ["ok"] * 3


def test_any_number_of_devices_have_names_and_addresses_of_their_own(tmp_path: Path) -> None:
    control = tmp_path / "fake.json"
    control.write_text('{"count": 600, "handles": 2}')
    devices = look(control)
    assert len({device.address for device in devices}) == len({device.key for device in devices}) == 600
    assert len({part.name for device in devices for part in device.deployables}) == 600
    assert {part.num_accelerators for device in devices for part in device.deployables} == {2}


def test_its_load_moves_by_itself_within_bounds_each_device_at_its_own_pace() -> None:
    hour = [simulate_load("fake_driver:0000:0c:00.0", float(second)) for second in range(0, 3600, 20)]
    busy = [load["utilization_percent"] for load in hour]
    assert min(busy) >= 0 and max(busy) <= 100 and max(busy) - min(busy) > 50
    assert all(0 < load["memory_used_bytes"] <= load["memory_total_bytes"] for load in hour)
    assert hour != [simulate_load("fake_driver:0000:0d:00.0", float(second)) for second in range(0, 3600, 20)]
    assert simulate_load("a", 1e9) == simulate_load("a", 1e9) != simulate_load("a", 1e9 + 30)


def test_its_load_is_what_the_script_says_and_moves_again_without(tmp_path: Path) -> None:
    control, ask = tmp_path / "fake.json", Ask("fake_driver:0000:0c:00.0")
    assert change(control, "set", "stats", '{"power_watts": 12.5}').returncode == 0
    settings: dict[str, object] = {"control_file": str(control)}
    assert FakeDriver().stats(Machine("n"), settings, ask) == (Sample(ask.key, "power_watts", 12.5),)
    assert change(control, "set", "stats", "null").returncode == 0
    assert {one.metric for one in FakeDriver().stats(Machine("n"), settings, ask)} == simulate_load("a", 0.0).keys()


@pytest.mark.parametrize("text", ["{", "[]", '{"count": -1}', '{"cuont": 1}', "\xff"])
def test_an_unusable_control_file_is_named(tmp_path: Path, text: str) -> None:
    control = tmp_path / "fake.json"
    control.write_text(text, encoding="latin-1")
    with pytest.raises(Invalid, match=r"fake\.json"):
        look(control)


def test_the_command_leaves_a_file_it_cannot_read_alone(tmp_path: Path) -> None:
    control = tmp_path / "fake.json"
    control.write_text("{")
    done = change(control, "count", "2")
    assert done.returncode == 1
    assert "fake.json is not usable" in done.stderr
    assert "Traceback" not in done.stderr
    assert control.read_text() == "{"
