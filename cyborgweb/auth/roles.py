"""The roles of the console: the group of each role, what its members see, and which roles they have for both APIs.

With Keystone, `cyborgweb.auth.login` puts a person into the group of their roles at every login; without it, an
administrator does so by hand. The console checks an action with the same rules as the APIs (`cyborgweb.auth.policy`),
so that a person can do the same things in the console as with a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from django.contrib.auth.models import Group, Permission
from django.http import HttpRequest

from accelerators.domain.caller import ADMIN_ROLE, Caller
from cyborgweb.auth import policy, read_only
from cyborgweb.auth.policy_rules import AUDITOR, OPERATOR
from cyborgweb.settings.keys import get_keys

VISIBLE_APPS = ("accelerators", "agents", "placement_sync")
"""Django applications whose models every role sees."""
AUDITOR_MODELS = ("user", "group", "apitoken", "maintenance")
"""Models that auditors see in addition."""
PROJECT_MODELS = ("acceleratorrequest", "deviceprofile")
"""Models that the members of a project's group see."""
PROJECT_PREFIX = "project:"
"""Prefix of the name of a project's group, followed by the project's id. Its members see what that project has."""
READER_ROLES = frozenset({"reader"})
LOCAL_PROJECT = "local"
SESSION_KEY = "keystone"
"""Key of a session's data under which the person's name, id, project and roles from Keystone are stored."""


@dataclass(frozen=True)
class ConsoleRole:
    """A role of the console. Without Keystone, members of `group` have the roles `keystone_roles` for the APIs.

    `meaning` says in a few words what the role sees and does.
    """

    group: str
    keystone_roles: frozenset[str]
    meaning: str


ADMINISTRATORS = ConsoleRole(
    "role:administrator", frozenset({ADMIN_ROLE, "manager", "member", "reader"}), "sees and does everything"
)
OPERATORS = ConsoleRole(
    "role:operator",
    frozenset({OPERATOR, "member", "reader"}),
    "sees all hosts and projects; rescans hosts, rolls out drivers, attaches, detaches and labels accelerators",
)
AUDITORS = ConsoleRole(
    "role:auditor", frozenset({AUDITOR, "reader"}), "sees all hosts and projects, events, and who has access"
)
VIEWERS = ConsoleRole("role:viewer", frozenset({"manager", "member", "reader"}), "sees all hosts and projects")
ROLES = (ADMINISTRATORS, OPERATORS, AUDITORS, VIEWERS)
"""A person with several roles has the rights of all of them. The prefix `role:` keeps a group that somebody made from
having a role's name by chance."""
_ROLE_BY_GROUP = {role.group: role for role in ROLES}


def get_group(name: str) -> Group:
    """Return the group `name` with the permissions of its role or project. The group is created if it does not
    exist."""
    role_group, _ = Group.objects.get_or_create(name=name)
    set_permissions(role_group)
    return role_group


def set_permissions(group: Group) -> None:
    """Replace the Django permissions of a group that is named after a role or a project by the permissions that this
    name stands for. Do nothing for other groups.
    """
    name, view_permissions = group.name, Permission.objects.filter(codename__startswith="view_")
    if name.startswith(PROJECT_PREFIX):
        group.permissions.set(view_permissions.filter(codename__in=[f"view_{model}" for model in PROJECT_MODELS]))
    elif name == ADMINISTRATORS.group:
        group.permissions.set(Permission.objects.all())
    elif name in _ROLE_BY_GROUP:
        permissions = view_permissions.filter(content_type__app_label__in=VISIBLE_APPS)
        if name == AUDITORS.group:
            permissions |= view_permissions.filter(content_type__model__in=AUDITOR_MODELS)
        group.permissions.set(permissions)


def describe_group(name: str) -> str:
    """Return what the members of a group see and do, in a few words, according to the group's name."""
    if role := _ROLE_BY_GROUP.get(name):
        return role.meaning
    if project := name.removeprefix(PROJECT_PREFIX) if name.startswith(PROJECT_PREFIX) else "":
        return f"sees the requests of the project {project}, and device profiles"
    return "has the permissions that were chosen for it"


def choose_group(roles: Iterable[str], project: str, viewers: Iterable[str], tenants: Iterable[str]) -> str:
    """Return the name of the group for a person with these Keystone roles in this project; '' if the roles give no
    access to the console.

    `viewers` and `tenants` are the roles of CYBORG_CONSOLE_VIEWER_ROLES and CYBORG_CONSOLE_TENANT_ROLES. The first
    group that the roles give is chosen: administrator, operator, auditor, viewer, then the project's.
    """
    role_names = set(roles)
    if ADMIN_ROLE in role_names:
        return ADMINISTRATORS.group
    if OPERATOR in role_names:
        return OPERATORS.group
    if AUDITOR in role_names:
        return AUDITORS.group
    if role_names & set(viewers):
        return VIEWERS.group
    return f"{PROJECT_PREFIX}{project}" if role_names & set(tenants) and project else ""


def get_group_names(user: Any) -> list[str]:
    """Return the names of the user's groups. They are cached on the user object: one query for each request."""
    if not hasattr(user, "group_names"):
        user.group_names = list(user.groups.order_by("name").values_list("name", flat=True))
    return list(user.group_names)


def get_only_project(user: Any) -> str:
    """Return the id of the only project whose data the user sees. It comes from the name of the user's group
    `project:<id>`; if the user has several such groups, the first by name counts.

    Returns '' for superusers and members of a group of ROLES, who see all projects, and for users without a group
    `project:<id>`.
    """
    if user.is_superuser:
        return ""
    groups = get_group_names(user)
    if any(name in _ROLE_BY_GROUP for name in groups):
        return ""
    return next(
        (
            name.removeprefix(PROJECT_PREFIX)
            for name in groups
            if name.startswith(PROJECT_PREFIX) and name != PROJECT_PREFIX
        ),
        "",
    )


def get_keystone_roles(user: Any) -> frozenset[str]:
    """Return the Keystone roles that the user has for the APIs when there is no Keystone; always includes reader.

    A superuser has those of ADMINISTRATORS. Others have those of the console roles (ROLES) in whose groups they are;
    Django permissions and other groups, such as a project's, add none. Costs one statement for each user object, none
    for a superuser.
    """
    if user.is_superuser:
        return ADMINISTRATORS.keystone_roles
    return READER_ROLES.union(
        *(_ROLE_BY_GROUP[name].keystone_roles for name in get_group_names(user) if name in _ROLE_BY_GROUP)
    )


def get_session_caller(user: Any, session: Any) -> Caller | None:
    """Return a logged-in user as the Caller that the APIs see: with Keystone from the session's data, otherwise from
    the user's groups.

    Returns None for a user who may not enter the console, and with Keystone for a session without Keystone's data.
    """
    if not user.is_staff:
        return None
    if get_keys().auth != "keystone":
        project = get_only_project(user) or LOCAL_PROJECT
        return Caller(user.get_username(), str(user.pk), get_keystone_roles(user), project, has_session=True)
    if not (facts := session.get(SESSION_KEY)):
        return None
    return Caller(facts["name"], facts["id"], frozenset(facts["roles"]), facts["project"], has_session=True)


def get_caller(request: HttpRequest) -> Caller | None:
    """Return the Caller for the user and session of this request.

    Returns None if the user may not enter the console, or if the session lacks the data of the login with Keystone.
    """
    return get_session_caller(request.user, getattr(request, "session", {}))


def has_right(request: HttpRequest, rule: str, permission: str) -> bool:
    """Return whether the request's user satisfies the policy rule or has the Django permission, directly or by a group.

    Read-only mode is not considered. Raises KeyError for an unknown rule.
    """
    user: Any = request.user
    caller = get_caller(request)
    return bool(user.has_perm(permission) or (caller and policy.is_allowed(caller, rule)))


def find_role_with_permission(permission: str) -> ConsoleRole:
    """Return the role with the fewest rights whose group has this Django permission, such as `accelerators.view_host`.

    It agrees with the permissions that `set_permissions` gives.
    """
    app, _, codename = permission.partition(".")
    verb, _, model = codename.partition("_")
    if verb == "view" and app in VISIBLE_APPS:
        return VIEWERS
    return AUDITORS if verb == "view" and model in AUDITOR_MODELS else ADMINISTRATORS


def _explain_missing_permission(user: Any, permission: str) -> str:
    """Return in which group a user would have the permission, which role of Keystone leads to the group, and who can
    give it."""
    role, keys = find_role_with_permission(permission), get_keys()
    keystone_roles = {
        ADMINISTRATORS: ADMIN_ROLE,
        AUDITORS: AUDITOR,
        VIEWERS: " or ".join(sorted(keys.console_viewer_roles)),
    }
    leading = keystone_roles[role] if keys.auth == "keystone" else ""
    hint = f" The role {leading} leads to this group." if leading else ""
    own_groups = ", ".join(get_group_names(user)) or "none"
    return (
        f"You need membership in the group {role.group} or the permission {permission}.{hint} Your groups:"
        f" {own_groups}. An administrator of this console can give it to you."
    )


def explain_refusal(request: HttpRequest, rule: str, permission: str) -> str:
    """Return why the request's user may not do what `rule` covers, and what would help; '' if the user may.

    The Django permission `permission`, given to the user or to one of the user's groups, is sufficient as well. Without
    a rule ('') only the permission counts. While everything is read only, nobody may change anything, and the returned
    text says so. Raises KeyError for an unknown rule.
    """
    if (maintenance := read_only.get_maintenance()) and ".view_" not in permission:
        return read_only.describe_maintenance(maintenance)
    if not rule:
        user: Any = request.user
        return "" if user.has_perm(permission) else _explain_missing_permission(user, permission)
    if has_right(request, rule, permission):
        return ""
    caller = get_caller(request)
    if caller is None:
        return "Your session no longer contains your roles. Log out and log in again."
    sufficient_role = policy.find_sufficient_role(caller, rule)
    if not sufficient_role:
        return f"No usual role is sufficient, because the policy file changes the rule {rule}."
    # With Keystone, groups do not give roles: the session has those of the login.
    groups = [role.group for role in reversed(ROLES) if sufficient_role in role.keystone_roles]
    helpful_group = groups[0] if groups and get_keys().auth != "keystone" else ""
    group_hint = f" or membership in the group {helpful_group}" if helpful_group else ""
    own_roles = ", ".join(sorted(caller.roles)) or "none"
    giver = (
        "An administrator of Keystone can give it to you; then log in again."
        if get_keys().auth == "keystone"
        else "An administrator of this console can give it to you."
    )
    return f"You need the role {sufficient_role}{group_hint}. Your roles: {own_roles}. {giver}"
