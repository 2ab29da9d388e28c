"""The read-only switch: while it is on, people and callers of both APIs can change nothing; agents and jobs go on.

The switch is on while the table `Maintenance` has its one row. `cyborgweb.auth.policy` checks it before every write of
an API, `cyborgweb.middleware.requests` before every write of the console. Both may have read it before it was switched
on. Therefore the transactions in which such a request writes check it again (`refuse_in_transaction`). It is switched
in the console and with `manage.py read_only`, which are both exempt from it, as is the link that ends mails
(`cyborgweb.pages.mail_links`).
"""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta

from django.db import OperationalError, connection, transaction
from psycopg.errors import LockNotAvailable

from accelerators import conductor
from accelerators.api.own.errors import READ_ONLY, ApiError
from accelerators.commands.command_queue import check_reason
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError, WritesRefusedError
from accelerators.domain.generations import refuse_if_changed
from accelerators.domain.states import EventSource
from accelerators.runtime import pubsub
from cyborgweb.errors import CyborgwebError
from cyborgweb.models import Maintenance

TOPIC = "maintenance"
TTL_S = 5.0
"""Seconds for which a process caches the row. A lost notification of a change goes unnoticed for this long at most."""
RETRY_S = 30
"""The Retry-After of a refusal, in seconds."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SWITCH_LOCK_ID = 0x72656164
"""Key of the advisory lock that serializes switches: without the row, there is nothing else to lock."""
SWITCH_TIMEOUT_S, WRITE_TIMEOUT_S = 5.0, 7.0
"""Seconds that a switch waits for writes that have begun before it, and a write for a switch. All writes that begin
while a switch waits wait behind it; therefore both give up, first the switch."""
LOCK_AND_READ_SWITCH = """
SET LOCAL lock_timeout = %s; SELECT pg_advisory_xact_lock_shared(%s); SET LOCAL lock_timeout TO DEFAULT;
SELECT id FROM cyborgweb_maintenance
"""
"""Several statements, so that the last one sees what was committed while the second one waited."""
_cached: tuple[float, Maintenance | None] | None = None
_drop_count = 0
_cache_lock = threading.Lock()
"""Guards `_cached` and `_drop_count`, which counts how often `_cached` was dropped."""


class ReadOnlyError(CyborgwebError, WritesRefusedError, ApiError):
    """503: everything is read only now. `wait` is the Retry-After in seconds."""

    wait = RETRY_S

    def __init__(self, message: str) -> None:
        super().__init__(503, message, READ_ONLY)


def get_maintenance() -> Maintenance | None:
    """Return the row of the read-only switch while everything is read only, otherwise None.

    The result is cached in this process for TTL_S seconds, or until a change is notified; so it costs one statement
    every few seconds. A row that was read before a notified change is not cached after it.
    """
    global _cached
    with _cache_lock:
        cached, drop_count = _cached, _drop_count
    if cached is None or time.monotonic() > cached[0]:
        pubsub.start_listener()
        cached = (time.monotonic() + TTL_S, Maintenance.objects.first())
        with _cache_lock:
            if _drop_count == drop_count:
                _cached = cached
    return cached[1]


def describe_maintenance(maintenance: Maintenance) -> str:
    """Return the message for a caller whose change is refused: since when, by whom and why everything is read only."""
    why = f": {maintenance.reason}" if maintenance.reason else ""
    since = f"{maintenance.since:%Y-%m-%d %H:%M} UTC"
    return f"All of this is read only since {since}, by {maintenance.by}{why}. Try again later."


def refuse_if_read_only() -> None:
    """Raise ReadOnlyError (503) with the reason while everything is read only; otherwise do nothing."""
    if maintenance := get_maintenance():
        raise ReadOnlyError(describe_maintenance(maintenance))


def refuse_in_transaction() -> None:
    """Raise ReadOnlyError while everything is read only, and hold off the switch until the present transaction ends.

    So nothing that a person or a caller has begun is committed after the switch. It is also raised if a switch has
    waited for WRITE_TIMEOUT_S. One round trip to the database.
    """
    with connection.cursor() as cursor:
        try:
            cursor.execute(LOCK_AND_READ_SWITCH, [int(WRITE_TIMEOUT_S * 1000), _SWITCH_LOCK_ID])
        except OperationalError as error:
            if not isinstance(error.__cause__, LockNotAvailable):
                raise
            raise ReadOnlyError("Read-only mode is being switched on or off: try again.") from None
        while cursor.nextset():
            pass
        is_on = cursor.fetchone() is not None
    if is_on:
        _drop_cached(None)  # this process has not noticed it yet
        refuse_if_read_only()


def compute_generation(maintenance: Maintenance | None) -> int:
    """Return the generation of the switch: 0 while it is off, otherwise the microsecond at which it was switched on.

    While the switch is off, no row is stored, so that no counter can be kept.
    """
    return (maintenance.since - _EPOCH) // timedelta(microseconds=1) if maintenance else 0


def switch_read_only(
    on: bool, actor: Caller, reason: str, source: EventSource, *, generation: int | None = None
) -> Maintenance | None:
    """Make everything read only (`on`), or end that. Return the row that is now in force, None if changes are allowed.

    A change records an event in the same transaction and notifies all processes after the commit. If the switch is
    already in that position, nothing changes. Waits while another transaction switches, and until the transactions in
    which people and callers write have ended; later ones are refused. Raises RefusedError: INVALID if the reason is too
    long or contains NUL, UNAVAILABLE if it had to wait for SWITCH_TIMEOUT_S; ChangedMeanwhileError if its generation is
    not `generation`.
    """
    reason = check_reason(reason)
    with conductor.writing():
        _lock_switch()
        previous = Maintenance.objects.first()
        refuse_if_changed("The read-only switch", compute_generation(previous), generation)
        maintenance = previous
        if on and previous is None:
            maintenance = Maintenance.objects.create(pk=1, by=actor.name[:255], reason=reason)
            maintenance.refresh_from_db()
        elif previous and not on:
            maintenance = None
            previous.delete()
        if maintenance != previous:
            changes = {"read_only": [previous is not None, maintenance is not None]}
            action = "maintenance.begun" if maintenance else "maintenance.ended"
            conductor.record_event(action, source, actor.name, changes=changes, reason=reason)
            transaction.on_commit(_notify_processes)
    return maintenance


def _lock_switch() -> None:
    """Take the lock of the switch, which ends with the transaction; raise RefusedError UNAVAILABLE if another
    transaction keeps it for SWITCH_TIMEOUT_S."""
    try:
        with connection.cursor() as cursor:
            cursor.execute(f"SET LOCAL lock_timeout = {int(SWITCH_TIMEOUT_S * 1000)}")
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_SWITCH_LOCK_ID])
    except OperationalError as error:
        if not isinstance(error.__cause__, LockNotAvailable):
            raise
        text = "Read-only mode was not switched, because a change has been running for long: try again."
        raise RefusedError(RefusalReason.UNAVAILABLE, text) from None


def _notify_processes() -> None:
    """Notify all processes, so that they drop their cached row of the read-only switch."""
    pubsub.publish(TOPIC)


def _drop_cached(_detail: str | None) -> None:
    """Forget the cached row of the read-only switch, so that the next `get_maintenance` reads the table."""
    global _cached, _drop_count
    with _cache_lock:
        _cached, _drop_count = None, _drop_count + 1


pubsub.subscribe(TOPIC, _drop_cached)
