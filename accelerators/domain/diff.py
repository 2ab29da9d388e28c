"""Compare the stored inventory of a host with its reports, and compute the rows to write.

This module reads and writes nothing itself; the merge does. The rules: a driver without an error gave its complete list
of devices, so a stored device that is not in the list becomes missing. If a driver, or one of its backends, reported an
error, its devices stay as they are. A device that is not reported is marked missing, and never removed here.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import msgspec

from accelerators.domain import driver_status, offer, provider_names, traits
from accelerators.domain.admission import AdmissionFacts, EnabledRule, first_matching_rule
from accelerators.domain.identity import SERIAL_PREFIX, IdentifiedDevice, identify_devices, may_be_same_card
from accelerators.domain.limits import DEFAULT_MAX_DEVICES, LimitedDevices, limit_devices
from accelerators.domain.provider_ids import compute_provider_uuid
from accelerators.domain.states import AttributeOrigin
from drivers.inventory import MAX_FAULTS, Backend, Deployable, Device, DriverReport, Fault

RowValues = dict[str, Any]

REPORTED_DEVICE_FIELDS = (
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
    "physical_function",
    "subsystem",
)
"""The columns of a device that reports set, in the order of `StoredDevice.facts`."""
RESTORED_BOOT = "restored"
"""The boot id that is stored for a host after a restore of the database. No kernel has this boot id.

The restored database does not contain what was programmed after the backup, not even into flash memory."""
INCOMPLETE_HASH = "incomplete"
"""The hash that is stored for a host if its last report was not stored completely. No report has this hash, so the
agent sends its report again with its next connection, or when the sweep has removed devices of the host."""
FOUND_EVENT_FIELDS = ("key", "driver", "type", "vendor", "model", "address", "status")
"""The columns that the event `device.found` contains. The other columns are in events only when they change later."""
_get_reported_values = attrgetter(*REPORTED_DEVICE_FIELDS[1:])
DRIVER_INDEX, VENDOR_INDEX, MODEL_INDEX, ADDRESS_INDEX, BACKEND_INDEX, STATUS_INDEX, STATUS_REASON_INDEX = (
    REPORTED_DEVICE_FIELDS.index(name)
    for name in ("driver", "vendor", "model", "address", "backend", "status", "status_reason")
)


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
    in_use: str = ""


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
    bitstream: str | None = None
    bitstream_in_flash: bool = False


class StoredDevice(msgspec.Struct, frozen=True, array_like=True):
    """A row of `accelerators_device` with its deployables; `facts` are the values of REPORTED_DEVICE_FIELDS."""

    uuid: str
    key: str
    state: str
    returns_to: str | None
    facts: tuple[str | int | None, ...]
    deployables: tuple[StoredDeployable, ...]
    state_since: str = ""
    """ISO timestamp. The event of the next change of state contains it, so that the event tells how long the state
    lasted."""
    held_handles: tuple[str, ...] = ()
    """The infos of its handles that requests hold, or that wait to be confirmed as unused (`ReleasedHandle`)."""
    drain_to: str | None = None

    @property
    def address(self) -> str | None:
        """The device's PCI address, None if it has none."""
        return self.facts[ADDRESS_INDEX]  # type: ignore[return-value]

    @property
    def vendor(self) -> str:
        """The device's vendor."""
        return str(self.facts[VENDOR_INDEX])

    @property
    def model(self) -> str:
        """The device's model."""
        return str(self.facts[MODEL_INDEX])

    @property
    def driver(self) -> str:
        """The driver that reported the device."""
        return str(self.facts[DRIVER_INDEX])

    @property
    def backend(self) -> str:
        """The driver's backend that found the device; '' if the driver has no backends."""
        return str(self.facts[BACKEND_INDEX])

    @property
    def health(self) -> tuple[str, str]:
        """The health of the device and the reason for it."""
        return str(self.facts[STATUS_INDEX]), str(self.facts[STATUS_REASON_INDEX])


class StoredHost(msgspec.Struct, frozen=True, array_like=True):
    """A row of `accelerators_host` with its devices; `drivers` is the host's JSON column of that name."""

    id: int
    uuid: str
    name: str
    epoch: int
    seq: int
    drivers: dict[str, dict[str, Any]]
    devices: tuple[StoredDevice, ...]
    boot_id: str = ""
    node: str = ""
    other_nodes: tuple[str, ...] = ()
    """The nodes of other hosts that `provider_names.describe_wrong_name` needs."""


class HostReport(msgspec.Struct, frozen=True):
    """One inventory report of a host. Reports are ordered by (`epoch`, `seq`). `boot_id` is '' if it is not known."""

    epoch: int
    seq: int
    hash: str
    drivers: tuple[DriverReport, ...]
    boot_id: str = ""


@dataclass
class InventoryChanges:
    """The rows to write, per table; `collect_changes` adds those of one host. A new row has a new random `uuid`."""

    new_keys: list[RowValues] = field(default_factory=list)
    """Stored devices (uuid) that get another key; written before `devices`."""
    devices: list[RowValues] = field(default_factory=list)
    deployables: list[RowValues] = field(default_factory=list)
    attributes: list[RowValues] = field(default_factory=list)
    handles: list[RowValues] = field(default_factory=list)
    state_changes: list[RowValues] = field(default_factory=list)
    gone_attributes: list[int] = field(default_factory=list)
    missing_deployables: list[int] = field(default_factory=list)
    missing_handles: list[int] = field(default_factory=list)
    resized_devices: list[str] = field(default_factory=list)
    """Stored devices (uuid) of which a deployable or a handle appeared, changed or went missing."""
    offer_changes: list[str] = field(default_factory=list)
    """Stored devices (uuid) that left the offer, or came back to it, because their health changed."""
    ended_programs: list[int] = field(default_factory=list)
    """Deployables that have lost what they were programmed with."""
    events: list[RowValues] = field(default_factory=list)
    hosts: list[RowValues] = field(default_factory=list)
    provider_intents: list[RowValues] = field(default_factory=list)
    doubts_if_held: list[tuple[StoredHost, StoredDevice, str]] = field(default_factory=list)
    """Offered devices whose key or address changes, each with its host and the reason for its quarantine if it is held;
    `quarantine_devices` decides about them."""
    found_devices: list[tuple[StoredHost, RowValues]] = field(default_factory=list)
    """The rows in `devices` that are new, each with its host; `apply_admission_rules` decides about them."""
    installs: list[tuple[str, EnabledRule]] = field(default_factory=list)
    """Devices (uuid) that a rule admits as ready and that must be installed before they can be offered."""


@dataclass(frozen=True)
class CombinedDriverReport:
    """The state of one driver after all reports of one batch.

    `error` ('' if it answered) and `faults` are from the last report. `devices` is the last list of devices that the
    driver gave, None if every report had an error. `backends` and their errors are from the last report without a
    driver error. `answered_backends` names the backends whose complete list is in `devices`.
    """

    error: str
    devices: tuple[Device, ...] | None
    faults: tuple[Fault, ...]
    backends: tuple[Backend, ...] = ()
    answered_backends: frozenset[str] = frozenset()

    def updated_by(self, later_report: DriverReport) -> CombinedDriverReport:
        """Return a copy of this answer that includes the driver's next report.

        If the driver now reports an error, its devices and backends of the earlier reports are kept. If only a backend
        reports an error, the devices of this backend are kept. The health of a device that was in an earlier report is
        combined with the new one by `offer.combine_health`. A device that is reported under another key at the same
        address counts as the same device, unless `may_be_same_card` denies it.
        """
        if later_report.error:
            return replace(self, error=later_report.error, faults=later_report.faults)
        failed_backends = {backend.name for backend in later_report.backends if backend.error}
        kept_devices = (device for device in self.devices or () if device.backend in failed_backends)
        earlier_by_key = {device.key: device for device in self.devices or ()}
        earlier_by_address = {device.address: device for device in self.devices or () if device.address}
        reported_devices = (
            _keep_unended_failure(device, _find_earlier_health(device, earlier_by_key, earlier_by_address))
            for device in later_report.devices
            if device.backend not in failed_backends
        )
        answered = {
            backend.name for backend in later_report.backends
        } - failed_backends | self.answered_backends & failed_backends
        return CombinedDriverReport(
            "", (*reported_devices, *kept_devices), later_report.faults, later_report.backends, frozenset(answered)
        )

    def is_complete_for(self, device: StoredDevice) -> bool:
        """Return True if the list is complete for the device's backend, so that the device is missing if it is not in
        `devices`. The device must belong to this driver."""
        failed_backends = {backend.name for backend in self.backends if backend.error}
        return self.devices is not None and device.backend not in failed_backends - self.answered_backends


def combine_reports(
    reports: Iterable[HostReport], after: tuple[int, int]
) -> tuple[HostReport, dict[str, CombinedDriverReport]] | None:
    """Combine the reports of one host that are later than `after`, an (epoch, seq) pair.

    Returns the latest report, and by name the combined answer of each driver whose devices the latest report may change
    (`select_reported_drivers`). If a driver or a backend answered in one report and failed in a later one, its answer
    is kept.
    Returns None if no report is later than `after`.
    """
    new_reports = sorted((r for r in reports if (r.epoch, r.seq) > after), key=lambda r: (r.epoch, r.seq))
    if not new_reports:
        return None
    combined: dict[str, CombinedDriverReport] = {}
    for report in new_reports:
        for driver_report in report.drivers:
            combined[driver_report.driver] = combined.get(
                driver_report.driver, CombinedDriverReport("", None, ())
            ).updated_by(driver_report)
    reported_drivers = driver_status.select_reported_drivers(new_reports[-1].drivers)
    return new_reports[-1], {name: answer for name, answer in combined.items() if name in reported_drivers}


def find_open_drivers(drivers: Iterable[DriverReport], candidates: Collection[str] | None = None) -> set[str]:
    """Return the drivers for which `combine_reports` may also need reports that are earlier than this one.

    `drivers` is the content of the report. The result is a part of `candidates`, by default of all drivers whose
    devices the report may change. A driver is left out if this report has its complete list, without an error of a
    backend and without a device of unknown health, because such an answer replaces all earlier ones. A candidate that
    the report does not name stays.
    """
    reports = list(drivers)
    considered = driver_status.select_reported_drivers(reports) if candidates is None else set(candidates)
    return considered - {report.driver for report in reports if _replaces_earlier_answers(report)}


def _replaces_earlier_answers(report: DriverReport) -> bool:
    """Return whether this answer replaces all earlier answers of the driver completely (`updated_by`)."""
    has_error = report.error or any(backend.error for backend in report.backends)
    return not has_error and all(device.status != "unknown" for device in report.devices)


def list_provider_ids(reports: Iterable[HostReport]) -> set[str]:
    """Return the ids of the providers of all deployables in these reports, computed from the deployables' names."""
    names = {
        deployable.name
        for report in reports
        for driver in report.drivers
        for device in driver.devices
        for deployable in device.deployables
    }
    return {str(compute_provider_uuid(name)) for name in names}


def collect_changes(
    host: StoredHost,
    report: HostReport,
    driver_reports: dict[str, CombinedDriverReport],
    now: str,
    collected: InventoryChanges,
    owners: dict[str, str] | None = None,
    max_devices: int = DEFAULT_MAX_DEVICES,
) -> None:
    """Compare a stored host with the result of `combine_reports`, and append all changes to `collected`.

    That is: rows, device states, events, the host's row with the hash of the applied report, and a `provider` intent if
    Placement may have to be updated. `now` is an ISO timestamp, for `since` and `state_since`. A stored device whose
    driver or backend reported an error stays as it is, even if another driver reports it. If the host was rebooted,
    all its devices lose what they were programmed with, unless it is in flash memory; after a restore of the database,
    the programs in flash memory are forgotten, too.

    `owners` maps the ids of providers to the names of the hosts to which they belong; the host's new providers are
    added. A deployable whose provider belongs to another host is left out, and so is one with a new name that does not
    begin with the host's node; its device gets a fault.
    Devices and parts above `max_devices` are not stored (`limits.limit_devices`); the stored hash then is
    INCOMPLETE_HASH.
    """
    provider_relevant: tuple[list[Any], ...] = (
        collected.deployables,
        collected.missing_deployables,
        collected.attributes,
        collected.state_changes,
        collected.gone_attributes,
        collected.offer_changes,
        collected.doubts_if_held,
    )
    size_before = sum(map(len, provider_relevant))
    if host.boot_id and report.boot_id not in ("", host.boot_id):
        host = _end_programs_after_reboot(host, collected)
    own_reports = {
        driver: _refuse_wrong_providers(host, answer, {} if owners is None else owners)
        for driver, answer in driver_reports.items()
    }
    identified = identify_devices(host.devices, own_reports)
    off = {one.driver for one in report.drivers if one.state in driver_status.OFF_STATES}
    limited = limit_devices(host, identified.accepted, max_devices, driver_reports.keys() - off)
    driver_reports = _leave_out_excess(identified.driver_reports, limited)
    for one in limited.accepted:
        _collect_device_changes(host, one, now, collected)
    reported = {one.stored.uuid for one in limited.accepted if one.stored}
    for stored_device in host.devices:
        owner_report = driver_reports.get(stored_device.driver)
        if owner_report and owner_report.is_complete_for(stored_device) and stored_device.uuid not in reported:
            _mark_device_missing(
                host,
                stored_device,
                driver_status.describe_missing_reason(stored_device.driver, report.drivers),
                identified.displaced.get(stored_device.uuid, ""),
                now,
                collected,
            )
    if sum(map(len, provider_relevant)) != size_before:
        collected.provider_intents.append({"kind": "provider", "key": host.uuid, "payload": {"host": host.name}})
    drivers = driver_status.build_driver_entries(
        host.drivers, _build_driver_entries(host, driver_reports, now, collected), report.drivers, now
    )
    applied_hash = INCOMPLETE_HASH if limited.faults else report.hash
    position: RowValues = {"epoch": report.epoch, "seq": report.seq, "hash": applied_hash}
    collected.hosts.append({"id": host.id, "drivers": drivers, "boot_id": report.boot_id or host.boot_id} | position)


def _leave_out_excess(
    driver_reports: dict[str, CombinedDriverReport], limited: LimitedDevices
) -> dict[str, CombinedDriverReport]:
    """Return the reports with only the devices in `limited`, and with its faults; unchanged if it has none."""
    if not limited.faults:
        return driver_reports
    devices: dict[str, list[Device]] = {}
    for one in limited.accepted:
        devices.setdefault(one.driver, []).append(one.device)
    result = {
        driver: answer if answer.devices is None else replace(answer, devices=tuple(devices.get(driver, ())))
        for driver, answer in driver_reports.items()
    }
    for driver, fault in limited.faults.items():
        result[driver] = replace(result[driver], faults=(fault, *result[driver].faults)[:MAX_FAULTS])
    return result


def _refuse_wrong_providers(
    host: StoredHost, answer: CombinedDriverReport, owners: dict[str, str]
) -> CombinedDriverReport:
    """Return the answer without wrongly named deployables and those whose provider belongs to another host; their
    devices get faults.

    The ids of the returned answer's providers are added to `owners`.
    """
    names = {deployable.name for device in answer.devices or () for deployable in device.deployables}
    providers = {name: str(compute_provider_uuid(name)) for name in names}
    problems = {
        name: _describe_wrong_provider(name, host, owners.get(provider)) for name, provider in providers.items()
    }
    wrong_names = {name: problem for name, problem in problems.items() if problem}
    owners.update({provider: host.name for name, provider in providers.items() if name not in wrong_names})
    return _leave_out_deployables(answer, wrong_names) if wrong_names else answer


def _describe_wrong_provider(name: str, host: StoredHost, owner: str | None) -> str:
    """Return why a host may not have the provider with this name; '' if it may. `owner` is the name of the host to
    which it belongs, None if it is new."""
    if owner is None:
        return provider_names.describe_wrong_name(name, host.node, host.other_nodes)
    return "" if owner == host.name else f"the resource provider {name} belongs to host {owner}"


def _leave_out_deployables(answer: CombinedDriverReport, wrong_names: Mapping[str, str]) -> CombinedDriverReport:
    """Return the answer without the deployables in `wrong_names` (name → why it is wrong), and with a fault for each
    device that had one, up to MAX_FAULTS."""
    devices: list[Device] = []
    faults: list[Fault] = []
    for device in answer.devices or ():
        kept = tuple(part for part in device.deployables if part.name not in wrong_names)
        if len(kept) < len(device.deployables):
            wrong = next(part.name for part in device.deployables if part.name in wrong_names)
            reason = (
                f"its deployable {wrong} is not stored, because of its name: {wrong_names[wrong]}. Correct the driver,"
                " or the node name of the host (CYBORG_HOST_NODE)"
            )
            faults.append(Fault(device.address or device.key, reason))
        devices.append(msgspec.structs.replace(device, deployables=kept))
    return replace(answer, devices=tuple(devices), faults=(*faults, *answer.faults)[:MAX_FAULTS])


def apply_admission_rules(collected: InventoryChanges, rules: Sequence[EnabledRule]) -> None:
    """Set the first state of each new device in `collected.found_devices` by the first rule that fits; add an event.

    Changes the rows in place (state, who decided, reason). A device that a rule makes ready becomes `installing` if it
    must be installed first, and is added to `collected.installs`. Without a rule that fits, the row stays as it is.
    """
    for host, row in collected.found_devices:
        facts = AdmissionFacts(host.name, row["driver"], row["vendor"], row["model"], row["type"])
        if rule := first_matching_rule(rules, facts):
            reason, state = f"found, and admitted by rule {rule.name}", rule.action
            if state == "ready" and row["to_install"]:
                state = "installing"
                collected.installs.append((row["uuid"], rule))
            row |= {"state": state, "who": rule.state_by, "reason": reason}
            changes: RowValues = {"state": ["inactive", state]} if state != "inactive" else {}
            event = _build_agent_event(host, f"device.{state}", row["uuid"], row["model"], changes, reason)
            collected.events.append(event | {"source": "rule", "actor": rule.name})


def quarantine_devices(collected: InventoryChanges, held: Collection[str], now: str) -> None:
    """Append the quarantine, with its event, of those devices in `collected.doubts_if_held` whose uuid is in `held`."""
    for host, device, reason in collected.doubts_if_held:
        if device.uuid in held:
            changes = _collect_state_change(device, "quarantined", None, reason, now, collected)
            event = _build_agent_event(host, "device.quarantined", device.uuid, device.model, changes, reason)
            collected.events.append(event)


def _collect_device_changes(host: StoredHost, one: IdentifiedDevice, now: str, collected: InventoryChanges) -> None:
    """Append the changes of one reported device and of its deployables.

    A device that was missing moves to the state that it returns to, and a device that must not be offered to
    `quarantined`. This appends at most one event: found, changed, back or quarantined. A second one follows if a rule
    admits the device (`apply_admission_rules`), or if it is bound meanwhile (`quarantine_devices`).
    `offer.combine_health` decides about the health to store. A device that gets a serial number and had none may be
    another card, so it loses what it was programmed with, also in flash memory.
    """
    programs: dict[str, list[Any]] = {}
    old = one.stored
    if old is not None:
        one = replace(one, device=_keep_unended_failure(one.device, old.health))
        if offer.is_offered(old.state, old.health[0]) != offer.is_offered(old.state, one.device.status):
            collected.offer_changes.append(old.uuid)
        if one.doubt_if_held and old.state == offer.OFFERED_STATE:
            collected.doubts_if_held.append((host, old, one.doubt_if_held))
        if one.device.key.startswith(SERIAL_PREFIX) and not old.key.startswith(SERIAL_PREFIX):
            old, programs = _end_programs(old, collected, also_in_flash=True)
    device = one.device
    device_uuid = old.uuid if old else str(uuid.uuid4())
    changes = _collect_device_row(host, one, device_uuid, collected) | programs
    stored_deployables = {d.name: d for d in old.deployables} if old else {}
    reported_deployables = {d.name: d for d in device.deployables}
    for name, deployable in reported_deployables.items():
        changes.update(_collect_deployable_changes(device_uuid, deployable, stored_deployables.get(name), collected))
    for name, gone in stored_deployables.items():
        if name not in reported_deployables and not gone.missing:
            collected.missing_deployables.append(gone.id)
            changes[f"deployable {name}"] = ["present", "missing"]
    if old is not None and any(name.startswith(("handle ", "deployable ")) for name in changes):
        collected.resized_devices.append(device_uuid)
    if old is None:
        action, reason = "device.found", one.doubt or f"reported by {one.driver}"
    else:
        action, reason, state_changes = _collect_state_after_report(old, one, now, collected)
        changes |= state_changes
    if old is None or changes:
        collected.events.append(_build_agent_event(host, action, device_uuid, device.model, changes, reason))


def _collect_device_row(
    host: StoredHost, one: IdentifiedDevice, device_uuid: str, collected: InventoryChanges
) -> dict[str, list[Any]]:
    """Append the row of a new or changed device, and its new key; return what changed, for the event.

    A new device is left to the admission rules, unless it must not be offered: then it is quarantined.
    """
    device, old = one.device, one.stored
    facts = (one.driver, *_get_reported_values(device))
    changes: dict[str, list[Any]] = {}
    if old is not None and old.key != device.key:
        collected.new_keys.append({"uuid": device_uuid, "key": device.key})
        changes["key"] = [old.key, device.key]
    if old is not None and old.facts == facts:
        return changes
    row = dict(zip(REPORTED_DEVICE_FIELDS, facts, strict=True))
    row.update(uuid=device_uuid, host=host.id, key=device.key)
    collected.devices.append(row)
    if old is not None:
        pairs = zip(REPORTED_DEVICE_FIELDS, old.facts, facts, strict=True)
        return changes | {name: [was, is_now] for name, was, is_now in pairs if was != is_now}
    changes = {name: [None, row[name]] for name in FOUND_EVENT_FIELDS if row[name]}
    if one.doubt:
        row |= {"state": "quarantined", "reason": one.doubt, "who": "agent"}
        return changes | {"state": [None, "quarantined"]}
    collected.found_devices.append((host, row))
    return changes | {"state": [None, "inactive"]}


def _collect_state_after_report(
    old: StoredDevice, one: IdentifiedDevice, now: str, collected: InventoryChanges
) -> tuple[str, str, dict[str, list[Any]]]:
    """Append the change of state of a stored device that is reported again; return action, reason and changes of its
    event."""
    state = (old.returns_to or "inactive") if old.state == "missing" else old.state
    if one.doubt and state not in ("quarantined", "retired"):
        return (
            "device.quarantined",
            one.doubt,
            _collect_state_change(old, "quarantined", None, one.doubt, now, collected),
        )
    reason = f"reported by {one.driver}"
    if old.state != "missing":
        return "device.changed", reason, {}
    why = "seen again by its driver" + (", and quarantined as before" if state == "quarantined" else "")
    return "device.back", reason, _collect_state_change(old, state, None, one.doubt or why, now, collected)


def _collect_state_change(
    device: StoredDevice, state: str, returns_to: str | None, reason: str, now: str, collected: InventoryChanges
) -> dict[str, list[Any]]:
    """Append the move of a stored device to another state; return what changes, for its event.

    The move to `quarantined` ends a drain.
    """
    drain_to = None if "quarantined" in (state, returns_to) else device.drain_to
    collected.state_changes.append(
        {"uuid": device.uuid, "state": state, "returns_to": returns_to, "drain_to": drain_to, "reason": reason}
    )
    changes: dict[str, list[Any]] = {"returns_to": [device.returns_to, returns_to]}
    if state != device.state:
        changes |= {"state": [device.state, state], "state_since": [device.state_since, now]}
    return changes | ({"drain_to": [device.drain_to, drain_to]} if drain_to != device.drain_to else {})


def _find_earlier_health(
    device: Device, earlier_by_key: Mapping[str, Device], earlier_by_address: Mapping[str, Device]
) -> tuple[str, str] | None:
    """Return the health of a device, and its reason, in the earlier report; None if the device was not in it."""
    earlier = earlier_by_key.get(device.key)
    if earlier is None:
        earlier = earlier_by_address.get(device.address or "")
        if earlier is None or not may_be_same_card(earlier.key, (earlier.vendor, earlier.model), device):
            return None
    return earlier.status, earlier.status_reason


def _keep_unended_failure(device: Device, earlier_health: tuple[str, str] | None) -> Device:
    """Return the device with the health that `offer.combine_health` computes from its earlier health and this report.

    `earlier_health` is None if nothing is known of the device yet.
    """
    reported_health = (device.status, device.status_reason)
    health, reason = offer.combine_health(earlier_health or reported_health, reported_health)
    if (health, reason) == reported_health:
        return device
    return msgspec.structs.replace(device, status=health, status_reason=reason)


def _collect_deployable_changes(
    device_uuid: str, new: Deployable, old: StoredDeployable | None, collected: InventoryChanges
) -> dict[str, list[Any]]:
    """Append the changes of one reported deployable; return what changed, for the event of its device.

    For a new deployable the result has only its number of accelerators, not each attribute and handle.
    """
    changes: dict[str, list[Any]] = {}
    deployable_uuid = old.uuid if old else str(uuid.uuid4())
    values = (new.num_accelerators, new.driver_name, False)
    if old is None or (old.num_accelerators, old.driver_name, old.missing) != values:
        collected.deployables.append(
            {
                "uuid": deployable_uuid,
                "device": device_uuid,
                "name": new.name,
                "num": new.num_accelerators,
                "driver_name": new.driver_name,
                "rp": str(compute_provider_uuid(new.name)),
            }
        )
        was = None if old is None else "missing" if old.missing else old.num_accelerators
        changes[f"deployable {new.name}"] = [was, new.num_accelerators]
    _collect_attribute_changes(deployable_uuid, new, old, collected, changes)
    _collect_handle_changes(deployable_uuid, new, old, collected, changes)
    return changes


def _collect_attribute_changes(
    deployable: str,
    new: Deployable,
    old: StoredDeployable | None,
    collected: InventoryChanges,
    changes: dict[str, list[Any]],
) -> None:
    """Append new, changed and removed attributes to `collected`, and store their old and new values in `changes`.

    `changes` is for the event; nothing is stored there for a new deployable. Only attributes of origin `agent` are
    changed. If the deployable was programmed, reported function traits are ignored, because the trait that programming
    has set is the current one.
    """
    stored_attributes = {a.key: a for a in old.attributes} if old else {}
    programmed = (
        traits.FUNCTION_TRAIT_KEY in stored_attributes
        and stored_attributes[traits.FUNCTION_TRAIT_KEY].origin == "conductor"
    )
    reported_values = {a.key: a.value for a in new.attributes if not (programmed and traits.is_function_trait(a.value))}
    for key, value in reported_values.items():
        attribute = stored_attributes.get(key)
        if attribute is None or (attribute.value != value and attribute.origin == "agent"):
            collected.attributes.append({"deployable": deployable, "key": key, "value": value})
            if old:
                changes[f"attribute {key}"] = [attribute.value if attribute else None, value]
    for key, attribute in stored_attributes.items():
        if key not in reported_values and attribute.origin == "agent":
            collected.gone_attributes.append(attribute.id)
            changes[f"attribute {key}"] = [attribute.value, None]


def _collect_handle_changes(
    deployable: str,
    new: Deployable,
    old: StoredDeployable | None,
    collected: InventoryChanges,
    changes: dict[str, list[Any]],
) -> None:
    """Append new, changed and missing handles to `collected`, and store their old and new values in `changes`.

    `changes` is for the event; nothing is stored there for a new deployable. A handle is identified by its `info`.
    """
    stored_handles = {h.info: h for h in old.handles} if old else {}
    reported_handles = {h.info: h for h in new.handles}
    for info, reported in reported_handles.items():
        handle, attach_type = stored_handles.get(info), reported.attach_type
        row = {"deployable": deployable, "type": attach_type, "info": info, "use": reported.in_use}
        if handle is None or handle.missing or handle.attach_type != attach_type:
            collected.handles.append(row)
            if old:
                changes[f"handle {info}"] = ["missing" if handle else None, attach_type]
        elif handle.in_use != reported.in_use:
            collected.handles.append(row)
            changes[f"use of handle {info}"] = [handle.in_use, reported.in_use]
    for info, handle in stored_handles.items():
        if info not in reported_handles and not handle.missing:
            collected.missing_handles.append(handle.id)
            changes[f"handle {info}"] = [handle.attach_type, "missing"]


def _mark_device_missing(
    host: StoredHost, device: StoredDevice, reason: str, doubt: str, now: str, collected: InventoryChanges
) -> None:
    """Append the move of a device to `missing`, with its event; nothing if it is missing already.

    When the device comes back, it returns to its present state, or to `quarantined` if `doubt` says why it may then be
    another device. It loses what it was programmed with, unless that is in flash memory: it may have been without
    power.
    """
    returns_to = device.returns_to if device.state == "missing" else device.state
    if doubt and returns_to != "retired":
        returns_to, reason = "quarantined", doubt
    if (device.state, device.returns_to) == ("missing", returns_to):
        return
    changes = _collect_state_change(device, "missing", returns_to, reason, now, collected)
    changes |= _end_programs(device, collected)[1]
    action = "device.quarantined" if device.state == "missing" else "device.missing"
    collected.events.append(_build_agent_event(host, action, device.uuid, device.model, changes, reason))


def _end_programs_after_reboot(host: StoredHost, collected: InventoryChanges) -> StoredHost:
    """Append the end of all that was programmed on the host and is not in flash memory, with an event for each device.

    After a restore of the database (RESTORED_BOOT), programs in flash memory end, too. Returns the host as it is stored
    then.
    """
    is_restored = host.boot_id == RESTORED_BOOT
    devices = []
    for device in host.devices:
        device_after, changes = _end_programs(device, collected, also_in_flash=is_restored)
        devices.append(device_after)
        if changes:
            reason = (
                "the database was restored, so it is not known what the device was programmed with since the backup"
                if is_restored
                else "the host was rebooted, so what the device was programmed with is lost"
            )
            event = _build_agent_event(host, "device.unclear", device.uuid, device.model, changes, reason)
            collected.events.append(event)
    return msgspec.structs.replace(host, devices=tuple(devices))


def _end_programs(
    device: StoredDevice, collected: InventoryChanges, *, also_in_flash: bool = False
) -> tuple[StoredDevice, dict[str, list[Any]]]:
    """Append the removal of what the device's deployables were programmed with: the bitstream, and the function trait
    that programming has set.

    Programs in flash memory are removed only with `also_in_flash`. Returns the device as it is stored then, and the
    changes for an event.
    """
    deployables, changes = [], {}
    for deployable in device.deployables:
        traits_set = tuple(
            one
            for one in deployable.attributes
            if (one.key, one.origin) == (traits.FUNCTION_TRAIT_KEY, AttributeOrigin.CONDUCTOR)
        )
        is_ended = also_in_flash or not deployable.bitstream_in_flash
        if is_ended and (deployable.bitstream or traits_set):
            collected.ended_programs.append(deployable.id)
            collected.gone_attributes += [one.id for one in traits_set]
            changes[f"{deployable.name} bitstream"] = [deployable.bitstream, None]
            changes |= {f"{deployable.name} function": [one.value, None] for one in traits_set}
            kept = tuple(one for one in deployable.attributes if one not in traits_set)
            deployables.append(msgspec.structs.replace(deployable, attributes=kept, bitstream=None))
        else:
            deployables.append(deployable)
    return msgspec.structs.replace(device, deployables=tuple(deployables)), changes


def _build_driver_entries(
    host: StoredHost, driver_reports: dict[str, CombinedDriverReport], now: str, collected: InventoryChanges
) -> dict[str, dict[str, Any]]:
    """Build the host's `drivers` column, and append events for drivers that failed or recovered.

    A driver that is no longer enabled stays in the column, with an error, as long as the host has devices of it.
    """
    result: dict[str, dict[str, Any]] = {}
    counts = {driver: len(answer.devices) for driver, answer in driver_reports.items() if answer.devices is not None}
    for stored_device in host.devices:
        driver = stored_device.driver
        if (
            driver in counts
            and stored_device.state != "missing"
            and not driver_reports[driver].is_complete_for(stored_device)
        ):
            counts[driver] += 1
    for driver, driver_report in driver_reports.items():
        old = host.drivers.get(driver, {})
        result[driver] = {
            "error": driver_report.error,
            "since": old.get("since", now) if old.get("error", "") == driver_report.error else now,
            "devices": counts.get(driver, old.get("devices", 0)),
            "faults": [[fault.subject, fault.reason] for fault in driver_report.faults],
            "backends": _build_backend_entries(host, driver, driver_report, now, collected),
        }
    for driver, old in host.drivers.items():
        if driver not in driver_reports and any(device.driver == driver for device in host.devices):
            error = "no longer enabled on this host"
            since = old["since"] if old.get("error") == error else now
            result[driver] = old | {"error": error, "since": since, "devices": old.get("devices", 0), "faults": []}
    for driver, entry in result.items():
        previous_error = host.drivers.get(driver, {}).get("error", "")
        if previous_error != entry["error"]:
            action = "driver.failed" if entry["error"] else "driver.recovered"
            collected.events.append(
                _build_agent_event(
                    host, action, None, driver, {"error": [previous_error, entry["error"]]}, entry["error"]
                )
            )
    return result


def _build_backend_entries(
    host: StoredHost, driver: str, driver_report: CombinedDriverReport, now: str, collected: InventoryChanges
) -> dict[str, RowValues]:
    """Return backend name → its kind, labels, error, services, and since when it has this error or none.

    Appends events for backends that failed or recovered. The stored backends are returned if the driver did not answer.
    """
    stored: dict[str, RowValues] = host.drivers.get(driver, {}).get("backends", {})
    if driver_report.devices is None:
        return stored
    result: dict[str, RowValues] = {}
    for backend in driver_report.backends:
        old = stored.get(backend.name, {"error": ""})
        previous_error, error = old["error"], backend.error
        entry = {"kind": backend.kind, "labels": backend.labels, "error": error}
        services = [msgspec.structs.asdict(service) for service in backend.services]
        result[backend.name] = entry | {
            "services": services,
            "since": old.get("since", now) if previous_error == error else now,
        }
        if previous_error != error:
            action = "backend.failed" if error else "backend.recovered"
            name = f"{driver}:{backend.name}"
            collected.events.append(
                _build_agent_event(host, action, None, name, {"error": [previous_error, error]}, error)
            )
    return result


def _build_agent_event(
    host: StoredHost, action: str, subject: str | None, name: str, changes: RowValues, reason: str
) -> RowValues:
    """Build the row of an event whose actor is the host's agent; `name` is cut at 255 characters.

    The row has no `source`: the statement that inserts events then stores `agent`.
    """
    return {
        "actor": host.name,
        "action": action,
        "subject": subject,
        "subject_name": name[:255],
        "host": host.name,
        "changes": changes,
        "reason": reason,
    }
