"""The database's clock, for times that are stored or compared with stored times.

The clocks of the machines of one installation may differ by seconds or hours; all of them use one database. In SQL use
`Now()` or `clock_timestamp()`. Python code calls this module. The difference between the database's clock and this
process's monotonic clock is measured at the first call and every REFRESH_S seconds, with one statement.
"""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime

from django.db import connection

REFRESH_S = 60.0
"""Seconds after which the difference is measured again: the database's clock may be set, or another server takes over.
"""

_lock = threading.Lock()
_difference_s: float | None = None
"""Database's clock (UNIX time) less this process's monotonic clock; None until it is measured."""
_measured_at = float("-inf")


def now() -> datetime:
    """Return the present time of the database's clock, in UTC.

    Sends a statement if the last measurement is older than REFRESH_S; then it raises database errors.
    """
    return datetime.fromtimestamp(timestamp(), UTC)


def timestamp() -> float:
    """Return the present time of the database's clock as UNIX time; costs what `now` costs."""
    refresh()
    return estimate_timestamp()


def estimate_timestamp() -> float:
    """Return the present UNIX time by the last measurement, without a statement: for the event loop.

    Before the first measurement of this process it is the time of this machine's clock.
    """
    return time.time() if _difference_s is None else _difference_s + time.monotonic()


def note_timestamp(unix_time: float) -> None:
    """Note the database's time that another statement has just returned; it counts as a measurement."""
    global _difference_s, _measured_at
    with _lock:
        _measured_at = time.monotonic()
        _difference_s = unix_time - _measured_at


def refresh() -> None:
    """Measure the difference if the last measurement is older than REFRESH_S. Raises database errors."""
    global _difference_s, _measured_at
    if time.monotonic() - _measured_at < REFRESH_S:
        return
    with connection.cursor() as cursor:
        before = time.monotonic()
        cursor.execute("SELECT extract(epoch FROM pg_catalog.clock_timestamp())::pg_catalog.float8")
        (database_time,) = cursor.fetchone()
        after = time.monotonic()
    with _lock:
        _difference_s, _measured_at = database_time - (before + after) / 2, after
