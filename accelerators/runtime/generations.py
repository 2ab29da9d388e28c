"""Read the generation of a collection: a number that grows with every write of its tables.

A cache entry or an ETag is valid as long as the generation at which it was made is current. Triggers
(`migrations/sql/generations.sql`) count inside the writer's transaction, so no writer can forget it.
"""

from __future__ import annotations

from typing import Literal

from django.db import connection

CollectionName = Literal["hosts", "devices", "profiles", "requests", "events", "commands"]
"""Names of the collections. `devices` includes deployables, attributes and attach handles."""


def current_generation(*collections: CollectionName) -> int:
    """Return the sum of the collections' generations; it grows with every committed write of any of them.

    Call it before reading the rows that are to be cached. A write in between then only makes the cache entry outdated
    too early; the other way round, the entry would be wrong. Costs one statement.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT coalesce(sum(value), 0) FROM generation WHERE collection = ANY(%s)", [list(collections)])
        return int(cursor.fetchone()[0])
