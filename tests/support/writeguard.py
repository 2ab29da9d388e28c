"""Check the single-writer rule in every statement that Django sends in this process, in every thread.

Statements that Django does not send are not checked: statements of other processes, and those of the gateway's own
psycopg connection (`agents.gateway.writer` writes its own tables).
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
"""Violations that the guards found since the last test ended, kept here in case product code catches the exception."""


class ForbiddenWriteError(AssertionError):
    """A statement wrote a table of `accelerators` outside `conductor.writing()`."""


def guard(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
    """Raise ForbiddenWriteError for a write outside `conductor.writing()`; TRUNCATE by the test runner is allowed."""
    found = None if sql.startswith("SELECT") else WRITES.search(sql)
    if found and not conductor.may_write() and not sql.startswith("TRUNCATE"):
        raise keep_violation(
            ForbiddenWriteError(f"{found.group(1)} is written outside conductor.writing(): {sql[:200]}")
        )
    return execute(sql, params, many, context)


def keep_violation(violation: AssertionError) -> AssertionError:
    """Keep the violation until the test ends, and return it, so that the caller can raise it."""
    violations.append(violation)
    return violation


@contextmanager
def expect_violation(kind: type[AssertionError], match: str | None = None) -> Iterator[None]:
    """Fail unless the block raises this violation; then forget it, because the test caused it on purpose."""
    with pytest.raises(kind, match=match) as raised:
        yield
    violations.remove(raised.value)


def wrap_every_connection(*wrappers: Callable[..., Any]) -> None:
    """Wrap every statement of all connections that Django opens from now on; the first wrapper is the outermost one."""

    def install(connection: BaseDatabaseWrapper, **_: Any) -> None:
        if wrappers[0] not in connection.execute_wrappers:
            # At the front, because a test's `execute_wrapper` removes the last wrapper of the list when it ends.
            connection.execute_wrappers[:0] = wrappers

    connection_created.connect(install, weak=False)
