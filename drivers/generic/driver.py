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
from msgspec import Struct

from drivers.base import Driver, Findings, Settings, at_most
from drivers.errors import DriverError, Gone
from drivers.generic import settings as generic_settings
from drivers.generic.backend import BackendBase
from drivers.inventory import Backend, Deployable, Device, Fault, HandleType, Sample, Service
from drivers.machine import Machine
from drivers.plan import Act, Ask, Plan, Vitals

DISCOVERY_SHARE = 0.6
"""The part of a call's deadline that all discoveries together may take; the rest is for starting and for the answer."""
MIN_BACKEND_S = 0.5
"""The minimum time of a backend in seconds, unless the remaining time of all backends is shorter."""
SLOW_REASON = "it did not answer within its share of CYBORG_DRIVER_DEADLINE_S: is a device stuck?"


class BackendDiscovery(threading.Thread):
    """One `discover` of one backend, in a thread: its devices, faults and services, or its error.

    `error` is SLOW_REASON until the thread has ended, and then '' or the reason of the failure. After a failure,
    `findings` and `services` are empty.
    """

    def __init__(self, backend: BackendBase, machine: Machine, previous: BackendDiscovery | None = None) -> None:
        super().__init__(daemon=True)
        self._backend, self._machine = backend, machine
        self.keys: frozenset[str] = previous.keys if previous else frozenset()
        """The keys of the devices that it found; those of the previous discovery until this one succeeds."""
        self.findings = Findings()
        self.services: tuple[Service, ...] = ()
        self.error = SLOW_REASON

    def run(self) -> None:
        """Call the backend and store its results, or the reason of its failure; raise nothing. threading calls it."""
        try:
            findings = self._backend.discover(self._machine)
            devices, faults = apply_limits(self._backend, findings.devices, self.keys)
            self.keys = frozenset(device.key for device in devices)
            self.services = list_backend_services(self._backend, self._machine, devices)
            self.findings, self.error = Findings(devices, (*findings.faults, *faults)), ""
        except DriverError as error:
            self.error = str(error) or "it gave no reason"
        except Exception as error:  # noqa: BLE001 - an error of one backend must not affect the others
            self.error = f"it raised {type(error).__name__}: {error}"


class GenericDriver(Driver):
    """Offers the devices of all backends in the settings. The kind of a device's backend plans all acts on it."""

    name: ClassVar[str] = "generic_driver"
    subsystems: ClassVar[tuple[str, ...]] = ("pci", "mdev", "accel", "firmware")
    writes: ClassVar[tuple[str, ...]] = tuple(
        dict.fromkeys(path for kind in generic_settings.BACKEND_CLASSES for path in kind.writes)
    )
    acts: ClassVar[tuple[Act, ...]] = ("install", "uninstall", "attach", "detach", "program", "partition", "reset")
    settings_type: ClassVar[type[Struct] | None] = generic_settings.GenericSettings
    resource_classes: ClassVar[tuple[str, ...]] = ("CUSTOM_PCI", "VGPU", "CUSTOM_MDEV")
    handle_types: ClassVar[tuple[HandleType, ...]] = ("PCI", "MDEV", "DEV")
    min_kernel: ClassVar[str] = "3.16"  # the first one with driver_override; the kinds look for what they need besides

    def __init__(self) -> None:
        self._discoveries: dict[str, BackendDiscovery] = {}
        """The last discovery of each backend by name; a new one is started only after it has ended."""

    def probe(self, machine: Machine, settings: Settings) -> tuple[str, ...]:
        """Return what each backend lacks on this host, at most 64 reasons. Raises Invalid for unusable settings."""
        backends = generic_settings.parse_backends(settings).items()
        return tuple(f"{name}: {reason}" for name, backend in backends for reason in backend.probe(machine))[:64]

    def discover(self, machine: Machine, settings: Settings) -> Findings:
        """Call one backend after the other and return all devices; a backend that takes too long reports an error.

        A backend with an error has no devices in the result. A device that several backends find is reported for each
        of them; the agent decides which one owns it (`drivers.pci.ownership`). Raises Invalid for unusable settings.
        """
        backends = generic_settings.parse_backends(settings)
        end = time.monotonic() + DISCOVERY_SHARE * machine.deadline_s
        devices: list[Device] = []
        faults: list[Fault] = []
        backend_reports: list[Backend] = []
        for position, (name, backend) in enumerate(backends.items()):
            remaining_s = end - time.monotonic()
            discovery = self._discover_backend(
                name, backend, machine, min(remaining_s, max(MIN_BACKEND_S, remaining_s / (len(backends) - position)))
            )
            error = SLOW_REASON if discovery.is_alive() else discovery.error[:4096]
            backend_reports.append(
                Backend(name, backend.kind, backend.labels, error, () if error else discovery.services)
            )
            if error:
                continue
            faults += discovery.findings.faults
            devices += (msgspec.structs.replace(device, backend=name) for device in discovery.findings.devices)
        if not backends:
            faults.append(Fault("backends", "none is configured: describe in `backends` what this host offers"))
        return Findings(tuple(devices), at_most(faults), tuple(backend_reports))

    def health(self, machine: Machine, settings: Settings, ask: Ask) -> Vitals:
        """Return the health of the device as its backend reads it.

        Raises Gone if no backend has the device, Invalid for unusable settings, and the errors of the backend.
        """
        return self._find_backend(machine, settings, ask).health(machine, ask)

    def stats(self, machine: Machine, settings: Settings, ask: Ask) -> tuple[Sample, ...]:
        """Return the load of the device as its backend reads it.

        Raises Gone if no backend has the device, Invalid for unusable settings, and the errors of the backend.
        """
        return self._find_backend(machine, settings, ask).stats(machine, ask)

    def install(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan how to bring the device into the state of the backend's `desired`; the layout overrides it.

        Only the kind `pci` has steps. Raises the errors of `_find_backend` and of the backend's `plan`.
        """
        return self._find_backend(machine, settings, ask).plan("install", machine, ask)

    def uninstall(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan how to restore the state that the device had before it was first changed.

        Raises Unsupported for all kinds but `pci`, and the errors of `_find_backend` and of the backend's `plan`.
        """
        return self._find_backend(machine, settings, ask).plan("uninstall", machine, ask)

    def attach(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan what the handle needs on the host for its consumer; only the kind `mdev` has steps.

        Raises the errors of `_find_backend` and of the backend's `plan`.
        """
        return self._find_backend(machine, settings, ask).plan("attach", machine, ask)

    def detach(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan how to remove what `attach` created; only the kind `mdev` has steps.

        Raises the errors of `_find_backend` and of the backend's `plan`.
        """
        return self._find_backend(machine, settings, ask).plan("detach", machine, ask)

    def program(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan how to load the image through the kernel's firmware upload class.

        Raises Unsupported for all kinds but `pci` and `firmware`, and for a device without an upload directory; also
        the errors of `_find_backend` and of the backend's `plan`.
        """
        return self._find_backend(machine, settings, ask).plan("program", machine, ask)

    def partition(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan how to divide the device as the layout describes.

        Raises Unsupported for all kinds but `pci`, and the errors of `_find_backend` and of the backend's `plan`.
        """
        return self._find_backend(machine, settings, ask).plan("partition", machine, ask)

    def reset(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan a reset by the kernel's own method.

        Raises Unsupported for all kinds but `pci`, and the errors of `_find_backend` and of the backend's `plan`.
        """
        return self._find_backend(machine, settings, ask).plan("reset", machine, ask)

    def _find_backend(self, machine: Machine, settings: Settings, ask: Ask) -> BackendBase:
        """Return the backend `ask.backend`, or else the first one that found the device.

        If no backend has found the device yet, all backends are called (`discover`) once. Raises Gone, and Invalid for
        unusable settings.
        """
        backends = generic_settings.parse_backends(settings)
        if ask.backend in backends:
            return backends[ask.backend]
        for first in (True, False):
            for name, backend in backends.items():
                if name in self._discoveries and ask.key in self._discoveries[name].keys:
                    return backend
            if first:
                self.discover(machine, settings)
        raise Gone(f"no backend of generic_driver has {ask.key} (any more)")

    def _discover_backend(self, name: str, backend: BackendBase, machine: Machine, wait_s: float) -> BackendDiscovery:
        """Start a discovery of a backend and wait for it at most `wait_s` seconds; return it, ended or not.

        If the last discovery of this backend has not ended, no other is started, and the last one is returned at once.
        """
        discovery = self._discoveries.get(name)
        if discovery is None or not discovery.is_alive():
            discovery = self._discoveries[name] = BackendDiscovery(backend, machine, discovery)
            discovery.start()
            discovery.join(max(0.0, wait_s))
        return discovery


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
