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
from drivers.generic.backend import BackendBase, make_service
from drivers.inventory import BackendKind, Device, DeviceType, Health, Name, Sample, Service, Text, Word
from drivers.machine import Machine
from drivers.plan import Ask, Vitals

KEY_PREFIX = "remote:"


class RemoteDevice(Struct, frozen=True, forbid_unknown_fields=True):
    """A device as the operator describes it in the settings."""

    name: Word
    type: DeviceType
    vendor: Name
    model: Name


class RemoteStatus(Struct, frozen=True):
    """The health and load of one device in the status file; metrics are named as in `drivers.inventory.Sample`."""

    status: Health
    reason: Text = ""
    load: Annotated[dict[Word, float], Meta(max_length=64)] = {}


class RemoteBackend(BackendBase, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="remote"):
    """Shows the devices that the settings describe. They have no handles, because they are not attached to this
    host."""

    kind: ClassVar[BackendKind] = "remote"

    devices: Annotated[list[RemoteDevice], Meta(min_length=1, max_length=1024)]
    status_file: Annotated[str, Meta(max_length=512, pattern=r"^/[^\x00]+$")] = ""

    def describe_problem(self) -> str:
        """Return a reason if two devices have the same name, because the name is a device's identity; '' otherwise."""
        names = [device.name for device in self.devices]
        return "two of its devices have the same name" if len(set(names)) < len(names) else ""

    def discover(self, machine: Machine) -> Findings:
        """Return the devices that the settings describe, with their health from the status file.

        The health is `unknown`, with the reason, if `status_file` is not set, the file does not exist, or it has no
        entry for the device. Raises Invalid if the status file is not valid, and another DriverError if it exists but
        cannot be read; then no device is returned.
        """
        statuses = self._read_status_file(machine)
        return Findings(tuple(self._build_device(device, statuses) for device in self.devices))

    def list_services(self, machine: Machine, devices: tuple[Device, ...]) -> tuple[Service, ...]:
        """Return the services `health` and `stats`. Both are unavailable if `status_file` is not set or the file does
        not exist."""
        has_file = self.status_file and machine.exists(self.status_file)
        missing = "" if has_file else f"there is no status file {self.status_file}".rstrip()
        return make_service("health", missing), make_service("stats", missing)

    def health(self, machine: Machine, ask: Ask) -> Vitals:
        """Return the device's health from the status file; `unknown` if the file does not exist or has no entry for the
        device.

        Raises Gone if the settings have no such device, Invalid if the status file is not valid, and another
        DriverError if the file exists but cannot be read.
        """
        for device in self.devices:
            if ask.key == f"{KEY_PREFIX}{device.name}":
                status = self._read_status_file(machine).get(device.name, self._make_unknown_status())
                return Vitals(status.status, status.reason)
        raise Gone(f"there is no {ask.key} (any more)")

    def stats(self, machine: Machine, ask: Ask) -> tuple[Sample, ...]:
        """Return the load from the status file; no samples if the file does not exist or has no entry for the device.

        Whether the settings have the device is not checked. Raises Invalid if the file is not valid, and another
        DriverError if the file exists but cannot be read.
        """
        status = self._read_status_file(machine).get(ask.key.removeprefix(KEY_PREFIX), self._make_unknown_status())
        return tuple(Sample(ask.key, metric, value) for metric, value in status.load.items())

    def _read_status_file(self, machine: Machine) -> dict[str, RemoteStatus]:
        """Return the content of the status file by device name; empty if there is no file or `status_file` is not set.

        Raises Invalid if the content is not valid, and another DriverError if the file exists but cannot be read.
        """
        try:
            return msgspec.json.decode(machine.read_bytes(self.status_file), type=dict[str, RemoteStatus])
        except Gone:
            return {}
        except (msgspec.MsgspecError, ValueError) as error:
            raise Invalid(f"the status file {self.status_file} is not usable: {error}") from None

    def _make_unknown_status(self) -> RemoteStatus:
        """Return the health `unknown` with the reason: no status file is set, or it has no entry for the device."""
        if not self.status_file:
            return RemoteStatus("unknown", "its health is not known: set status_file")
        return RemoteStatus("unknown", f"the status file {self.status_file} has no entry for it")

    def _build_device(self, device: RemoteDevice, statuses: dict[str, RemoteStatus]) -> Device:
        """Return the device without deployables, with its health from `statuses` (by device name); the health is
        `unknown` if `statuses` has no entry for the device."""
        status = statuses.get(device.name, self._make_unknown_status())
        return Device(
            key=f"{KEY_PREFIX}{device.name}",
            type=device.type,
            vendor=device.vendor,
            model=device.model,
            status=status.status,
            status_reason=status.reason,
            acts="health",
        )
