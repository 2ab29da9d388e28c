"""Keep the gateway's threads from waiting for rows that another transaction has locked.

All agents wait for the writer thread and for the thread that sends commands. So their database connections have a lock
timeout of a few milliseconds. Items that cannot be written because a row is locked are kept and tried again; all other
items are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

import psycopg
from django.db import DEFAULT_DB_ALIAS, OperationalError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from psycopg.errors import LockNotAvailable

LOCK_TIMEOUT_MS = 5
"""Milliseconds that a statement of these threads waits for a lock."""
MAX_LOCK_TIMEOUTS = 20
"""Maximum number of lock timeouts in one attempt to write many rows. The items that were not tried by then are tried
later."""

ItemT = TypeVar("ItemT")


class UnwrittenItems(NamedTuple, Generic[ItemT]):
    """The items that one attempt has not written: those that were not tried after MAX_LOCK_TIMEOUTS, and those whose
    row is locked.

    The next attempt begins with the untried ones. Otherwise it could use up its time for the same locked rows again.
    """

    untried: list[ItemT]
    locked: list[ItemT]


@contextmanager
def limiting_lock_waits() -> Iterator[None]:
    """Set the lock timeout on each database connection that this thread opens in the `with` block.

    The timeout is set by an SQL statement, because some connection poolers refuse parameters in the options of a
    connection.
    """
    of_this_thread = connections[DEFAULT_DB_ALIAS]

    def set_lock_timeout(connection: BaseDatabaseWrapper, **_: object) -> None:
        """Set the lock timeout if the new connection belongs to this thread."""
        if connection is of_this_thread:
            with connection.cursor() as cursor:
                cursor.execute(f"SET lock_timeout = {LOCK_TIMEOUT_MS}")

    connection_created.connect(set_lock_timeout, weak=False)
    try:
        yield
    finally:
        connection_created.disconnect(set_lock_timeout)


def is_lock_timeout(error: BaseException) -> bool:
    """Return whether an error of Django or psycopg says that a lock was not available in time."""
    return isinstance(error, LockNotAvailable) or isinstance(error.__cause__, LockNotAvailable)


@contextmanager
def suppressing_lock_timeouts() -> Iterator[None]:
    """End the `with` block silently if a lock is not available in time. For work that is done again soon anyway."""
    try:
        yield
    except (OperationalError, psycopg.OperationalError) as error:
        if not is_lock_timeout(error):
            raise


def write_unless_locked(items: list[ItemT], write: Callable[[list[ItemT]], object]) -> UnwrittenItems[ItemT]:
    """Write all items together; if a row is locked, write those whose rows are not. Return the items not written.

    `write` writes a list of items in one transaction. If a lock is not available, the list is halved until the items
    with locked rows are alone. After MAX_LOCK_TIMEOUTS the rest is returned without having been tried. Other errors are
    raised.
    """
    unwritten = UnwrittenItems[ItemT]([], [])
    parts, timeout_count = [items] if items else [], 0
    while parts:
        part = parts.pop()
        if timeout_count >= MAX_LOCK_TIMEOUTS:
            unwritten.untried.extend(part)
            continue
        with suppressing_lock_timeouts():
            write(part)
            continue
        timeout_count += 1
        middle = len(part) // 2
        if middle:
            parts += [part[middle:], part[:middle]]
        else:
            unwritten.locked.extend(part)
    return unwritten
