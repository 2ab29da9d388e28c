"""Query, for all watchers at once, which user each session belongs to, and whether that user may still watch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django.contrib.auth import get_user
from django.contrib.sessions.backends.db import SessionStore
from django.db import connection
from django.http import HttpRequest

from agents.liveness import compute_thresholds

SELECT_LIVE_SESSIONS = "SELECT session_key FROM django_session WHERE session_key = ANY(%s) AND expire_date > now()"
SELECT_PERMISSION_FINGERPRINTS = """
SELECT u.id, md5(concat_ws(' ', u.password, u.is_superuser,
  (SELECT string_agg(permission_id::text, ',' ORDER BY permission_id) FROM auth_user_user_permissions
   WHERE user_id = u.id), 'and',
  (SELECT string_agg(g.group_id || '/' || p.permission_id, ',' ORDER BY g.group_id, p.permission_id)
   FROM auth_user_groups g JOIN auth_group_permissions p USING (group_id) WHERE g.user_id = u.id)))
FROM auth_user u WHERE u.id = ANY(%s) AND u.is_active AND u.is_staff
"""


def open_session_store(key: str) -> SessionStore:
    """Return the session with this key. It is not loaded until something is read from it."""
    return SessionStore(key)


def user_of_session(session: str) -> Any | None:
    """Return the user of this session after Django's own checks, or None if there is none."""
    request = HttpRequest()
    request.session = SessionStore(session)
    user = get_user(request)
    return user if user.is_authenticated else None


def fingerprint_permissions(user_ids: Collection[int]) -> dict[int, str]:
    """Return, for each of these users that may enter the console, a fingerprint that changes when their password or
    permissions change.
    """
    with connection.cursor() as cursor:
        cursor.execute(SELECT_PERMISSION_FINGERPRINTS, [list(user_ids)])
        return dict(cursor.fetchall())


def filter_live_sessions(sessions: Collection[str]) -> set[str]:
    """Return those of these sessions that still exist and have not expired."""
    with connection.cursor() as cursor:
        cursor.execute(SELECT_LIVE_SESSIONS, [list(sessions)])
        return {key for (key,) in cursor.fetchall()}


def query_with_liveness_limits(statement: str) -> tuple[Any, ...]:
    """Run `statement`, whose parameters are the two time limits of agents' liveness, and return its one row."""
    with connection.cursor() as cursor:
        cursor.execute(statement, list(compute_thresholds()))
        return tuple(cursor.fetchone())
