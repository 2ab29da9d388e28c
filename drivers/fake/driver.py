"""The fake driver: simulated FPGAs that look exactly like upstream's fake device and can simulate hardware failures.

Settings: `control_file`, the path of a JSON file that contains a Script and is read at every call; `python -m
drivers.fake` changes it. The state of device n is stored in the files of `/state/<boot id>/<n>/`; like the state of
real hardware, it is lost at a reboot.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
import zlib
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple, get_args

import msgspec
from msgspec import Meta, Struct

from drivers.base import Driver, Findings, Settings
from drivers.errors import KINDS, Busy, Failed, Gone, Invalid
from drivers.inventory import AttachHandle, Attribute, Deployable, Device, HandleType, Name, PciSubsystem, Sample, Word
from drivers.machine import Machine
from drivers.plan import Act, Ask, Check, Plan, Signal, Step, Vitals, Write

DEFAULT_HANDLES, MAX_HANDLES = 16, 128
MEMORY_BYTES = 16 * 2**30
"""The memory of each device in bytes."""
BOOT_ID = "/proc/sys/kernel/random/boot_id"
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
FILE_NAME = re.compile(r"[a-z0-9_-]+")
MDEV_PREFIX = "mdev-"

ErrorKind = Literal["Invalid", "Unsupported", "Busy", "Denied", "Gone", "Failed", "Timeout"]
InstallName = Annotated[str, Meta(pattern=r"^[a-z0-9_]{1,32}$")]
DelaySeconds = Annotated[float, Meta(ge=0, le=3600)]


class Hardware(NamedTuple):
    """The names of the devices' hardware: the vendor, the model and the board, as `drivers.inventory.Device` has them.

    The vendor and the model are upstream's. The PCI ID database has this board, of Lenovo with an FPGA of Xilinx
    (10ee:7038).
    """

    vendor: Name = "0xABCD"
    model: Name = "miss model info"
    subsystem: PciSubsystem = "17aa:402f"


class Script(Struct, forbid_unknown_fields=True):
    """The content of the control file. Devices are identified by their numbers; as JSON keys these are strings.

    `count`: devices have the numbers below this one; those in `unplugged` are missing. `handles`: handles per device,
    until it is partitioned. `failing`, `degraded`: number → reason. `delay_s`: seconds that `discover` sleeps.
    `misbehave`: how the driver itself fails (see `_misbehave`). `install`: names, each of which takes one step to
    install. `handle_type`: MDEV handles must be attached. `refuse`: act → kind and text of the error it raises.
    `wrong`: acts that get a last step whose check never succeeds. `slow_s`: act or `stats` → seconds that it sleeps.
    `busy`: numbers of devices that another program uses. `signals`: the readings of `health`. `stats`: the load of
    every device; if it is None, it changes by itself (`simulate_load`). `hardware`: the names of their hardware.
    """

    count: Annotated[int, Meta(ge=0, le=4096)] = 1
    handles: Annotated[int, Meta(ge=1, le=MAX_HANDLES)] = DEFAULT_HANDLES
    unplugged: list[int] = []
    failing: dict[str, str] = {}
    degraded: dict[str, str] = {}
    delay_s: Annotated[float, Meta(ge=0)] = 0.0
    misbehave: str = ""
    install: list[InstallName] = []
    handle_type: Literal["TEST_PCI", "MDEV"] = "TEST_PCI"
    refuse: dict[Act, tuple[ErrorKind, str]] = {}
    wrong: dict[Act, bool] = {}
    slow_s: dict[Act | Literal["stats"], DelaySeconds] = {}
    busy: list[int] = []
    signals: tuple[Signal, ...] = (Signal("temperature", "40", "°C", "90"),)
    stats: dict[Word, float] | None = None
    hardware: Hardware = Hardware()


class FakeSettings(Struct, frozen=True):
    """The settings of fake_driver. Other keys are ignored."""

    control_file: str = ""


class FakeDriver(Driver):
    """Simulates one FPGA with 16 `TEST_PCI` handles like upstream's; the Script can change that and cause failures."""

    name: ClassVar[str] = "fake_driver"
    watched: ClassVar[tuple[str, ...]] = ("control_file",)
    writes: ClassVar[tuple[str, ...]] = ("/state/*/*/*",)
    acts: ClassVar[tuple[Act, ...]] = get_args(Act)
    settings_type: ClassVar[type[Struct] | None] = FakeSettings
    resource_classes: ClassVar[tuple[str, ...]] = ("FPGA",)
    handle_types: ClassVar[tuple[HandleType, ...]] = ("TEST_PCI", "MDEV")

    def discover(self, machine: Machine, settings: Settings) -> Findings:
        """Return the devices of the Script, after the delay and the failure that it defines.

        Raises Invalid for an unusable control file.
        """
        script = _load_script(settings)
        time.sleep(script.delay_s)
        _misbehave(script.misbehave)
        home = _get_state_folder(machine)
        return Findings(
            tuple(FakeDevice(machine, script, n, home).build_device() for n in _list_device_numbers(script))
        )

    def health(self, machine: Machine, settings: Settings, ask: Ask) -> Vitals:
        """Return the health and signals of the Script.

        Raises Gone if there is no such device, and Invalid for an unusable control file.
        """
        device = _find_device(machine, _load_script(settings), ask)
        return Vitals(*device.get_status(), signals=device.script.signals)

    def stats(self, machine: Machine, settings: Settings, ask: Ask) -> tuple[Sample, ...]:
        """Return the load of the Script or, if it has none, the simulated load of this moment.

        It sleeps as `slow_s` says, and does not check that the device exists. Raises Invalid for an unusable control
        file.
        """
        script = _load_script(settings)
        time.sleep(script.slow_s.get("stats", 0))
        load = simulate_load(ask.key, time.time()) if script.stats is None else script.stats
        return tuple(Sample(ask.key, metric, value) for metric, value in load.items())

    def install(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan a step for each missing name of the Script's `install`, and the division that `ask.layout` wants.

        Raises Invalid for an unusable layout, Busy if the division would change while a handle is attached, and the
        errors of `_prepare_act`.
        """
        device = _prepare_act("install", machine, settings, ask)
        return device.make_plan("install", [*device.plan_install(), *device.plan_partition(ask.layout)])

    def uninstall(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan to restore the first values of all written files, or to remove the files that have none in `ask.first`.

        Raises Busy if a handle is attached, and the errors of `_prepare_act`.
        """
        device = _prepare_act("uninstall", machine, settings, ask)
        device.refuse_if_attached()
        first_values = {name: ask.first.get(device.get_path(name), "") for name in device.files}
        steps = [
            device.make_set_step(name, value) for name, value in first_values.items() if device.files[name] != value
        ]
        return device.make_plan("uninstall", steps)

    def attach(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan to create an MDEV handle for its consumer under the handle's uuid; TEST_PCI handles need no steps.

        Raises the errors of `FakeDevice.plan_attach` (MDEV handles only) and of `_prepare_act`.
        """
        device = _prepare_act("attach", machine, settings, ask)
        return device.make_plan("attach", device.plan_attach(ask) if _is_mdev(ask) else [])

    def detach(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan to remove what `attach` created for this consumer; a handle of another consumer stays.

        If `ask.consumer` is empty, the handle is removed whoever has it. Raises the errors of `_prepare_act`.
        """
        device = _prepare_act("detach", machine, settings, ask)
        holder = device.files.get(MDEV_PREFIX + ask.uuid, "")
        is_attached = holder and ask.consumer in ("", holder)
        return device.make_plan("detach", [device.make_set_step(MDEV_PREFIX + ask.uuid, "")] if is_attached else [])

    def program(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan to copy the image to a file and its checksum to a second file, which shows what is loaded.

        There are no steps if this image is loaded already. Raises Invalid without an image or for an image of other
        hardware, Busy if a handle is attached, and the errors of `_prepare_act`.
        """
        device = _prepare_act("program", machine, settings, ask)
        if ask.image is None:
            raise Invalid("there is no image to program")
        wanted_device = ask.image.properties.get("accel:device", "fake")
        if wanted_device != "fake":
            raise Invalid(f"the image {ask.image.name} is made for the device {wanted_device}, but this device is fake")
        device.refuse_if_attached()
        if device.files.get("loaded") == ask.image.sha256:
            return device.make_plan("program", [])
        path = device.get_path("image")
        copy_step = Step(f"copy {ask.image.size} bytes", Write(path, ""), "copy", undo=(Write(path, ""),), timeout_s=60)
        clear_steps = [device.make_set_step("loaded", "")] if "loaded" in device.files else []
        return device.make_plan(
            "program", [*clear_steps, copy_step, device.make_set_step("loaded", ask.image.sha256, expected="")]
        )

    def partition(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan to give the device as many handles as `parts` of the layout states.

        Raises Invalid for an unusable layout, Busy if a handle is attached, and the errors of `_prepare_act`.
        """
        device = _prepare_act("partition", machine, settings, ask)
        if not ask.layout:
            raise Invalid('the layout does not state a number of parts, like {"parts": "4"}')
        device.refuse_if_attached()
        return device.make_plan("partition", device.plan_partition(ask.layout))

    def reset(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan to remove the loaded image and to increment the number in the file `resets`.

        Raises Busy if a handle is attached, and the errors of `_prepare_act`.
        """
        device = _prepare_act("reset", machine, settings, ask)
        device.refuse_if_attached()
        count = device.files.get("resets", "0")
        clear_steps = [device.make_set_step(name, "") for name in ("loaded", "image") if name in device.files]
        return device.make_plan("reset", [*clear_steps, device.make_set_step("resets", str(int(count) + 1))])


class FakeDevice:
    """Device `n` in its present state, which is read once, when this object is created.

    Device 0 equals upstream's (contract section 6.3); the others have their own PCI buses and names. Upstream does not
    report boards.
    """

    def __init__(self, machine: Machine, script: Script, n: int, home: str) -> None:
        self.n, self.script, self._node = n, script, machine.node
        self.address = _make_address(n)
        domain, bus, _ = self.address.split(":")
        self.pci_location = {"bus": bus, "device": "00", "domain": domain, "function": "0"}
        self.key = f"fake_driver:{self.address}"
        self._folder = f"{home}/{n}"
        names = filter(FILE_NAME.fullmatch, machine.names(self._folder))
        self.files = {name: "…" if name == "image" else machine.text(self.get_path(name)) for name in names}

    def get_path(self, name: str) -> str:
        """Return the path of one of the device's files, below `/state`; the file need not exist."""
        return f"{self._folder}/{name}"

    def get_status(self) -> tuple[Literal["ok", "degraded", "failed"], str]:
        """Return the health that the Script gives to the device, and the reason ('' for ok).

        If the device is in both `failing` and `degraded`, it is failed.
        """
        failed, degraded = (reasons.get(str(self.n), "") for reasons in (self.script.failing, self.script.degraded))
        return "failed" if failed else "degraded" if degraded else "ok", failed or degraded

    def build_device(self) -> Device:
        """Return this simulated device as `discover` reports it, from the state that was read at creation."""
        name = re.sub(r"[^a-zA-Z0-9_-]", "_", f"{self._node}_FakeDevice" + (f"_{self.n}" if self.n else ""))
        attributes = (Attribute("traits1", "CUSTOM_FAKE_DEVICE"), Attribute("rc", "FPGA"))
        handles = self._list_handles()
        status, reason = self.get_status()
        return Device(
            key=self.key,
            type="FPGA",
            vendor=self.script.hardware.vendor,
            model=self.script.hardware.model,
            subsystem=self.script.hardware.subsystem,
            address=self.address,
            std_board_info='{"device_id": "0xabcd", "class": "Fake class"}',
            vendor_board_info="fake_vendor_info",
            status=status,
            status_reason=reason,
            deployables=(Deployable(name, len(handles), attributes, handles, "fake"),),
            to_install="\n".join(step.does for step in self.plan_install()),
            acts=" ".join(sorted((*FakeDriver.acts, "health"))),
            changeable="parts",
            sized_by="parts",
        )

    def make_set_step(self, name: str, value: str, expected: str | None = None) -> Step:
        """Return a step that sets one of the device's files to `value`; '' removes the file.

        `expected` is the value that the file must have before the write; None stands for the value that was read when
        this FakeDevice was created. The file `image` can only be removed, by a step without checks and without `undo`.
        """
        path = self.get_path(name)
        before = self.files.get(name, "") if expected is None else expected
        description = f"set {name} of device {self.n} to {value}" if value else f"remove {name} of device {self.n}"
        if name == "image":
            return Step(description, Write(path, ""))
        checks = (Check(path, before),), (Check(path, value),)
        return Step(description, Write(path, value), expect=checks[0], seen=checks[1], undo=(Write(path, before),))

    def make_plan(self, act: Act, steps: list[Step]) -> Plan:
        """Return a plan of the steps, whose text says what they do, shortened to 4096 characters.

        If `wrong` of the Script has a true value for the act, a step whose check never succeeds is added to the list.
        """
        if self.script.wrong.get(act):
            path = self.get_path("wrong")
            never = (Check(self.get_path("never"), "so"),)
            steps.append(Step("do it wrong", Write(path, "on"), seen=never, undo=(Write(path, ""),), timeout_s=0.2))
        return Plan(tuple(steps), "; ".join(step.does for step in steps)[:4096])

    def plan_install(self) -> list[Step]:
        """Return a step for each name in the Script's `install`, unless the device's file of that name has the content
        `on`.
        """
        return [
            self.make_set_step(word, "on")
            for word in dict.fromkeys(self.script.install)
            if self.files.get(word) != "on"
        ]

    def plan_partition(self, layout: dict[str, str]) -> list[Step]:
        """Return the step to as many handles as `parts` states.

        There are no steps for an empty layout, or if the device's file `parts` has this value. Raises Invalid for a
        layout with other keys or an unusable number, and Busy if the number would change while a handle is attached.
        """
        parts = layout.get("parts", "1")
        if layout.keys() - {"parts"} or not re.fullmatch("[1-9][0-9]{0,2}", parts) or int(parts) > MAX_HANDLES:
            raise Invalid(
                f'the layout {json.dumps(layout)} is not like {{"parts": "4"}}, with 1 to {MAX_HANDLES} parts'
            )
        if not layout or self.files.get("parts") == parts:
            return []
        self.refuse_if_attached()
        return [self.make_set_step("parts", parts)]

    def plan_attach(self, ask: Ask) -> list[Step]:
        """Return the steps that attach an MDEV handle; none if it is attached to this consumer.

        Raises Busy if it is attached to another consumer, Gone if there is no such handle, and Invalid without a valid
        uuid and a consumer.
        """
        if not UUID.fullmatch(ask.uuid) or not ask.consumer:
            raise Invalid(f"an MDEV handle needs a uuid and a consumer, not {ask.uuid!r} and {ask.consumer!r}")
        if ask.handle not in self._list_handles():
            raise Gone(f"device {self.n} has no such handle (any more)")
        holder = self.files.get(MDEV_PREFIX + ask.uuid, "")
        if holder == ask.consumer:
            return []
        if holder:
            raise Busy(f"handle {ask.uuid} is attached to {holder}")
        return [self.make_set_step(MDEV_PREFIX + ask.uuid, ask.consumer)]

    def refuse_if_attached(self) -> None:
        """Raise Busy if an MDEV handle of the device is attached."""
        for name, holder in self.files.items():
            if name.startswith(MDEV_PREFIX):
                raise Busy(f"handle {name.removeprefix(MDEV_PREFIX)} is attached to {holder}: detach it first")

    def _list_handles(self) -> tuple[AttachHandle, ...]:
        """Return the device's handles. Their number comes from the device's file `parts` or, if there is no such file,
        from `handles` of the Script."""
        count = int(self.files.get("parts", self.script.handles))
        if self.script.handle_type == "TEST_PCI":
            places = (
                {**self.pci_location, "device": f"{k // 8:x}", "function": f"{k % 8:x}"} for k in range(1, count + 1)
            )
            return tuple(AttachHandle("TEST_PCI", json.dumps(place)) for place in places)
        marks = ({"asked_type": "fake-1", **self.pci_location, "vgpu_mark": f"fake-1_{k}"} for k in range(count))
        return tuple(AttachHandle("MDEV", json.dumps(mark)) for mark in marks)


def simulate_load(key: str, unix_time: float) -> dict[str, float]:
    """Return the simulated load of a device at `unix_time` (seconds): metric → value, see `drivers.inventory.Sample`.

    The same key and time always give the same load. Utilization (0 to 100 %) changes over minutes, with smaller changes
    over seconds, at a different pace for each key. Memory (bytes) follows the slow change; temperature (°C) and power
    (W) follow utilization. The counters of errors are always 0.
    """
    offset = zlib.crc32(key.encode()) / 2**32
    slow_wave = 0.5 + 0.5 * math.sin(math.tau * (unix_time / (400 + 400 * offset) + offset))
    utilization = min(100.0, max(0.0, 90 * slow_wave + 8 * math.sin(math.tau * (unix_time / 23 + 7 * offset))))
    return {
        "utilization_percent": round(utilization, 1),
        "memory_used_bytes": float(int(MEMORY_BYTES * (0.05 + 0.85 * slow_wave))),
        "memory_total_bytes": float(MEMORY_BYTES),
        "temperature_celsius": round(36 + 0.42 * utilization, 1),
        "power_watts": round(25 + 1.75 * utilization, 1),
        **dict.fromkeys(("errors_correctable_total", "errors_nonfatal_total", "errors_fatal_total"), 0.0),
    }


def _prepare_act(act: Act, machine: Machine, settings: Settings, ask: Ask) -> FakeDevice:
    """Return the device of an act, after the delays and failures that the Script defines for it.

    Raises the error of `refuse`, Gone for an unknown device, Busy for a device in `busy`, Invalid for an unusable
    control file, and whatever `_misbehave` raises.
    """
    script = _load_script(settings)
    _misbehave(script.misbehave)
    time.sleep(script.slow_s.get(act, 0))
    if act in script.refuse:
        kind, text = script.refuse[act]
        raise KINDS[kind](text)
    device = _find_device(machine, script, ask)
    if device.n in script.busy:
        raise Busy(f"device {device.n} is in use by another program of this host")
    return device


def _find_device(machine: Machine, script: Script, ask: Ask) -> FakeDevice:
    """Return the device `ask.key` in its present state.

    Raises Gone if the Script has no such device, or it is unplugged.
    """
    for n in _list_device_numbers(script):
        if ask.key == f"fake_driver:{_make_address(n)}":
            return FakeDevice(machine, script, n, _get_state_folder(machine))
    raise Gone(f"there is no device {ask.key} (any more)")


def _is_mdev(ask: Ask) -> bool:
    """Return whether the call is about an MDEV handle; False if the call names no handle."""
    return ask.handle is not None and ask.handle.attach_type == "MDEV"


def _get_state_folder(machine: Machine) -> str:
    """Return the directory of all devices' files, `/state/<boot id>`; the boot id is `unknown` if the host has none."""
    return f"/state/{machine.text(BOOT_ID, 'unknown')}"


def _list_device_numbers(script: Script) -> list[int]:
    """Return the numbers of the devices that are plugged in."""
    return [n for n in range(script.count) if n not in script.unplugged]


def _make_address(n: int) -> str:
    """Return the PCI address of device `n`. Each device has a bus of its own, beginning with 0c for device 0."""
    return f"{(0x0C + n) // 256:04x}:{(0x0C + n) % 256:02x}:00.0"


def _misbehave(how: str) -> None:
    """Fail in one of the ways in which a driver can fail; '' does nothing.

    `raise` raises RuntimeError and `fail` raises Failed. `hang` and `flood` never return; `flood` prints without end.
    `rubbish` writes invalid JSON to file descriptor 1 and raises Failed. `die` ends the process with exit status 3.
    Raises Invalid for an unknown way.
    """
    if how == "raise":
        raise RuntimeError("told to raise")
    if how == "fail":
        raise Failed("told to fail")
    if how == "hang":
        while True:
            time.sleep(3600)
    if how == "flood":
        while True:
            print("x" * 65536)  # noqa: T201
    if how == "rubbish":
        os.write(1, b"{]\n")
        raise Failed("told to answer rubbish")
    if how == "die":
        os._exit(3)
    if how:
        raise Invalid(f"misbehave={how!r} is not usable: write raise, fail, hang, flood, rubbish or die")


def _load_script(settings: Settings) -> Script:
    """Return the Script of the control file that the settings name; the default Script if they name none.

    Raises Invalid if the file cannot be read or contains no valid Script.
    """
    return read_script(str(settings.get("control_file") or ""))


def read_script(path: str) -> Script:
    """Return the Script of the control file, or the default Script if `path` is empty or there is no such file.

    Raises Invalid if the file cannot be read or contains no valid Script.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Script) if path else Script()
    except FileNotFoundError:
        return Script()
    except (OSError, msgspec.MsgspecError) as error:
        raise Invalid(f"the control file {path} is not usable: {error}") from None
