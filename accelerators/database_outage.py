"""Log lines about a database that does not answer: one a minute for the whole process, and one when it answers again.

An outage is noticed by many at once: every request, every agent that connects, every thread that tries again. All of
them call `log_outage`, so that the log says it once, and says what to do.
"""

from __future__ import annotations

import logging
import threading
import time

log = logging.getLogger(__name__)

REPEAT_S = 60.0
"""An outage that goes on is logged again after so many seconds."""


class OutageLog:
    """Decides what is logged. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged_at = float("-inf")
        self._began_at: float | None = None

    def log_outage(self, reason: object) -> None:
        """Log that PostgreSQL does not answer, unless that was logged within `REPEAT_S`."""
        now = time.monotonic()
        with self._lock:
            if self._logged_at + REPEAT_S > now:
                return
            self._logged_at = now
            self._began_at = now if self._began_at is None else self._began_at
        text = str(reason).strip() or type(reason).__name__
        log.warning(
            "PostgreSQL does not answer (%s). Agents and API clients are told to come back; what was acknowledged is"
            " not lost. Check that PostgreSQL runs and that CYBORG_DATABASE_URL leads to it. While it does not answer,"
            " this line is repeated every %.0f s.",
            text.splitlines()[0],
            REPEAT_S,
        )

    def log_recovery(self) -> None:
        """Log that PostgreSQL answers, if it was logged that it does not. Costs nothing otherwise."""
        if self._began_at is None:
            return
        with self._lock:
            began, self._began_at = self._began_at, None
        if began is not None:
            log.warning("PostgreSQL answers again, after %.0f s.", time.monotonic() - began)


_process = OutageLog()
log_outage = _process.log_outage
log_recovery = _process.log_recovery
