"""The roles of the console: which group stands for each, what it sees, what it is to both APIs; and why not.

Where Keystone vouches, `cyborgweb.auth.login` puts people into the group that their roles give at every login;
elsewhere an
administrator does it by hand. Whether an act is allowed is asked of the same rules as in the APIs
(`cyborgweb.auth.policy`),
so that a person can do as much in the console as with a token. Named by the settings as `CONSOLE_WHY_NOT`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from django.contrib.auth.models import Group, Permission
from django.http import HttpRequest

from accelerators.domain.caller import ADMIN, Caller
from cyborgweb.auth import policy, read_only
from cyborgweb.auth.policy_rules import AUDITOR, OPERATOR
from cyborgweb.settings.keys import keys

ROOMS = ("accelerators", "agents", "placement_sync")
ACCESS = ("user", "group", "apitoken", "maintenance")
OWN = ("acceleratorrequest", "deviceprofile")
TENANT = "project:"
"""Begins the name of a group whose members see what one project has; its id follows."""
READER = frozenset({"reader"})
LOCAL_PROJECT = "local"
SESSION = "keystone"
"""Where a session keeps what Keystone said of its person."""


@dataclass(frozen=True)
class Role:
    """`words` are what its group's members are to the APIs where there is no Keystone, in Keystone's own words."""

    group: str
    words: frozenset[str]


ADMINISTRATORS = Role("role:administrator", frozenset({ADMIN, "manager", "member", "reader"}))
OPERATORS = Role("role:operator", frozenset({OPERATOR, "member", "reader"}))
AUDITORS = Role("role:auditor", frozenset({AUDITOR, "reader"}))
VIEWERS = Role("role:viewer", frozenset({"manager", "member", "reader"}))
ROLES = (ADMINISTRATORS, OPERATORS, AUDITORS, VIEWERS)
"""Who has several, has all that they give. The names begin so that no group of somebody's own means one by chance."""
_BY_GROUP = {role.group: role for role in ROLES}


def group(name: str) -> Group:
    """The group of this name with the permissions to look that belong to it; made where there is none."""
    found, _ = Group.objects.get_or_create(name=name)
    give(found)
    return found


def give(found: Group) -> None:
    """What belongs to a group of ours; others, which people made by other names, are left as they are."""
    name, seen = found.name, Permission.objects.filter(codename__startswith="view_")
    if name.startswith(TENANT):
        found.permissions.set(seen.filter(codename__in=[f"view_{model}" for model in OWN]))
    elif name == ADMINISTRATORS.group:
        found.permissions.set(Permission.objects.all())
    elif name in _BY_GROUP:
        wanted = seen.filter(content_type__app_label__in=ROOMS)
        if name == AUDITORS.group:
            wanted |= seen.filter(content_type__model__in=ACCESS)
        found.permissions.set(wanted)


def of_keystone(roles: Iterable[str], project: str, viewers: Iterable[str], tenants: Iterable[str]) -> str:
    """The group for who has these roles in this project; '' for who has no business in the console."""
    has = set(roles)
    if ADMIN in has:
        return ADMINISTRATORS.group
    if OPERATOR in has:
        return OPERATORS.group
    if AUDITOR in has:
        return AUDITORS.group
    if has & set(viewers):
        return VIEWERS.group
    return f"{TENANT}{project}" if has & set(tenants) and project else ""


def names(user: Any) -> list[str]:
    """The groups somebody is in; asked once for each request's user."""
    if not hasattr(user, "group_names"):
        user.group_names = list(user.groups.order_by("name").values_list("name", flat=True))
    return list(user.group_names)


def project_of(user: Any) -> str:
    """The one project that somebody sees; '' for who sees them all."""
    if user.is_superuser:
        return ""
    groups = names(user)
    if any(name in _BY_GROUP for name in groups):
        return ""
    return next((name.removeprefix(TENANT) for name in groups if name.startswith(TENANT) and name != TENANT), "")


def words_of(user: Any) -> frozenset[str]:
    """What somebody is to the APIs where there is no Keystone."""
    if user.is_superuser:
        return ADMINISTRATORS.words
    return READER.union(*(_BY_GROUP[name].words for name in names(user) if name in _BY_GROUP))


def session_caller(user: Any, session: Any) -> Caller | None:
    """Who a logged-in person is to the APIs; None for who may not enter the console."""
    if not user.is_staff:
        return None
    if keys().auth != "keystone":
        project = project_of(user) or LOCAL_PROJECT
        return Caller(user.get_username(), str(user.pk), words_of(user), project)
    facts = session.get(SESSION)
    return Caller(facts["name"], facts["id"], frozenset(facts["roles"]), facts["project"]) if facts else None


def caller_of(request: HttpRequest) -> Caller | None:
    """The same of who sent this request."""
    return session_caller(request.user, getattr(request, "session", {}))


def why_not(request: HttpRequest, rule: str, permission: str) -> str:
    """Why this person may not do what `rule` is about, and what would help; '' where they may.

    Django's `permission`, given to one person or to a group of one's own making, does as well.
    """
    if now := read_only.current():
        return read_only.sentence(now)
    user: Any = request.user
    caller = caller_of(request)
    if user.has_perm(permission) or (caller and policy.allows(caller, rule)):
        return ""
    if caller is None:
        return "Your session does not say who you are any more: log out and in again."
    would_do = policy.least(caller, rule)
    if not would_do:
        return f"Nobody may: the policy file has a rule {rule} of its own."
    helps = next((role.group for role in reversed(ROLES) if would_do in role.words), "")
    into = f", or a place in the group {helps}" if helps else ""
    has = ", ".join(sorted(caller.roles)) or "none"
    return f"It takes the role {would_do}{into}; yours: {has}. Who administers this console can give it to you."
