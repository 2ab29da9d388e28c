"""The session with the cloud, where there is one to talk to. Called by the jobs of this room."""

from __future__ import annotations

import logging
from typing import Any

from django.conf import settings
from django.utils.module_loading import import_string

from drivers.configuration import ConfigurationError

log = logging.getLogger(__name__)


def session(endpoint: str) -> Any | None:
    """The service user's; None where this side is `off` or no cloud is configured: then there is nobody to tell."""
    if endpoint == "off":
        return None
    try:
        return import_string(settings.SERVICE_SESSION)()
    except ConfigurationError as error:
        log.debug("OpenStack is told nothing: %s", error)
        return None
