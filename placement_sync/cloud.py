"""Return the service user's session with the cloud, if one is configured."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from accelerators.runtime.registry import Registry
from drivers.configuration import ConfigurationError

log = logging.getLogger(__name__)

SERVICE_SESSION: Registry[Callable[[], Any]] = Registry("service session", single=True)
"""Function that returns the service user's keystoneauth1 session, or raises ConfigurationError if no cloud is
configured. Everything here that sends requests to OpenStack calls it."""


def get_service_session() -> Any:
    """Return the service user's session.

    Raises ConfigurationError if no cloud is configured, LookupError if nothing is registered in SERVICE_SESSION.
    """
    return SERVICE_SESSION.only()()


def get_cloud_session(endpoint: str) -> Any | None:
    """Return the service user's session, or None if `endpoint` is `off` or no cloud is configured."""
    if endpoint == "off":
        return None
    try:
        return get_service_session()
    except ConfigurationError as error:
        log.debug("Nothing is sent to OpenStack: %s", error)
        return None
