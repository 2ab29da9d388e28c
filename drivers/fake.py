"""The fake driver: upstream's fake FPGA to the byte, and a script for everything that can go wrong with hardware.

Loaded by `drivers.child`. Settings: `control_file`, a JSON file read at every look. `python -m drivers.fake` writes it:
it unplugs and plugs devices, changes their number and health, and makes the driver itself misbehave.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta, Struct

from drivers.base import Driver, Findings
from drivers.errors import Failed, Invalid
from drivers.inventory import AttachHandle, Attribute, Deployable, Device
from drivers.machine import Machine

HANDLES = 16


class Script(Struct, forbid_unknown_fields=True):
    """What the control file may say. `failing` maps a device's number to why its hardware failed."""

    count: Annotated[int, Meta(ge=0, le=4096)] = 1
    handles: Annotated[int, Meta(ge=1, le=128)] = HANDLES
    unplugged: list[int] = []
    failing: dict[str, str] = {}
    degraded: dict[str, str] = {}
    delay_s: Annotated[float, Meta(ge=0)] = 0.0
    misbehave: str = ""


class FakeDriver(Driver):
    """One FPGA with 16 `TEST_PCI` handles, as upstream's; more of them, and faults, by script."""

    name: ClassVar[str] = "fake_driver"
    subsystems: ClassVar[tuple[str, ...]] = ()
    watched: ClassVar[tuple[str, ...]] = ("control_file",)

    def discover(self, machine: Machine, settings: dict[str, object]) -> Findings:
        """The scripted devices; raises Invalid for an unusable control file."""
        script = read_script(str(settings.get("control_file") or ""))
        time.sleep(script.delay_s)
        _misbehave(script.misbehave)
        numbers = (n for n in range(script.count) if n not in script.unplugged)
        return Findings(tuple(_device(machine.node, n, script) for n in numbers))


def _device(node: str, n: int, script: Script) -> Device:
    """Device 0 is upstream's (contract section 6.3); the others have buses and names of their own."""
    bus, domain = (0x0C + n) % 256, (0x0C + n) // 256
    handles = tuple(_handle(domain, bus, number) for number in range(1, script.handles + 1))
    name = re.sub(r"[^a-zA-Z0-9_-]", "_", f"{node}_FakeDevice" + (f"_{n}" if n else ""))
    attributes = (Attribute("traits1", "CUSTOM_FAKE_DEVICE"), Attribute("rc", "FPGA"))
    address = f"{domain:04x}:{bus:02x}:00.0"
    failed, degraded = script.failing.get(str(n), ""), script.degraded.get(str(n), "")
    return Device(
        key=f"fake_driver:{address}",
        type="FPGA",
        vendor="0xABCD",
        model="miss model info",
        address=address,
        std_board_info='{"device_id": "0xabcd", "class": "Fake class"}',
        vendor_board_info="fake_vendor_info",
        status="failed" if failed else "degraded" if degraded else "ok",
        status_reason=failed or degraded,
        deployables=(Deployable(name, script.handles, attributes, handles, "fake"),),
    )


def _handle(domain: int, bus: int, number: int) -> AttachHandle:
    info = {"bus": f"{bus:02x}", "device": f"{number // 8:x}", "domain": f"{domain:04x}", "function": f"{number % 8:x}"}
    return AttachHandle("TEST_PCI", json.dumps(info))


def _misbehave(how: str) -> None:
    """Every way in which a driver can fail its host."""
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
        raise Invalid(f"misbehave={how!r}: raise, fail, hang, flood, rubbish or die")


def read_script(path: str) -> Script:
    """The control file, or the default where there is none; raises Invalid."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Script) if path else Script()
    except FileNotFoundError:
        return Script()
    except (OSError, msgspec.MsgspecError) as error:
        raise Invalid(f"the control file {path} is not usable: {error}") from None


def main() -> None:
    """`python -m drivers.fake`: change the script of a running fake driver."""
    state = os.environ.get("CYBORG_STATE_DIR", "./var")
    parser = argparse.ArgumentParser(
        prog="drivers.fake", description="Change what the fake driver of this machine shows."
    )
    parser.add_argument("--control", default=f"{state}/fake-driver.json", help="control file (default: %(default)s)")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, text in (("unplug", "take device N away"), ("plug", "put device N back")):
        verbs.add_parser(verb, help=text).add_argument("n", type=int)
    for verb, text in (("fail", "device N fails"), ("degrade", "device N is degraded")):
        parts = verbs.add_parser(verb, help=text)
        parts.add_argument("n", type=int)
        parts.add_argument("reason")
    verbs.add_parser("count", help="have N devices").add_argument("n", type=int)
    misbehave = verbs.add_parser("misbehave", help="make the driver itself fail")
    misbehave.add_argument("how", choices=["raise", "fail", "hang", "flood", "rubbish", "die"])
    verbs.add_parser("reset", help="one healthy device, as at first")
    arguments = parser.parse_args()
    try:
        script = Script() if arguments.verb == "reset" else _changed(read_script(arguments.control), arguments)
        _write(Path(arguments.control), script)
    except (Invalid, OSError) as error:
        sys.exit(f"drivers.fake: {error}")


def _changed(script: Script, arguments: argparse.Namespace) -> Script:
    if arguments.verb == "misbehave":
        script.misbehave = arguments.how
    elif arguments.verb == "count":
        script.count = arguments.n
    elif arguments.verb == "unplug":
        script.unplugged = sorted({*script.unplugged, arguments.n})
    elif arguments.verb == "plug":
        script.unplugged = [n for n in script.unplugged if n != arguments.n]
        script.failing.pop(str(arguments.n), None)
        script.degraded.pop(str(arguments.n), None)
    else:
        (script.failing if arguments.verb == "fail" else script.degraded)[str(arguments.n)] = arguments.reason
    return msgspec.convert(msgspec.to_builtins(script), Script)


def _write(path: Path, script: Script) -> None:
    """In one step: the driver never reads half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(msgspec.json.encode(script))
    os.replace(file.name, path)


if __name__ == "__main__":
    main()
