"""Our database as programs and connections without Django name it. Used by `backup` and `manage.py prepare`."""

from __future__ import annotations

from django.db import connection

OURS = ("context", "cursor_factory", "prepare_threshold")
"""Of our connection, what psycopg alone knows."""


def parameters() -> dict[str, str]:
    """Keywords of a libpq connection string, `password` among them where there is one."""
    return {name: value for name, value in connection.get_connection_params().items() if name not in OURS}
