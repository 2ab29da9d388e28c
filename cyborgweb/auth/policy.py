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
"""Seconds between two checks of the policy file. The manual promises that an edit takes effect within one second; the
rest of the second is for reading the file."""
MAX_DECISIONS = 20_000
"""Cached decisions; when the cache is full, it is emptied."""
MAX_FILE_BYTES = 1_048_576
LIKE_A_GET = ("HEAD", "OPTIONS")
READS = ("GET", *LIKE_A_GET)
RANKS = ("reader", "member", "manager", "admin")
ROLES = {role: frozenset(RANKS[: n + 1]) for n, role in enumerate(RANKS)}
ROLES[OPERATOR] = frozenset({OPERATOR, *RANKS[:2]})
ROLES[AUDITOR] = frozenset({AUDITOR, *RANKS[:1]})
"""Each usual role with the roles that it implies in Keystone. The operator's role implies member, the auditor's implies
reader."""


class PolicyDeniedError(PermissionDenied):
    """403 with upstream's sentence. `remedy` is our own additional sentence: which role would be sufficient."""

    def __init__(self, rule: str | None, remedy: str = "") -> None:
        super().__init__(f"Access was denied to the following resource: {rule}")
        self.remedy = remedy


class RulePermission(BasePermission):
    """Lets a request through if the rule that the view names for its method allows the caller.

    A view without a rule for the method is closed to everybody. HEAD and OPTIONS use the rule of GET.
    """

    def has_permission(self, request: Request, view: Any) -> bool:
        """Return True, or raise PolicyDeniedError (403).

        Raises ReadOnlyError (503) for a permitted write while everything is read only; a view with `only_reads` is
        exempt.
        """
        rules = getattr(view, "policy_rules", {})
        rule = rules.get(request.method) or (rules.get("GET") if request.method in LIKE_A_GET else None)
        if rule and allows(request.user, rule):
            if request.method not in READS and not getattr(view, "only_reads", False):
                read_only.refuse()
            return True
        raise PolicyDeniedError(rule, remedy(request.user, rule) if rule else "")


def allows(caller: Caller, rule: str) -> bool:
    """Return whether the rule allows the caller. Raises KeyError for an unknown rule, which is a programming error.

    A cached decision costs nothing; twice a second at most, a call also checks the policy file.
    """
    return _policy().allows(caller, rule)


def remedy(caller: Caller, rule: str) -> str:
    """Return one sentence that tells a denied caller what would help, according to the rules in force."""
    if not caller.project_id or caller.system_scope or caller.domain_id:
        return "Use a project-scoped token."
    if role := least(caller, rule):
        return f"The role {role} would be sufficient."
    return "None of the usual roles is sufficient; the policy file says who may do this."


def least(caller: Caller, rule: str) -> str:
    """Return the first of the usual roles with which the rule would allow this caller; '' if there is none."""
    usual = (*RANKS[:3], OPERATOR, "admin")
    return next((role for role in usual if allows(replace(caller, roles=ROLES[role]), rule)), "")


@lru_cache(maxsize=1)
def _policy() -> Policy:
    return Policy(keys().policies, keys().enforce_new_defaults)


class PolicyFileError(ValueError):
    """The policy file cannot be used; the message says what is wrong with it, on one line."""


@dataclass(frozen=True)
class InForce:
    """One loaded set of rules, and the cached decisions made with it. Without an `enforcer` nobody may do anything."""

    enforcer: Any = None
    decisions: dict[tuple[str, frozenset[str], str, str], bool] = field(default_factory=dict)


class Policy:
    """The rules in force: the defaults and the overrides in the policy file. Thread-safe.

    The file is checked twice a second at most, and read again when it has changed. If it is broken, this is logged once
    and the last good rules stay in force. If there are none yet, everybody is refused until the file is repaired,
    because its author may have wanted to forbid something.
    """

    def __init__(self, path: Path, new_defaults: bool, steady: Callable[[], float] = time.monotonic) -> None:
        self._path, self._new_defaults, self._steady = path, new_defaults, steady
        self._reading = threading.Lock()
        self._look_at = float("-inf")
        self._seen: object = ...
        self._in_force = InForce()

    def allows(self, caller: Caller, rule: str) -> bool:
        """See the module's `is_allowed`. A token without a project, or with domain or system scope, is always refused,
        whatever the policy file says (CVE-2026-40213, CVE-2026-40214)."""
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
            log.warning(
                "The policy file %s is missing; its rules stay in force until it is back or this process ends",
                self._path,
            )
            return
        try:
            written = _parse(self._path) if there else {}
            self._in_force = InForce(_enforcer(written, self._new_defaults))
        except PolicyFileError as error:
            instead = "the last good rules stay in force" if in_force else "nobody may do anything until it is repaired"
            log.error("The policy file %s cannot be used (%s); %s", self._path, error, instead)
            return
        if there:
            log.info("The policy file %s is in force; number of rules in it: %d", self._path, len(written))
            if strange := sorted(n for n in written if n.startswith("cyborg:") and n not in _NAMES):
                log.warning(
                    "The policy file %s names rules that do not exist: %s", self._path, ", ".join(strange)[:500]
                )


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
    # As upstream does: the target is the caller's own project, never the stored object. Ownership is checked elsewhere.
    return bool(enforcer.authorize(rule, who, who | {"roles": list(caller.roles), "is_admin": caller.is_admin}))


def _parse(path: Path) -> dict[str, str]:
    """Return the operator's overrides, rule → check. Raises PolicyFileError if the file cannot be used."""
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
        raise PolicyFileError("it does not consist of rules, each `name: check`")
    for name, check in written.items():
        if not isinstance(name, str) or not isinstance(check, str):
            raise PolicyFileError(f"the rule {str(name)[:100]!r} is not text")
        # oslo.policy replaces a check that it does not understand by "!", which allows nobody.
        if "!" in str(oslo.Rules.from_dict({name: check})[name]) and "!" not in check:
            raise PolicyFileError(f"the check of {name[:100]!r} cannot be understood")
    return written


def _enforcer(written: Mapping[str, str], new_defaults: bool) -> Any:
    """Return an Enforcer with the default rules and the `overrides`; it never reads files itself.

    Raises PolicyFileError if a rule refers to itself or to an unknown rule.
    """
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

    # oslo.policy would log long tracebacks; `Policy` logs one line instead.
    logging.getLogger("oslo_policy").setLevel(logging.CRITICAL + 1)
    return policy
