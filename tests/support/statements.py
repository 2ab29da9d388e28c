"""How many statements a page costs."""

from __future__ import annotations

from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext


def statements(client: Client, path: str) -> int:
    """Of a GET that is answered 200: the fewer of two, for what a process reads anew every few seconds may fall into
    one of them."""
    counts = []
    for _ in range(2):
        with CaptureQueriesContext(connection) as captured:
            assert client.get(path).status_code == 200
        counts.append(len(captured))
    return min(counts)
