"""Decide which caller may do what, with oslo.policy, the rules of `cyborgweb.auth.policy_rules` and `policy.yaml`.

A view names its rules in `policy_rules` (method → rule) and needs to know nothing else about identity; other code calls
`is_allowed`. Decisions are cached. Importing oslo.policy takes 0.1 s, so it is imported at the first decision.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from rest_framework.exceptions import PermissionDenied
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from accelerators.domain.caller import Caller
from cyborgweb.auth import read_only
from cyborgweb.auth.policy_rules import AUDITOR, OPERATOR, RULES, SESSION_RULES, PolicyRule
from cyborgweb.errors import CyborgwebError
from cyborgweb.settings.keys import get_keys

log = logging.getLogger(__name__)

FILE_CHECK_INTERVAL_S = 0.5
"""Seconds between two checks of the policy file. The manual promises that an edit takes effect within one second; the
rest of the second is for reading the file."""
MAX_DECISIONS = 20_000
"""Cached decisions; when the cache is full, it is emptied."""
MAX_FILE_BYTES = 1_048_576
GET_LIKE_METHODS = ("HEAD", "OPTIONS")
READ_METHODS = ("GET", *GET_LIKE_METHODS)
RANKED_ROLES = ("reader", "member", "manager", "admin")
IMPLIED_ROLES = {role: frozenset(RANKED_ROLES[: n + 1]) for n, role in enumerate(RANKED_ROLES)}
IMPLIED_ROLES[OPERATOR] = frozenset({OPERATOR, *RANKED_ROLES[:2]})
IMPLIED_ROLES[AUDITOR] = frozenset({AUDITOR, *RANKED_ROLES[:1]})
"""Each usual role with the roles that it implies in Keystone. The operator's role implies member, the auditor's implies
reader."""


def list_roles_with_implied(role: str) -> list[str]:
    """Return the role and then those that it implies, the one with the most rights first; `service` implies none."""
    implied = [one for one in RANKED_ROLES if one in IMPLIED_ROLES.get(role, ()) and one != role]
    return [role, *reversed(implied)]


class PolicyDeniedError(CyborgwebError, PermissionDenied):
    """403 with upstream's sentence, which names the rule. `explanation` adds our own sentence: what would help."""

    def __init__(self, rule: str | None, remedy: str) -> None:
        super().__init__(f"Access was denied to the following resource: {rule}")
        self.explanation = f"{self.detail}. {remedy}" if remedy else str(self.detail)


class RulePermission(BasePermission):
    """Lets a request through if the rule that the view names for its method allows the caller.

    A view without a rule for the method is closed. HEAD and OPTIONS use the rule of GET. A person who runs `manage.py`
    may do everything, also while everything is read only, because they could change the database directly.
    """

    def has_permission(self, request: Request, view: Any) -> bool:
        """Return True if the rule for the request's method allows the caller, or if the caller runs `manage.py`;
        otherwise raise PolicyDeniedError (403).

        Also raises ReadOnlyError (503) for a permitted write while everything is read only, except for views with
        `only_reads`; KeyError if the view names an unknown rule.
        """
        if _get_caller(request).is_local:
            return True
        rules = getattr(view, "policy_rules", {})
        rule = rules.get(request.method) or (rules.get("GET") if request.method in GET_LIKE_METHODS else None)
        if rule and is_allowed(_get_caller(request), rule):
            if request.method not in READ_METHODS and not getattr(view, "only_reads", False):
                read_only.refuse_if_read_only()
            return True
        raise PolicyDeniedError(rule, describe_remedy(_get_caller(request), rule) if rule else "")


def _get_caller(request: Request) -> Caller:
    """Return the request's user, which `CallerAuthentication` has set to a Caller."""
    return cast(Caller, request.user)


def is_allowed(caller: Caller, rule: str) -> bool:
    """Return whether the rule allows the caller; always False without a project, or with domain or system scope.

    Raises KeyError for an unknown rule, which is a programming error. A cached decision costs nothing; twice a second
    at most, a call also checks the policy file.
    """
    return _get_policy().allows(caller, rule)


def has_rules() -> bool:
    """Return whether rules are in force. If not, because the policy file was never usable, every decision is False and
    says nothing about the rights of anybody.
    """
    return _get_policy().has_rules()


def describe_remedy(caller: Caller, rule: str) -> str:
    """Return one sentence that tells a denied caller what would help, according to the rules in force."""
    if not caller.project_id or caller.system_scope or caller.domain_id:
        return "Use a project-scoped token."
    if role := find_sufficient_role(caller, rule):
        return f"The role {role} would be sufficient."
    return "None of the usual roles is sufficient; the policy file says who may do this."


def find_sufficient_role(caller: Caller, rule: str) -> str:
    """Return the first of reader, member, auditor, manager, operator and admin with which the rule would allow this
    caller, who keeps the present roles. The auditor comes before the manager, who may also write.

    Returns '' if none of these roles is sufficient. Raises KeyError for an unknown rule.
    """
    usual_roles = ("reader", "member", AUDITOR, "manager", OPERATOR, "admin")
    with_role = {role: replace(caller, roles=caller.roles | IMPLIED_ROLES[role]) for role in usual_roles}
    return next((role for role in usual_roles if is_allowed(with_role[role], rule)), "")


@lru_cache(maxsize=1)
def _get_policy() -> Policy:
    """Return this process's Policy. It reads the policy file at its first decision."""
    return Policy(get_keys().policy_path, get_keys().enforce_new_defaults)


class PolicyFileError(CyborgwebError):
    """The policy file cannot be used; the message says what is wrong with it, on one line."""


@dataclass(frozen=True)
class LoadedRules:
    """A loaded set of policy rules, and the decisions made with it. Without `enforcer` nobody may do anything."""

    enforcer: Any = None
    decisions: dict[tuple[str, frozenset[str], str, str], bool] = field(default_factory=dict)


class Policy:
    """The policy rules in force: the defaults and the overrides in the policy file. Thread-safe.

    The file is checked twice a second at most, and read again when it has changed. If it is broken, this is logged once
    and the last good rules stay in force. If there are none yet, everybody is refused until the file is repaired,
    because its author may have wanted to forbid something.
    """

    def __init__(self, path: Path, new_defaults: bool, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._path, self._new_defaults, self._monotonic = path, new_defaults, monotonic
        self._reload_lock = threading.Lock()
        self._next_check_at = float("-inf")
        self._loaded_signature: object = ...
        self._loaded = LoadedRules()

    def allows(self, caller: Caller, rule: str) -> bool:
        """Return whether the rule allows the caller, from the cache if possible. Raises KeyError for an unknown rule.

        A token without a project, or with domain or system scope, is always refused, whatever the policy file says
        (CVE-2026-40213, CVE-2026-40214). A caller with a session of the console must satisfy the rule's `session_rule`
        as well. The policy file is checked first if the last check is long enough ago.
        """
        if not caller.project_id or caller.system_scope or caller.domain_id:
            return False
        if self._monotonic() >= self._next_check_at:
            self._check_file()
        if not self._is_rule_satisfied(caller, rule):
            return False
        session_rule = SESSION_RULES.get(rule) if caller.has_session else None
        return session_rule is None or self._is_rule_satisfied(caller, session_rule)

    def _is_rule_satisfied(self, caller: Caller, rule: str) -> bool:
        """Return whether the caller satisfies this one rule, from the cache if possible; KeyError if it is unknown."""
        loaded = self._loaded
        key = rule, caller.roles, caller.project_id, caller.user_id
        if (cached_decision := loaded.decisions.get(key)) is not None:
            return cached_decision
        if len(loaded.decisions) >= MAX_DECISIONS:
            loaded.decisions.clear()
        allowed = loaded.decisions[key] = _evaluate_rule(loaded.enforcer, caller, rule)
        return allowed

    def has_rules(self) -> bool:
        """Return whether rules are in force, after a check of the policy file."""
        if self._monotonic() >= self._next_check_at:
            self._check_file()
        return self._loaded.enforcer is not None

    def _check_file(self) -> None:
        """Reload the policy rules if the policy file has changed. Do nothing if the file was checked less than
        `FILE_CHECK_INTERVAL_S` seconds ago.
        """
        with self._reload_lock:
            if self._monotonic() < self._next_check_at:
                return
            signature = _file_signature(self._path)
            if signature != self._loaded_signature:
                self._reload(file_exists=signature is not None)
                self._loaded_signature = signature
            self._next_check_at = self._monotonic() + FILE_CHECK_INTERVAL_S

    def _reload(self, file_exists: bool) -> None:
        """Put the default rules and the policy file's overrides in force, with an empty cache of decisions.

        If the file is unusable, or is gone after rules were loaded, log this and keep the rules that are in force. If
        none are in force yet, nobody may do anything until the file is repaired.
        """
        has_rules = self._loaded.enforcer is not None
        if has_rules and not file_exists:
            log.warning(
                "The policy file %s is missing; its rules stay in force until it is back or this process ends",
                self._path,
            )
            return
        try:
            overrides = _parse_file(self._path) if file_exists else {}
            self._loaded = LoadedRules(_build_enforcer(overrides, self._new_defaults))
        except PolicyFileError as error:
            consequence = (
                "the last good rules stay in force" if has_rules else "nobody may do anything until it is repaired"
            )
            log.error("The policy file %s cannot be used (%s); %s", self._path, error, consequence)
            return
        if file_exists:
            log.info("The policy file %s is in force; number of rules in it: %d", self._path, len(overrides))
            if unknown_names := sorted(n for n in overrides if n.startswith("cyborg:") and n not in _RULE_NAMES):
                log.warning(
                    "The policy file %s names rules that do not exist: %s", self._path, ", ".join(unknown_names)[:500]
                )


_RULE_NAMES = frozenset(rule.name for rule in RULES)


def _file_signature(path: Path) -> tuple[int, int, int] | None:
    """Return the file's time of change, size and inode, which show whether it has changed; None if it does not exist or
    its folder cannot be entered.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _evaluate_rule(enforcer: Any, caller: Caller, rule: str) -> bool:
    """Return whether the rule allows the caller; False without an enforcer. Raises KeyError for an unknown rule.

    As upstream does, the target is the caller's own project and user, never the stored object. Ownership is checked
    elsewhere.
    """
    if rule not in _RULE_NAMES:
        raise KeyError(rule)
    if enforcer is None:
        return False
    target: dict[str, Any] = {"project_id": caller.project_id, "user_id": caller.user_id}
    return bool(enforcer.authorize(rule, target, target | {"roles": list(caller.roles), "is_admin": caller.is_admin}))


def _parse_file(path: Path) -> dict[str, str]:
    """Return the operator's overrides in a policy file: rule → check.

    Raises PolicyFileError if the file cannot be read, is too large, is not YAML with texts, or has a check that
    oslo.policy does not understand.
    """
    oslo = _import_oslo_policy()
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise PolicyFileError(f"it cannot be read: {error.strerror}") from None
    if len(text) > MAX_FILE_BYTES:
        raise PolicyFileError(f"it is larger than {MAX_FILE_BYTES} bytes")
    try:
        overrides = oslo.parse_file_contents(text)
    except ValueError as error:
        raise PolicyFileError(f"it is not YAML: {' '.join(str(error).split())[:300]}") from None
    if not isinstance(overrides, dict):
        raise PolicyFileError("it does not consist of rules, each `name: check`")
    for name, check in overrides.items():
        if not isinstance(name, str) or not isinstance(check, str):
            raise PolicyFileError(f"the rule {str(name)[:100]!r} is not text")
        # oslo.policy replaces a check that it does not understand by "!", which allows nobody.
        if "!" in str(oslo.Rules.from_dict({name: check})[name]) and "!" not in check:
            raise PolicyFileError(f"the check of {name[:100]!r} cannot be understood")
    return overrides


def _build_enforcer(overrides: Mapping[str, str], new_defaults: bool) -> Any:
    """Return an Enforcer of oslo.policy with the default rules and the `overrides`; it never reads files itself.

    Raises PolicyFileError if a rule refers to itself or to an unknown rule.
    """
    from oslo_config import cfg

    oslo = _import_oslo_policy()
    checks = {rule.name: _effective_check(rule, new_defaults) for rule in RULES} | dict(overrides)
    enforcer = oslo.Enforcer(cfg.ConfigOpts(), rules=oslo.Rules.from_dict(checks), use_conf=False)
    enforcer.register_defaults([_build_documented_default(oslo, rule) for rule in RULES if rule.operations])
    try:
        enforcer.check_rules(raise_on_violation=True)
    except oslo.InvalidDefinitionError:
        raise PolicyFileError("a rule refers to itself, or to one that does not exist") from None
    return enforcer


def _effective_check(rule: PolicyRule, new_defaults: bool) -> str:
    """Return the rule's check. Unless `new_defaults` is set, the rule's legacy check, if any, is added to it
    with `or`.
    """
    return rule.check if new_defaults or not rule.legacy else f"({rule.check}) or ({rule.legacy})"


def _build_documented_default(oslo: Any, rule: PolicyRule) -> Any:
    """Return the rule as oslo.policy's DocumentedRuleDefault, for `enforcer.register_defaults`."""
    operations = [dict(zip(("method", "path"), o.split(" ", 1), strict=True)) for o in rule.operations]
    return oslo.DocumentedRuleDefault(rule.name, rule.check, rule.description, operations, scope_types=["project"])


def _import_oslo_policy() -> Any:
    """Import `oslo_policy.policy`, silence its log, and return the module."""
    from oslo_policy import policy

    # oslo.policy would log long tracebacks; `Policy` logs one line instead.
    logging.getLogger("oslo_policy").setLevel(logging.CRITICAL + 1)
    return policy
