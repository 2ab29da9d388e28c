"""Parse the settings of the generic driver: `backends`, a table of named sections."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from drivers.base import Settings
from drivers.errors import Invalid
from drivers.generic.accel import AccelBackend
from drivers.generic.backend import BackendBase
from drivers.generic.firmware import FirmwareBackend
from drivers.generic.mdev import MdevBackend
from drivers.generic.pci import PciBackend
from drivers.generic.remote import RemoteBackend

MAX_BACKENDS = 64
BACKEND_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
BACKEND_CLASSES: tuple[type[BackendBase], ...] = (PciBackend, MdevBackend, AccelBackend, FirmwareBackend, RemoteBackend)


AnyBackend = PciBackend | MdevBackend | AccelBackend | FirmwareBackend | RemoteBackend


class GenericSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of generic_driver: sections by name. `parse_backends` reads them one by one, for better errors."""

    backends: Annotated[dict[str, AnyBackend], Meta(max_length=MAX_BACKENDS)] = {}


def parse_backends(settings: Settings) -> dict[str, BackendBase]:
    """Return the enabled backends of the generic driver by name, in the order of its settings.

    Raises Invalid, which describes the first mistake, also one in a disabled backend.
    """
    if unknown := sorted(settings.keys() - {"backends"}):
        raise Invalid(f"generic_driver has no setting {unknown[0]!r}: its only setting is backends")
    sections = settings.get("backends", {})
    if not isinstance(sections, dict) or len(sections) > MAX_BACKENDS:
        raise Invalid(f"backends of generic_driver must be a table of at most {MAX_BACKENDS} named sections")
    backends = {str(name): _parse_backend(str(name), section) for name, section in sections.items()}
    return {name: backend for name, backend in backends.items() if backend.enabled}


def _parse_backend(name: str, section: object) -> BackendBase:
    """Return the backend that one section describes. Raises Invalid for an unusable name or section."""
    if not BACKEND_NAME.fullmatch(name):
        raise Invalid(
            f"a backend of generic_driver cannot be called {name[:80]!r}: use at most 64 letters, digits and _ . -"
        )
    try:
        backend: BackendBase = msgspec.convert(section, AnyBackend)
    except msgspec.ValidationError as error:
        raise Invalid(f"backend {name} of generic_driver is not usable: {error}{_get_hint(str(error))}") from None
    if problem := backend.describe_problem():
        raise Invalid(f"backend {name} of generic_driver is not usable: {problem}")
    return backend


def _get_hint(error: str) -> str:
    """Return advice that is added to a validation error about the kind or a match; '' for any other error."""
    if "kind" in error:
        return f" (kind is one of {', '.join(kind.kind for kind in BACKEND_CLASSES)})"
    if "`$.match" in error and "regex" in error:
        return " (hex digits in lower case without 0x, and * ? [] as wildcards)"
    return ""
