"""Records as events what this process counts in memory: slow neighbours, refused clients and refused binds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from django.db import Error, connection

from accelerators import refusal_counts, slow_neighbours

log = logging.getLogger(__name__)

RECORD_INTERVAL_S = 5.0
"""Seconds between two attempts to record."""


def record_counts() -> None:
    """Write the events that are due. If the database fails, this is only logged: the counts are kept, and a later call
    records them.
    """
    for record in (slow_neighbours.record, refusal_counts.record):
        try:
            record()
        except Error as error:
            log.warning("What %s has counted cannot be recorded now: %s", record.__module__, type(error).__name__)


def start_recording(interval_s: float = RECORD_INTERVAL_S) -> Callable[[], None]:
    """Record every `interval_s` seconds, in a thread that ends with the process. Return a function that ends it before,
    and waits for it.

    Every process that serves HTTP needs this. Workers record after each task.
    """
    stopped = threading.Event()

    def run() -> None:
        """Record until the thread is stopped. The connection is open only while something is recorded."""
        while not stopped.wait(interval_s):
            record_counts()
            connection.close()

    thread = threading.Thread(target=run, name="event-recorder", daemon=True)
    thread.start()

    def stop() -> None:
        """End the thread."""
        stopped.set()
        thread.join()

    return stop
