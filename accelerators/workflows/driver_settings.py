"""Check the settings of a driver with the driver's own code, before they are stored or sent to an agent.

Only drivers of this product are known here. The settings of other drivers, and of a driver whose version on the host is
another one than here, are checked by the host's agent alone, which tries them before it uses them. So are the settings
of a driver whose code fails here (docs/adr/0019-driver-code-in-the-conductor.md).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from drivers import catalogue
from drivers.base import Driver
from drivers.errors import Failed, Invalid

log = logging.getLogger(__name__)


@lru_cache(maxsize=64)
def find_own_driver(name: str) -> Driver | None:
    """Return a driver of this product; None if the name is another one's, or if its code cannot be loaded here.

    The first call imports the driver: make it before a transaction is opened.
    """
    try:
        return catalogue.load_own_driver(name)
    except Failed:
        log.exception("The settings of %s are checked by the agents alone, because its code cannot be loaded", name)
        return None


def is_checked_here(driver: str, entry: Mapping[str, Any] | None = None) -> bool:
    """Return whether the settings of a driver are checked here.

    `entry` is the driver's entry in `Host.drivers`. It has the version that the host has; if it is not known, the host
    is taken to have the same version.
    """
    known = find_own_driver(driver)
    version = (entry or {}).get("version") or ""
    return known is not None and version in ("", known.version)


def find_settings_error(driver: str, settings: Mapping[str, Any]) -> str:
    """Return why a driver of this product cannot use these settings, '' if it can, or if it is another one's driver.

    If the driver's code fails, that is logged, and the settings are left to the agent.
    """
    known = find_own_driver(driver)
    try:
        if known is not None:
            known.check_settings(dict(settings))
    except Invalid as error:
        return f"{error}. Nothing was changed: correct the settings."
    except Exception:
        log.exception("Settings of %s are checked by the agent alone, because the driver's check failed", driver)
    return ""
