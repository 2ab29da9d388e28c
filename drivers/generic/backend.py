"""The base class of all kinds of backends of the generic driver.

Each backend class is a msgspec struct. Its fields are the keys that an operator may write in the backend's section of
the settings; the section is decoded into an instance of the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from drivers.base import Findings
from drivers.errors import Invalid, Unsupported
from drivers.inventory import BackendKind, Device, Sample, Service, ServiceName, Word
from drivers.machine import Machine
from drivers.plan import Act, Ask, Plan, Vitals


class BackendLimits(Struct, frozen=True, forbid_unknown_fields=True):
    """The maximum number of devices of a backend, and of attach handles of all its devices; None means no limit."""

    max_devices: Annotated[int, Meta(ge=0, le=4096)] | None = None
    max_handles: Annotated[int, Meta(ge=0, le=65_535)] | None = None


class BackendBase(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base class of all backends; a subclass is one kind.

    All methods read the present state of the machine and change nothing. They raise the errors of `drivers.errors`; an
    error of `discover` affects this backend only.
    """

    kind: ClassVar[BackendKind]
    writes: ClassVar[tuple[str, ...]] = ()
    """Globs that cover every path its steps may write."""

    enabled: bool = True
    """Whether the driver uses the backend; without it, its devices are missing."""
    limits: BackendLimits = BackendLimits()
    labels: Annotated[dict[Word, Annotated[str, Meta(max_length=255)]], Meta(max_length=64)] = {}

    def describe_problem(self) -> str:
        """Return why settings that are valid one by one are invalid together; '' if they are valid (the default)."""
        return ""

    def refuse_above_max_handles(self, wanted: int, others: int = 0) -> None:
        """Raise Invalid if a device cannot have `wanted` handles beside the `others` of its backend, because
        `limits.max_handles` leaves the rest out."""
        maximum = self.limits.max_handles
        if maximum is not None and wanted + others > maximum:
            text = f"this backend hands out at most {maximum} handles (its limits.max_handles), not {wanted}"
            raise Invalid(text + (f" beside the {others} of its other devices" if others else ""))

    def probe(self, machine: Machine) -> tuple[str, ...]:
        """Return what this host lacks for full use of this backend, one sentence each; the default is nothing."""
        return ()

    def discover(self, machine: Machine) -> Findings:
        """Return all devices of the backend, and a fault for each thing that cannot be used as a device.

        Raises DriverError only if no result is possible. Subclasses must implement this method.
        """
        raise NotImplementedError

    def list_services(self, machine: Machine, devices: tuple[Device, ...]) -> tuple[Service, ...]:
        """Return the services that the backend has for these devices, available or not.

        Subclasses must implement this.
        """
        raise NotImplementedError

    def health(self, machine: Machine, ask: Ask) -> Vitals:
        """Return the health of the device `ask.key`.

        Raises Gone if it is absent. Subclasses must implement this method.
        """
        raise NotImplementedError

    def stats(self, machine: Machine, ask: Ask) -> tuple[Sample, ...]:
        """Return the load of the device `ask.key`; the default is no samples."""
        return ()

    def plan(self, act: Act, machine: Machine, ask: Ask) -> Plan:
        """Return the plan of an act; the default has no steps for install, attach and detach.

        Raises Unsupported for an act that the kind cannot do.
        """
        if act in ("install", "attach", "detach"):
            return Plan()
        raise Unsupported(f"a backend of kind {self.kind} cannot {act} a device")


def make_service(name: ServiceName, missing: str = "", limits: Mapping[str, str] | None = None) -> Service:
    """Return a service that is ready or, if `missing` is not empty, unavailable for that reason.

    Texts are shortened to the sizes that a report allows: 1024 characters for the reason, 255 for the value of a limit.
    """
    shortened_limits = {word: value[:255] for word, value in (limits or {}).items()}
    return Service(name, state="unavailable" if missing else "ready", reason=missing[:1024], limits=shortened_limits)
