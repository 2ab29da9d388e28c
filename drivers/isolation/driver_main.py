"""The main program of a driver's process: `python -I -m drivers.isolation.driver_main NAME`.

The agent starts it (`drivers.isolation.runner`); for inspection it can be started by hand. It speaks JSON lines: it
first writes `{"ready": {manifest}}`, then answers each line of stdin, a Request, with an Answer.
The process can only read the host (`drivers.isolation.sandbox`), so its stdout must be a terminal or a pipe, not a file
(docs/writing-a-driver.md). To keep the process small it uses no asyncio and no logging, and imports pyudev only for
drivers that need it.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Annotated, BinaryIO, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from drivers import catalogue
from drivers.base import API, Driver, Findings, at_most
from drivers.errors import DriverError, Failed, Invalid, Unsupported, kind_of
from drivers.inventory import Backend, Device, DriverReport, Fault, Sample, Text
from drivers.isolation.process import die_with_parent
from drivers.isolation.sampler import MAX_PER_DEVICE, Gauge
from drivers.isolation.sandbox import MEMORY, confine
from drivers.machine import Machine
from drivers.plan import Act, Ask, Load, Plan, Vitals

MAX_DEVICES, MAX_STEPS = 4096, 256
"""Maximum lengths of `DriverReport.devices` and `Plan.steps`, checked before anything is encoded."""
MAX_TEXT = 4096

T = TypeVar("T")
Call = Literal["discover", "probe", "health", "samples", Act]
Backends = Annotated[tuple[Backend, ...], Meta(max_length=256)]
Reasons = Annotated[tuple[Text, ...], Meta(max_length=64)]
Globs = Annotated[tuple[Annotated[str, Meta(max_length=512)], ...], Meta(max_length=256)]


class Request(Struct, frozen=True):
    """One line of stdin.

    `state` is the directory to which `/state` leads. The caller waits `deadline_s` seconds for the answer. `ask` is set
    for health and the acts, `asks` for samples, where only `key` and `backend` of each are used.
    """

    id: int
    call: Call
    node: str
    state: str = ""
    settings: dict[str, object] = {}
    deadline_s: float = 20.0
    ask: Ask | None = None
    asks: Annotated[tuple[Ask, ...], Meta(max_length=MAX_DEVICES)] = ()


class Ready(Struct, frozen=True):
    """A driver's manifest: its identity, what the agent should watch, the paths its steps may write, its acts.

    `unconfined` lists the restrictions of `drivers.isolation.sandbox` that this kernel does not support.
    """

    name: str = ""
    version: Annotated[str, Meta(max_length=64)] = ""
    api: int = API
    subsystems: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()
    writes: Globs = ()
    acts: tuple[Act, ...] = ()
    unconfined: Reasons = ()


class Answer(Struct, frozen=True, omit_defaults=True):
    """One line of stdout. Exactly one field after `id` is set; `kind` (a key of `errors.KINDS`) accompanies `error`."""

    id: int = 0
    ready: Ready | None = None
    report: DriverReport | None = None
    reasons: Reasons | None = None
    vitals: Vitals | None = None
    load: Load | None = None
    plan: Plan | None = None
    error: str = ""
    kind: str = ""


def main() -> int:
    """Run the driver that the command line names, until stdin ends; return the exit status.

    Returns 1 if the driver cannot be loaded or needs more than the memory limit.
    """
    die_with_parent()
    name, pipe = sys.argv[1], _private_stdout()
    unconfined = confine()
    try:
        driver = catalogue.load(name)
        _say(pipe, Answer(ready=_manifest(name, driver, unconfined)))
    except Exception as error:  # noqa: BLE001 - a driver that lacks required attributes counts as not loadable
        _say(pipe, _refusal(0, error))
        return 1
    gauge = Gauge(driver, lambda samples: _checked(samples, tuple[Sample, ...], "its load"))
    for line in sys.stdin.buffer:
        try:
            _say(pipe, _answer(name, driver, msgspec.json.decode(line, type=Request), unconfined, gauge))
        except MemoryError:
            _say(pipe, Answer(error=f"it needed more than {MEMORY >> 20} MiB of memory"))
            return 1
    return 0


def _private_stdout() -> BinaryIO:
    """Return a private copy of stdout for answers, and redirect stdout itself to stderr.

    Output that a driver or its libraries print therefore does not mix with the answers.
    """
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return pipe


def _say(pipe: BinaryIO, answer: Answer) -> None:
    pipe.write(msgspec.json.encode(answer) + b"\n")
    pipe.flush()


def _manifest(name: str, driver: Driver, unconfined: tuple[str, ...]) -> Ready:
    manifest = Ready(
        name,
        driver.version,
        API,
        tuple(driver.subsystems),
        tuple(driver.watched),
        tuple(driver.writes),
        tuple(driver.acts),
        unconfined,
    )
    return _checked(manifest, Ready, "itself")


def _answer(name: str, driver: Driver, request: Request, unconfined: tuple[str, ...], gauge: Gauge) -> Answer:
    try:
        machine = Machine(request.node, state_root=request.state or "/state")
        machine.deadline_s = request.deadline_s
        if request.call == "discover":
            findings = driver.discover(machine, request.settings)
            return Answer(request.id, report=_report(name, findings))
        if request.call == "probe":
            reasons = (*unconfined, *driver.probe(machine, request.settings))
            return Answer(request.id, reasons=_checked(reasons, Reasons, "the host"))
        if request.call == "samples":
            return Answer(request.id, load=_load(gauge.read(machine, request.settings, request.asks)))
        if request.ask is None:
            raise Invalid(f"the request {request.call} does not name a device")
        if request.call == "health":
            return Answer(request.id, vitals=_vitals(driver, machine, request.settings, request.ask, gauge))
        if request.call not in driver.acts:
            raise Unsupported(f"it cannot {request.call} a device")
        planned: Callable[..., Plan] = getattr(driver, request.call)
        return Answer(request.id, plan=_plan(planned(machine, request.settings, request.ask)))
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - this process exists to contain it
        if not isinstance(error, DriverError):
            traceback.print_exc()
        return _refusal(request.id, error)


def _refusal(number: int, error: Exception) -> Answer:
    text = str(error) if isinstance(error, DriverError) else f"it raised {type(error).__name__}: {error}"
    return Answer(number, error=_clean(text) or "it gave no reason", kind=kind_of(error))


def _clean(text: str) -> str:
    """Return the text so that it can be sent and stored: shortened, without NUL characters and lone surrogates."""
    return text[:MAX_TEXT].replace("\0", " ").encode(errors="replace").decode()


def _report(name: str, findings: object) -> DriverReport:
    """Check the findings and turn them into a report.

    Devices are checked one by one: an invalid device becomes a Fault, and the others stay. Raises Failed if the
    findings have the wrong type, too many devices, or invalid backends.
    """
    if not isinstance(findings, Findings):
        raise Failed(f"its discover returned {type(findings).__name__} in place of Findings")
    if len(findings.devices) > MAX_DEVICES:
        raise Failed(f"its discover returned {len(findings.devices)} devices, more than {MAX_DEVICES}")
    devices, faults = [], []
    for device in findings.devices:
        try:
            devices.append(_checked(device, Device, "this device"))
        except Failed as error:
            subject = str(getattr(device, "key", "")) or type(device).__name__
            faults.append(_fault(subject, str(error)))
    known = [_fault(fault.subject, fault.reason) for fault in at_most(findings.faults)]
    backends = (msgspec.structs.replace(backend, error=_clean(backend.error)) for backend in findings.backends)
    checked = _checked(tuple(backends), Backends, "its backends")
    return DriverReport(name, devices=tuple(devices), faults=at_most([*known, *faults]), backends=checked)


def _fault(subject: str, reason: str) -> Fault:
    return Fault(_clean(subject)[:255] or "…", _clean(reason))


def _vitals(driver: Driver, machine: Machine, settings: dict[str, object], ask: Ask, gauge: Gauge) -> Vitals:
    """Return the driver's health of a device, with the load added that can be read in the remaining time.

    A load that cannot be read does not make the health fail.
    """
    end = time.monotonic() + machine.deadline_s
    vitals = _checked(driver.health(machine, settings, ask), Vitals, "its health")
    machine.deadline_s = max(0.0, end - time.monotonic())
    samples = (*vitals.samples, *gauge.read(machine, settings, (ask,)).samples)
    return msgspec.structs.replace(vitals, samples=samples[:MAX_PER_DEVICE])


def _load(load: Load) -> Load:
    return Load(load.samples, tuple(_fault(one.subject, one.reason) for one in load.unread))


def _plan(plan: object) -> Plan:
    if isinstance(plan, Plan) and len(plan.steps) > MAX_STEPS:
        raise Failed(f"it planned {len(plan.steps)} steps, more than {MAX_STEPS}")
    return _checked(plan, Plan, "its plan")


def _checked(thing: object, kind: type[T], what: str) -> T:
    """Return `thing` as a validated `kind`; `what` names it in the error. Raises Failed if it is not valid.

    The value is encoded and decoded again, because msgspec structs validate their fields only when decoded.
    """
    try:
        data = msgspec.json.encode(thing)
        if rb"\u0000" in data:
            raise ValueError("it contains a NUL character, which cannot be stored")
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Failed(f"the driver describes {what} wrongly: {_clean(str(error))}") from None


if __name__ == "__main__":
    sys.exit(main())
