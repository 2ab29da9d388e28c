"""Count what is refused too often for an event each, and record it as few events.

Refusals may come hundreds of times a second, and must not cost a row each. `note_refusal` only counts in memory, also
on the event loop. `record` writes the events; each process that refuses something calls it every few seconds. A
restart loses what was not recorded yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.db import Error

from accelerators import conductor

INTERVAL_S = 60.0
"""Minimum seconds between two records of one process about the same kind of refusals."""
MAX_KEYS = 1_000
"""Maximum number of keys of one kind that a process counts between two records; further keys are ignored."""


@dataclass(slots=True)
class Refusals:
    """The refusals with one key since the last record: their number, and the details of the newest one."""

    number: int = 0
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RefusalKind:
    """A kind of refusals. `build_events` returns the events about refusals, which it gets by key; it must return few
    events, however many keys there are."""

    build_events: Callable[[Mapping[str, Refusals]], list[dict[str, Any]]]


_lock = threading.Lock()
_noted: dict[RefusalKind, dict[str, Refusals]] = {}
_recorded_at: dict[RefusalKind, float] = {}


def note_refusal(kind: RefusalKind, key: str, number: int = 1, details: Mapping[str, str] | None = None) -> None:
    """Count `number` refusals with this key. `details` describe the newest one. It writes nothing."""
    with _lock:
        _add(kind, key, Refusals(number, details or {}))


def record() -> None:
    """Write the events about the refusals that were noted, in one statement; usually there are none.

    Each kind is recorded at its first refusal, and then at most every INTERVAL_S. Raises database errors; the counts
    are kept then, and recorded after INTERVAL_S.
    """
    now = time.monotonic()
    with _lock:
        due = {kind: _noted[kind] for kind in _noted if now - _recorded_at.get(kind, float("-inf")) >= INTERVAL_S}
        for kind in due:
            del _noted[kind]
            _recorded_at[kind] = now
    if not due:
        return
    try:
        conductor.record_events([event for kind, refusals in due.items() for event in kind.build_events(refusals)])
    except Error:
        with _lock:
            for kind, refusals in due.items():
                newer_refusals, _noted[kind] = _noted.get(kind, {}), refusals
                for key, newer in newer_refusals.items():
                    _add(kind, key, newer)
        raise


def forget() -> None:
    """Delete all counts of this process. For tests."""
    with _lock:
        _noted.clear()
        _recorded_at.clear()


def _add(kind: RefusalKind, key: str, refusals: Refusals) -> None:
    """Add refusals to those that were noted with this key. The caller holds the lock."""
    by_key = _noted.setdefault(kind, {})
    if key in by_key:
        by_key[key].number += refusals.number
        by_key[key].details = refusals.details
    elif len(by_key) < MAX_KEYS:
        by_key[key] = refusals
