"""Which other devices of a host an act on one device affects, as the device's driver declares it.

`drivers.inventory.Scope` describes the scopes, and `drivers.plan.get_affected_prefix` tells which devices they cover.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivers.plan import DEVICE_SCOPE


def get_scope(driver_entry: Mapping[str, Any], act: str) -> str:
    """Return what an act affects, from the driver's entry in `Host.drivers`; without a declaration the device."""
    return str(driver_entry.get("declares", {}).get("affects", {}).get(act, DEVICE_SCOPE))
