"""The generic driver: it calls each backend separately and combines their results.

Concurrency: the agent executes one act at a time on a device and sends one request at a time to this process. Every
question to a backend runs in that backend's own thread and with a deadline (`drivers.generic.backend_calls`). A backend
that hangs, for example in the kernel, is suspended alone and reports an error; the results of the other backends are
not affected.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import ClassVar

import msgspec
from msgspec import Struct

from drivers.base import Driver, Findings, Settings, at_most
from drivers.errors import Busy, DriverError, Failed, Gone
from drivers.generic import mdev
from drivers.generic import settings as generic_settings
from drivers.generic.backend import BackendBase
from drivers.generic.backend_calls import BackendCaller
from drivers.inventory import Backend, Deployable, Device, Fault, HandleType, Sample, Service
from drivers.machine import Machine
from drivers.plan import Act, Ask, Plan, Vitals

QUESTION_SHARE = 0.6
"""The part of a call's deadline that all its questions may take; the rest is for starting and for the answer."""
MIN_QUESTION_S = 0.5
"""The minimum time of one question in seconds, unless the remaining time of all questions is shorter."""
HEALTH_S = 5.0
"""The maximum time of a question about health in seconds; it should take less than one second (`drivers.base`)."""
STATS_S = 1.0
"""The maximum time of a question about load in seconds. It is less than the time of one round of samples."""


class GenericDriver(Driver):
    """Offers the devices of all backends in the settings. The kind of a device's backend plans all acts on it."""

    name: ClassVar[str] = "generic_driver"
    subsystems: ClassVar[tuple[str, ...]] = ("pci", "mdev", "accel", "firmware")
    writes: ClassVar[tuple[str, ...]] = tuple(
        dict.fromkeys(path for kind in generic_settings.BACKEND_CLASSES for path in kind.writes)
    )
    acts: ClassVar[tuple[Act, ...]] = ("install", "uninstall", "attach", "detach", "program", "partition", "reset")
    settings_type: ClassVar[type[Struct] | None] = generic_settings.GenericSettings
    handle_types: ClassVar[tuple[HandleType, ...]] = ("PCI", "MDEV", "DEV")
    min_kernel: ClassVar[str] = "3.16"  # the first one with driver_override; the kinds look for what they need besides

    def __init__(self) -> None:
        self._callers: dict[str, BackendCaller] = {}
        """The lock, the last question and the health of each backend by name."""
        self._keys: dict[str, frozenset[str]] = {}
        """The keys of the devices that each backend found in its last successful discovery."""

    def probe(self, machine: Machine, settings: Settings) -> tuple[str, ...]:
        """Return what each backend lacks on this host, at most 64 reasons; an error of a backend is a reason, too.

        Raises Invalid for unusable settings.
        """
        backends = generic_settings.parse_backends(settings)
        deadline = QuestionDeadline(machine, len(backends))
        reasons: list[str] = []
        for name, backend in backends.items():
            try:
                missing = self._get_caller(name).call("probe", partial(backend.probe, machine), deadline.take_share())
            except DriverError as error:
                missing = (self._get_caller(name).suspension or str(error),)
            reasons += (f"{name}: {reason}" for reason in missing)
        return tuple(reasons[:64])

    def check_settings(self, settings: Settings) -> None:
        """Raise Invalid, which describes the first mistake, if the settings are unusable."""
        generic_settings.parse_backends(settings)

    def discover(self, machine: Machine, settings: Settings) -> Findings:
        """Call one backend after the other and return all devices; a backend that takes too long reports an error.

        A backend with an error has no devices in the result. A device that several backends find is reported for each
        of them; the agent decides which one owns it (`drivers.pci.ownership`). Raises Invalid for unusable settings.
        """
        return self._discover_backends(machine, settings, QUESTION_SHARE)

    def health(self, machine: Machine, settings: Settings, ask: Ask) -> Vitals:
        """Return the health of the device as its backend reads it.

        Raises Gone if no backend has the device, Invalid for unusable settings, Failed while the backend does not
        answer, and the errors of the backend.
        """
        deadline = QuestionDeadline(machine)
        name, backend = self._find_backend(machine, settings, ask)
        timeout_s = min(HEALTH_S, deadline.take_share())
        return self._get_caller(name).call("health", lambda: backend.health(machine, ask), timeout_s)

    def stats(self, machine: Machine, settings: Settings, ask: Ask) -> tuple[Sample, ...]:
        """Return the load of the device as its backend reads it.

        Raises Busy if it is not known which backend has the device, or while another question to that backend has not
        returned; Invalid for unusable settings, Failed while the backend does not answer, and the backend's errors.
        """
        name, backend = self._find_backend(machine, settings, ask, may_discover=False)
        return self._get_caller(name).call_if_idle("stats", lambda: backend.stats(machine, ask), STATS_S)

    def release(self) -> None:
        """End the pauses of all suspended backends."""
        for caller in tuple(self._callers.values()):
            caller.release()

    def install(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan how to bring the device into the state of the backend's `desired`; the layout overrides it.

        Only the kind `pci` has steps. Raises the errors of `_plan_act`.
        """
        return self._plan_act("install", machine, settings, ask)

    def uninstall(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan how to restore the state that the device had before it was first changed.

        Raises Unsupported for all kinds but `pci`, and the errors of `_plan_act`.
        """
        return self._plan_act("uninstall", machine, settings, ask)

    def attach(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan what the handle needs on the host for its consumer; only the kind `mdev` has steps.

        Raises the errors of `_plan_act`.
        """
        return self._plan_act("attach", machine, settings, ask)

    def detach(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan how to remove the handle's mediated device and its definition, whoever made them.

        Other handles need no step, whichever backend had them and whether their card is still there. The remains of a
        mediated device are removed even if no backend has its card any more. Raises the errors of `_plan_act`, and
        Invalid for an unusable handle.
        """
        if ask.handle is not None and ask.handle.attach_type != "MDEV":
            return Plan()
        try:
            return self._plan_act("detach", machine, settings, ask)
        except Gone:
            if ask.handle is None:
                raise
            return mdev.plan_detach_without_backend(machine, ask)

    def program(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan how to load the image through the kernel's firmware upload class.

        Raises Unsupported for all kinds but `pci` and `firmware`, and for a device without an upload directory; also
        the errors of `_find_backend` and of the backend's `plan`.
        """
        return self._plan_act("program", machine, settings, ask)

    def partition(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan how to divide the device as the layout describes.

        Raises Unsupported for all kinds but `pci` and `mdev`, and the errors of `_plan_act`.
        """
        return self._plan_act("partition", machine, settings, ask)

    def reset(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan a reset by the kernel's own method.

        Raises Unsupported for all kinds but `pci`, and the errors of `_plan_act`.
        """
        return self._plan_act("reset", machine, settings, ask)

    def _plan_act(self, act: Act, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Return the plan of the device's backend for an act.

        Raises Gone if no backend has the device, Invalid for unusable settings, Failed while the backend does not
        answer, and the errors of the backend's `plan`.
        """
        deadline = QuestionDeadline(machine)
        name, backend = self._find_backend(machine, settings, ask)
        return self._get_caller(name).call(act, lambda: backend.plan(act, machine, ask), deadline.take_share())

    def _find_backend(
        self, machine: Machine, settings: Settings, ask: Ask, *, may_discover: bool = True
    ) -> tuple[str, BackendBase]:
        """Return the backend `ask.backend` with its name, or else the first one that found the device.

        If no backend has found the device yet, all backends are called (`discover`) once, in half of the time that the
        questions of a call have. Raises Invalid for unusable settings; Failed if a backend that may have the device
        does not answer; Gone if all backends answer and none has it. With `may_discover` False, no backend is called
        and Busy is raised instead. Samples need this: they have no time for a discovery, and for them the agent does
        not send the open device nodes, without which a discovery cannot tell what the host uses.
        """
        backends = generic_settings.parse_backends(settings)
        if ask.backend in backends:
            return ask.backend, backends[ask.backend]
        if name := self._find_name_by_key(backends, ask.key):
            return name, backends[name]
        if not may_discover:
            raise Busy(
                f"it is not known which backend has {ask.key} until this host is scanned again: run"
                " manage.py command rescan HOST --driver generic_driver"
            )
        findings = self._discover_backends(machine, settings, QUESTION_SHARE / 2)
        if name := self._find_name_by_key(backends, ask.key):
            return name, backends[name]
        if errors := "; ".join(f"backend {one.name}: {one.error}" for one in findings.backends if one.error):
            raise Failed(f"no backend of generic_driver that answers has {ask.key}; {errors}")
        raise Gone(f"no backend of generic_driver has {ask.key} (any more)")

    def _find_name_by_key(self, backends: Iterable[str], key: str) -> str:
        """Return the first of these backends whose last successful discovery found a device with this key, or ''."""
        return next((name for name in backends if key in self._keys.get(name, ())), "")

    def _discover_backends(self, machine: Machine, settings: Settings, share: float) -> Findings:
        """Do what `discover` describes, within this share of the machine's deadline."""
        backends = generic_settings.parse_backends(settings)
        deadline = QuestionDeadline(machine, len(backends), share)
        devices: list[Device] = []
        faults: list[Fault] = []
        backend_reports: list[Backend] = []
        for name, backend in backends.items():
            caller, error = self._get_caller(name), ""
            services: tuple[Service, ...] = ()
            try:
                findings, services = caller.call(
                    "discover",
                    partial(discover_backend, name, backend, machine, self._keys.get(name, frozenset())),
                    deadline.take_share(),
                )
                self._keys[name] = frozenset(device.key for device in findings.devices)
                faults += findings.faults
                devices += findings.devices
            except DriverError as problem:
                error = caller.suspension or str(problem)[:4096]
                if caller.suspension:
                    faults.append(Fault(f"backend {name}", caller.suspension))
            backend_reports.append(Backend(name, backend.kind, backend.labels, error, services))
        if not backends:
            faults.append(
                Fault("backends", "none is configured and enabled: describe in `backends` what this host offers")
            )
        return Findings(tuple(devices), at_most(faults), tuple(backend_reports))

    def _get_caller(self, name: str) -> BackendCaller:
        """Return the caller of a backend; it is created at the first question."""
        return self._callers.setdefault(name, BackendCaller(name))


class QuestionDeadline:
    """Divides time among `count` questions that are asked one after the other.

    The time is the part `share` (0 to 1) of the machine's deadline; it begins when the object is created.
    """

    def __init__(self, machine: Machine, count: int = 1, share: float = QUESTION_SHARE) -> None:
        self._end = time.monotonic() + share * machine.deadline_s
        self._count = count

    def take_share(self) -> float:
        """Return how many seconds the next question may take: an equal part of what remains, or MIN_QUESTION_S."""
        remaining_s = self._end - time.monotonic()
        share_s = max(MIN_QUESTION_S, remaining_s / max(1, self._count))
        self._count -= 1
        return max(0.0, min(remaining_s, share_s))


def discover_backend(
    name: str, backend: BackendBase, machine: Machine, known_keys: frozenset[str]
) -> tuple[Findings, tuple[Service, ...]]:
    """Return the devices within the backend's limits, with its name in each, its faults, and its services.

    `known_keys` are the keys of the devices that it found before. Raises whatever the backend raises.
    """
    found = backend.discover(machine)
    devices, faults = apply_limits(backend, found.devices, known_keys)
    services = list_backend_services(backend, machine, devices)
    named_devices = tuple(msgspec.structs.replace(device, backend=name) for device in devices)
    return Findings(named_devices, (*found.faults, *faults)), services


def list_backend_services(backend: BackendBase, machine: Machine, devices: tuple[Device, ...]) -> tuple[Service, ...]:
    """Return the backend's services; if it has no devices, all of them are unavailable."""
    services = backend.list_services(machine, devices)
    if devices:
        return services
    reason = "no device of this host matches"
    return tuple(Service(one.name, one.version, "unavailable", reason) for one in services)


def apply_limits(
    backend: BackendBase, devices: tuple[Device, ...], known_keys: frozenset[str]
) -> tuple[tuple[Device, ...], tuple[Fault, ...]]:
    """Return the devices and handles that the backend's limits allow, and a fault for everything that is left out.

    Devices whose keys are in `known_keys` come first, so that a new device does not displace them.
    Within both groups the order is by address.
    """
    max_devices, max_handles = backend.limits.max_devices, backend.limits.max_handles
    ordered = sorted(devices, key=lambda device: (device.key not in known_keys, device.address or "", device.key))
    kept_devices = ordered[:max_devices]
    faults = [
        Fault(device.address or device.key, f"left out: limits.max_devices of its backend is {max_devices}")
        for device in ordered[len(kept_devices) :]
    ]
    if max_handles is None:
        return tuple(kept_devices), tuple(faults)
    remaining_handles, limited_devices = max_handles, []
    for device in kept_devices:
        parts = []
        for part in device.deployables:
            parts.append(_keep_first_handles(part, remaining_handles))
            remaining_handles -= len(parts[-1].handles)
            if excess := len(part.handles) - len(parts[-1].handles):
                reason = f"{excess} of its handles are left out: limits.max_handles of its backend is {max_handles}"
                faults.append(Fault(part.name, reason))
        limited_devices.append(msgspec.structs.replace(device, deployables=tuple(parts)))
    return tuple(limited_devices), tuple(faults)


def _keep_first_handles(part: Deployable, count: int) -> Deployable:
    """Return the deployable with at most `count` handles, its first ones."""
    if len(part.handles) <= count:
        return part
    return msgspec.structs.replace(part, handles=part.handles[:count], num_accelerators=count)
