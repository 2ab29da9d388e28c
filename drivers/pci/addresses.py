"""Read PCI addresses that a driver or an operator wrote, and write them as sysfs does, so that they can be compared.

The database reads the addresses in attach handles in the same way (`accelerators_claim` in
accelerators/migrations/sql/claims.sql).
"""

from __future__ import annotations

import json
import re

_ADDRESS = re.compile(
    r"(?:0x)?([0-9a-f]{1,8}):(?:0x)?([0-9a-f]{1,2}):(?:0x)?([01]?[0-9a-f])\.(?:0x)?0?([0-7])", re.IGNORECASE | re.ASCII
)


def normalize_address(text: str) -> str:
    """Return a PCI address as the kernel writes it (`%04x:%02x:%02x.%d`, pci_setup_device in drivers/pci/probe.c).

    Capital letters, `0x` and missing or additional zeros are accepted. Returns '' if the text is no PCI address.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None:
        return ""
    domain, bus, slot, function = (int(part, 16) for part in match.groups())
    return f"{domain:04x}:{bus:02x}:{slot:02x}.{function}"


def read_handle_address(info: str) -> str:
    """Return the PCI address in the JSON of an attach handle as the kernel writes it; '' if it has none.

    The four values must be strings: a JSON number is not in hex, and the database does not read it.
    """
    try:
        fields = json.loads(info)
        parts = [fields[name] for name in ("domain", "bus", "device", "function")]
    except (ValueError, KeyError, TypeError):
        return ""
    if not all(isinstance(part, str) for part in parts):
        return ""
    return normalize_address("{}:{}:{}.{}".format(*parts))
