"""Check whether a console user may do something, by the same policy rules as in the APIs, and explain refusals.

The function that knows users and rules is named by the setting CONSOLE_WHY_NOT.
"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from django.utils.module_loading import import_string

DECIDE = "cyborg:device:update"
ORDER = "cyborg:command:create"
RESCAN = "cyborg:service:discover"
UNITS = "cyborg:accelerator:create"
ROLLOUT = "cyborg:driver:rollout"
ATTACH = DETACH = "cyborg:attachment:elevated"
"""The elevated rule, because the console shows the attachments of all projects and does not check which project owns an
instance."""
RULES = "cyborg:rule:update"
AGENTS = "cyborg:agent:update"


def why_not(request: HttpRequest, rule: str = DECIDE, permission: str = "accelerators.change_device") -> str:
    """Return why the user may not do what `rule` is about, and what would help; '' if they may.

    Django's `permission` is sufficient, too.
    """
    return str(import_string(settings.CONSOLE_WHY_NOT)(request, rule, permission))


def may(request: HttpRequest, rule: str = DECIDE, permission: str = "accelerators.change_device") -> bool:
    """Return whether the user may do what `rule` is about."""
    return not why_not(request, rule, permission)


def require(request: HttpRequest, rule: str = DECIDE, permission: str = "accelerators.change_device") -> None:
    """Raise PermissionDenied with the sentence of `why_not` if the user may not do what `rule` is about."""
    if why := why_not(request, rule, permission):
        raise PermissionDenied(why)


def page(request: HttpRequest, rule: str = DECIDE, permission: str = "accelerators.change_device") -> dict[str, Any]:
    """Return the template context of a page with buttons: `may`, and in `why_not` the reason if the user may not."""
    why = why_not(request, rule, permission)
    return {"may": not why, "why_not": why}
