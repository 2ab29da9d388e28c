"""The main program of a driver's process: `python -I -m drivers.isolation.driver_main NAME`.

The agent starts it (`drivers.isolation.runner`); for inspection it can be started by hand. It speaks JSON lines: it
first writes `{"ready": {manifest}}`, then answers each line of stdin, a DriverRequest, with a DriverAnswer.
The process can only read the host (`drivers.isolation.sandbox`), so its stdout must be a terminal or a pipe, not a file
(docs/writing-a-driver.md). To keep the process small it uses no asyncio and no logging, and imports pyudev only for
drivers that need it.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import time
import traceback
from collections.abc import Callable
from typing import Annotated, BinaryIO, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct

from drivers import catalogue
from drivers.base import API, WIDE_ACTS, Driver, Findings, at_most
from drivers.errors import DriverError, Failed, Invalid, Unsupported, kind_of
from drivers.inventory import Backend, Device, DriverDeclaration, DriverReport, Fault, Sample, Scope, Text
from drivers.isolation.process import die_with_parent
from drivers.isolation.sampler import MAX_PER_DEVICE, LoadSampler
from drivers.isolation.sandbox import MAX_MEMORY, confine
from drivers.machine import Machine, OpenNodes
from drivers.plan import Act, Ask, Load, Plan, Vitals

MAX_DEVICES, MAX_STEPS = 4096, 256
"""Maximum lengths of `DriverReport.devices` and `Plan.steps`, checked before anything is encoded."""
MAX_TEXT = 4096

T = TypeVar("T")
CallName = Literal["discover", "probe", "health", "samples", Act]
Backends = Annotated[tuple[Backend, ...], Meta(max_length=256)]
Reasons = Annotated[tuple[Text, ...], Meta(max_length=64)]
PathGlobs = Annotated[tuple[Annotated[str, Meta(max_length=512)], ...], Meta(max_length=256)]


class DriverRequest(Struct, frozen=True):
    """One line of stdin.

    `state` is the directory to which `/state` leads. The caller waits `deadline_s` seconds for the answer. `ask` is set
    for health and the acts, `asks` for samples, where only `key`, `backend` and `address` of each are used.
    `open_nodes` is what the agent saw for discover, probe and the acts, because this process may not look at other
    processes. With `release` the driver first forgets its pauses after failures (`Driver.release`).
    """

    id: int
    call: CallName
    node: str
    state: str = ""
    settings: dict[str, object] = {}
    deadline_s: float = 20.0
    ask: Ask | None = None
    asks: Annotated[tuple[Ask, ...], Meta(max_length=MAX_DEVICES)] = ()
    open_nodes: OpenNodes | None = None
    release: bool = False


class Manifest(Struct, frozen=True):
    """A driver's manifest: its identity, what the agent should watch, the paths its steps may write, its acts.

    `declares` goes on to the conductor; `settings_schema`, the JSON schema of the settings, stays on the host.
    `unconfined` lists the restrictions of `drivers.isolation.sandbox` that this kernel does not support.
    """

    name: str = ""
    version: Annotated[str, Meta(max_length=64)] = ""
    api: int = API
    subsystems: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()
    writes: PathGlobs = ()
    acts: tuple[Act, ...] = ()
    unconfined: Reasons = ()
    declares: DriverDeclaration = DriverDeclaration()
    settings_schema: dict[str, object] = {}


class DriverAnswer(Struct, frozen=True, omit_defaults=True):
    """One line of stdout. Exactly one field after `id` is set; `kind` (a key of `errors.KINDS`) accompanies `error`."""

    id: int = 0
    ready: Manifest | None = None
    report: DriverReport | None = None
    reasons: Reasons | None = None
    vitals: Vitals | None = None
    load: Load | None = None
    plan: Plan | None = None
    error: str = ""
    kind: str = ""


def main() -> int:
    """Run the driver that the command line names, until stdin ends; return the exit status.

    Returns 1 if the driver cannot be loaded or needs more than the memory limit. A line of stdin that is no
    DriverRequest ends the process with an exception.
    """
    die_with_parent()
    name, output = sys.argv[1], _separate_stdout()
    unconfined = confine()
    try:
        driver = catalogue.load_driver(name)
        _write_answer(output, DriverAnswer(ready=_build_manifest(name, driver, unconfined)))
    except Exception as error:  # noqa: BLE001 - a driver that lacks required attributes counts as not loadable
        _write_answer(output, _make_error_answer(0, error))
        return 1
    load_sampler = LoadSampler(driver, lambda samples: _validate(samples, tuple[Sample, ...], "its load"))
    for line in sys.stdin.buffer:
        try:
            _write_answer(
                output,
                _handle_request(name, driver, msgspec.json.decode(line, type=DriverRequest), unconfined, load_sampler),
            )
        except MemoryError:
            _write_answer(output, DriverAnswer(error=f"it needed more than {MAX_MEMORY >> 20} MiB of memory"))
            return 1
    return 0


def _separate_stdout() -> BinaryIO:
    """Return a private copy of stdout for answers, and redirect stdout itself to stderr.

    Output that a driver or its libraries print therefore does not mix with the answers.
    """
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return output


def _write_answer(output: BinaryIO, answer: DriverAnswer) -> None:
    """Write the answer as one line of JSON and flush it."""
    output.write(msgspec.json.encode(answer) + b"\n")
    output.flush()


def _build_manifest(name: str, driver: Driver, unconfined: tuple[str, ...]) -> Manifest:
    """Return the validated manifest of a driver.

    Raises Failed if a value is invalid, and AttributeError or TypeError if the object is no driver.
    """
    if wrong := driver.affects.keys() - WIDE_ACTS or set(driver.affects.values()) - set(get_args(Scope)):
        raise Failed(f"the driver describes itself wrongly: `affects` cannot have {min(wrong)!r}")
    if driver.min_kernel and parse_kernel_version(driver.min_kernel) is None:
        raise Failed(f"the driver describes itself wrongly: `min_kernel` is {driver.min_kernel!r}, not like 6.2")
    declaration = DriverDeclaration(
        tuple(driver.matches),
        tuple(driver.resource_classes),
        tuple(driver.handle_types),
        driver.min_kernel,
        {act: str(scope) for act, scope in driver.affects.items()},
    )
    manifest = Manifest(
        name,
        driver.version,
        API,
        tuple(driver.subsystems),
        tuple(driver.watched),
        tuple(driver.writes),
        tuple(driver.acts),
        unconfined,
        declaration,
        msgspec.json.schema(driver.settings_type) if driver.settings_type else {},
    )
    return _validate(manifest, Manifest, "itself")


def _handle_request(
    name: str, driver: Driver, request: DriverRequest, unconfined: tuple[str, ...], load_sampler: LoadSampler
) -> DriverAnswer:
    """Execute one request and return its answer.

    Every exception becomes an answer with `error`, except MemoryError, which is raised. If the exception is no
    DriverError, its traceback is also printed to stderr.
    """
    try:
        machine = Machine(request.node, state_root=request.state or "/state")
        machine.deadline_s, machine.open_nodes = request.deadline_s, request.open_nodes
        if request.release:
            driver.release()
        if request.call == "discover":
            findings = driver.discover(machine, request.settings)
            return DriverAnswer(request.id, report=_build_report(name, driver, findings))
        if request.call == "probe":
            old_kernel = explain_old_kernel(driver.min_kernel, platform.release())
            reasons = (*unconfined, *filter(None, [old_kernel]), *driver.probe(machine, request.settings))
            return DriverAnswer(request.id, reasons=_validate(reasons, Reasons, "the host"))
        if request.call == "samples":
            return DriverAnswer(
                request.id, load=_sanitize_load(load_sampler.read_load(machine, request.settings, request.asks))
            )
        if request.ask is None:
            raise Invalid(f"the request {request.call} does not name a device")
        if request.call == "health":
            return DriverAnswer(
                request.id, vitals=_read_vitals(driver, machine, request.settings, request.ask, load_sampler)
            )
        if request.call not in driver.acts:
            raise Unsupported(f"it cannot {request.call} a device")
        plan_act: Callable[..., Plan] = getattr(driver, request.call)
        return DriverAnswer(request.id, plan=_validate_plan(plan_act(machine, request.settings, request.ask)))
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - this process exists to contain it
        if not isinstance(error, DriverError):
            traceback.print_exc()
        return _make_error_answer(request.id, error)


def _make_error_answer(request_id: int, error: Exception) -> DriverAnswer:
    """Return the answer that reports an error; `request_id` is 0 if the driver could not be loaded."""
    text = str(error) if isinstance(error, DriverError) else f"it raised {type(error).__name__}: {error}"
    return DriverAnswer(request_id, error=_sanitize_text(text) or "it gave no reason", kind=kind_of(error))


def _sanitize_text(text: str) -> str:
    """Return the text so that it can be sent and stored: at most MAX_TEXT characters, no NUL, no lone surrogates."""
    return text[:MAX_TEXT].replace("\0", " ").encode(errors="replace").decode()


def _build_report(name: str, driver: Driver, findings: object) -> DriverReport:
    """Check the findings and turn them into a report.

    Devices are checked one by one: a device that is invalid, or not as the driver declares, becomes a Fault, and the
    others stay. Raises Failed if the findings have the wrong type, too many devices, or invalid backends.
    """
    if not isinstance(findings, Findings):
        raise Failed(f"its discover returned {type(findings).__name__} in place of Findings")
    if len(findings.devices) > MAX_DEVICES:
        raise Failed(f"its discover returned {len(findings.devices)} devices, more than {MAX_DEVICES}")
    devices, faults = [], []
    for device in findings.devices:
        try:
            devices.append(_validate(device, Device, "this device"))
            if undeclared := find_undeclared(devices[-1], driver.resource_classes, driver.handle_types):
                devices.pop()
                raise Failed(f"the driver does not declare {undeclared}")
        except Failed as error:
            subject = str(getattr(device, "key", "")) or type(device).__name__
            faults.append(_make_fault(subject, str(error)))
    driver_faults = [_make_fault(fault.subject, fault.reason) for fault in at_most(findings.faults)]
    backends = (msgspec.structs.replace(backend, error=_sanitize_text(backend.error)) for backend in findings.backends)
    checked_backends = _validate(tuple(backends), Backends, "its backends")
    return DriverReport(
        name, devices=tuple(devices), faults=at_most([*driver_faults, *faults]), backends=checked_backends
    )


def find_undeclared(device: Device, resource_classes: tuple[str, ...], handle_types: tuple[str, ...]) -> str:
    """Return the first resource class or handle type of a device that is not among the declared ones; '' if there is
    none. If none are declared, all are allowed."""
    for part in device.deployables:
        classes = [attribute.value for attribute in part.attributes if attribute.key == "rc"]
        for kind, values, declared in (
            ("resource class", classes, resource_classes),
            ("handle type", [handle.attach_type for handle in part.handles], handle_types),
        ):
            if declared and (undeclared := set(values) - set(declared)):
                return f"the {kind} {min(undeclared)}"
    return ""


def parse_kernel_version(release: str) -> tuple[int, int] | None:
    """Return the first two numbers of a kernel release (`6.1.0-18-amd64` → (6, 1)); None if it has none."""
    match = re.match(r"(\d{1,6})\.(\d{1,6})", release)
    return (int(match[1]), int(match[2])) if match else None


def explain_old_kernel(min_kernel: str, release: str) -> str:
    """Return that a driver needs a newer kernel than `release`; '' if it does not, or if the versions are unknown."""
    needed, present = parse_kernel_version(min_kernel), parse_kernel_version(release)
    if needed and present and present < needed:
        return f"it needs Linux {min_kernel} or later, and this is {release}: upgrade the kernel"
    return ""


def _make_fault(subject: str, reason: str) -> Fault:
    """Return a fault whose texts can be sent and stored; an empty subject becomes "…"."""
    return Fault(_sanitize_text(subject)[:255] or "…", _sanitize_text(reason))


def _read_vitals(
    driver: Driver, machine: Machine, settings: dict[str, object], ask: Ask, load_sampler: LoadSampler
) -> Vitals:
    """Return the driver's health of a device, with the load added that can be read in the remaining time.

    A load that cannot be read does not make the health fail. Raises what `Driver.health` raises, and Failed if its
    result is invalid. `machine.deadline_s` is reduced to the remaining time.
    """
    end = time.monotonic() + machine.deadline_s
    vitals = _validate(driver.health(machine, settings, ask), Vitals, "its health")
    machine.deadline_s = max(0.0, end - time.monotonic())
    samples = (*vitals.samples, *load_sampler.read_load(machine, settings, (ask,)).samples)
    return msgspec.structs.replace(vitals, samples=samples[:MAX_PER_DEVICE])


def _sanitize_load(load: Load) -> Load:
    """Return the load with texts in `unread` that can be sent and stored."""
    return Load(load.samples, tuple(_make_fault(one.subject, one.reason) for one in load.unread))


def _validate_plan(plan: object) -> Plan:
    """Return the plan that a driver returned, validated.

    Raises Failed for more than MAX_STEPS steps or an invalid plan.
    """
    if isinstance(plan, Plan) and len(plan.steps) > MAX_STEPS:
        raise Failed(f"it planned {len(plan.steps)} steps, more than {MAX_STEPS}")
    return _validate(plan, Plan, "its plan")


def _validate(value: object, expected_type: type[T], subject: str) -> T:
    """Return `value` as a validated `expected_type`; `subject` names it in the error. Raises Failed if it is not valid.

    The value is encoded and decoded again, because msgspec structs validate their fields only when decoded.
    """
    try:
        data = msgspec.json.encode(value)
        if rb"\u0000" in data:
            raise ValueError("it contains a NUL character, which cannot be stored")
        return msgspec.json.decode(data, type=expected_type)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Failed(f"the driver describes {subject} wrongly: {_sanitize_text(str(error))}") from None


if __name__ == "__main__":
    sys.exit(main())
