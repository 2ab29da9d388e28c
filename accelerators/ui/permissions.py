"""Check whether a console user may do something, by the same policy rules as in the APIs, and explain refusals.

Every action of the console names the rights that it needs (`Right`); there is no default. `docs/rights.md` lists all
actions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest

from accelerators.ui.extensions import DENIAL_REASON


@dataclass(frozen=True)
class Right:
    """A right that an action of the console needs: a policy rule, or a Django permission that is sufficient in its
    place.

    `rule` is '' where only the permission counts, and `permission` is '' where only the rule counts.
    """

    rule: str
    permission: str


VIEW_DEVICES = Right("", "accelerators.view_device")
UPDATE_DEVICE = Right("cyborg:device:update", "accelerators.change_device")
CREATE_COMMAND = Right("cyborg:command:create", "accelerators.add_command")
RESCAN = Right("cyborg:service:discover", "accelerators.change_host")
ADD_UNITS = Right("cyborg:accelerator:create", "accelerators.add_attachhandle")
REMOVE_UNITS = Right("cyborg:accelerator:delete", "accelerators.delete_attachhandle")
START_ROLLOUT = Right("cyborg:driver:rollout", "accelerators.add_rollout")
CANCEL_ROLLOUT = Right("cyborg:driver:rollout", "accelerators.change_rollout")
ATTACH = (
    Right("cyborg:attachment:create", "accelerators.add_attachment"),
    Right("cyborg:attachment:elevated", "accelerators.add_attachment"),
)
"""Both rights, because the console attaches for all projects and does not check which project owns an instance."""
DETACH = (
    Right("cyborg:attachment:delete", "accelerators.delete_attachment"),
    Right("cyborg:attachment:elevated", "accelerators.delete_attachment"),
)
"""Both rights, because the console shows the attachments of all projects."""
LABEL = (
    Right("cyborg:accelerator:update", "accelerators.change_acceleratorrequest"),
    Right("cyborg:accelerator:update_elevated", "accelerators.change_acceleratorrequest"),
)
"""Both rights, because the console labels the accelerators of all projects."""
REMOVE_HOST = Right("cyborg:host:delete", "accelerators.delete_host")
CREATE_PROFILE = Right("cyborg:device_profile:create", "accelerators.add_deviceprofile")
DELETE_PROFILE = Right("cyborg:device_profile:delete", "accelerators.delete_deviceprofile")
CREATE_RULE = Right("cyborg:rule:create", "accelerators.add_admissionrule")
UPDATE_RULE = Right("cyborg:rule:update", "accelerators.change_admissionrule")
DELETE_RULE = Right("cyborg:rule:delete", "accelerators.delete_admissionrule")
APPLY_RULES = (UPDATE_RULE, UPDATE_DEVICE)
"""Both rights, because applying the rules changes the state of devices."""


def explain_denial(request: HttpRequest, right: Right, *more_rights: Right) -> str:
    """Return why the user lacks one of these rights, and what would help; '' if the user has all of them.

    While everything is read only, nobody has any.
    """
    denials = (DENIAL_REASON.only()(request, one.rule, one.permission) for one in (right, *more_rights))
    return next((denial for denial in denials if denial), "")


def is_allowed(request: HttpRequest, right: Right, *more_rights: Right) -> bool:
    """Return whether the user has all of these rights, as `explain_denial` decides; False while all is read only."""
    return not explain_denial(request, right, *more_rights)


def require_permission(request: HttpRequest, right: Right, *more_rights: Right) -> None:
    """Raise PermissionDenied, with the sentence of `explain_denial`, if the user lacks one of these rights."""
    if denial := explain_denial(request, right, *more_rights):
        raise PermissionDenied(denial)


def build_permission_context(request: HttpRequest, right: Right, *more_rights: Right) -> dict[str, Any]:
    """Return the template context of a page with buttons that need all of these rights: `may_change`, and
    `read_only_reason`, which says why the user may not change anything."""
    denial = explain_denial(request, right, *more_rights)
    return {"may_change": not denial, "read_only_reason": denial}
