"""Check around every test that every change has an event (promise X6).

Every change that product code writes inside `conductor.writing()` must have an event in the same transaction, or be
listed in EXEMPT or COLUMNS with the reason. The events must be about the type of object that was changed (SUBJECTS),
and about as many objects as rows were changed (ITSELF). The guard does not compare which rows an event is about, nor
whether it names every changed column. Writes of the tests themselves are not checked.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from accelerators import conductor
from accelerators.conductor_sql import INSERT_EVENTS
from tests.support.writeguard import keep_violation

EVENT = "accelerators_event"
WRITES = re.compile(r'\b(INSERT\s+INTO|UPDATE|DELETE\s+FROM)\s+(?:ONLY\s+)?"?(accelerators_\w+)"?', re.IGNORECASE)
SETS = re.compile(r"\bSET\b(.*?)(?:\bFROM\b|\bWHERE\b|$)", re.IGNORECASE | re.DOTALL)
COLUMN = re.compile(r'(?:^|,)\s*"?(\w+)"?\s*=')

EXEMPT = {
    ("INSERT", "accelerators_seal"): "the chain over events is no change of what they tell about",
    ("UPDATE", "accelerators_seal"): "the same",
    ("INSERT", "accelerators_auditstatus"): "what the jobs that seal and verify events found, for the console",
    ("UPDATE", "accelerators_auditstatus"): "the same",
    ("DELETE", "accelerators_auditstatus"): "the same, of a node that is gone",
    ("INSERT", "accelerators_intent"): "an outbox: what raised it has its event",
    ("UPDATE", "accelerators_intent"): "the same: attempts are bookkeeping",
    ("DELETE", "accelerators_intent"): "the same: it is done",
    ("UPDATE", "accelerators_command"): "how far a command is: its end is an event, with the seconds it took",
    ("INSERT", "accelerators_bulk"): "a draft that nobody has confirmed",
    ("INSERT", "accelerators_bulkitem"): "the same",
    ("UPDATE", "accelerators_bulk"): "how far it is: its end is an event, with the numbers; each device has its own",
    ("INSERT", "accelerators_rollout"): "a draft that nobody has confirmed: its start is an event",
    ("INSERT", "accelerators_rolloutstep"): "the same",
    ("UPDATE", "accelerators_bulkitem"): "the same, and what a dry run found out",
}
COLUMNS = {
    "accelerators_host": "applied_epoch applied_seq applied_hash boot_id reported_at drivers",
    "accelerators_image": "used_at",
    "accelerators_attachment": "claim release fault",
    "accelerators_releasedhandle": "answer ask_at ask_until",
    "accelerators_rolloutstep": "attempts next_at text",
}
"""Columns that an UPDATE may set without an event, by table.

They store which report was applied last and its data about unchanged drivers; when an image was last used; what an
attachment will write to Placement, and what prevents the write; when a host is asked about a released handle again, and
what it answered; when a rollout tries a host again, and why.
"""


SUBJECTS = {
    "acceleratorrequest": "request database",
    "admissionrule": "rule",
    "attachhandle": "device",
    "attribute": "device",
    "bulkitem": "bulk",
    "deployable": "device",
    "device": "device command",
    "deviceprofile": "profile",
    "driverwish": "driver host",
    "providerowner": "host",
    "releasedhandle": "device",
    "rolloutstep": "rollout driver command host",
}
"""The subject types of events that may record a change of a table. For other tables it is the table's own name.

A change of a part of a device is recorded by an event of the device. The removal of a host deletes what is wanted of
its drivers and whose its providers are. A command makes its device busy or free again, and moves the step of a rollout.
After a restore all requests that are being bound get a later deadline; one event of the database records that.
"""
ITSELF = {"acceleratorrequest", "admissionrule", "attachment", "command", "device", "deviceprofile", "host", "image"}
"""Tables whose rows are the subjects of events. A statement may change at most as many rows as there are subjects."""
EACH = object()
"""Stands for any number of subjects.

Either one SQL statement wrote the changes and an event for each of them, or an event without a subject records only how
many objects changed.
"""
TYPE_IN_SQL = re.compile(r"'(\w+)\.' \|\| [^,]+ AS action")
"""Finds the subject type in a statement that writes both the changes and their events (binding_sql, commands.sql)."""


class Write(NamedTuple):
    """A change of one table by a statement. `rows` is None if the number of changed rows of this table is not known."""

    verb: str
    table: str
    rows: int | None
    sql: str


class UnrecordedChangeError(AssertionError):
    """Product code changed something without recording an event."""


@dataclass
class _WritesAndEvents:
    """The writes since `writing()` was entered, and the subjects of the events since then, by subject type."""

    writes: list[Write] = field(default_factory=list)
    event_subjects: dict[str, set[Any]] = field(default_factory=dict)


_seen: ContextVar[_WritesAndEvents | None] = ContextVar("seen", default=None)


def watch(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
    """Execute a statement, as a wrapper of Django's, and remember what it wrote and which events it recorded."""
    result, seen = execute(sql, params, many, context), _seen.get()
    if seen is not None and not sql.startswith("SELECT") and (rows := context["cursor"].rowcount):
        found = [(verb.split()[0].upper(), table) for verb, table in WRITES.findall(sql)]
        if ("INSERT", EVENT) in found:
            _remember_events(seen.event_subjects, sql, params)
        alone = len(found) == 1 and not sql.startswith("WITH")
        seen.writes += [
            Write(verb, table, rows if alone else None, sql)
            for verb, table in found
            if table != EVENT and (verb, table) not in EXEMPT and not _sets_only_exempt_columns(verb, table, sql)
        ]
    return result


def _remember_events(event_subjects: dict[str, set[Any]], sql: str, params: Any) -> None:
    """Add the subjects of the events that this statement records to `event_subjects`.

    A statement of `record_events` names each event's subject; of other statements only the subject type is known
    (EACH).
    """
    if sql == INSERT_EVENTS:
        for one in json.loads(params[0]):
            event_subjects.setdefault(one["action"].split(".")[0], set()).add(one["subject"] or EACH)
    else:
        event_subjects.setdefault(TYPE_IN_SQL.findall(sql)[0], set()).add(EACH)


def _sets_only_exempt_columns(verb: str, table: str, sql: str) -> bool:
    """Return True if the statement sets only columns that need no event (COLUMNS)."""
    sets = SETS.search(sql)
    if verb != "UPDATE" or table not in COLUMNS or sets is None:
        return False
    return {*COLUMN.findall(sets[1])} <= {"updated_at", *COLUMNS[table].split()}


@contextmanager
def audited() -> Iterator[None]:
    """Replace `conductor.writing` for the block: product code that leaves it without an event for its changes fails.

    The failure is UnrecordedChangeError. Nested blocks and blocks that tests enter themselves are not checked.
    """
    plain = conductor.writing

    def writing() -> Any:
        module = sys._getframe(1).f_globals["__name__"]
        return plain() if _seen.get() or module.startswith("tests.") else _checked_writing(plain, module)

    conductor.writing = writing
    try:
        yield
    finally:
        conductor.writing = plain


def _find_unrecorded_change(seen: _WritesAndEvents) -> str:
    """Describe the first change that has no event; return "" if there is none."""
    for write in seen.writes:
        table = write.table.removeprefix("accelerators_")
        types = SUBJECTS.get(table, table).split()
        subjects = {one for kind in types for one in seen.event_subjects.get(kind, ())}
        if not subjects:
            return f"{write.sql[:300]} (the events are about: {', '.join(sorted(seen.event_subjects)) or 'nothing'})"
        if table in ITSELF and write.rows is not None and EACH not in subjects and write.rows > len(subjects):
            return f"{write.sql[:300]} ({write.rows} rows, events about {len(subjects)})"
    return ""


@contextmanager
def _checked_writing(plain: Callable[[], Any], module: str) -> Iterator[None]:
    token = _seen.set(seen := _WritesAndEvents())
    try:
        with plain():
            yield
            if unrecorded := _find_unrecorded_change(seen):
                raise keep_violation(UnrecordedChangeError(f"{module} changed this without an event: {unrecorded}"))
    finally:
        _seen.reset(token)
