"""The console's login: with a local password, or with Keystone by name, password, project and domains (docs/adr/0004).

The settings use `LoginForm` when `CYBORG_AUTH=keystone`; local passwords are not accepted then. Neither password nor
token is stored: a session holds the person's roles and project, from which `cyborgweb.auth.roles` makes a Caller.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from django import forms
from django.contrib.auth import get_user_model
from django.contrib.auth.backends import ModelBackend
from django.contrib.auth.hashers import make_password
from django.contrib.auth.signals import user_logged_in
from django.db import connection, transaction
from django.dispatch import Signal, receiver
from django.views.decorators.debug import sensitive_variables
from unfold.forms import AuthenticationForm

from accelerators import conductor
from accelerators.domain.caller import ADMIN_ROLE
from accelerators.domain.states import EventSource
from accelerators.runtime import database_clock
from cyborgweb.auth import keystone, login_throttle, roles
from cyborgweb.auth.token_cache import TokenCheckUnavailableError
from cyborgweb.models import KeystoneUser
from cyborgweb.settings.keys import get_keys

log = logging.getLogger(__name__)

roles_confirmed = Signal()
"""Sent with `caller` after Keystone has told the roles of a person in one project at a login, whether or not these
roles give access to the console.
"""

REFUSED_TEXT = "Keystone does not accept this name, password, domain and project together."
INACTIVE_TEXT = "Your user is deactivated in this console: ask an administrator to activate it."
UNAVAILABLE_TEXT = "Keystone cannot be asked now; try again in a few seconds."


class KeystoneBackend(ModelBackend):
    """Loads the user of a session and the permissions of the user's groups.

    It checks no passwords: `LoginForm` asks Keystone to do so.
    """

    def authenticate(self, request: Any, username: str | None = None, password: str | None = None, **_: Any) -> None:
        """Return None always: local passwords are not accepted."""
        return None


BACKEND_PATH = f"{KeystoneBackend.__module__}.{KeystoneBackend.__qualname__}"


class LocalLoginForm(AuthenticationForm):
    """The login form for local passwords."""

    @sensitive_variables()
    def clean(self) -> dict[str, Any]:
        """Check the password and return the form's data.

        Raises ValidationError if the login is refused, or if the password cannot be checked now
        (`cyborgweb.auth.login_throttle`). Checks nothing if a field is wrong.
        """
        data: dict[str, Any] = self.cleaned_data
        if not self.errors:
            with _throttle_attempt(self.request, data["username"]) as take_back:
                data = super().clean()
                take_back(True)
        return data


class LoginForm(AuthenticationForm):
    """The login form with the fields that Keystone needs. The error does not say which field was wrong."""

    username = forms.CharField(max_length=255, widget=forms.TextInput({"autocomplete": "username"}))
    password = forms.CharField(
        max_length=255, strip=False, widget=forms.PasswordInput({"autocomplete": "current-password"})
    )
    domain = forms.CharField(max_length=64, initial="Default")
    project = forms.CharField(max_length=64)
    project_domain = forms.CharField(
        max_length=64, required=False, widget=forms.TextInput({"placeholder": "the same domain"})
    )

    def __init__(self, request: Any = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(request, *args, **kwargs)
        self.fields["username"].label = "Name"
        self.fields["username"].widget.attrs["maxlength"] = 255
        self.fields["project_domain"].label = "Domain of the project"
        for name in ("domain", "project", "project_domain"):
            self.fields[name].widget.attrs["class"] = self.fields["username"].widget.attrs["class"]

    @sensitive_variables()
    def clean(self) -> dict[str, Any]:
        """Check the password with Keystone, update the person's user and groups, and return the form's data.

        Raises ValidationError if Keystone cannot be asked or refuses the login, if the password cannot be checked now
        (`cyborgweb.auth.login_throttle`), if the roles give no access to the console, or if the person's user is not
        active here. Asks nothing if a field is wrong.
        """
        data: dict[str, Any] = self.cleaned_data
        if self.errors:
            return data
        with _throttle_attempt(self.request, f"{data['username']}@{data['domain']}") as take_back:
            try:
                project_domain = data["project_domain"] or data["domain"]
                person = keystone.check_password(
                    data["username"], data["password"], data["domain"], data["project"], project_domain
                )
            except TokenCheckUnavailableError as error:
                take_back(False)
                log.warning("a login could not be checked: %s", error.reason)
                raise forms.ValidationError(UNAVAILABLE_TEXT) from None
            if person is None:
                raise forms.ValidationError(REFUSED_TEXT)
            take_back(True)
        user = update_user(person)
        if user is None:
            role_names = " or ".join(
                dict.fromkeys((ADMIN_ROLE, *get_keys().console_viewer_roles, *get_keys().console_tenant_roles))
            )
            raise forms.ValidationError(f"The console needs the role {role_names} in the project; you do not have it.")
        if not user.is_active:
            raise forms.ValidationError(INACTIVE_TEXT)
        self.user_cache = user
        return data


@contextmanager
def _throttle_attempt(request: Any, name: str) -> Iterator[Callable[[bool], None]]:
    """Count a failed attempt to log in; the yielded function takes it back, and is told whether the password was right.
    Raises ValidationError if the password cannot be checked now."""
    try:
        with login_throttle.throttle.attempt(name, login_throttle.get_client_address(request)) as take_back:
            yield take_back
    except login_throttle.LoginThrottledError as refused:
        raise forms.ValidationError(str(refused)) from None


def update_user(person: keystone.AuthenticatedPerson) -> Any:
    """Create or update the person's user, set the group that their roles give now, and return the user.

    Sends `roles_confirmed`. Returns None if the roles give no group: a known user then loses all groups and staff
    rights, and an unknown one is not created. A change of the name, the rights or the groups records an event. The user
    may be inactive. The user is found by Keystone's id, because a name can be given to another person later, or exist
    in another domain. Locks on that id and on the name serialize logins of one person, and of persons with one name.
    """
    caller, console_roles = person.caller, (get_keys().console_viewer_roles, get_keys().console_tenant_roles)
    group = roles.choose_group(caller.roles, caller.project_id, *console_roles)
    users, username = get_user_model().objects, f"{person.caller.name}@{person.domain}"[:140]
    roles_confirmed.send_robust(None, caller=caller)  # Django logs the error of a receiver
    with transaction.atomic():
        with connection.cursor() as cursor:  # two first logins of one person, or with one name, may come together
            for key in (person.caller.user_id, username):
                cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [key])
        keystone_user = KeystoneUser.objects.select_related("user").filter(keystone_id=person.caller.user_id).first()
        if keystone_user is None and not group:
            return None
        user = keystone_user.user if keystone_user else get_user_model()(password=make_password(None))
        before = _describe_user(user)
        user.username = username
        if users.filter(username=username).exclude(pk=user.pk).exists():
            user.username = f"{username} {person.caller.user_id[:8]}"
        user.is_staff, user.is_superuser = bool(group), group == roles.ADMINISTRATORS.group
        user.save()
        if keystone_user is None:
            KeystoneUser.objects.create(keystone_id=person.caller.user_id, user=user)
        user.groups.set([roles.get_group(group)] if group else [])
        after = _describe_user(user)
        if changes := {name: [before[name], value] for name, value in after.items() if before[name] != value}:
            action = "user.changed" if keystone_user else "user.created"
            subject = (None, user.get_username())
            conductor.record_event(action, EventSource.SYSTEM, "Keystone", subject=subject, changes=changes)
    # Django's login reads `backend`; `_store_caller_in_session` reads `keystone_caller`.
    vars(user).update(backend=BACKEND_PATH, keystone_caller=person.caller)
    return user if group else None


def _describe_user(user: Any) -> dict[str, Any]:
    """Return the name, the rights and the groups of a user as events record them; None for each if it is not stored."""
    if user.pk is None:
        return dict.fromkeys(("username", "is_staff", "is_superuser", "groups"))
    groups = list(user.groups.order_by("name").values_list("name", flat=True))
    return {
        "username": user.username,
        "is_staff": user.is_staff,
        "is_superuser": user.is_superuser,
        "groups": groups,
    }


@receiver(user_logged_in)
def _store_caller_in_session(sender: Any, request: Any, user: Any, **_: Any) -> None:
    """After a login with Keystone, store the person's name, id, roles and project in the session, and make the session
    end after CYBORG_CONSOLE_SESSION_H hours. Do nothing for other logins.
    """
    if caller := getattr(user, "keystone_caller", None):
        facts = {"name": caller.name, "id": caller.user_id, "project": caller.project_id, "roles": sorted(caller.roles)}
        request.session[roles.SESSION_KEY] = facts
        request.session.set_expiry(database_clock.now() + timedelta(hours=get_keys().console_session_h))
