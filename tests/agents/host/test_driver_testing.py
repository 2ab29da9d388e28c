"""Tests of `Rehearsal`, with which authors of drivers run plans in a folder, including preflight checks and undo."""

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

CARD, OTHER_CARD = "0000:01:00.0", "0000:02:00.0"
CARD_PATH = f"/sys/bus/pci/devices/{CARD}"


class PaintingDriver(Driver):
    """Its reset writes `red` into the files that its settings name; the undo of each step writes `blue`."""

    name: ClassVar[str] = "painter"
    writes: ClassVar[tuple[str, ...]] = ("/sys/bus/pci/devices/*/*",)
    acts: ClassVar[tuple[Act, ...]] = ("reset",)

    def discover(self, machine: Machine, settings: Settings) -> Findings:
        """Return the only card."""
        return Findings((Device("card", "GPU", "v", str(settings.get("model", "m")), address=CARD),))

    def reset(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan one step for each path of the settings."""
        paths = [str(path) for path in settings["paths"]]  # type: ignore[attr-defined]
        return Plan(tuple(Step(f"paint {path}", Write(path, "red"), undo=(Write(path, "blue"),)) for path in paths))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for address in (CARD, OTHER_CARD):
        home = tmp_path / f"sys/bus/pci/devices/{address}"
        home.mkdir(parents=True)
        for name in ("door", "roof"):
            (home / name).write_text("blue")
    return tmp_path


def rehearse_failure(root: Path, *paths: str, kernel: object = keep) -> str:
    host = Rehearsal(PaintingDriver(), root, {"paths": paths}, kernel=kernel)  # type: ignore[arg-type]
    with pytest.raises(PlanFailedError) as ended:
        host.do("reset", Ask("card"))
    return f"{ended.value.outcome}: {ended.value.text}"


def test_a_rehearsal_refuses_undeclared_paths_and_other_devices(root: Path) -> None:
    assert "which is not among the paths that it declares" in rehearse_failure(root, "/sys/class/net/eth0/mtu")
    assert "may affect more than this device" in rehearse_failure(root, f"/sys/bus/pci/devices/{OTHER_CARD}/door")
    assert {file.read_text() for file in root.rglob("*") if file.is_file()} == {"blue"}


def test_a_rehearsal_undoes_earlier_steps_when_the_kernel_refuses_one(root: Path) -> None:
    def kernel(file: Path, value: str) -> None:
        if file.name == "roof":
            raise OSError(16, "Device or resource busy")
        keep(file, value)

    said = rehearse_failure(root, f"{CARD_PATH}/door", f"{CARD_PATH}/roof", kernel=kernel)
    assert said == (
        f"failed: paint {CARD_PATH}/roof: {CARD_PATH}/roof: Device or resource busy. Undone: paint {CARD_PATH}/door"
    )
    assert (root / CARD_PATH[1:] / "door").read_text() == "blue"


def test_a_rehearsal_creates_no_missing_file_in_sys(root: Path) -> None:
    assert "No such file or directory" in rehearse_failure(root, f"{CARD_PATH}/window")
    assert not (root / CARD_PATH[1:] / "window").exists()


def test_a_report_that_cannot_be_sent_is_refused_with_the_path_of_the_field(root: Path) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"\$\.devices\[0\].model"):
        Rehearsal(PaintingDriver(), root, {"model": ""}).report()


@pytest.mark.slow
def test_a_rehearsal_writes_and_removes_the_state_files_of_the_driver(tmp_path: Path) -> None:
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


def test_a_rehearsal_resets_a_card_although_its_folder_has_no_processes_and_no_mounts(root: Path) -> None:
    card = root / CARD_PATH.lstrip("/")
    (card / "reset").write_text("")
    (card / "class").write_text("0x030000\n")
    (card / "driver").symlink_to("../../drivers/nouveau")
    settings = {"paths": [f"{CARD_PATH}/reset"]}
    assert Rehearsal(PaintingDriver(), root, settings).do("reset", Ask("card")) == f"paint {CARD_PATH}/reset"
