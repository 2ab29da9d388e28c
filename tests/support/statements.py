"""Count the SQL statements of a page or of a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import connection
from django.db.backends.postgresql.operations import DatabaseOperations
from django.test import Client
from django.test.utils import CaptureQueriesContext


def show_texts_of_prepared_statements() -> None:
    """Make CaptureQueriesContext show the text of every statement.

    A cursor of `conductor.open_cursor` prepares a statement that it repeats, and then does not tell its text.
    """
    told_by_cursor = DatabaseOperations.last_executed_query

    def last_executed_query(self: Any, cursor: Any, sql: Any, params: Any) -> str | None:
        text = told_by_cursor(self, cursor, sql, params)
        return self.compose_sql(sql, params) if text is None else text

    DatabaseOperations.last_executed_query = last_executed_query


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
