"""Count the SQL statements of a page or of a function."""

from __future__ import annotations

from collections.abc import Callable

from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext


def count_call_statements(function: Callable[[], object]) -> int:
    """Call the function once and return how many SQL statements this thread sent meanwhile."""
    with CaptureQueriesContext(connection) as captured:
        function()
    return len(captured)


def count_statements(client: Client, path: str, enough: int = 0) -> int:
    """Return how many SQL statements a GET of `path` costs; fails unless it is answered with 200.

    The page is fetched twice and the smaller count is returned, because a cache that expires every few seconds may be
    refilled during one of the two. If the first GET costs at most `enough` statements, there is no second one.
    """

    def fetch() -> None:
        assert client.get(path).status_code == 200

    first = count_call_statements(fetch)
    return first if first <= enough else min(first, count_call_statements(fetch))
