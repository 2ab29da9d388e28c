"""Which other devices of a host an act on one device affects, as the device's driver declares it.

`drivers.inventory.Scope` describes the scopes. A conductor that does not know a scope takes the widest one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEVICE_SCOPE = "device"


def get_scope(driver_entry: Mapping[str, Any], act: str) -> str:
    """Return what an act affects, from the driver's entry in `Host.drivers`; without a declaration the device."""
    return str(driver_entry.get("declares", {}).get("affects", {}).get(act, DEVICE_SCOPE))


def get_affected_prefix(scope: str, address: str | None) -> str | None:
    """Return how the PCI addresses of all devices begin that an act with this scope affects; '' for the whole host.

    Returns None if it affects the device alone. A device without a PCI address has no slot or bus, so a scope beyond
    the device then is the host.
    """
    if scope == DEVICE_SCOPE:
        return None
    if scope == "card" and address:
        return address.rpartition(".")[0] + "."
    if scope == "bus" and address:
        return address.rpartition(":")[0] + ":"
    return ""
