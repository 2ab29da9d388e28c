"""Check whether a console user may do something, by the same policy rules as in the APIs, and explain refusals."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest

from accelerators.ui.extensions import DENIAL_REASON

UPDATE_DEVICE = "cyborg:device:update"
CREATE_COMMAND = "cyborg:command:create"
RESCAN = "cyborg:service:discover"
ADD_UNITS, REMOVE_UNITS = "cyborg:accelerator:create", "cyborg:accelerator:delete"
START_ROLLOUT = "cyborg:driver:rollout"
ATTACH = DETACH = "cyborg:attachment:elevated"
"""The elevated rule, because the console shows the attachments of all projects and does not check which project owns an
instance."""
UPDATE_RULES = "cyborg:rule:update"
UPDATE_AGENTS = "cyborg:agent:update"
CONFIRM_NOVA = "cyborg:nova_endpoint:update"


def explain_denial(
    request: HttpRequest, rule: str = UPDATE_DEVICE, permission: str = "accelerators.change_device"
) -> str:
    """Return why the user may not do what the policy rule `rule` covers, and what would help; '' if they may.

    The Django permission `permission` is sufficient, too. While everything is read only, nobody may.
    """
    return DENIAL_REASON.only()(request, rule, permission)


def is_allowed(request: HttpRequest, rule: str = UPDATE_DEVICE, permission: str = "accelerators.change_device") -> bool:
    """Return whether the user may do what `rule` covers, as `explain_denial` decides; False while all is read only."""
    return not explain_denial(request, rule, permission)


def require_permission(
    request: HttpRequest, rule: str = UPDATE_DEVICE, permission: str = "accelerators.change_device"
) -> None:
    """Raise PermissionDenied, with the sentence of `explain_denial`, if the user may not do what `rule` covers."""
    if denial := explain_denial(request, rule, permission):
        raise PermissionDenied(denial)


def build_permission_context(
    request: HttpRequest, rule: str = UPDATE_DEVICE, permission: str = "accelerators.change_device"
) -> dict[str, Any]:
    """Return the template context of a page with buttons: `may_change`, and `read_only_reason`, which says why the user
    may not change anything."""
    denial = explain_denial(request, rule, permission)
    return {"may_change": not denial, "read_only_reason": denial}
