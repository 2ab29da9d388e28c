"""The process a driver lives in: `python -I -m drivers.child NAME`, started by `drivers.runner` and by nobody else.

JSON lines. It first says `{"ready": {"subsystems": […], "watched": […]}}`, then answers each line of stdin:
`{"id": 1, "call": "discover", "settings": {…}, "node": "…"}` with `{"id": 1, "report": {DriverReport}}` or
`{"id": 1, "error": "…"}`. Small on purpose: no asyncio, no logging, pyudev only for those who use it.
"""

from __future__ import annotations

import os
import resource
import sys
import traceback
from typing import BinaryIO, Literal

import msgspec

from drivers import catalogue
from drivers.base import Driver, Findings, at_most
from drivers.errors import DriverError
from drivers.inventory import Device, DriverReport, Fault
from drivers.machine import Machine
from drivers.process import die_with_parent

MEMORY = 512 * 1024 * 1024
"""Bytes of address space. CPU time is not limited: the process lives long, its parent's deadline ends a busy loop."""
OPEN_FILES = 256
MAX_DEVICES = 4096
"""The bound of `DriverReport.devices`."""


class Request(msgspec.Struct, frozen=True):
    """One line of stdin."""

    id: int
    call: Literal["discover"]
    node: str
    settings: dict[str, object] = {}


class Ready(msgspec.Struct, frozen=True):
    """What the parent should watch: kernel subsystems, and settings that name files."""

    subsystems: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of stdout; exactly one of `ready`, `report` and `error` is there."""

    id: int = 0
    ready: Ready | None = None
    report: DriverReport | None = None
    error: str = ""


def main() -> int:
    """Run the driver named on the command line until stdin ends."""
    die_with_parent()
    name, pipe = sys.argv[1], _private_stdout()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        driver = catalogue.load(name)
        _say(pipe, Answer(ready=Ready(tuple(driver.subsystems), tuple(driver.watched))))
    except Exception as error:  # noqa: BLE001 - a driver without its attributes is one that does not load
        _say(pipe, Answer(error=_sentence(error)))
        return 1
    for line in sys.stdin.buffer:
        try:
            answer = _answer(name, driver, msgspec.json.decode(line, type=Request))
            _say(pipe, answer)
        except MemoryError:
            _say(pipe, Answer(error=f"it needed more than {MEMORY >> 20} MiB of memory"))
            return 1
    return 0


def _private_stdout() -> BinaryIO:
    """Our end of the pipe; whatever a driver or its libraries print goes to stderr instead of into our answers."""
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return pipe


def _say(pipe: BinaryIO, answer: Answer) -> None:
    pipe.write(msgspec.json.encode(answer) + b"\n")
    pipe.flush()


def _answer(name: str, driver: Driver, request: Request) -> Answer:
    try:
        findings = driver.discover(Machine(request.node), request.settings)
        return Answer(request.id, report=_report(name, findings))
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - this process exists to contain it
        if not isinstance(error, DriverError):
            traceback.print_exc()
        return Answer(request.id, error=_sentence(error))


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, DriverError) else f"it raised {type(error).__name__}: {error}"


def _report(name: str, findings: object) -> DriverReport:
    """Bound and check what the driver says, device by device, so that one bad device costs only itself."""
    if not isinstance(findings, Findings):
        raise DriverError(f"it answered rubbish: {type(findings).__name__} in place of devices")
    if len(findings.devices) > MAX_DEVICES:
        raise DriverError(f"it answered {len(findings.devices)} devices, more than {MAX_DEVICES}")
    checked = [_checked(device) for device in findings.devices]
    devices = tuple(device for device in checked if isinstance(device, Device))
    faults = at_most([*findings.faults, *(fault for fault in checked if isinstance(fault, Fault))])
    return DriverReport(name, devices=devices, faults=faults)


def _checked(device: object) -> Device | Fault:
    """Structs do not check themselves when they are made; decoding does."""
    try:
        return msgspec.json.decode(msgspec.json.encode(device), type=Device)
    except (msgspec.MsgspecError, TypeError, UnicodeError) as error:
        subject = str(getattr(device, "key", "")) or type(device).__name__
        return Fault(subject[:255], f"the driver describes this device wrongly: {error}"[:4096])


if __name__ == "__main__":
    sys.exit(main())
