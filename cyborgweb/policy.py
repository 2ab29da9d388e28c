"""Who may do what: upstream's rule names (contract section 3.1) and the roles that satisfy them.

A view names its rule in `policy_rules` (method → rule) and knows nothing else of identity.
"""

from __future__ import annotations

from typing import Any

from rest_framework.exceptions import PermissionDenied
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

ANYONE_IN_A_PROJECT = "anyone in a project"
RULES: dict[str, str] = {
    "cyborg:device:get_all": ANYONE_IN_A_PROJECT,
    "cyborg:device:get_one": ANYONE_IN_A_PROJECT,
    "cyborg:deployable:get_all": ANYONE_IN_A_PROJECT,
    "cyborg:deployable:get_one": ANYONE_IN_A_PROJECT,
}
"""Upstream's defaults with `enforce_new_defaults` off, as it ships (contract section 3.1)."""


class RulePermission(BasePermission):
    """403 with upstream's sentence, naming the rule."""

    def has_permission(self, request: Request, view: Any) -> bool:
        """Check the view's rule for this method; a view without a rule is open to nobody."""
        rule = getattr(view, "policy_rules", {}).get(request.method)
        if rule and RULES.get(rule) == ANYONE_IN_A_PROJECT and request.user.project_id:
            return True
        raise PermissionDenied(f"Access was denied to the following resource: {rule}")
