"""One declaration per resource feeds its list and its detail: names, SQL, since which microversion.

PostgreSQL makes the JSON text; it goes out as it comes. Declared in `devices` and `deployables`, whose views call
`listing` and `detail`. Every value travels as a parameter; only declared SQL is ever put into a statement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db import connection

from accelerators.api.v2.faults import Fault
from accelerators.api.v2.microversion import OLDEST, Version
from accelerators.api.v2.query import Page

MOUNT = "/accelerator"
"""Links always say so, wherever the API is mounted (contract section 2.0)."""


@dataclass(frozen=True)
class Field:
    """A key of the answer, the SQL of its value, what a list is sorted by under that key (None: cannot be)."""

    name: str
    sql: str
    sort: str | None = None
    since: Version = OLDEST


def column(name: str, sql: str = "") -> Field:
    """A value shown as it is stored."""
    sql = sql or f"this.{name}"
    return Field(name, sql, sql)


def moment(name: str) -> Field:
    """A time in whole seconds with its offset, or null."""
    text = f"""to_char(this.{name} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"+00:00"')"""
    return Field(name, text, f"this.{name}")


def links(**paths: str) -> Field:
    """`links`: per rel, the path below the mount that the uuid is appended to."""
    made = ", ',', ".join(
        f"'{{\"href\":', to_json(%(base)s || '{MOUNT}{path}/' || this.uuid), ',\"rel\":\"{rel}\"}}'"
        for rel, path in paths.items()
    )
    return Field("links", f"concat('[', {made}, ']')::json")


@dataclass(frozen=True)
class Resource:
    """`source` names the resource's row `this`; `shown` says which rows the API shows at all."""

    name: str
    collection: str
    fields: tuple[Field, ...]
    source: str
    shown: str
    equal: dict[str, str]
    """Parameter → the column it is compared with; what is not here is ignored."""

    def listing(self, base: str, version: Version, page: Page) -> bytes:
        """`{"devices":[…]}`, in one statement at any size; 400 for an unknown marker or sort key."""
        conditions = [self.shown, *(f"{sql} = %({name})s" for name, sql in self.equal.items() if name in page.equal)]
        statement = f"""
            WITH ranked AS (SELECT this.id, this.uuid, row_number() OVER (ORDER BY {self._order(page)}) AS place
                            FROM {self.source} WHERE {" AND ".join(conditions)}),
                 start AS (SELECT place FROM ranked WHERE uuid::text = %(marker)s)
            SELECT %(marker)s::text IS NULL OR EXISTS (SELECT FROM start),
                   (SELECT string_agg(row_to_json(item)::text, ',') FROM (
                      SELECT {self._columns(version)} FROM ranked JOIN {self.source_by("ranked.id")}
                      WHERE place > coalesce((SELECT place FROM start), 0) ORDER BY place LIMIT %(limit)s) item)
        """
        values = page.equal | {"base": base, "marker": page.marker, "limit": page.limit}
        found, items = _row(statement, values)
        if not found:
            raise Fault(400, f"Marker {page.marker} could not be found.")
        return f'{{"{self.collection}":[{items or ""}]}}'.encode()

    def detail(self, base: str, version: Version, uuid: str) -> bytes:
        """The bytes of the list's element, or 404. Only the uuid's exact, canonical text names it (contract 2.0)."""
        statement = f"""
            SELECT row_to_json(item)::text FROM (
              SELECT {self._columns(version)} FROM {self.source} WHERE {self.shown} AND this.uuid = %(uuid)s) item
        """
        row = _row(statement, {"base": base, "uuid": uuid}) if _is_canonical(uuid) else None
        if row is None:
            raise Fault(404, f"{self.name} not found with uuid={uuid}")
        return row[0].encode()
