"""Publish and subscribe between all processes, by PostgreSQL's NOTIFY.

A notification says only that something of a topic has changed, with a name or an id as its detail; the data itself is
in the database. Writers call `publish` after their commit; code that keeps data in memory calls `subscribe`. A
notification may be lost while the listener is not connected. Therefore subscribers are called with None after every
(re)connection, and must also re-read their data from time to time.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

import psycopg
from django.db import connection

from accelerators.runtime import database_outage

log = logging.getLogger(__name__)

CHANNEL = "cyborg_hub"
RETRY_S = 1.0
MAX_PAYLOAD = 7000
"""Longest payload sent, in characters. PostgreSQL's limit is 8000 bytes."""

Subscriber = Callable[[str | None], None]
_subscribers: dict[str, list[Subscriber]] = {}
_listener_pid: int | None = None
_lock = threading.Lock()


def publish(topic: str, detail: str = "") -> None:
    """Notify the subscribers of `topic` in every process; those in this process are called before this returns.

    Call it after the commit of the changes, not in their transaction: NOTIFY takes a lock that would serialise the
    commits of large transactions. A text longer than MAX_PAYLOAD is cut. If a subscriber of this process raises, its
    exception is raised here, and the other processes are not notified.
    """
    _call_subscribers(topic, detail)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_notify(%s, %s)", [CHANNEL, f"{os.getpid()} {topic} {detail}"[:MAX_PAYLOAD]])


def subscribe(topic: str, subscriber: Subscriber) -> None:
    """Call `subscriber(detail)` at every notification of `topic`, and `subscriber(None)` if some may have been lost.

    The subscriber runs in the listener's thread, or for notifications of this process in the thread that calls
    `publish`. It must not raise: an exception would end the listener's thread. Call `start_listener` as well, to start
    the listener.
    """
    with _lock:
        _subscribers.setdefault(topic, []).append(subscriber)


def start_listener() -> None:
    """Start this process's listener thread unless it runs.

    A forked process starts its own, because a fork does not inherit its parent's threads.
    """
    global _listener_pid
    with _lock:
        if _listener_pid == os.getpid():
            return
        _listener_pid = os.getpid()
    threading.Thread(target=_listen_forever, name="hub", daemon=True).start()


def _listen_forever() -> None:
    """Listen for ever: connect again `RETRY_S` seconds after the connection was lost or refused. A loss is logged."""
    while True:
        try:
            _deliver_until_disconnected()
        except psycopg.Error as error:
            log.info(
                "The connection that listens for notifications is lost (%s); connecting again.",
                str(error).strip() or type(error).__name__,
            )
        except Exception:
            log.exception(
                "A subscriber failed on a notification. Connecting again; all subscribers read their data anew."
            )
        time.sleep(RETRY_S)


def _deliver_until_disconnected() -> None:
    """Connect, tell all subscribers that notifications may have been lost, then deliver those of other processes.

    Return if PostgreSQL does not answer (the outage is logged); raise psycopg.Error if the connection is lost later.
    """
    options = {"connect_timeout": 5} | connection.get_connection_params() | {"autocommit": True}
    try:
        listener = psycopg.connect(**options)
    except psycopg.Error as error:
        database_outage.log_outage(error)
        return
    with listener:
        listener.execute(f"LISTEN {CHANNEL}")
        database_outage.log_recovery()
        for topic in list(_subscribers):
            _call_subscribers(topic, None)
        for notice in listener.notifies():
            sender, _, message = notice.payload.partition(" ")
            topic, separator, detail = message.partition(" ")
            if not separator:
                log.warning("A notification on the channel %s is not ours and was ignored.", CHANNEL)
            elif sender != str(os.getpid()):
                _call_subscribers(topic, detail)


def _call_subscribers(topic: str, detail: str | None) -> None:
    """Call the subscribers of `topic` in this process, in the current thread; raise the exception of the first that
    fails.
    """
    for subscriber in _subscribers.get(topic, []):
        subscriber(detail)
