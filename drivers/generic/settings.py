"""Parse the settings of the generic driver: `backends`, a table of named sections."""

from __future__ import annotations

import re

import msgspec

from drivers.base import Settings
from drivers.errors import Invalid
from drivers.generic.accel import Accel
from drivers.generic.backend import Kind
from drivers.generic.firmware import Firmware
from drivers.generic.mdev import Mdev
from drivers.generic.pci import Pci
from drivers.generic.remote import Remote

MAX_BACKENDS = 64
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
KINDS: tuple[type[Kind], ...] = (Pci, Mdev, Accel, Firmware, Remote)


def read(settings: Settings) -> dict[str, Kind]:
    """Return the backends by name, in the order of the settings. Raises Invalid, which describes the first mistake."""
    if unknown := sorted(settings.keys() - {"backends"}):
        raise Invalid(f"generic_driver has no setting {unknown[0]!r}: its only setting is backends")
    sections = settings.get("backends", {})
    if not isinstance(sections, dict) or len(sections) > MAX_BACKENDS:
        raise Invalid(f"backends of generic_driver must be a table of at most {MAX_BACKENDS} named sections")
    return {str(name): _backend(str(name), section) for name, section in sections.items()}


def _backend(name: str, section: object) -> Kind:
    if not NAME.fullmatch(name):
        raise Invalid(
            f"a backend of generic_driver cannot be called {name[:80]!r}: use at most 64 letters, digits and _ . -"
        )
    try:
        backend: Kind = msgspec.convert(section, Pci | Mdev | Accel | Firmware | Remote)
    except msgspec.ValidationError as error:
        raise Invalid(f"backend {name} of generic_driver is not usable: {error}{_hint(str(error))}") from None
    if problem := backend.problem():
        raise Invalid(f"backend {name} of generic_driver is not usable: {problem}")
    return backend


def _hint(error: str) -> str:
    if "kind" in error:
        return f" (kind is one of {', '.join(kind.kind for kind in KINDS)})"
    if "`$.match" in error and "regex" in error:
        return " (hex digits in lower case without 0x, and * ? [] as wildcards)"
    return ""
