"""What every kind of backend says and does. Subclassed in this folder; asked by `drivers.generic.driver`.

A backend is its section of the settings: the fields of the struct are the words an operator may write there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from drivers.base import Findings
from drivers.errors import Unsupported
from drivers.inventory import BackendKind, Device, Sample, Service, ServiceName, Word
from drivers.machine import Machine
from drivers.plan import Act, Ask, Plan, Vitals


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    """How much a backend offers in all: devices, and the attach handles of all of them. None: what there is."""

    max_devices: Annotated[int, Meta(ge=0, le=4096)] | None = None
    max_handles: Annotated[int, Meta(ge=0, le=65_535)] | None = None


class Kind(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """One backend. All methods look at the machine as it is now, change nothing, and raise the errors of
    `drivers.errors`, which are this backend's alone."""

    kind: ClassVar[BackendKind]
    writes: ClassVar[tuple[str, ...]] = ()
    """Globs of the paths its steps may write."""

    limits: Limits = Limits()
    labels: Annotated[dict[Word, Annotated[str, Meta(max_length=255)]], Meta(max_length=64)] = {}

    def problem(self) -> str:
        """Why these words, each of which may be written, make no sense together; '' when they do."""
        return ""

    def probe(self, machine: Machine) -> tuple[str, ...]:
        """Why this host cannot be used to the full by this backend."""
        return ()

    def discover(self, machine: Machine) -> Findings:
        """Its complete list of devices, and what it could not take for one."""
        raise NotImplementedError

    def services(self, machine: Machine, devices: tuple[Device, ...]) -> tuple[Service, ...]:
        """What can be done with these devices."""
        raise NotImplementedError

    def health(self, machine: Machine, ask: Ask) -> Vitals:
        """How a device of this backend is."""
        raise NotImplementedError

    def stats(self, machine: Machine, ask: Ask) -> tuple[Sample, ...]:
        """The load of a device of this backend."""
        return ()

    def plan(self, act: Act, machine: Machine, ask: Ask) -> Plan:
        """The steps of an act, none where the kind needs none for it."""
        if act in ("install", "attach", "detach"):
            return Plan()
        raise Unsupported(f"a backend of kind {self.kind} cannot {act} a device")


def service(name: ServiceName, missing: str = "", limits: Mapping[str, str] | None = None) -> Service:
    """A service that is ready unless something is `missing` for it, which is said in words."""
    said = {word: value[:255] for word, value in (limits or {}).items()}
    return Service(name, state="unavailable" if missing else "ready", reason=missing[:1024], limits=said)
