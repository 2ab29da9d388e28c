"""Names of PCI hardware: read the format of the PCI ID database, and shorten its names. This module is pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

MAX_LINE, MAX_ENTRIES = 512, 500_000
"""Longer lines are ignored, and after this number of vendors and devices the rest of the database is."""
PCI_ID = re.compile(r"(?:0x)?([0-9a-fA-F]{4})")
_VENDOR_LINE = re.compile(r"([0-9a-fA-F]{4})\s+(\S.*)")
_DEVICE_LINE = re.compile(r"\t([0-9a-fA-F]{4})\s+(\S.*)")
_LEGAL_FORM = re.compile(
    r"[\s,]+(?:corporation|corp|incorporated|inc|co|ltd|limited|llc|gmbh|ag|technologies)\.?$", re.I
)
_TRADE_NAME = re.compile(r".*\[([^\[\]]+)\]$")


@dataclass(frozen=True)
class PciVendor:
    """A vendor of the PCI ID database, with the names of its devices by id."""

    name: str
    devices: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class HardwareName:
    """The names of one model of hardware.

    `vendor` and `model` are those of the database, '' if it does not have them. `full` is what people call the
    hardware; without any name it is made of what the driver reported.
    """

    vendor: str
    model: str
    full: str


def parse_pci_ids(lines: Iterable[str]) -> dict[str, PciVendor]:
    """Return the vendors by id. Lines that are not understood are ignored; so is everything after the vendors, such as
    the list of classes.
    """
    vendors: dict[str, PciVendor] = {}
    vendor: PciVendor | None = None
    entries = 0
    for line in lines:
        if len(line) > MAX_LINE:
            continue
        if found := _VENDOR_LINE.fullmatch(line.rstrip()):
            vendor = vendors.setdefault(found[1].lower(), PciVendor(found[2]))
        elif vendor and (found := _DEVICE_LINE.fullmatch(line.rstrip())):
            vendor.devices.setdefault(found[1].lower(), found[2])
        elif line.startswith("C "):
            break
        else:
            continue
        entries += 1
        if entries >= MAX_ENTRIES:
            break
    return vendors


def name_hardware(
    vendor: str, model: str, vendors: Mapping[str, PciVendor], overrides: Mapping[tuple[str, str], str]
) -> HardwareName:
    """Return the names of hardware whose driver reports this vendor and model; both may be PCI ids or texts."""
    vendor_id, model_id = PCI_ID.fullmatch(vendor), PCI_ID.fullmatch(model)
    entry = vendors.get(vendor_id[1].lower()) if vendor_id else None
    vendor_name = entry.name if entry else ""
    model_name = entry.devices.get(model_id[1].lower(), "") if entry and model_id else ""
    if chosen := overrides.get(make_override_key(vendor, model)):
        return HardwareName(vendor_name, model_name, chosen)
    parts = (shorten_vendor(vendor_name) or ("" if vendor_id else vendor), shorten_model(model_name) or model)
    full = parts[1] if parts[1].lower().startswith(parts[0].lower()) else " ".join(parts)
    return HardwareName(vendor_name, model_name, full if entry or not vendor_id else model)


def make_override_key(vendor: str, model: str) -> tuple[str, str]:
    """Return the key under which an override is stored: both in lower case, and PCI ids without `0x`."""
    ids = (PCI_ID.fullmatch(text) for text in (vendor, model))
    first, second = (found[1] if found else text for found, text in zip(ids, (vendor, model), strict=True))
    return first.lower(), second.lower()


def shorten_vendor(name: str) -> str:
    """Return the vendor's trade name: the text in brackets at the end, otherwise the name without its legal form."""
    if found := _TRADE_NAME.fullmatch(name):
        return found[1]
    while (shorter := _LEGAL_FORM.sub("", name)) != name and shorter:
        name = shorter
    return name


def shorten_model(name: str) -> str:
    """Return the trade name of a model: the text in brackets at the end if there is one, otherwise the whole name."""
    found = _TRADE_NAME.fullmatch(name)
    return found[1] if found else name


def find_ids(term: str, vendors: Mapping[str, PciVendor], limit: int) -> list[tuple[str, str]]:
    """Return the ids of vendor and model, at most `limit` pairs, for which the names contain every word of `term`.

    A word may be in the name of the model or of the vendor. Case is ignored.
    """
    words = term.lower().split()
    found: list[tuple[str, str]] = []
    for vendor_id, vendor in vendors.items():
        vendor_name = vendor.name.lower()
        wanted = [word for word in words if word not in vendor_name]
        for model_id, name in vendor.devices.items():
            if all(word in name.lower() for word in wanted):
                found.append((vendor_id, model_id))
                if len(found) == limit:
                    return found
    return found
