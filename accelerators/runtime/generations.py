"""How often each collection was written. A cache entry or an ETag made at a generation holds until it has moved on.

Counted by triggers (migration 0003) inside the writer's transaction, so nobody can forget to. Read by `cache` and by
the own API's ETags.
"""

from __future__ import annotations

from typing import Literal

from django.db import connection

Collection = Literal["hosts", "devices", "profiles", "requests", "events", "commands"]
"""`devices` covers deployables, attributes and attach handles, too."""


def current(*collections: Collection) -> int:
    """Their generations, added up: it grows with every committed write of any of them. One statement.

    Take it before what is to be remembered is read: what is written in between then makes the memory old, never wrong.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT coalesce(sum(value), 0) FROM generation WHERE collection = ANY(%s)", [list(collections)])
        return int(cursor.fetchone()[0])
