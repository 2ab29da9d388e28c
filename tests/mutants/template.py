"""The test database as it was before the first test, brought back after a mutant that may have left something in it."""

from __future__ import annotations

from typing import Any

KEPT = "mutants_template"


class Template:
    """A copy of the test database on the same server."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.name = ""

    def keep(self) -> None:
        """Copy the database; nobody may be connected to it."""
        from django.db import connection

        self.settings = connection.settings_dict
        self.name = str(self.settings["NAME"])
        self._run(f'DROP DATABASE IF EXISTS "{KEPT}"', f'CREATE DATABASE "{KEPT}" TEMPLATE "{self.name}"')

    def restore(self) -> None:
        """Throw the database away with everybody who is still in it, and copy it anew."""
        make = f'CREATE DATABASE "{self.name}" TEMPLATE "{KEPT}"'
        self._run(f'DROP DATABASE IF EXISTS "{self.name}" WITH (FORCE)', make)

    def _run(self, *statements: str) -> None:
        import psycopg

        names = {"HOST": "host", "PORT": "port", "USER": "user", "PASSWORD": "password"}
        where = {name: self.settings[key] for key, name in names.items() if self.settings.get(key)}
        with psycopg.connect(dbname="postgres", autocommit=True, **where) as server:
            for statement in statements:
                server.execute(statement)  # type: ignore[call-overload]
