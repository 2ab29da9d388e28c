"""Connection parameters of our database for programs and connections that do not use Django."""

from __future__ import annotations

from django.db import connection

PSYCOPG_ONLY = ("context", "cursor_factory", "prepare_threshold")
"""Django's connection parameters that only psycopg understands, and libpq does not."""


def get_connection_parameters() -> dict[str, str]:
    """Return the keywords and values of a libpq connection string for our database, with `password` if there is one.
    Does not connect.
    """
    return {name: value for name, value in connection.get_connection_params().items() if name not in PSYCOPG_ONLY}
