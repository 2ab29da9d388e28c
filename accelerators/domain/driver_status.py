"""How a host's drivers stand, as its agent reports it: what `Host.drivers` holds of each beside its error and devices.

Pure. Called by `diff`; read by whoever shows a driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from accelerators.domain.states import DriverState
from drivers.inventory import DriverReport

Entry = dict[str, Any]


KNOWN = frozenset(word.value for word in DriverState)
OFF = (DriverState.DISABLED, DriverState.ABSENT)


def spoken_for(reports: Iterable[DriverReport]) -> set[str]:
    """The drivers whose devices a report speaks of. One that only the host's own configuration does not name (no more)
    is left out: what is known of its devices stays."""
    return {said.driver for said in reports if said.state != DriverState.ABSENT or said.generation}


def why_missing(driver: str, reports: Iterable[DriverReport]) -> str:
    """Why a device of this driver counts as missing."""
    off = next((said.state for said in reports if said.driver == driver and said.state in OFF), "")
    if off:
        return f"{driver} is {'disabled' if off == DriverState.DISABLED else 'uninstalled'} on its host"
    return f"{driver} answered and did not name it"


def entries(stored: Mapping[str, Entry], made: Mapping[str, Entry], said: Iterable[DriverReport], now: str) -> Any:
    """`Host.drivers` to be: `made`, with how each driver stands, and those that are there and not asked."""
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
    """Of an entry of `Host.drivers`; older agents do not say it."""
    return DriverState(entry.get("state") or (DriverState.FAILED if entry.get("error") else DriverState.OK))


def is_on(entry: Mapping[str, Any]) -> bool:
    """Whether the driver is asked, or should be: for pages that show how drivers answer."""
    return state_of(entry) not in OFF or bool(entry.get("error"))
