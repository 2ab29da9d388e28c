"""Who may do what: oslo.policy over `cyborgweb.auth.policy_rules` and the operator's `policy.yaml`, every decision
remembered.

A view names its rule in `policy_rules` (method → rule) and knows nothing else of identity. Code that needs a yes or no
asks `allows`. oslo.policy costs a tenth of a second to import, so that waits for the first question.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from rest_framework.exceptions import PermissionDenied
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from accelerators.domain.caller import Caller
from cyborgweb.auth import read_only
from cyborgweb.auth.policy_rules import AUDITOR, OPERATOR, RULES, Rule
from cyborgweb.settings.keys import keys

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
"""An edit counts within a second, as the manual says: half of it is left for reading the file."""
MAX_DECISIONS = 20_000
MAX_FILE_BYTES = 1_048_576
LIKE_A_GET = ("HEAD", "OPTIONS")
READS = ("GET", *LIKE_A_GET)
RANKS = ("reader", "member", "manager", "admin")
ROLES = {role: frozenset(RANKS[: n + 1]) for n, role in enumerate(RANKS)}
ROLES[OPERATOR] = frozenset({OPERATOR, *RANKS[:2]})
ROLES[AUDITOR] = frozenset({AUDITOR, *RANKS[:1]})
"""The usual roles, each with those that it brings along in Keystone; the operator's, who is a member, too; and the
auditor's, who reads."""


class PolicyDeniedError(PermissionDenied):
    """Upstream's sentence. `remedy` is one of ours, for who reads more: which role would do."""

    def __init__(self, rule: str | None, remedy: str = "") -> None:
        super().__init__(f"Access was denied to the following resource: {rule}")
        self.remedy = remedy


class RulePermission(BasePermission):
    """403 with upstream's sentence, naming the rule. A view without a rule for the method is open to nobody."""

    def has_permission(self, request: Request, view: Any) -> bool:
        """True, or PermissionDenied."""
        rules = getattr(view, "policy_rules", {})
        rule = rules.get(request.method) or (rules.get("GET") if request.method in LIKE_A_GET else None)
        if rule and allows(request.user, rule):
            if request.method not in READS and not getattr(view, "only_reads", False):
                read_only.refuse()
            return True
        raise PolicyDeniedError(rule, remedy(request.user, rule) if rule else "")


def allows(caller: Caller, rule: str) -> bool:
    """Whether the rule lets the caller do it. An unknown rule is a fault of ours: KeyError."""
    return _policy().allows(caller, rule)


def remedy(caller: Caller, rule: str) -> str:
    """What a caller who was denied needs, as the rules in force have it: one sentence."""
    if not caller.project_id or caller.system_scope or caller.domain_id:
        return "Ask with a token of a project."
    if role := least(caller, rule):
        return f"The role {role} would do."
    return "None of the usual roles would do; the policy file says who may."


def least(caller: Caller, rule: str) -> str:
    """The first of the usual roles that would do, '' where none would."""
    usual = (*RANKS[:3], OPERATOR, "admin")
    return next((role for role in usual if allows(replace(caller, roles=ROLES[role]), rule)), "")


@lru_cache(maxsize=1)
def _policy() -> Policy:
    return Policy(keys().policies, keys().enforce_new_defaults)


class PolicyFileError(ValueError):
    """The policy file cannot be used; the message says what is wrong with it, on one line."""


@dataclass(frozen=True)
class InForce:
    """One reading of the rules, and what they were found to say. Without an `enforcer` nobody may do anything."""

    enforcer: Any = None
    decisions: dict[tuple[str, frozenset[str], str, str], bool] = field(default_factory=dict)


class Policy:
    """The rules in force. Thread-safe.

    The file is looked at twice a second at most. A broken one leaves the last good reading in force and is logged once;
    if there is none yet, everybody is refused until the file is mended, as its author may have wanted to forbid things.
    """

    def __init__(self, path: Path, new_defaults: bool, steady: Callable[[], float] = time.monotonic) -> None:
        self._path, self._new_defaults, self._steady = path, new_defaults, steady
        self._reading = threading.Lock()
        self._look_at = float("-inf")
        self._seen: object = ...
        self._in_force = InForce()

    def allows(self, caller: Caller, rule: str) -> bool:
        """See the module's `allows`. Tokens without a project, of a domain or of the system get nothing, whatever the
        file says (CVE-2026-40213, CVE-2026-40214)."""
        if not caller.project_id or caller.system_scope or caller.domain_id:
            return False
        if self._steady() >= self._look_at:
            self._look()
        now = self._in_force
        key = rule, caller.roles, caller.project_id, caller.user_id
        if (known := now.decisions.get(key)) is not None:
            return known
        if len(now.decisions) >= MAX_DECISIONS:
            now.decisions.clear()
        allowed = now.decisions[key] = _decide(now.enforcer, caller, rule)
        return allowed

    def _look(self) -> None:
        with self._reading:
            if self._steady() < self._look_at:
                return
            seen = _signature(self._path)
            if seen != self._seen:
                self._read(there=seen is not None)
                self._seen = seen
            self._look_at = self._steady() + LOOK_EVERY_S

    def _read(self, there: bool) -> None:
        in_force = self._in_force.enforcer is not None
        if in_force and not there:
            log.warning("%s is gone; its rules stay in force until it is back or this process ends", self._path)
            return
        try:
            written = _parse(self._path) if there else {}
            self._in_force = InForce(_enforcer(written, self._new_defaults))
        except PolicyFileError as error:
            instead = "the last good rules stay in force" if in_force else "nobody may do anything until it is mended"
            log.error("%s is broken (%s); %s", self._path, error, instead)
            return
        if there:
            log.info("%s is in force, with %d rules of its own", self._path, len(written))
            if strange := sorted(n for n in written if n.startswith("cyborg:") and n not in _NAMES):
                log.warning("%s names rules that do not exist here: %s", self._path, ", ".join(strange)[:500])


_NAMES = frozenset(rule.name for rule in RULES)


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _decide(enforcer: Any, caller: Caller, rule: str) -> bool:
    if rule not in _NAMES:
        raise KeyError(rule)
    if enforcer is None:
        return False
    who: dict[str, Any] = {"project_id": caller.project_id, "user_id": caller.user_id}
    # As upstream's: the target is the caller's own project, never the stored object. Whose it is, is asked elsewhere.
    return bool(enforcer.authorize(rule, who, who | {"roles": list(caller.roles), "is_admin": caller.is_admin}))


def _parse(path: Path) -> dict[str, str]:
    """What the operator wrote: rule → check."""
    oslo = _oslo()
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise PolicyFileError(f"it cannot be read: {error.strerror}") from None
    if len(text) > MAX_FILE_BYTES:
        raise PolicyFileError(f"it is larger than {MAX_FILE_BYTES} bytes")
    try:
        written = oslo.parse_file_contents(text)
    except ValueError as error:
        raise PolicyFileError(f"it is not YAML: {' '.join(str(error).split())[:300]}") from None
    if not isinstance(written, dict):
        raise PolicyFileError("it is not a list of rules, each `name: check`")
    for name, check in written.items():
        if not isinstance(name, str) or not isinstance(check, str):
            raise PolicyFileError(f"the rule {str(name)[:100]!r} is not text")
        # oslo.policy reads what it does not understand as "!", nobody.
        if "!" in str(oslo.Rules.from_dict({name: check})[name]) and "!" not in check:
            raise PolicyFileError(f"the check of {name[:100]!r} cannot be understood")
    return written


def _enforcer(written: Mapping[str, str], new_defaults: bool) -> Any:
    """An Enforcer over the defaults and what was `written` instead of them; it never looks at files itself."""
    from oslo_config import cfg

    oslo = _oslo()
    checks = {rule.name: _default(rule, new_defaults) for rule in RULES} | dict(written)
    enforcer = oslo.Enforcer(cfg.ConfigOpts(), rules=oslo.Rules.from_dict(checks), use_conf=False)
    enforcer.register_defaults([_documented(oslo, rule) for rule in RULES if rule.operations])
    try:
        enforcer.check_rules(raise_on_violation=True)
    except oslo.InvalidDefinitionError:
        raise PolicyFileError("a rule refers to itself, or to one that does not exist") from None
    return enforcer


def _default(rule: Rule, new_defaults: bool) -> str:
    return rule.check if new_defaults or not rule.legacy else f"({rule.check}) or ({rule.legacy})"


def _documented(oslo: Any, rule: Rule) -> Any:
    operations = [dict(zip(("method", "path"), o.split(" ", 1), strict=True)) for o in rule.operations]
    return oslo.DocumentedRuleDefault(rule.name, rule.check, rule.description, operations, scope_types=["project"])


def _oslo() -> Any:
    from oslo_policy import policy

    # What it would say over a traceback's length, `Policy` says on one line.
    logging.getLogger("oslo_policy").setLevel(logging.CRITICAL + 1)
    return policy
