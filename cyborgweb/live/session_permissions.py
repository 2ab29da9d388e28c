"""Who looks, and whether they still may: asked for all watchers at once. Called by `live.feed` in its thread."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

from django.contrib.auth import get_user
from django.contrib.sessions.backends.db import SessionStore
from django.db import connection

from agents.liveness import limits

ALIVE = "SELECT session_key FROM django_session WHERE session_key = ANY(%s) AND expire_date > now()"
RIGHTS = """
SELECT u.id, md5(concat_ws(' ', u.password, u.is_superuser,
  (SELECT string_agg(permission_id::text, ',' ORDER BY permission_id) FROM auth_user_user_permissions
   WHERE user_id = u.id), 'and',
  (SELECT string_agg(g.group_id || '/' || p.permission_id, ',' ORDER BY g.group_id, p.permission_id)
   FROM auth_user_groups g JOIN auth_group_permissions p USING (group_id) WHERE g.user_id = u.id)))
FROM auth_user u WHERE u.id = ANY(%s) AND u.is_active AND u.is_staff
"""


def session(key: str) -> SessionStore:
    """Of this key; read when somebody asks it for something."""
    return SessionStore(key)


def who(session: str) -> Any | None:
    """The person this session belongs to, by Django's own checks; None: nobody."""
    user = get_user(SimpleNamespace(session=SessionStore(session)))
    return user if user.is_authenticated else None


def of(users: Collection[int]) -> dict[int, str]:
    """What each of those who may enter the console may do, as a text that any change of it changes."""
    with connection.cursor() as cursor:
        cursor.execute(RIGHTS, [list(users)])
        return dict(cursor.fetchall())


def alive(sessions: Collection[str]) -> set[str]:
    """Those that go on: a logout deletes one, and it has its time."""
    with connection.cursor() as cursor:
        cursor.execute(ALIVE, [list(sessions)])
        return {key for (key,) in cursor.fetchall()}


def facts(statement: str) -> tuple[Any, ...]:
    """What the overview and the pages show besides what is counted."""
    with connection.cursor() as cursor:
        cursor.execute(statement, list(limits()))
        return tuple(cursor.fetchone())
