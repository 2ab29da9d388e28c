"""The single-writer rule as a wrapper around every statement that Django sends in this process, in whatever thread.

What Django does not send is not seen: the gateway's own psycopg connection (`agents.gateway.writer` writes its own
tables), and other processes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from accelerators import conductor

WRITES = re.compile(
    r'\b(?:INSERT\s+INTO|UPDATE|DELETE\s+FROM|TRUNCATE|COPY)\s+(?:ONLY\s+|TABLE\s+)?"?(accelerators_\w+)"?',
    re.IGNORECASE,
)


violations: list[AssertionError] = []
"""What the guards found since the last test ended. Product code that catches every exception cannot hide it."""


class ForbiddenWrite(AssertionError):
    """Something wrote a table of `accelerators` without `conductor.writing()`."""


def guard(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
    """Refuse the statement unless the conductor is writing; the test runner's own TRUNCATE is let through."""
    found = None if sql.startswith("SELECT") else WRITES.search(sql)
    if found and not conductor.may_write() and not sql.startswith("TRUNCATE"):
        raise note(ForbiddenWrite(f"{found.group(1)} is written outside conductor.writing(): {sql[:200]}"))
    return execute(sql, params, many, context)


def note(violation: AssertionError) -> AssertionError:
    """Keep the violation until the test ends, and return it to be raised."""
    violations.append(violation)
    return violation


@contextmanager
def expect_violation(kind: type[AssertionError], match: str | None = None) -> Iterator[None]:
    """Demand that the block raises this violation, and forget it: the test planted it."""
    with pytest.raises(kind, match=match) as raised:
        yield
    violations.remove(raised.value)


def wrap_every_connection(*wrappers: Callable[..., Any]) -> None:
    """Put these around each statement of every connection that Django opens from now on, the first one outermost."""

    def install(connection: BaseDatabaseWrapper, **_: Any) -> None:
        if wrappers[0] not in connection.execute_wrappers:
            # In front: `execute_wrapper` of a test takes the last one away when it ends.
            connection.execute_wrappers[:0] = wrappers

    connection_created.connect(install, weak=False)
