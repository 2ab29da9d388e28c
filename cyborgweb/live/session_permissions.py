"""Query, for all watchers at once, which user each session belongs to, and whether that user may still watch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django.contrib.auth import get_user
from django.contrib.auth.models import Group, User
from django.contrib.postgres.expressions import ArraySubquery
from django.contrib.sessions.models import Session
from django.db.models import OuterRef
from django.db.models.functions import Now
from django.http import HttpRequest

from cyborgweb.auth.sessions import SessionStore


def user_of_session(session: str) -> Any | None:
    """Return the user who is logged in with this session key, after Django's own checks; None if there is none.

    Whether the user may enter the console is not checked.
    """
    request = HttpRequest()
    request.session = SessionStore(session)
    user = get_user(request)
    return user if user.is_authenticated else None


def fingerprint_permissions(user_ids: Collection[int]) -> dict[int, str]:
    """Return user id → a text that changes when the user's password or superuser status changes, or a permission of the
    user or of the user's groups. Users who may not enter the console are left out. Costs one statement.
    """
    own_permissions, group_permissions = User.user_permissions.through, Group.permissions.through
    rows = User.objects.filter(pk__in=user_ids, is_active=True, is_staff=True).values_list(
        "pk",
        "password",
        "is_superuser",
        ArraySubquery(own_permissions._default_manager.filter(user=OuterRef("pk")).order_by("pk").values("pk")),
        ArraySubquery(
            group_permissions._default_manager.filter(group__user=OuterRef("pk")).order_by("pk").values("pk")
        ),
    )
    return {user_id: repr(facts) for user_id, *facts in rows}


def filter_live_sessions(sessions: Collection[str]) -> set[str]:
    """Return those of these session keys whose session still exists and has not expired. Costs one statement."""
    live_sessions = Session.objects.filter(session_key__in=sessions, expire_date__gt=Now())
    return set(live_sessions.values_list("session_key", flat=True))
