"""Log database outages without repetition: one line a minute per process, and one line when PostgreSQL answers again.

Many callers notice an outage at the same time: every request, every agent that connects, every thread that retries.
All of them call `log_outage`, so that the log reports the outage once and tells the operator what to do.
"""

from __future__ import annotations

import logging
import threading
import time

log = logging.getLogger(__name__)

REPEAT_S = 60.0
"""Seconds after which an outage that continues is logged again."""


class OutageLog:
    """Throttle the log lines about one database outage. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged_at = float("-inf")
        self._began_at: float | None = None

    def log_outage(self, reason: object) -> None:
        """Log a warning that PostgreSQL does not answer, unless one was logged within the last `REPEAT_S` seconds.

        `reason` is the error or a text; only its first line is logged.
        """
        now = time.monotonic()
        with self._lock:
            if self._logged_at + REPEAT_S > now:
                return
            self._logged_at = now
            self._began_at = now if self._began_at is None else self._began_at
        text = str(reason).strip() or type(reason).__name__
        log.warning(
            "PostgreSQL does not answer (%s). Agents and API clients are asked to retry later; no acknowledged data"
            " is lost. Check that PostgreSQL runs and that CYBORG_DATABASE_URL points to it. This line is repeated"
            " every %.0f s until PostgreSQL answers.",
            text.splitlines()[0],
            REPEAT_S,
        )

    def log_recovery(self) -> None:
        """Log that PostgreSQL answers again, if an outage was logged. Otherwise do nothing, without taking the lock."""
        if self._began_at is None:
            return
        with self._lock:
            began, self._began_at = self._began_at, None
        if began is not None:
            log.warning("PostgreSQL answers again, after %.0f s.", time.monotonic() - began)


_process_log = OutageLog()
log_outage = _process_log.log_outage
log_recovery = _process_log.log_recovery
