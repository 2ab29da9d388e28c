"""Note which HTTP clients are slow, by their address, so that the console can name them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from django.db import Error, connection

from accelerators import slow_neighbours

log = logging.getLogger(__name__)

SLOW_REQUESTS = 10
"""A client is shown as slow if it missed this many deadlines of a minute, or more. People and tools behind a bad line
miss a few."""
SENTENCE = (
    "missed {count} deadlines: it sent the headers or bodies of requests too slowly, or read answers too slowly, and"
    " its connections were ended. It delays nobody. Find out who uses this address; behind a proxy it is that of the"
    " proxy."
)

RECORD_INTERVAL_S = 5.0
"""Seconds between two attempts to record slow clients."""


def note_slow_client(client: Any) -> None:
    """Count that a client has missed a deadline. `client` is the ASGI scope's: (address, port), or None."""
    if client:
        slow_neighbours.note(f"The client {client[0]}", SENTENCE, needed=SLOW_REQUESTS, is_client=True)


def start_recording(interval_s: float = RECORD_INTERVAL_S) -> Callable[[], None]:
    """Record slow clients as events every `interval_s` seconds, in a thread that ends with the process. Return a
    function that ends it before, and waits for it.

    Processes without a gateway need this; a gateway records them itself.
    """
    stopped = threading.Event()

    def run() -> None:
        """Record until the thread is stopped. A database error is logged; the next attempt records the clients."""
        while not stopped.wait(interval_s):
            try:
                slow_neighbours.record()
            except Error:
                log.exception("slow clients cannot be recorded as events")
            finally:
                connection.close()

    thread = threading.Thread(target=run, name="slow-clients", daemon=True)
    thread.start()

    def stop() -> None:
        """End the thread."""
        stopped.set()
        thread.join()

    return stop
