"""Whether the person at the console may do something, by the same rules as in the APIs; and if not, why.

Called by the pages of every room. Who knows people and rules is named by the settings (`CONSOLE_WHY_NOT`).
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
"""The console shows those of every project, and asks nobody whose an instance is."""
RULES = "cyborg:rule:update"
AGENTS = "cyborg:agent:update"


def why_not(request: HttpRequest, rule: str = DECIDE, permission: str = "accelerators.change_device") -> str:
    """Why they may not, and what would help; '' where they may. Django's `permission` does, too."""
    return str(import_string(settings.CONSOLE_WHY_NOT)(request, rule, permission))


def may(request: HttpRequest, rule: str = DECIDE, permission: str = "accelerators.change_device") -> bool:
    """Whether they may."""
    return not why_not(request, rule, permission)


def require(request: HttpRequest, rule: str = DECIDE, permission: str = "accelerators.change_device") -> None:
    """Raises PermissionDenied with the sentence."""
    if why := why_not(request, rule, permission):
        raise PermissionDenied(why)


def page(request: HttpRequest, rule: str = DECIDE, permission: str = "accelerators.change_device") -> dict[str, Any]:
    """What the template of a page with buttons asks: `may`, and `why_not` where it may not."""
    why = why_not(request, rule, permission)
    return {"may": not why, "why_not": why}
