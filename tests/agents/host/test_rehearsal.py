"""What authors of drivers test with: the agent around a folder, with its fence and its undoing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from agents.host.driver_testing import Rehearsal, keep
from agents.host.execution.plan_runner import PlanFailedError
from drivers.base import Driver, Findings, Settings
from drivers.fake.driver import FakeDriver
from drivers.inventory import Device
from drivers.machine import Machine
from drivers.plan import Act, Ask, Plan, Step, Write

CARD, OTHER = "0000:01:00.0", "0000:02:00.0"
HOME = f"/sys/bus/pci/devices/{CARD}"


class Painter(Driver):
    """Writes `red` into the files that its settings name; each may be taken back."""

    name: ClassVar[str] = "painter"
    writes: ClassVar[tuple[str, ...]] = ("/sys/bus/pci/devices/*/*",)
    acts: ClassVar[tuple[Act, ...]] = ("reset",)

    def discover(self, machine: Machine, settings: Settings) -> Findings:
        """The card."""
        return Findings((Device("card", "GPU", "v", str(settings.get("model", "m")), address=CARD),))

    def reset(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """As the settings say."""
        paths = [str(path) for path in settings["paths"]]  # type: ignore[attr-defined]
        return Plan(tuple(Step(f"paint {path}", Write(path, "red"), undo=(Write(path, "blue"),)) for path in paths))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for address in (CARD, OTHER):
        home = tmp_path / f"sys/bus/pci/devices/{address}"
        home.mkdir(parents=True)
        for name in ("door", "roof"):
            (home / name).write_text("blue")
    return tmp_path


def painted(root: Path, *paths: str, kernel: object = keep) -> str:
    host = Rehearsal(Painter(), root, {"paths": paths}, kernel=kernel)  # type: ignore[arg-type]
    with pytest.raises(PlanFailedError) as ended:
        host.do("reset", Ask("card"))
    return f"{ended.value.outcome}: {ended.value.text}"


def test_the_agents_fence_is_around_it(root: Path) -> None:
    assert "which is not among the paths that it declares" in painted(root, "/sys/class/net/eth0/mtu")
    assert "may affect more than this device" in painted(root, f"/sys/bus/pci/devices/{OTHER}/door")
    assert {file.read_text() for file in root.rglob("*") if file.is_file()} == {"blue"}


def test_what_was_done_is_taken_back_when_the_kernel_refuses(root: Path) -> None:
    def kernel(file: Path, value: str) -> None:
        if file.name == "roof":
            raise OSError(16, "Device or resource busy")
        keep(file, value)

    said = painted(root, f"{HOME}/door", f"{HOME}/roof", kernel=kernel)
    assert said == (f"failed: paint {HOME}/roof: {HOME}/roof: Device or resource busy. Undone: paint {HOME}/door")
    assert (root / HOME[1:] / "door").read_text() == "blue"


def test_a_file_of_sys_must_be_there(root: Path) -> None:
    assert "No such file or directory" in painted(root, f"{HOME}/window")
    assert not (root / HOME[1:] / "window").exists()


def test_what_cannot_be_sent_is_said_with_its_place(root: Path) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"\$\.devices\[0\].model"):
        Rehearsal(Painter(), root, {"model": ""}).report()


def test_a_drivers_own_files_are_written_and_removed(tmp_path: Path) -> None:
    control = tmp_path / "control.json"
    control.write_text(json.dumps({"install": ["clock"]}))
    host = Rehearsal(FakeDriver(), tmp_path, {"control_file": str(control)})
    (device,) = host.report().devices
    assert host.do("install", Ask(device.key)) == "set clock of device 0 to on"
    made = tmp_path / "state/unknown/0/clock"
    assert made.read_text() == "on"
    assert host.health(device.key).status == "ok"
    host.do("uninstall", Ask(device.key))
    assert not made.exists()
