"""Backends of kind `remote`: devices elsewhere that an operator describes; they are shown and never changed.

Their health and load come from a file that another program on this host writes: `{"NAME": {"status": "ok", "reason":
"", "load": {"utilization_percent": 12.5}}}`. The file may have at most `drivers.machine.MAX_READ` bytes.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta, Struct

from drivers.base import Findings
from drivers.errors import Gone, Invalid
from drivers.generic.backend import Kind, service
from drivers.inventory import BackendKind, Device, DeviceType, Health, Name, Sample, Service, Text, Word
from drivers.machine import Machine
from drivers.plan import Ask, Vitals

KEY = "remote:"


class Described(Struct, frozen=True, forbid_unknown_fields=True):
    """A device as the operator describes it in the settings."""

    name: Word
    type: DeviceType
    vendor: Name
    model: Name


class Status(Struct, frozen=True):
    """The health and load of one device in the status file; metrics are named as in `drivers.inventory.Sample`."""

    status: Health
    reason: Text = ""
    load: Annotated[dict[Word, float], Meta(max_length=64)] = {}


class Remote(Kind, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="remote"):
    """Shows the described devices. They have no handles, because nothing of them can be attached on this host."""

    kind: ClassVar[BackendKind] = "remote"

    devices: Annotated[list[Described], Meta(min_length=1, max_length=1024)]
    status_file: Annotated[str, Meta(max_length=512, pattern=r"^/[^\x00]+$")] = ""

    def problem(self) -> str:
        """Return a reason if two devices have the same name, because the name is a device's identity; '' otherwise."""
        names = [device.name for device in self.devices]
        return "two of its devices have the same name" if len(set(names)) < len(names) else ""

    def discover(self, machine: Machine) -> Findings:
        """Return the described devices with their health from the status file. Raises Invalid for an unusable file."""
        said = self._said(machine)
        return Findings(tuple(self._device(device, said) for device in self.devices))

    def services(self, machine: Machine, devices: tuple[Device, ...]) -> tuple[Service, ...]:
        """Return health and stats, which are unavailable if the status file does not exist."""
        there = self.status_file and machine.exists(self.status_file)
        missing = "" if there else f"there is no status file {self.status_file}".rstrip()
        return service("health", missing), service("stats", missing)

    def health(self, machine: Machine, ask: Ask) -> Vitals:
        """Return the health from the status file, `unknown` if it has none. Raises Gone, and Invalid for the file."""
        for device in self.devices:
            if ask.key == f"{KEY}{device.name}":
                said = self._said(machine).get(device.name, self._unknown())
                return Vitals(said.status, said.reason)
        raise Gone(f"there is no {ask.key} (any more)")

    def stats(self, machine: Machine, ask: Ask) -> tuple[Sample, ...]:
        """Return the load from the status file; no samples if it has none. Raises Invalid for an unusable file."""
        said = self._said(machine).get(ask.key.removeprefix(KEY), self._unknown())
        return tuple(Sample(ask.key, metric, value) for metric, value in said.load.items())

    def _said(self, machine: Machine) -> dict[str, Status]:
        """Return the content of the status file by device name; empty if there is no file. Raises Invalid, Failed …."""
        try:
            return msgspec.json.decode(machine.read_bytes(self.status_file), type=dict[str, Status])
        except Gone:
            return {}
        except (msgspec.MsgspecError, ValueError) as error:
            raise Invalid(f"the status file {self.status_file} is not usable: {error}") from None

    def _unknown(self) -> Status:
        if not self.status_file:
            return Status("unknown", "its health is not known: set status_file")
        return Status("unknown", f"the status file {self.status_file} has no entry for it")

    def _device(self, device: Described, said: dict[str, Status]) -> Device:
        now = said.get(device.name, self._unknown())
        return Device(
            key=f"{KEY}{device.name}",
            type=device.type,
            vendor=device.vendor,
            model=device.model,
            status=now.status,
            status_reason=now.reason,
            acts="health",
        )
