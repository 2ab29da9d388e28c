"""Human names for hardware, from the PCI ID database of this machine and from the configuration.

The conductor looks names up, so that hosts without the database have names, too. The file is read once in a process,
and again when it has changed; nothing is read for a single row. A file that is missing or broken is no failure: the
console then shows what drivers report.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from django.conf import settings

from accelerators.domain import pci_names
from accelerators.domain.pci_names import HardwareName, PciVendor

log = logging.getLogger(__name__)

MAX_BYTES = 16_000_000
"""A larger file is not read: Debian's has 1.4 MB."""
CHECK_INTERVAL_S = 60.0
"""Seconds after which it is looked whether the file has changed."""


class _Database:
    """The names of one file. `get` returns them, and reads the file when it is new or has changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._version: tuple[str, int, int] | None = None
        self._checked_at = float("-inf")
        self._path = ""
        self._vendors: Mapping[str, PciVendor] = {}

    def get(self, path: str) -> Mapping[str, PciVendor]:
        """Return the vendors in the file; empty if it is `off`, missing or unusable, which is logged once."""
        now = time.monotonic()
        if path == self._path and now - self._checked_at < CHECK_INTERVAL_S:
            return self._vendors
        with self._lock:
            self._path, self._checked_at = path, now
            try:
                facts = Path(path).stat() if path != "off" else None
            except OSError:
                facts = None
            version = (path, facts.st_mtime_ns, facts.st_size) if facts else None
            if version != self._version:
                self._version, self._vendors = version, _read_names(path, facts.st_size) if facts else {}
                _name_hardware.cache_clear()
            return self._vendors


def _read_names(path: str, size: int) -> Mapping[str, PciVendor]:
    """Return the vendors in the file; empty if it is too large or cannot be read, which is logged."""
    if size > MAX_BYTES:
        log.warning("the names of hardware in %s are not used: the file has more than %d bytes", path, MAX_BYTES)
        return {}
    try:
        text = Path(path).read_bytes()[:MAX_BYTES].decode(errors="replace")
    except OSError as error:
        log.warning("the names of hardware in %s are not used: %s", path, error.strerror)
        return {}
    return pci_names.parse_pci_ids(text.split("\n"))


_database = _Database()


def get_hardware_name(vendor: str, model: str, subsystem: str) -> HardwareName:
    """Return the names of hardware whose driver reports this vendor, model and subsystem ('' if it has none)."""
    _database.get(settings.KEYS.pci_ids)
    return _name_hardware(vendor, model, subsystem, settings.KEYS.hardware_names)


@lru_cache(maxsize=4096)
def _name_hardware(vendor: str, model: str, subsystem: str, overrides: tuple[str, ...]) -> HardwareName:
    """Return the names by the file that was read last, and by the overrides."""
    return pci_names.name_hardware(vendor, model, subsystem, _database._vendors, _parse_overrides(overrides))


@lru_cache(maxsize=8)
def _parse_overrides(overrides: tuple[str, ...]) -> Mapping[tuple[str, str], str]:
    """Return the overrides of CYBORG_HARDWARE_NAMES by vendor and model, with the subsystem after the
    model if there is one; entries in another form are ignored."""
    entries = (entry.partition("=") for entry in overrides)
    split = ((ids.partition(":"), name.strip()) for ids, equals, name in entries if equals)
    return {
        pci_names.make_override_key(vendor.strip(), model.strip()): name
        for (vendor, colon, model), name in split
        if colon and name
    }
