"""Preview a new or changed admission rule, and check that what a caller has confirmed is still what would happen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from accelerators.devices import admission_rules
from accelerators.devices.admission_rules import RuleReach
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusedError
from accelerators.models import AdmissionRule
from accelerators.workflows import confirmations
from accelerators.workflows.confirmations import PreviewToken

MAX_PREVIEW_HOSTS = 20
"""Number of hosts that the preview of a rule lists; its counts include all."""
NEW_RULE = UUID(int=0)
"""The subject of the token of a preview if the rule is not stored yet."""


@dataclass(frozen=True)
class RulePreview:
    """The inactive devices that a rule would move, and the values of the rule to which a token is bound."""

    reach: RuleReach
    action: str
    subject: UUID
    described: Mapping[str, Any]

    def issue_token(self, caller: Caller) -> PreviewToken:
        """Return the token with which this caller may confirm the rule."""
        return confirmations.issue_token(self.subject, caller, self.described)

    def refuse_unless_confirmed(self, token: str, caller: Caller) -> None:
        """Raise RefusedError STALE_PREVIEW for a token of another preview, or if other devices would be moved by
        now."""
        if confirmations.read_token(token, caller, self.described) != self.subject:
            raise confirmations.stale_preview_error()

    def is_confirmed(self, token: str, caller: Caller) -> bool:
        """Return whether this caller has confirmed exactly this preview with the token."""
        try:
            self.refuse_unless_confirmed(token, caller)
        except RefusedError:
            return False
        return True


def preview_rule(values: Mapping[str, Any], rule: AdmissionRule | None = None) -> RulePreview:
    """Return what a new rule with these values, or `rule` changed to them, would do. Two statements."""
    reach = admission_rules.forecast_rule(values, rule)
    described = {"kind": "rule", "values": dict(values), "reach": sorted(reach.by_host.items())}
    action = values.get("action", rule.action if rule else "")
    return RulePreview(reach, action, rule.uuid if rule else NEW_RULE, described)
