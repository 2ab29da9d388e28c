"""Count the SQL statements of a page."""

from __future__ import annotations

from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext


def count_statements(client: Client, path: str) -> int:
    """Return how many SQL statements a GET of `path` costs; fails unless it is answered with 200.

    The page is fetched twice and the smaller count is returned, because a cache that expires every few seconds may be
    refilled during one of the two.
    """
    counts = []
    for _ in range(2):
        with CaptureQueriesContext(connection) as captured:
            assert client.get(path).status_code == 200
        counts.append(len(captured))
    return min(counts)
