"""The state, version and generation of each driver in the column `Host.drivers`, as the host's agent reports them.

`diff` fills the other keys of an entry (error, since, devices, faults, backends).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from accelerators.domain.states import DriverState
from drivers.inventory import DriverReport

Entry = dict[str, Any]
"""The value of one driver in `Host.drivers`."""

KNOWN = frozenset(word.value for word in DriverState)
OFF = (DriverState.DISABLED, DriverState.ABSENT)
"""The states of a driver that does not run because it is not supposed to."""


def spoken_for(reports: Iterable[DriverReport]) -> set[str]:
    """Return the drivers whose devices may be changed by a report.

    Left out is a driver that is absent only because the host's own configuration does not name it (generation 0): its
    devices stay as they are stored.
    """
    return {said.driver for said in reports if said.state != DriverState.ABSENT or said.generation}


def why_missing(driver: str, reports: Iterable[DriverReport]) -> str:
    """Return the reason for the state `missing` of a device of this driver: the driver is disabled or uninstalled, or
    it answered without the device."""
    off = next((said.state for said in reports if said.driver == driver and said.state in OFF), "")
    if off:
        return f"{driver} is {'disabled' if off == DriverState.DISABLED else 'uninstalled'} on its host"
    return f"{driver} no longer reports this device"


def entries(stored: Mapping[str, Entry], made: Mapping[str, Entry], said: Iterable[DriverReport], now: str) -> Any:
    """Return the new value of `Host.drivers`.

    `made` are the entries that `diff` built; each gets the reported state, version and generation. Drivers in the
    report that have no entry (the agent did not ask them) get one. `since` becomes `now` if the state has changed. If
    the agent reports no known state, the state is computed from the error.
    """
    result = dict(made)
    for one in said:
        old = stored.get(one.driver, {})
        entry = result.get(one.driver, {"error": "", "since": old.get("since", now), "devices": 0, "faults": []})
        state = one.state if one.state in KNOWN else state_of(entry | {"state": ""}).value
        stands = {"state": state, "version": one.version or old.get("version", ""), "generation": one.generation}
        if old.get("state", state) != state:
            entry = entry | {"since": now}
        result[one.driver] = entry | stands
    return result


def state_of(entry: Mapping[str, Any]) -> DriverState:
    """Return the state of a driver from its entry in `Host.drivers`. Entries from older agents have no state: it is
    `failed` if they have an error, otherwise `ok`."""
    return DriverState(entry.get("state") or (DriverState.FAILED if entry.get("error") else DriverState.OK))


def is_on(entry: Mapping[str, Any]) -> bool:
    """Return True if a page that shows how drivers answer should list this driver: it is neither disabled nor absent,
    or it has an error."""
    return state_of(entry) not in OFF or bool(entry.get("error"))
