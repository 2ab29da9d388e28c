"""Return the service user's session with the cloud, if one is configured."""

from __future__ import annotations

import logging
from typing import Any

from django.conf import settings
from django.utils.module_loading import import_string

from drivers.configuration import ConfigurationError

log = logging.getLogger(__name__)


def get_cloud_session(endpoint: str) -> Any | None:
    """Return the service user's session, or None if `endpoint` is `off` or no cloud is configured."""
    if endpoint == "off":
        return None
    try:
        return import_string(settings.SERVICE_SESSION)()
    except ConfigurationError as error:
        log.debug("Nothing is sent to OpenStack: %s", error)
        return None
