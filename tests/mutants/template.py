"""Restore the test database to its state before the first test, after a mutant that may have left data in it."""

from __future__ import annotations

from typing import Any

KEPT = "mutants_template"


class Template:
    """A copy of the test database on the same server, used as a template."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.name = ""

    def keep(self) -> None:
        """Copy the database; there must be no connection to it."""
        from django.db import connection

        self.settings = connection.settings_dict
        self.name = str(self.settings["NAME"])
        self._run(f'DROP DATABASE IF EXISTS "{KEPT}"', f'CREATE DATABASE "{KEPT}" TEMPLATE "{self.name}"')

    def restore(self) -> None:
        """Drop the database and all connections to it, and create it again from the copy."""
        make = f'CREATE DATABASE "{self.name}" TEMPLATE "{KEPT}"'
        self._run(f'DROP DATABASE IF EXISTS "{self.name}" WITH (FORCE)', make)

    def _run(self, *statements: str) -> None:
        import psycopg

        names = {"HOST": "host", "PORT": "port", "USER": "user", "PASSWORD": "password"}
        where = {name: self.settings[key] for key, name in names.items() if self.settings.get(key)}
        with psycopg.connect(dbname="postgres", autocommit=True, **where) as server:
            for statement in statements:
                server.execute(statement)  # type: ignore[call-overload]
