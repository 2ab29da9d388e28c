"""The rule that every change has an event (promise X6), around every test: what product code writes between entering
and leaving `conductor.writing()` has one in the same transaction, or stands in the table below with the reason why not.

What a test itself sets up is its own business.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from accelerators import conductor

EVENT = "accelerators_event"
WRITES = re.compile(r'\b(INSERT\s+INTO|UPDATE|DELETE\s+FROM)\s+(?:ONLY\s+)?"?(accelerators_\w+)"?', re.IGNORECASE)
SETS = re.compile(r"\bSET\b(.*?)(?:\bFROM\b|\bWHERE\b|$)", re.IGNORECASE | re.DOTALL)
COLUMN = re.compile(r'(?:^|,)\s*"?(\w+)"?\s*=')

EXEMPT = {
    ("INSERT", "accelerators_seal"): "the chain over events is no change of what they tell about",
    ("UPDATE", "accelerators_seal"): "the same",
    ("INSERT", "accelerators_intent"): "an outbox: what raised it has its event",
    ("UPDATE", "accelerators_intent"): "the same: attempts are bookkeeping",
    ("DELETE", "accelerators_intent"): "the same: it is done",
    ("UPDATE", "accelerators_command"): "how far a command is: its end is an event, with the seconds it took",
    ("INSERT", "accelerators_bulk"): "a draft that nobody has confirmed",
    ("INSERT", "accelerators_bulkitem"): "the same",
    ("UPDATE", "accelerators_bulk"): "how far it is: its end is an event, with the numbers; each device has its own",
    ("UPDATE", "accelerators_bulkitem"): "the same, and what a dry run found out",
}
COLUMNS = {
    "accelerators_host": "applied_epoch applied_seq applied_hash reported_at drivers",
    "accelerators_image": "used_at",
    "accelerators_attachment": "claim release fault",
}
"""What an UPDATE may set without an event: which report was applied last and what it said of drivers that are as they
were, when an image was last used, what an attachment is about to write to Placement and what is in its way."""


class Unrecorded(AssertionError):
    """Something was changed, and no event says so."""


class _Seen:
    """What was written since `writing()` was entered."""

    def __init__(self) -> None:
        self.writes: list[str] = []
        self.recorded = False


_seen: ContextVar[_Seen | None] = ContextVar("seen", default=None)


def watch(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
    """Remember what a statement wrote, around its execution."""
    result, seen = execute(sql, params, many, context), _seen.get()
    if seen is not None and context["cursor"].rowcount and not sql.startswith("SELECT"):
        found = [(verb.split()[0].upper(), table) for verb, table in WRITES.findall(sql)]
        seen.recorded |= ("INSERT", EVENT) in found
        seen.writes += [sql for one in found if one[1] != EVENT and one not in EXEMPT and not _kept(*one, sql)]
    return result


def _kept(verb: str, table: str, sql: str) -> bool:
    """Whether it sets nothing but columns that need no event."""
    sets = SETS.search(sql)
    if verb != "UPDATE" or table not in COLUMNS or sets is None:
        return False
    return {*COLUMN.findall(sets[1])} <= {"updated_at", *COLUMNS[table].split()}


@contextmanager
def audited() -> Iterator[None]:
    """While this lasts, product code that leaves `conductor.writing()` without an event for what it wrote fails."""
    plain = conductor.writing

    def writing() -> Any:
        module = sys._getframe(1).f_globals["__name__"]
        return plain() if _seen.get() or module.startswith("tests.") else _judged(plain, module)

    conductor.writing = writing
    try:
        yield
    finally:
        conductor.writing = plain


@contextmanager
def _judged(plain: Callable[[], Any], module: str) -> Iterator[None]:
    token = _seen.set(seen := _Seen())
    try:
        with plain():
            yield
            if seen.writes and not seen.recorded:
                raise Unrecorded(f"{module} changed this without an event: {seen.writes[0][:300]}")
    finally:
        _seen.reset(token)
