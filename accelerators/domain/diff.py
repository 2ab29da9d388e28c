"""Compare the stored inventory of a host with its reports, and compute the rows to write.

This module reads and writes nothing itself; the merge does. The rules: a driver without an error gave its complete list
of devices, so a stored device that is not in the list becomes missing. If a driver, or one of its backends, reported an
error, its devices stay as they are. A device that is not reported is marked missing, and never removed here.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import msgspec

from accelerators.domain import driver_status, traits
from accelerators.domain.admission import Facts, Rule, first
from accelerators.domain.provider_ids import provider_uuid
from drivers.inventory import Backend, Deployable, Device, DriverReport, Fault

Row = dict[str, Any]

DEVICE_FIELDS = (
    "driver",
    "type",
    "vendor",
    "model",
    "address",
    "std_board_info",
    "vendor_board_info",
    "numa_node",
    "kernel_driver",
    "status",
    "status_reason",
    "to_install",
    "acts",
    "changeable",
    "sized_by",
    "backend",
    "bridges",
)
"""The columns of a device that reports set, in the order of `StoredDevice.facts`."""
FOUND = ("key", "driver", "type", "vendor", "model", "address", "status")
"""The columns that the event `device.found` contains. The other columns are in events only when they change later."""
_facts = attrgetter(*DEVICE_FIELDS[1:])
DRIVER, MODEL, BACKEND = (DEVICE_FIELDS.index(name) for name in ("driver", "model", "backend"))


class StoredAttribute(msgspec.Struct, frozen=True, array_like=True):
    """A row of `accelerators_attribute`."""

    id: int
    key: str
    value: str
    origin: str


class StoredHandle(msgspec.Struct, frozen=True, array_like=True):
    """A row of `accelerators_attachhandle`."""

    id: int
    attach_type: str
    info: str
    missing: bool


class StoredDeployable(msgspec.Struct, frozen=True, array_like=True):
    """A row of `accelerators_deployable` with its attributes and attach handles."""

    id: int
    uuid: str
    name: str
    num_accelerators: int
    driver_name: str
    missing: bool
    attributes: tuple[StoredAttribute, ...]
    handles: tuple[StoredHandle, ...]


class StoredDevice(msgspec.Struct, frozen=True, array_like=True):
    """A row of `accelerators_device` with its deployables; `facts` are the values of DEVICE_FIELDS."""

    uuid: str
    key: str
    state: str
    returns_to: str | None
    facts: tuple[str | int | None, ...]
    deployables: tuple[StoredDeployable, ...]
    state_since: str = ""
    """ISO timestamp. The event of the next change of state contains it, so that the event tells how long the state
    lasted."""

    @property
    def owner(self) -> tuple[object, object]:
        """The driver and the backend that reported the device."""
        return self.facts[DRIVER], self.facts[BACKEND]


class StoredHost(msgspec.Struct, frozen=True, array_like=True):
    """A row of `accelerators_host` with its devices; `drivers` is the host's JSON column of that name."""

    id: int
    uuid: str
    name: str
    epoch: int
    seq: int
    drivers: dict[str, dict[str, Any]]
    devices: tuple[StoredDevice, ...]


class HostReport(msgspec.Struct, frozen=True):
    """One inventory report of a host. Reports are ordered by (`epoch`, `seq`)."""

    epoch: int
    seq: int
    hash: str
    drivers: tuple[DriverReport, ...]


@dataclass
class Changes:
    """The rows to write, per table; `compare` adds those of one host. A new row has a new random `uuid`."""

    devices: list[Row] = field(default_factory=list)
    deployables: list[Row] = field(default_factory=list)
    attributes: list[Row] = field(default_factory=list)
    handles: list[Row] = field(default_factory=list)
    moves: list[Row] = field(default_factory=list)
    gone_attributes: list[int] = field(default_factory=list)
    missing_deployables: list[int] = field(default_factory=list)
    missing_handles: list[int] = field(default_factory=list)
    resized: list[str] = field(default_factory=list)
    """Stored devices (uuid) of which a deployable or a handle appeared, changed or went missing."""
    events: list[Row] = field(default_factory=list)
    hosts: list[Row] = field(default_factory=list)
    providers: list[Row] = field(default_factory=list)
    found: list[tuple[StoredHost, Row]] = field(default_factory=list)
    """The rows in `devices` that are new, each with its host; `admit` decides about them."""
    installs: list[tuple[str, Rule]] = field(default_factory=list)
    """Devices (uuid) that a rule admits as ready and that must be installed before they can be offered."""


@dataclass(frozen=True)
class Answer:
    """What the reports of one batch together say about one driver.

    `error` ('' if it answered) and `faults` are from the last report. `devices` is the last list of devices that the
    driver gave, None if every report had an error. `backends` and their errors are from the last report without a
    driver error. `answered` names the backends whose complete list is in `devices`.
    """

    error: str
    devices: tuple[Device, ...] | None
    faults: tuple[Fault, ...]
    backends: tuple[Backend, ...] = ()
    answered: frozenset[str] = frozenset()

    def then(self, said: DriverReport) -> Answer:
        """Return this answer updated by a later report `said`.

        If the driver now reports an error, its devices of the earlier reports are kept. If only a backend does, the
        devices of this backend are kept.
        """
        if said.error:
            return replace(self, error=said.error, faults=said.faults)
        failed = {backend.name for backend in said.backends if backend.error}
        kept = (device for device in self.devices or () if device.backend in failed)
        found = (device for device in said.devices if device.backend not in failed)
        answered = {backend.name for backend in said.backends} - failed | self.answered & failed
        return Answer("", (*found, *kept), said.faults, said.backends, frozenset(answered))

    def names_all_of(self, device: StoredDevice) -> bool:
        """Return True if the list is complete for the device's backend, so that the device is missing if it is not in
        `devices`. The device must belong to this driver."""
        failed = {backend.name for backend in self.backends if backend.error}
        return self.devices is not None and device.facts[BACKEND] not in failed - self.answered


def fold(reports: Iterable[HostReport], after: tuple[int, int]) -> tuple[HostReport, dict[str, Answer]] | None:
    """Combine the reports of one host that are later than `after`, an (epoch, seq) pair.

    Returns the latest report, and for each driver that it is about (`spoken_for`) the combined answer of
    all these reports: if a driver or a backend answered in one report and failed in a later one, its answer is kept.
    Returns None if no report is later than `after`.
    """
    fresh = sorted((r for r in reports if (r.epoch, r.seq) > after), key=lambda r: (r.epoch, r.seq))
    if not fresh:
        return None
    answers: dict[str, Answer] = {}
    for report in fresh:
        for said in report.drivers:
            answers[said.driver] = answers.get(said.driver, Answer("", None, ())).then(said)
    enabled = driver_status.spoken_for(fresh[-1].drivers)
    return fresh[-1], {name: answer for name, answer in answers.items() if name in enabled}


def compare(host: StoredHost, report: HostReport, answers: dict[str, Answer], now: str, into: Changes) -> None:
    """Compare a stored host with the result of `fold`, and append all changes to `into`.

    That is: rows, device states, events, the host's row with the hash of the applied report, and a `provider` intent if
    Placement may have to be updated. `now` is an ISO timestamp, for `since` and `state_since`.
    """
    stored = {device.key: device for device in host.devices}
    told: tuple[list[Any], ...] = (into.deployables, into.missing_deployables, into.attributes, into.moves)
    told += (into.gone_attributes,)
    before = sum(map(len, told))
    reported: set[str] = set()
    for driver, answer in answers.items():
        for device in answer.devices or ():
            old = stored.get(device.key)
            asked = answers.get(str(old.facts[DRIVER])) if old else None
            if old and asked and not asked.names_all_of(old) and old.owner != (driver, device.backend):
                continue  # its driver or backend did not answer, so another one must not take the device over
            if device.key not in reported:
                reported.add(device.key)
                _device(host, driver, device, old, now, into)
    for known in host.devices:
        asked = answers.get(str(known.facts[DRIVER]))
        if asked and asked.names_all_of(known) and known.key not in reported and known.state != "missing":
            _missing(host, known, driver_status.why_missing(str(known.facts[DRIVER]), report.drivers), now, into)
    if sum(map(len, told)) != before:
        into.providers.append({"kind": "provider", "key": host.uuid, "payload": {"host": host.name}})
    drivers = driver_status.entries(host.drivers, _drivers(host, answers, now, into), report.drivers, now)
    into.hosts.append(
        {"id": host.id, "epoch": report.epoch, "seq": report.seq, "hash": report.hash, "drivers": drivers}
    )


def admit(into: Changes, rules: Sequence[Rule]) -> None:
    """Set the first state of each new device in `into.found` by the first rule that fits; add an event.

    Changes the rows in place (state, who decided, reason). A device that a rule makes ready becomes `installing` if it
    must be installed first, and is added to `into.installs`. Without a rule that fits, the row stays as it is.
    """
    for host, row in into.found:
        facts = Facts(host.name, row["driver"], row["vendor"], row["model"], row["type"])
        if rule := first(rules, facts):
            reason, state = f"found, and admitted by rule {rule.name}", rule.action
            if state == "ready" and row["to_install"]:
                state = "installing"
                into.installs.append((row["uuid"], rule))
            row |= {"state": state, "who": rule.by, "reason": reason}
            changes: Row = {"state": ["inactive", state]} if state != "inactive" else {}
            event = _event(host, f"device.{state}", row["uuid"], row["model"], changes, reason)
            into.events.append(event | {"source": "rule", "actor": rule.name})


def _device(host: StoredHost, driver: str, device: Device, old: StoredDevice | None, now: str, into: Changes) -> None:
    """Append the changes of one reported device; `old` is the stored one, None if the device is new.

    A device that was missing moves to the state that it returns to. There is at most one event: found, changed or back.
    """
    facts = (driver, *_facts(device))
    changes: dict[str, list[Any]] = {}
    device_uuid = old.uuid if old else str(uuid.uuid4())
    if old is None or old.facts != facts:
        row = dict(zip(DEVICE_FIELDS, facts, strict=True))
        row.update(uuid=device_uuid, host=host.id, key=device.key)
        into.devices.append(row)
        if old is not None:
            pairs = zip(DEVICE_FIELDS, old.facts, facts, strict=True)
            changes = {name: [was, is_now] for name, was, is_now in pairs if was != is_now}
        else:
            changes = {name: [None, row[name]] for name in FOUND if row[name]} | {"state": [None, "inactive"]}
    known = {d.name: d for d in old.deployables} if old else {}
    named = {d.name: d for d in device.deployables}
    for name, deployable in named.items():
        changes.update(_deployable(device_uuid, deployable, known.get(name), into))
    for name, gone in known.items():
        if name not in named and not gone.missing:
            into.missing_deployables.append(gone.id)
            changes[f"deployable {name}"] = ["present", "missing"]
    if old is not None and any(name.startswith(("handle ", "deployable ")) for name in changes):
        into.resized.append(device_uuid)
    action = "device.found" if old is None else "device.changed"
    if old is not None and old.state == "missing":
        action = "device.back"
        state = old.returns_to or "inactive"
        into.moves.append(
            {"uuid": device_uuid, "state": state, "returns_to": None, "reason": "seen again by its driver"}
        )
        changes |= {"state": ["missing", state], "state_since": [old.state_since, now]}
        changes["returns_to"] = [old.returns_to, None]
    if old is None:
        into.found.append((host, row))
    if old is None or changes:
        into.events.append(_event(host, action, device_uuid, device.model, changes, f"reported by {driver}"))


def _deployable(device_uuid: str, new: Deployable, old: StoredDeployable | None, into: Changes) -> dict[str, list[Any]]:
    """Append the changes of one reported deployable; return what changed, for the event of its device.

    For a new deployable the result has only its number of accelerators, not each attribute and handle.
    """
    changes: dict[str, list[Any]] = {}
    deployable_uuid = old.uuid if old else str(uuid.uuid4())
    values = (new.num_accelerators, new.driver_name, False)
    if old is None or (old.num_accelerators, old.driver_name, old.missing) != values:
        into.deployables.append(
            {
                "uuid": deployable_uuid,
                "device": device_uuid,
                "name": new.name,
                "num": new.num_accelerators,
                "driver_name": new.driver_name,
                "rp": str(provider_uuid(new.name)),
            }
        )
        was = None if old is None else "missing" if old.missing else old.num_accelerators
        changes[f"deployable {new.name}"] = [was, new.num_accelerators]
    _attributes(deployable_uuid, new, old, into, changes)
    _handles(deployable_uuid, new, old, into, changes)
    return changes


def _attributes(
    deployable: str, new: Deployable, old: StoredDeployable | None, into: Changes, changes: dict[str, list[Any]]
) -> None:
    """Append changed attributes to `into`, and what changed to `changes`.

    Only attributes of origin `agent` are changed. If the deployable was programmed, reported function traits are
    ignored, because the trait that programming has set is the current one.
    """
    known = {a.key: a for a in old.attributes} if old else {}
    programmed = traits.KEY in known and known[traits.KEY].origin == "conductor"
    wanted = {a.key: a.value for a in new.attributes if not (programmed and traits.is_function(a.value))}
    for key, value in wanted.items():
        attribute = known.get(key)
        if attribute is None or (attribute.value != value and attribute.origin == "agent"):
            into.attributes.append({"deployable": deployable, "key": key, "value": value})
            if old:
                changes[f"attribute {key}"] = [attribute.value if attribute else None, value]
    for key, attribute in known.items():
        if key not in wanted and attribute.origin == "agent":
            into.gone_attributes.append(attribute.id)
            changes[f"attribute {key}"] = [attribute.value, None]


def _handles(
    deployable: str, new: Deployable, old: StoredDeployable | None, into: Changes, changes: dict[str, list[Any]]
) -> None:
    """Append new, changed and missing handles to `into`, and what changed to `changes`.

    A handle is identified by its `info`.
    """
    known = {h.info: h for h in old.handles} if old else {}
    wanted = {h.info: h.attach_type for h in new.handles}
    for info, attach_type in wanted.items():
        handle = known.get(info)
        if handle is None or handle.missing or handle.attach_type != attach_type:
            into.handles.append({"deployable": deployable, "type": attach_type, "info": info})
            if old:
                changes[f"handle {info}"] = ["missing" if handle else None, attach_type]
    for info, handle in known.items():
        if info not in wanted and not handle.missing:
            into.missing_handles.append(handle.id)
            changes[f"handle {info}"] = [handle.attach_type, "missing"]


def _missing(host: StoredHost, device: StoredDevice, reason: str, now: str, into: Changes) -> None:
    """Append the move of a device to `missing`, with its event; the device returns to its present state."""
    into.moves.append({"uuid": device.uuid, "state": "missing", "returns_to": device.state, "reason": reason})
    changes: dict[str, Any] = {"state": [device.state, "missing"], "state_since": [device.state_since, now]}
    changes["returns_to"] = [None, device.state]
    into.events.append(_event(host, "device.missing", device.uuid, str(device.facts[MODEL]), changes, reason))


def _drivers(host: StoredHost, answers: dict[str, Answer], now: str, into: Changes) -> dict[str, dict[str, Any]]:
    """Build the host's `drivers` column, and append events for drivers that failed or recovered.

    A driver that is no longer enabled stays in the column, with an error, as long as the host has devices of it.
    """
    result: dict[str, dict[str, Any]] = {}
    counts = {driver: len(answer.devices) for driver, answer in answers.items() if answer.devices is not None}
    for known in host.devices:
        driver = str(known.facts[DRIVER])
        if driver in counts and known.state != "missing" and not answers[driver].names_all_of(known):
            counts[driver] += 1
    for driver, answer in answers.items():
        old = host.drivers.get(driver, {})
        result[driver] = {
            "error": answer.error,
            "since": old.get("since", now) if old.get("error", "") == answer.error else now,
            "devices": counts.get(driver, old.get("devices", 0)),
            "faults": [[fault.subject, fault.reason] for fault in answer.faults],
            "backends": _backends(host, driver, answer, now, into),
        }
    for driver, old in host.drivers.items():
        if driver not in answers and any(device.facts[0] == driver for device in host.devices):
            error = "no longer enabled on this host"
            since = old["since"] if old.get("error") == error else now
            result[driver] = old | {"error": error, "since": since, "devices": old.get("devices", 0), "faults": []}
    for driver, entry in result.items():
        was = host.drivers.get(driver, {}).get("error", "")
        if was != entry["error"]:
            action = "driver.failed" if entry["error"] else "driver.recovered"
            into.events.append(_event(host, action, None, driver, {"error": [was, entry["error"]]}, entry["error"]))
    return result


def _backends(host: StoredHost, driver: str, answer: Answer, now: str, into: Changes) -> dict[str, Row]:
    """Return backend name → its kind, labels, error, services, and since when it has this error or none.

    Appends events for backends that failed or recovered. The stored backends are returned if the driver did not answer.
    """
    stored: dict[str, Row] = host.drivers.get(driver, {}).get("backends", {})
    if answer.devices is None:
        return stored
    result: dict[str, Row] = {}
    for backend in answer.backends:
        old = stored.get(backend.name, {"error": ""})
        was, error = old["error"], backend.error
        said = {"kind": backend.kind, "labels": backend.labels, "error": error}
        services = [msgspec.structs.asdict(service) for service in backend.services]
        result[backend.name] = said | {"services": services, "since": old.get("since", now) if was == error else now}
        if was != error:
            action = "backend.failed" if error else "backend.recovered"
            name = f"{driver}:{backend.name}"
            into.events.append(_event(host, action, None, name, {"error": [was, error]}, error))
    return result


def _event(host: StoredHost, action: str, subject: str | None, name: str, changes: Row, reason: str) -> Row:
    """Build the row of an event whose actor is the host's agent. The subject's type is the first word of `action`."""
    return {
        "actor": host.name,
        "action": action,
        "subject_type": action.split(".", maxsplit=1)[0],
        "subject": subject,
        "subject_name": name[:255],
        "host": host.name,
        "changes": changes,
        "reason": reason,
    }
