"""Read only for a while: people, and callers of both APIs, change nothing; agents report and jobs go on.

There is one row, or none. `cyborgweb.auth.policy` asks before whatever an API would write,
`cyborgweb.middleware.requests` before what
the console would. Switched in the console and by `manage.py read_only`, by one who may write always.
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
"""How long a ring that was lost goes unnoticed."""
RETRY_S = 30

_known: tuple[float, Maintenance | None] | None = None


class ReadOnlyError(APIException):
    """503: come back later. `wait` is for Retry-After, in seconds."""

    status_code = 503
    wait = RETRY_S


def current() -> Maintenance | None:
    """What is in force, None for nothing. One statement every few seconds in each process."""
    global _known
    known = _known
    if known is None or time.monotonic() > known[0]:
        pubsub.listen()
        _known = known = (time.monotonic() + TTL_S, Maintenance.objects.first())
    return known[1]


def sentence(now: Maintenance) -> str:
    """For who is refused."""
    why = f": {now.reason}" if now.reason else ""
    return f"All of this is read only since {now.since:%Y-%m-%d %H:%M} UTC, by {now.by}{why}. Try again later."


def refuse() -> None:
    """Raises ReadOnlyError while it is in force."""
    if now := current():
        raise ReadOnlyError(sentence(now))


def switch(on: bool, by: Caller, reason: str, source: Source) -> Maintenance | None:
    """From now on nobody writes, or all may again; nothing changes where it is so. Raises Refused INVALID."""
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
