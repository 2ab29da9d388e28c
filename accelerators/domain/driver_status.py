"""The state, version, generation and declaration of each driver in the column `Host.drivers`.

The agent of the host reports them. `diff` fills the other keys of an entry (error, since, devices, faults, backends).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import to_builtins

from accelerators.domain.states import DriverState
from drivers.inventory import DriverReport
from drivers.plan import DEVICE_SCOPE

DriverEntry = dict[str, Any]
"""The value of one driver in `Host.drivers`."""

KNOWN_STATES = frozenset(word.value for word in DriverState)
OFF_STATES = (DriverState.DISABLED, DriverState.ABSENT)
"""The states of a driver that does not run because it is not supposed to."""


def get_declared_scope(entry: Mapping[str, Any], act: str) -> str:
    """Return the scope (`drivers.inventory.Scope`) that a driver declares for an act; `device` if it declares none.

    `entry` is the driver's entry in `Host.drivers`. `drivers.plan.get_affected_prefix` tells which devices a scope
    covers.
    """
    return str(entry.get("declares", {}).get("affects", {}).get(act, DEVICE_SCOPE))


def select_reported_drivers(reports: Iterable[DriverReport]) -> set[str]:
    """Return the drivers whose devices may be changed by a report.

    Left out is a driver that is absent only because the host's own configuration does not name it (generation 0): its
    devices stay as they are stored.
    """
    return {said.driver for said in reports if said.state != DriverState.ABSENT or said.generation}


def describe_missing_reason(driver: str, reports: Iterable[DriverReport]) -> str:
    """Return the reason for the state `missing` of a device of this driver: the driver is disabled or uninstalled, or
    it answered without the device."""
    off_state = next((said.state for said in reports if said.driver == driver and said.state in OFF_STATES), "")
    if off_state:
        return f"{driver} is {'disabled' if off_state == DriverState.DISABLED else 'uninstalled'} on its host"
    return f"{driver} no longer reports this device"


def build_driver_entries(
    stored: Mapping[str, DriverEntry], built: Mapping[str, DriverEntry], reports: Iterable[DriverReport], now: str
) -> Any:
    """Return the new value of `Host.drivers`.

    `built` are the entries that `diff` built; each gets the reported state, version, generation and declaration. An
    agent older than declarations reports none; the stored one then stays, as for a driver that does not run. Drivers in
    the report that have no entry (the agent did not ask them) get one. `since` becomes `now` if the state has changed.
    If the agent reports no known state, the state is computed from the error. The state is `failed` if the agent
    reports `ok` and the entry has an error, because the conductor refused what the driver reported.
    """
    result = dict(built)
    for report in reports:
        old = stored.get(report.driver, {})
        entry = result.get(report.driver, {"error": "", "since": old.get("since", now), "devices": 0, "faults": []})
        state = report.state if report.state in KNOWN_STATES else driver_state_of(entry | {"state": ""}).value
        if state == DriverState.OK and entry["error"]:
            state = DriverState.FAILED.value
        reported: DriverEntry = {
            "state": state,
            "version": report.version or old.get("version", ""),
            "generation": report.generation,
        }
        if declaration := to_builtins(report.declares) if report.declares else old.get("declares"):
            reported["declares"] = declaration
        if old.get("state", state) != state:
            entry = entry | {"since": now}
        result[report.driver] = entry | reported
    return result


def driver_state_of(entry: Mapping[str, Any]) -> DriverState:
    """Return the state of a driver from its entry in `Host.drivers`. Entries from older agents have no state: it is
    `failed` if they have an error, otherwise `ok`."""
    return DriverState(entry.get("state") or (DriverState.FAILED if entry.get("error") else DriverState.OK))


def should_list_driver(entry: Mapping[str, Any]) -> bool:
    """Return True if a page that shows how drivers answer should list this driver: it is neither disabled nor absent,
    or it has an error."""
    return driver_state_of(entry) not in OFF_STATES or bool(entry.get("error"))
