"""The single-writer rule as a wrapper around every statement Django sends."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from accelerators import conductor

WRITES = re.compile(
    r'\b(?:INSERT\s+INTO|UPDATE|DELETE\s+FROM|TRUNCATE|COPY)\s+(?:ONLY\s+|TABLE\s+)?"?(accelerators_\w+)"?',
    re.IGNORECASE,
)


class ForbiddenWrite(AssertionError):
    """Something wrote a table of `accelerators` without `conductor.writing()`."""


def guard(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
    """Refuse the statement unless the conductor is writing; the test runner's own TRUNCATE is let through."""
    found = None if sql.startswith("SELECT") else WRITES.search(sql)
    if found and not conductor.may_write() and not sql.startswith("TRUNCATE"):
        raise ForbiddenWrite(f"{found.group(1)} is written outside conductor.writing(): {sql[:200]}")
    return execute(sql, params, many, context)
