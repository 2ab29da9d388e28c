"""The read-only switch: while it is on, people and callers of both APIs can change nothing; agents and jobs go on.

The switch is on while the table `Maintenance` has its one row. `cyborgweb.auth.policy` checks it before every write of
an API, `cyborgweb.middleware.requests` before every write of the console. It is switched in the console and with
`manage.py read_only`, which are both exempt from it.
"""

from __future__ import annotations

import time

from django.db import transaction
from rest_framework.exceptions import APIException

from accelerators import conductor
from accelerators.commands.placing import check_reason
from accelerators.domain.caller import Caller
from accelerators.domain.states import Source
from accelerators.runtime import pubsub
from cyborgweb.models import Maintenance

TOPIC = "maintenance"
TTL_S = 5.0
"""Seconds for which a process caches the row. A lost notification of a change goes unnoticed for this long at most."""
RETRY_S = 30
"""The Retry-After of a refusal, in seconds."""

_known: tuple[float, Maintenance | None] | None = None


class ReadOnlyError(APIException):
    """503: everything is read only now. `wait` is the Retry-After in seconds."""

    status_code = 503
    wait = RETRY_S


def current() -> Maintenance | None:
    """Return the row while everything is read only, otherwise None.

    The row is cached for TTL_S, or until a change is notified: one statement every few seconds in each process.
    """
    global _known
    known = _known
    if known is None or time.monotonic() > known[0]:
        pubsub.listen()
        _known = known = (time.monotonic() + TTL_S, Maintenance.objects.first())
    return known[1]


def sentence(now: Maintenance) -> str:
    """Return the message for a caller who is refused: since when, by whom and why everything is read only."""
    why = f": {now.reason}" if now.reason else ""
    return f"All of this is read only since {now.since:%Y-%m-%d %H:%M} UTC, by {now.by}{why}. Try again later."


def refuse() -> None:
    """Raise ReadOnlyError while everything is read only."""
    if now := current():
        raise ReadOnlyError(sentence(now))


def switch(on: bool, by: Caller, reason: str, source: Source) -> Maintenance | None:
    """Make everything read only (`on`), or end that. Return the row in force, None when writing is allowed.

    A change locks the row, records an event and notifies all processes after the commit. If the switch is already in
    that position, nothing changes. Raises RefusedError INVALID for an unusable reason.
    """
    check_reason(reason)
    with conductor.writing():
        before = Maintenance.objects.select_for_update().first()
        now = before
        if on and before is None:
            now = Maintenance.objects.create(pk=1, by=by.name[:255], reason=reason)
            now.refresh_from_db()
        elif before and not on:
            now = None
            before.delete()
        if now != before:
            changes = {"read_only": [before is not None, now is not None]}
            action = "maintenance.begun" if now else "maintenance.ended"
            conductor.record(action, source, by.name, changes=changes, reason=reason)
            transaction.on_commit(_ring)
    return now


def _ring() -> None:
    pubsub.ring(TOPIC)


def _heard(_detail: str | None) -> None:
    global _known
    _known = None


pubsub.subscribe(TOPIC, _heard)
