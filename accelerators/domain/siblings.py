"""Find out which other devices of the same host are affected by an act on one device. The device's driver declares it.

`drivers.inventory.Scope` describes the scopes. A scope that this release does not know is treated like `host`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEVICE_SCOPE = "device"


def get_scope(driver_entry: Mapping[str, Any], act: str) -> str:
    """Return the scope that a driver declares for an act; `device` if it declares none.

    `driver_entry` is the driver's entry in `Host.drivers`.
    """
    return str(driver_entry.get("declares", {}).get("affects", {}).get(act, DEVICE_SCOPE))


def get_affected_prefix(scope: str, address: str | None) -> str | None:
    """Return the prefix of the PCI addresses of all devices that an act with this scope affects; '' for the whole host.

    Returns None if the act affects the device alone. `address` is the PCI address of the device, None if it has none.
    Such a device has no slot and no bus, so a scope wider than `device` means the whole host for it.
    """
    if scope == DEVICE_SCOPE:
        return None
    if scope == "card" and address:
        return address.rpartition(".")[0] + "."
    if scope == "bus" and address:
        return address.rpartition(":")[0] + ":"
    return ""
