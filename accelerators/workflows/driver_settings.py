"""Check the settings of a driver with the driver's own code, before they are stored or sent to an agent.

Only drivers of this product are known here. The settings of other drivers, and of a driver whose version on the host is
another one than here, are checked by the host's agent alone, which tries them before it uses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from accelerators.domain.errors import RefusalReason, RefusedError
from drivers import catalogue
from drivers.base import Driver
from drivers.errors import Invalid


@lru_cache(maxsize=64)
def _find_driver(name: str) -> Driver | None:
    """Return a driver of this product, None if the name is another one's."""
    return catalogue.load_own_driver(name)


def is_checked_here(driver: str, entry: Mapping[str, Any] | None = None) -> bool:
    """Return whether the settings of a driver are checked here.

    `entry` is the driver's entry in `Host.drivers`. It has the version that the host has; if it is not known, the host
    is taken to have the same version.
    """
    known = _find_driver(driver)
    version = (entry or {}).get("version") or ""
    return known is not None and version in ("", known.version)


def refuse_unusable_settings(driver: str, settings: Mapping[str, Any]) -> None:
    """Raise RefusedError INVALID if a driver of this product cannot use these settings; do nothing for others."""
    known = _find_driver(driver)
    if known is None:
        return
    try:
        known.check_settings(dict(settings))
    except Invalid as error:
        text = f"{error}. Nothing was changed: correct the settings."
        raise RefusedError(RefusalReason.INVALID, text) from None
