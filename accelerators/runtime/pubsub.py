"""The hub: one process tells all others that a topic has news. Names and ids only; what is new stands in the database.

Called by writers after their commit (`ring`) and by whoever keeps something in memory (`subscribe`). A ring may be lost
(the listener was away): a subscriber is told `None` after every (re)connection, and must not trust a silence for ever.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

import psycopg
from django.db import connection

from accelerators import database_outage

log = logging.getLogger(__name__)

CHANNEL = "cyborg_hub"
RETRY_S = 1.0
MAX_PAYLOAD = 7000
"""PostgreSQL carries 8000 bytes."""

Heard = Callable[[str | None], None]
_subscribers: dict[str, list[Heard]] = {}
_listening: int | None = None
_lock = threading.Lock()


def ring(topic: str, detail: str = "") -> None:
    """Wake the subscribers of `topic` in every process, this one at once. Call it after the commit.

    In a transaction of its own: a NOTIFY takes a lock that would serialise the commits of large ones.
    """
    _tell(topic, detail)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_notify(%s, %s)", [CHANNEL, f"{os.getpid()} {topic} {detail}"[:MAX_PAYLOAD]])


def subscribe(topic: str, heard: Heard) -> None:
    """Call `heard(detail)` in the listener's thread at every ring of `topic`, `heard(None)` when rings may be lost."""
    with _lock:
        _subscribers.setdefault(topic, []).append(heard)


def listen() -> None:
    """Start this process's listener unless it runs. A fork has none of its parent's threads, so it starts its own."""
    global _listening
    with _lock:
        if _listening == os.getpid():
            return
        _listening = os.getpid()
    threading.Thread(target=_run, name="hub", daemon=True).start()


def _run() -> None:
    while True:
        try:
            _follow()
        except psycopg.Error as error:
            log.info("the hub's connection is gone (%s): connecting again", str(error).strip() or type(error).__name__)
        time.sleep(RETRY_S)


def _follow() -> None:
    options = {"connect_timeout": 5} | connection.get_connection_params() | {"autocommit": True}
    try:
        own = psycopg.connect(**options)
    except psycopg.Error as error:
        database_outage.log_outage(error)
        return
    with own:
        own.execute(f"LISTEN {CHANNEL}")
        database_outage.log_recovery()
        for topic in list(_subscribers):
            _tell(topic, None)
        for notice in own.notifies():
            sender, topic, detail = notice.payload.split(" ", 2)
            if sender != str(os.getpid()):
                _tell(topic, detail)


def _tell(topic: str, detail: str | None) -> None:
    for heard in _subscribers.get(topic, []):
        heard(detail)
