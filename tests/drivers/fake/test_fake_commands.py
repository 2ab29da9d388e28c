"""Tests of the fake driver's plans, carried out on its files, and of the failures that its control file can order."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from drivers.errors import KINDS, Busy, DriverError, Gone, Invalid
from drivers.fake.driver import BOOT_ID, FakeDriver
from drivers.inventory import AttachHandle, Device, Sample
from drivers.isolation.runner import DriverProcess
from drivers.machine import Machine
from drivers.plan import Act, Ask, Check, Image, Plan, Signal, stray
from tests.drivers.fake.test_fake import run_fake_command

KEY = "fake_driver:0000:0c:00.0"
HANDLE, OTHER_HANDLE = "8f1c7a52-4a8e-4c3b-9f9e-1d2b3c4d5e6f", "00000000-0000-0000-0000-000000000001"
CONSUMER, OTHER_CONSUMER = "b1d5c1f0-6a33-4a43-8d2c-7c1a54a0a001", "b1d5c1f0-6a33-4a43-8d2c-7c1a54a0a002"


class FakeDriverBench:
    """A host in a directory with the fake driver, its control file, and a simple executor of its plans."""

    def __init__(self, root: Path) -> None:
        self.root, self.control = root, root / "fake.json"
        self.machine = Machine("node-1", proc_root=str(root / "proc"), state_root=str(root / "state"))
        self.boot("boot-1")
        self.write_control_file()

    def boot(self, boot_id: str) -> None:
        """Give the host a new boot id, as after a reboot."""
        file = self.root / BOOT_ID.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{boot_id}\n")

    def write_control_file(self, **keys: Any) -> None:
        """Replace the control file."""
        self.control.write_text(json.dumps(keys))

    @property
    def settings(self) -> dict[str, object]:
        """Return the settings of the driver."""
        return {"control_file": str(self.control)}

    def discover_device(self) -> Device:
        """Return device 0 as the driver reports it."""
        return FakeDriver().discover(self.machine, self.settings).devices[0]

    def plan(self, act: Act, **words: Any) -> Plan:
        """Return the driver's plan for device 0. Check that it writes only to the paths that the driver declares."""
        plan: Plan = getattr(FakeDriver(), act)(self.machine, self.settings, Ask(KEY, **words))
        assert not stray(plan, FakeDriver.writes)
        return plan

    def run_plan(self, act: Act, **words: Any) -> list[str]:
        """Plan an act and carry it out; return what its steps do. Except after a reset, a second plan must be empty."""
        plan = self.plan(act, **words)
        for step in plan.steps:
            assert all(map(self.is_true, step.expect)), step
            file = self.root / step.write.path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            if step.image:
                file.write_bytes(Path(words["image"].path).read_bytes())
            elif step.write.value:
                file.write_text(step.write.value)
            else:
                file.unlink()
            assert all(map(self.is_true, step.seen)), step
        if act != "reset":
            assert not self.plan(act, **words).steps, "it is idempotent"
        return [step.does for step in plan.steps]

    def is_true(self, check: Check) -> bool:
        """Return whether the file of the check has its value."""
        return self.machine.text(check.path) == check.value

    def handles(self) -> tuple[AttachHandle, ...]:
        """Return the handles of device 0."""
        return self.discover_device().deployables[0].handles


@pytest.fixture
def bench(tmp_path: Path) -> FakeDriverBench:
    return FakeDriverBench(tmp_path)


def test_the_default_fake_device_needs_no_steps_and_supports_every_act(bench: FakeDriverBench) -> None:
    assert (
        bench.run_plan("install")
        == bench.run_plan("attach", handle=bench.handles()[0], uuid=HANDLE, consumer=CONSUMER)
        == []
    )
    assert bench.discover_device().to_install == ""
    assert bench.discover_device().acts.split() == sorted({*get_args(Act), "health"})


def test_install_plans_a_step_for_each_configured_word_and_uninstall_removes_them(bench: FakeDriverBench) -> None:
    bench.write_control_file(install=["firmware", "clock"])
    both = ["set firmware of device 0 to on", "set clock of device 0 to on"]
    assert bench.discover_device().to_install.splitlines() == both
    assert bench.run_plan("install") == both
    assert bench.discover_device().to_install == ""
    kept = {"/state/boot-1/0/clock": "on"}
    assert bench.run_plan("uninstall", first=kept) == ["remove firmware of device 0"]
    assert bench.run_plan("uninstall") == ["remove clock of device 0"]


def test_a_reboot_resets_the_fake_device_to_its_initial_state(bench: FakeDriverBench) -> None:
    bench.write_control_file(install=["firmware"])
    bench.run_plan("install")
    bench.run_plan("partition", layout={"parts": "4"})
    bench.boot("boot-2")
    assert bench.discover_device().to_install and len(bench.handles()) == 16


@pytest.mark.parametrize("act", ["install", "partition"])
def test_a_layout_divides_the_fake_device_into_as_many_handles(bench: FakeDriverBench, act: Act) -> None:
    assert bench.run_plan(act, layout={"parts": "4"}) == ["set parts of device 0 to 4"]
    assert len(bench.handles()) == bench.discover_device().deployables[0].num_accelerators == 4


@pytest.mark.parametrize("layout", [{}, {"parts": "0"}, {"parts": "129"}, {"parts": "x"}, {"vfs": "1"}])
def test_a_layout_without_a_usable_number_of_parts_is_refused(bench: FakeDriverBench, layout: dict[str, str]) -> None:
    with pytest.raises(Invalid, match="parts"):
        bench.plan("partition", layout=layout)


def test_an_mdev_handle_looks_like_upstreams_and_is_attached_to_one_consumer_only(bench: FakeDriverBench) -> None:
    bench.write_control_file(handle_type="MDEV", handles=2)
    first, second = bench.handles()
    assert first == AttachHandle(
        "MDEV",
        '{"asked_type": "fake-1", "bus": "0c", "device": "00", "domain": "0000", "function": "0", '
        '"vgpu_mark": "fake-1_0"}',
    )
    mine = {"handle": first, "uuid": HANDLE, "consumer": CONSUMER}
    assert bench.run_plan("attach", **mine) == [f"set mdev-{HANDLE} of device 0 to {CONSUMER}"]
    with pytest.raises(Busy, match=f"attached to {CONSUMER}"):
        bench.plan("attach", **{**mine, "consumer": OTHER_CONSUMER})
    for act in ("uninstall", "program", "partition", "reset"):
        image = Image("/nowhere", 0, "0" * 64)
        with pytest.raises(Busy, match="detach it first"):
            bench.plan(act, image=image, layout={"parts": "4"})
    assert bench.run_plan("detach", **{**mine, "consumer": OTHER_CONSUMER}) == []
    assert bench.run_plan("attach", handle=second, uuid=OTHER_HANDLE, consumer=OTHER_CONSUMER)
    assert bench.run_plan("detach", **mine) == [f"remove mdev-{HANDLE} of device 0"]
    with pytest.raises(Invalid, match="uuid"):
        bench.plan("attach", handle=first, uuid="../x", consumer=CONSUMER)
    with pytest.raises(Gone, match="no such handle"):
        bench.plan("attach", handle=AttachHandle("MDEV", "{}"), uuid=HANDLE, consumer=CONSUMER)


def test_an_image_is_loaded_replaced_by_another_and_removed_by_reset(bench: FakeDriverBench) -> None:
    file = bench.root / "image"
    file.write_bytes(b"\xff" * 100_000)
    one, two = (Image(str(file), 100_000, digit * 64, "a.bit", {"accel:device": "fake"}) for digit in "12")
    assert bench.run_plan("program", image=one) == ["copy 100000 bytes", f"set loaded of device 0 to {'1' * 64}"]
    assert bench.run_plan("program", image=two)[0] == "remove loaded of device 0"
    assert bench.run_plan("reset") == [
        "remove loaded of device 0",
        "remove image of device 0",
        "set resets of device 0 to 1",
    ]
    with pytest.raises(Invalid, match="made for the device T4"):
        bench.plan("program", image=Image(str(file), 1, "0" * 64, properties={"accel:device": "T4"}))
    with pytest.raises(Invalid, match="no image"):
        bench.plan("program")


@pytest.mark.slow
def test_health_of_the_fake_device_has_status_signals_and_samples(bench: FakeDriverBench) -> None:
    bench.write_control_file(count=2, failing={"1": "smoke"}, stats={"load_percent": 12.5})

    async def story() -> None:
        process = DriverProcess("fake_driver", "n", bench.settings)
        vitals = await process.health(Ask(KEY))
        assert (vitals.status, vitals.signals) == ("ok", (Signal("temperature", "40", "°C", "90"),))
        assert vitals.samples == (Sample(KEY, "load_percent", 12.5),)
        vitals = await process.health(Ask("fake_driver:0000:0d:00.0"))
        assert (vitals.status, vitals.reason) == ("failed", "smoke")
        with pytest.raises(Gone):
            await process.health(Ask("fake_driver:0000:0e:00.0"))
        await process.close()

    asyncio.run(story())


@pytest.mark.slow
def test_the_driver_process_reads_the_state_directory_it_was_given(bench: FakeDriverBench, tmp_path: Path) -> None:
    bench.write_control_file(install=["firmware"])

    async def story() -> None:
        process = DriverProcess("fake_driver", "n", bench.settings, state=str(tmp_path / "own"))
        (step,) = (await process.plan("install", Ask(KEY))).steps
        path = tmp_path / "own" / Path(step.write.path).relative_to("/state")
        path.parent.mkdir(parents=True)
        path.write_text("on")
        assert (await process.plan("install", Ask(KEY))) == Plan()
        assert (await process.discover()).devices[0].to_install == ""
        await process.close()

    asyncio.run(story())


@pytest.mark.parametrize("kind", KINDS)
def test_the_fake_driver_raises_the_error_of_its_control_file(bench: FakeDriverBench, kind: str) -> None:
    bench.write_control_file(refuse={"install": [kind, "told to"]})
    with pytest.raises(DriverError, match="told to") as error:
        bench.plan("install")
    assert type(error.value) is KINDS[kind]


def test_the_control_file_makes_a_step_fail_a_device_busy_or_gone(bench: FakeDriverBench) -> None:
    bench.write_control_file(wrong={"install": True}, install=["firmware"], busy=[1], count=2)
    *_, last = bench.plan("install").steps
    assert last.undo and not bench.is_true(last.seen[0])
    with pytest.raises(Busy, match="device 1 is in use"):
        FakeDriver().reset(bench.machine, bench.settings, Ask("fake_driver:0000:0d:00.0"))
    bench.write_control_file(unplugged=[0])
    with pytest.raises(Gone, match="any more"):
        bench.plan("reset")


@pytest.mark.system
def test_the_fake_command_sets_valid_keys_and_refuses_others(bench: FakeDriverBench) -> None:
    for words in (
        ("set", "install", '["firmware"]'),
        ("refuse", "reset", "Busy", "a guest has it"),
        ("set", "slow_s", '{"program": 0.5}'),
    ):
        assert run_fake_command(bench.control, *words).returncode == 0
    known = json.loads(bench.control.read_text())
    assert (known["install"], known["refuse"], known["slow_s"]) == (
        ["firmware"],
        {"reset": ["Busy", "a guest has it"]},
        {"program": 0.5},
    )
    for words in (("set", "install", "firmware"), ("set", "install", '["../x"]'), ("refuse", "dance", "Busy", "no")):
        done = run_fake_command(bench.control, *words)
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert json.loads(bench.control.read_text()) == known
    assert "set install" in run_fake_command(bench.control, "--help").stdout
