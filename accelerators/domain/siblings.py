"""Find out which other devices of the same host are affected by an act on one device. The device's driver declares it.

`drivers.inventory.Scope` describes the scopes, and `drivers.plan.get_affected_prefix` tells which devices they cover.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivers.plan import DEVICE_SCOPE


def get_scope(driver_entry: Mapping[str, Any], act: str) -> str:
    """Return the scope that a driver declares for an act; `device` if it declares none.

    `driver_entry` is the driver's entry in `Host.drivers`.
    """
    return str(driver_entry.get("declares", {}).get("affects", {}).get(act, DEVICE_SCOPE))
