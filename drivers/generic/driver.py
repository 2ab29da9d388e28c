"""The driver itself: it asks each backend for itself and puts the answers together. Loaded by
`drivers.isolation.driver_main`.

What locks what: the agent does one act at a time on a device, and asks this process one question at a time. A backend
is looked at in a thread, and while that has not ended (the kernel holds it) it is not looked at again: its answer is
an error, the others' answers are not touched by it.
"""

from __future__ import annotations

import threading
import time
from typing import ClassVar

import msgspec

from drivers.base import Driver, Findings, Settings, at_most
from drivers.errors import DriverError, Gone
from drivers.generic import settings as words
from drivers.generic.backend import Kind
from drivers.inventory import Backend, Deployable, Device, Fault, Sample, Service
from drivers.machine import Machine
from drivers.plan import Act, Ask, Plan, Vitals

FOR_LOOKS = 0.6
"""The part of a call's deadline that all looks together may take; the rest is for the start and for what follows."""
LEAST_S = 0.5
"""A backend has at least this, as long as there is any time at all."""
SLOW = "it did not answer in its share of the time (CYBORG_DRIVER_DEADLINE_S): is a device stuck?"


class Look(threading.Thread):
    """One backend looking, once: its devices, faults and services, or the error that ended it."""

    def __init__(self, kind: Kind, machine: Machine, before: Look | None = None) -> None:
        super().__init__(daemon=True)
        self._kind, self._machine = kind, machine
        self.keys: frozenset[str] = before.keys if before else frozenset()
        """Of the devices it saw, or of those before while it has seen none."""
        self.findings = Findings()
        self.services: tuple[Service, ...] = ()
        self.error = SLOW

    def run(self) -> None:
        """threading: the thread's work."""
        try:
            findings = self._kind.discover(self._machine)
            devices, faults = within(self._kind, findings.devices, self.keys)
            self.keys = frozenset(device.key for device in devices)
            self.services = services_of(self._kind, self._machine, devices)
            self.findings, self.error = Findings(devices, (*findings.faults, *faults)), ""
        except DriverError as error:
            self.error = str(error) or "it gave no reason"
        except Exception as error:  # noqa: BLE001 - it is this backend's alone
            self.error = f"it raised {type(error).__name__}: {error}"


class GenericDriver(Driver):
    """Devices of all backends in the settings; each is its backend's, whose kind plans what is done to it."""

    name: ClassVar[str] = "generic_driver"
    subsystems: ClassVar[tuple[str, ...]] = ("pci", "mdev", "accel", "firmware")
    writes: ClassVar[tuple[str, ...]] = tuple(dict.fromkeys(path for kind in words.KINDS for path in kind.writes))
    acts: ClassVar[tuple[Act, ...]] = ("install", "uninstall", "attach", "detach", "program", "partition", "reset")

    def __init__(self) -> None:
        self._looks: dict[str, Look] = {}
        """The last look of each backend: one that has not ended is waited for, not begun again."""

    def probe(self, machine: Machine, settings: Settings) -> tuple[str, ...]:
        """What each backend lacks here."""
        backends = words.read(settings).items()
        return tuple(f"{name}: {reason}" for name, backend in backends for reason in backend.probe(machine))[:64]

    def discover(self, machine: Machine, settings: Settings) -> Findings:
        """Look with one backend after the other; one that takes too long is left behind. Raises Invalid.

        A device that several of them see is said of each: the agent knows which had it (`drivers.pci.ownership`).
        """
        backends = words.read(settings)
        end = time.monotonic() + FOR_LOOKS * machine.deadline_s
        devices: list[Device] = []
        faults: list[Fault] = []
        answers: list[Backend] = []
        for place, (name, kind) in enumerate(backends.items()):
            left = end - time.monotonic()
            look = self._look(name, kind, machine, min(left, max(LEAST_S, left / (len(backends) - place))))
            error = SLOW if look.is_alive() else look.error[:4096]
            answers.append(Backend(name, kind.kind, kind.labels, error, () if error else look.services))
            if error:
                continue
            faults += look.findings.faults
            devices += (msgspec.structs.replace(device, backend=name) for device in look.findings.devices)
        if not backends:
            faults.append(Fault("backends", "none is configured: describe in `backends` what this host is to offer"))
        return Findings(tuple(devices), at_most(faults), tuple(answers))

    def health(self, machine: Machine, settings: Settings, ask: Ask) -> Vitals:
        """As its kind reads it."""
        return self._backend(machine, settings, ask).health(machine, ask)

    def stats(self, machine: Machine, settings: Settings, ask: Ask) -> tuple[Sample, ...]:
        """As its kind reads it."""
        return self._backend(machine, settings, ask).stats(machine, ask)

    def install(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """As the backend's `desired`, or the layout over it, wants the device."""
        return self._backend(machine, settings, ask).plan("install", machine, ask)

    def uninstall(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """As it was before it was first touched."""
        return self._backend(machine, settings, ask).plan("uninstall", machine, ask)

    def attach(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """What the handle needs on the host."""
        return self._backend(machine, settings, ask).plan("attach", machine, ask)

    def detach(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Take that back."""
        return self._backend(machine, settings, ask).plan("detach", machine, ask)

    def program(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Load the image by the kernel's upload class."""
        return self._backend(machine, settings, ask).plan("program", machine, ask)

    def partition(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Divide it as the layout says."""
        return self._backend(machine, settings, ask).plan("partition", machine, ask)

    def reset(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """By the kernel's own method."""
        return self._backend(machine, settings, ask).plan("reset", machine, ask)

    def _backend(self, machine: Machine, settings: Settings, ask: Ask) -> Kind:
        """The backend that has the device, or the first that saw it; raises Gone. It looks if none has seen it yet."""
        backends = words.read(settings)
        if ask.backend in backends:
            return backends[ask.backend]
        for first in (True, False):
            for name, kind in backends.items():
                if name in self._looks and ask.key in self._looks[name].keys:
                    return kind
            if first:
                self.discover(machine, settings)
        raise Gone(f"no backend of generic_driver has {ask.key} (any more)")

    def _look(self, name: str, kind: Kind, machine: Machine, wait_s: float) -> Look:
        look = self._looks.get(name)
        if look is None or not look.is_alive():
            look = self._looks[name] = Look(kind, machine, look)
            look.start()
            look.join(max(0.0, wait_s))
        return look


def services_of(kind: Kind, machine: Machine, devices: tuple[Device, ...]) -> tuple[Service, ...]:
    """The backend's services; without a device none of them is available."""
    services = kind.services(machine, devices)
    if devices:
        return services
    reason = "no device of this host matches"
    return tuple(Service(one.name, one.version, "unavailable", reason) for one in services)


def within(
    kind: Kind, devices: tuple[Device, ...], known: frozenset[str]
) -> tuple[tuple[Device, ...], tuple[Fault, ...]]:
    """What the limits leave of the devices and their handles, those that are `known` first, each in the order of
    addresses; what is over is said."""
    most_devices, most_handles = kind.limits.max_devices, kind.limits.max_handles
    ordered = sorted(devices, key=lambda device: (device.key not in known, device.address or "", device.key))
    kept = ordered[:most_devices]
    faults = [
        Fault(device.address or device.key, f"left out: limits.max_devices of its backend is {most_devices}")
        for device in ordered[len(kept) :]
    ]
    if most_handles is None:
        return tuple(kept), tuple(faults)
    left, cut = most_handles, []
    for device in kept:
        parts = []
        for part in device.deployables:
            parts.append(_first(part, left))
            left -= len(parts[-1].handles)
            if over := len(part.handles) - len(parts[-1].handles):
                reason = f"{over} of its handles are left out: limits.max_handles of its backend is {most_handles}"
                faults.append(Fault(part.name, reason))
        cut.append(msgspec.structs.replace(device, deployables=tuple(parts)))
    return tuple(cut), tuple(faults)


def _first(part: Deployable, count: int) -> Deployable:
    """The deployable with the first handles only."""
    if len(part.handles) <= count:
        return part
    return msgspec.structs.replace(part, handles=part.handles[:count], num_accelerators=count)
