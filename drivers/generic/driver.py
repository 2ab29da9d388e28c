"""The generic driver: it calls each backend separately and combines their results.

Concurrency: the agent executes one act at a time on a device and sends one request at a time to this process. Each
backend's `discover` runs in a thread. While that thread has not ended, for example because it hangs in the kernel, the
backend is not called again and reports an error; the results of the other backends are not affected.
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
"""The part of a call's deadline that all looks together may take; the rest is for starting and for the answer."""
LEAST_S = 0.5
"""The minimum time of a backend in seconds, unless the remaining time of all backends is shorter."""
SLOW = "it did not answer within its share of CYBORG_DRIVER_DEADLINE_S: is a device stuck?"


class Look(threading.Thread):
    """One `discover` of one backend, in a thread: its devices, faults and services, or its error.

    `error` is SLOW until the thread has ended, and then '' or the reason of the failure.
    """

    def __init__(self, kind: Kind, machine: Machine, before: Look | None = None) -> None:
        super().__init__(daemon=True)
        self._kind, self._machine = kind, machine
        self.keys: frozenset[str] = before.keys if before else frozenset()
        """The keys of the devices that it found; those of the previous look until this one succeeds."""
        self.findings = Findings()
        self.services: tuple[Service, ...] = ()
        self.error = SLOW

    def run(self) -> None:
        """Call the backend and store its results or its error. threading calls it."""
        try:
            findings = self._kind.discover(self._machine)
            devices, faults = within(self._kind, findings.devices, self.keys)
            self.keys = frozenset(device.key for device in devices)
            self.services = services_of(self._kind, self._machine, devices)
            self.findings, self.error = Findings(devices, (*findings.faults, *faults)), ""
        except DriverError as error:
            self.error = str(error) or "it gave no reason"
        except Exception as error:  # noqa: BLE001 - an error of one backend must not affect the others
            self.error = f"it raised {type(error).__name__}: {error}"


class GenericDriver(Driver):
    """Offers the devices of all backends in the settings. The kind of a device's backend plans all acts on it."""

    name: ClassVar[str] = "generic_driver"
    subsystems: ClassVar[tuple[str, ...]] = ("pci", "mdev", "accel", "firmware")
    writes: ClassVar[tuple[str, ...]] = tuple(dict.fromkeys(path for kind in words.KINDS for path in kind.writes))
    acts: ClassVar[tuple[Act, ...]] = ("install", "uninstall", "attach", "detach", "program", "partition", "reset")

    def __init__(self) -> None:
        self._looks: dict[str, Look] = {}
        """The last look of each backend by name; a new one is started only after it has ended."""

    def probe(self, machine: Machine, settings: Settings) -> tuple[str, ...]:
        """Return what each backend lacks on this host, at most 64 reasons. Raises Invalid for unusable settings."""
        backends = words.read(settings).items()
        return tuple(f"{name}: {reason}" for name, backend in backends for reason in backend.probe(machine))[:64]

    def discover(self, machine: Machine, settings: Settings) -> Findings:
        """Call one backend after the other and return all devices; a backend that takes too long reports an error.

        A device that several backends find is reported for each of them; the agent decides which one owns it
        (`drivers.pci.ownership`). Raises Invalid for unusable settings.
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
            faults.append(Fault("backends", "none is configured: describe in `backends` what this host offers"))
        return Findings(tuple(devices), at_most(faults), tuple(answers))

    def health(self, machine: Machine, settings: Settings, ask: Ask) -> Vitals:
        """Return the health of the device as its backend reads it. Raises Gone if no backend has it."""
        return self._backend(machine, settings, ask).health(machine, ask)

    def stats(self, machine: Machine, settings: Settings, ask: Ask) -> tuple[Sample, ...]:
        """Return the load of the device as its backend reads it. Raises Gone if no backend has it."""
        return self._backend(machine, settings, ask).stats(machine, ask)

    def install(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan how to bring the device into the state of the backend's `desired`; the layout overrides it."""
        return self._backend(machine, settings, ask).plan("install", machine, ask)

    def uninstall(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan how to restore the state that the device had before it was first changed."""
        return self._backend(machine, settings, ask).plan("uninstall", machine, ask)

    def attach(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan what the handle needs on the host for its consumer."""
        return self._backend(machine, settings, ask).plan("attach", machine, ask)

    def detach(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan how to remove what `attach` created."""
        return self._backend(machine, settings, ask).plan("detach", machine, ask)

    def program(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan how to load the image through the kernel's firmware upload class."""
        return self._backend(machine, settings, ask).plan("program", machine, ask)

    def partition(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan how to divide the device as the layout describes."""
        return self._backend(machine, settings, ask).plan("partition", machine, ask)

    def reset(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan a reset by the kernel's own method."""
        return self._backend(machine, settings, ask).plan("reset", machine, ask)

    def _backend(self, machine: Machine, settings: Settings, ask: Ask) -> Kind:
        """Return the backend `ask.backend`, or else the first one that found the device.

        If no backend has found the device yet, all backends are called (`discover`) once. Raises Gone, and Invalid for
        unusable settings.
        """
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
        """Start a look of a backend and wait for it at most `wait_s` seconds; return it, ended or not.

        If the last look of this backend has not ended, it is returned at once.
        """
        look = self._looks.get(name)
        if look is None or not look.is_alive():
            look = self._looks[name] = Look(kind, machine, look)
            look.start()
            look.join(max(0.0, wait_s))
        return look


def services_of(kind: Kind, machine: Machine, devices: tuple[Device, ...]) -> tuple[Service, ...]:
    """Return the backend's services; if it has no devices, all of them are unavailable."""
    services = kind.services(machine, devices)
    if devices:
        return services
    reason = "no device of this host matches"
    return tuple(Service(one.name, one.version, "unavailable", reason) for one in services)


def within(
    kind: Kind, devices: tuple[Device, ...], known: frozenset[str]
) -> tuple[tuple[Device, ...], tuple[Fault, ...]]:
    """Return the devices and handles that the backend's limits allow, and a fault for everything that is left out.

    Devices whose keys are `known` come first, so that a new device does not displace them.
    Within both groups the order is by address.
    """
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
    """Return the deployable with at most `count` handles, its first ones."""
    if len(part.handles) <= count:
        return part
    return msgspec.structs.replace(part, handles=part.handles[:count], num_accelerators=count)
