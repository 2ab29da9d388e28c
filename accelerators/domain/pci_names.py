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
_SUBSYSTEM_LINE = re.compile(r"\t\t([0-9a-fA-F]{4})\s+([0-9a-fA-F]{4})\s+(\S.*)")
_LEGAL_FORM = re.compile(
    r"[\s,]+(?:corporation|corp|incorporated|inc|co|ltd|limited|llc|gmbh|ag|technologies)\.?$", re.I
)
_TRADE_NAME = re.compile(r".*\[([^\[\]]+)\]$")
_BOARD_DETAILS = re.compile(r"\s*[,;].*")
_SEARCHED_WORD = re.compile(r'"([^"]*)"' + r"|'([^']*)'|(\S+)")


@dataclass(frozen=True)
class PciVendor:
    """A vendor of the PCI ID database.

    `devices` has the names of its devices by id, `subsystems` those of boards with its devices, by the device's id and
    the ids of the subsystem, such as `10de:1533`.
    """

    name: str
    devices: dict[str, str] = field(default_factory=dict)
    subsystems: dict[tuple[str, str], str] = field(default_factory=dict)


@dataclass(frozen=True)
class HardwareName:
    """The names of one model of hardware.

    `vendor` and `model` are those of the database, and `subsystem` is the vendor and the name of the board; each is ''
    if the database does not have it. `full` is what people call the hardware; without any name it is made of what the
    driver reported.
    """

    vendor: str
    model: str
    full: str
    subsystem: str = ""

    def has_words(self, term: str) -> bool:
        """Return whether each word of `term` is in the names. Case is ignored. A phrase in quotation marks is one
        word."""
        names = " ".join((self.vendor, self.model, self.subsystem, self.full)).lower()
        return all("".join(parts) in names for parts in _SEARCHED_WORD.findall(term.lower()))


def parse_pci_ids(lines: Iterable[str]) -> dict[str, PciVendor]:
    """Return the vendors by id. Lines that are not understood are ignored; so is everything after the vendors, such as
    the list of classes.
    """
    vendors: dict[str, PciVendor] = {}
    vendor: PciVendor | None = None
    device = ""
    entries = 0
    for line in lines:
        if len(line) > MAX_LINE:
            continue
        if found := _VENDOR_LINE.fullmatch(line.rstrip()):
            vendor, device = vendors.setdefault(found[1].lower(), PciVendor(found[2])), ""
        elif vendor and (found := _DEVICE_LINE.fullmatch(line.rstrip())):
            device = found[1].lower()
            vendor.devices.setdefault(device, found[2])
        elif vendor and device and (found := _SUBSYSTEM_LINE.fullmatch(line.rstrip())):
            vendor.subsystems.setdefault((device, f"{found[1]}:{found[2]}".lower()), found[3])
        elif line.startswith("C "):
            break
        else:
            continue
        entries += 1
        if entries >= MAX_ENTRIES:
            break
    return vendors


def name_hardware(
    vendor: str,
    model: str,
    subsystem: str,
    vendors: Mapping[str, PciVendor],
    overrides: Mapping[tuple[str, str], str],
) -> HardwareName:
    """Return the names of hardware whose driver reports this vendor, model and subsystem.

    Vendor and model may be PCI ids or texts; `subsystem` may be ''. An override of the subsystem precedes one of the
    model. The full name is that of the board if the database has it. If another vendor made the board than the model,
    the name of the model follows in parentheses.
    """
    vendor_id, model_id = PCI_ID.fullmatch(vendor), PCI_ID.fullmatch(model)
    entry = vendors.get(vendor_id[1].lower()) if vendor_id else None
    model_name = entry.devices.get(model_id[1].lower(), "") if entry and model_id else ""
    board_name = entry.subsystems.get((model_id[1].lower(), subsystem), "") if entry and model_id else ""
    maker = vendors.get(subsystem.partition(":")[0])
    names = entry.name if entry else "", model_name
    subsystem_name = " ".join(filter(None, (maker.name if maker else "", board_name)))
    key = make_override_key(vendor, model)
    if chosen := overrides.get((key[0], f"{key[1]}:{subsystem}")) or overrides.get(key):
        return HardwareName(*names, chosen, subsystem_name)
    if vendor_id and not entry:
        return HardwareName(*names, model, subsystem_name)
    short_vendor = shorten_vendor(entry.name) if entry else vendor
    full = _join_names(short_vendor, shorten_model(model_name) or model)
    if board_name and maker is entry:
        full = _join_names(short_vendor, shorten_board(board_name))
    elif board_name:
        full = f"{_join_names(shorten_vendor(maker.name) if maker else '', shorten_board(board_name))} ({full})"
    return HardwareName(*names, full, subsystem_name)


def _join_names(vendor: str, model: str) -> str:
    """Return both names as one, without the vendor's if the model's begins with it."""
    return model if not vendor or model.lower().startswith(vendor.lower()) else f"{vendor} {model}"


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


def shorten_board(name: str) -> str:
    """Return the name of a board without details such as ports and brackets, which follow a comma or semicolon."""
    return shorten_model(_BOARD_DETAILS.sub("", name) or name)
