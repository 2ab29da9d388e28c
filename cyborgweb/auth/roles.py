"""The roles of the console: the group of each role, what its members see, and which roles they have for both APIs.

With Keystone, `cyborgweb.auth.login` puts a person into the group of their roles at every login; without it, an
administrator does so by hand. The console checks an action with the same rules as the APIs (`cyborgweb.auth.policy`),
so that a person can do the same things in the console as with a token. The settings name `explain_refusal` as
`CONSOLE_WHY_NOT`, and `get_only_project` as `CONSOLE_PROJECT`.
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
"""Django applications whose models every role sees."""
ACCESS = ("user", "group", "apitoken", "maintenance")
"""Models that auditors see in addition."""
OWN = ("acceleratorrequest", "deviceprofile")
"""Models that the members of a project's group see."""
TENANT = "project:"
"""Prefix of the name of a project's group, followed by the project's id. Its members see what that project has."""
READER = frozenset({"reader"})
LOCAL_PROJECT = "local"
SESSION = "keystone"
"""Key of a session's data under which the person's name, id, project and roles from Keystone are stored."""


@dataclass(frozen=True)
class Role:
    """A role of the console. Without Keystone, members of `group` have the roles `keystone_roles` for the APIs."""

    group: str
    words: frozenset[str]


ADMINISTRATORS = Role("role:administrator", frozenset({ADMIN, "manager", "member", "reader"}))
OPERATORS = Role("role:operator", frozenset({OPERATOR, "member", "reader"}))
AUDITORS = Role("role:auditor", frozenset({AUDITOR, "reader"}))
VIEWERS = Role("role:viewer", frozenset({"manager", "member", "reader"}))
ROLES = (ADMINISTRATORS, OPERATORS, AUDITORS, VIEWERS)
"""A person with several roles has the rights of all of them. The prefix `role:` keeps a group that somebody made from
having a role's name by chance."""
_BY_GROUP = {role.group: role for role in ROLES}


def group(name: str) -> Group:
    """Return the group of this name with the permissions of its role or project; create it if there is none."""
    found, _ = Group.objects.get_or_create(name=name)
    give(found)
    return found


def give(found: Group) -> None:
    """Set the permissions of a role's or project's group, according to its name. Other groups are not changed."""
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
    """Return the name of the group for a person with these Keystone roles in this project.

    Returns '' if the roles give no access to the console.
    """
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
    """Return the names of the user's groups. They are cached on the user object: one query for each request."""
    if not hasattr(user, "group_names"):
        user.group_names = list(user.groups.order_by("name").values_list("name", flat=True))
    return list(user.group_names)


def project_of(user: Any) -> str:
    """Return the id of the only project that the user sees.

    Returns '' for a superuser and a member of a role's group, who see all projects, and for a user without a project's
    group.
    """
    if user.is_superuser:
        return ""
    groups = names(user)
    if any(name in _BY_GROUP for name in groups):
        return ""
    return next((name.removeprefix(TENANT) for name in groups if name.startswith(TENANT) and name != TENANT), "")


def words_of(user: Any) -> frozenset[str]:
    """Return the Keystone roles that the user has for the APIs when there is no Keystone; always includes reader."""
    if user.is_superuser:
        return ADMINISTRATORS.words
    return READER.union(*(_BY_GROUP[name].words for name in names(user) if name in _BY_GROUP))


def session_caller(user: Any, session: Any) -> Caller | None:
    """Return a logged-in user as the Caller that the APIs see.

    Returns None for a user who may not enter the console, and with Keystone for a session without Keystone's data.
    """
    if not user.is_staff:
        return None
    if keys().auth != "keystone":
        project = project_of(user) or LOCAL_PROJECT
        return Caller(user.get_username(), str(user.pk), words_of(user), project)
    facts = session.get(SESSION)
    return Caller(facts["name"], facts["id"], frozenset(facts["roles"]), facts["project"]) if facts else None


def caller_of(request: HttpRequest) -> Caller | None:
    """Return the Caller for the user and session of this request; None as in `get_session_caller`."""
    return session_caller(request.user, getattr(request, "session", {}))


def why_not(request: HttpRequest, rule: str, permission: str) -> str:
    """Return why the request's user may not do what `rule` covers, and what would help; '' if the user may.

    The Django permission `permission`, given to the user or to any group of theirs, is sufficient as well. While
    everything is read only, nobody may.
    """
    if now := read_only.current():
        return read_only.sentence(now)
    user: Any = request.user
    caller = caller_of(request)
    if user.has_perm(permission) or (caller and policy.allows(caller, rule)):
        return ""
    if caller is None:
        return "Your session no longer contains your roles. Log out and log in again."
    would_do = policy.least(caller, rule)
    if not would_do:
        return f"No usual role is sufficient, because the policy file changes the rule {rule}."
    helps = next((role.group for role in reversed(ROLES) if would_do in role.words), "")
    into = f" or membership in the group {helps}" if helps else ""
    has = ", ".join(sorted(caller.roles)) or "none"
    return (
        f"You need the role {would_do}{into}. Your roles: {has}. An administrator of this console can give it to you."
    )
