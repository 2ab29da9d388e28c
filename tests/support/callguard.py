"""Forbid calls to other machines while a transaction is open: a slow service would keep the locked rows locked.

The guard sees every connection and every HTTP request that Python makes over TCP (audit hook), also in threads that are
started while their starter has a transaction open. Connections to PostgreSQL are made by libpq and are not seen. The
models of other services that tests put in place of a session call `refuse_call_in_transaction` themselves.

Also installed in every process of the products of system tests: `tests/support/startup/sitecustomize.py`. There the
message goes to the log, too, in which `tests.system.product` looks for it.
"""

from __future__ import annotations

import concurrent.futures
import concurrent.futures.thread
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

MESSAGE = "a call to another service inside a transaction"
violations: list[AssertionError] = []
"""Violations since the last test ended, kept here in case product code catches the exception."""
_inherited = threading.local()
"""`transactions` of a thread: those that were open in the thread which started its work, and which waits for it."""
OpenTransaction = tuple[Any, Any]
"""A connection of Django, and one of its blocks `atomic`."""


class CallInTransactionError(AssertionError):
    """A call to another service was made while a transaction was open."""


def refuse_call_in_transaction(what: str) -> None:
    """Raise CallInTransactionError if this thread, or the thread that started its work, has a transaction open.

    The transaction that a test runs in does not count.
    """
    if _find_own_transactions() or any(atomic in conn.atomic_blocks for conn, atomic in _get_inherited()):
        violation = CallInTransactionError(f"{MESSAGE}: {what}")
        violations.append(violation)
        print(violation, file=sys.stderr, flush=True)
        raise violation


def install() -> None:
    """Watch this process from now on, until it ends."""
    sys.addaudithook(_watch_events)
    _carry_transactions_into_threads()


def _watch_events(event: str, args: tuple[Any, ...]) -> None:
    """Refuse TCP connections and HTTP requests inside a transaction; the hook of `sys.addaudithook`."""
    if event == "socket.connect" and args[0].family in (socket.AF_INET, socket.AF_INET6):
        refuse_call_in_transaction(f"connect to {args[1]}")
    elif event == "http.client.send":
        refuse_call_in_transaction(f"request to {args[0].host}")


def _find_own_transactions() -> list[OpenTransaction]:
    """Return the open transactions of this thread's connections; nothing before Django is loaded."""
    django_db = sys.modules.get("django.db")
    connections = getattr(django_db, "connections", None)
    return [
        (connection, atomic)
        for connection in (connections.all(initialized_only=True) if connections else ())
        for atomic in connection.atomic_blocks
        if not getattr(atomic, "_from_testcase", False)
    ]


def _get_inherited() -> list[OpenTransaction]:
    """Return the transactions that were open where this thread's work was started."""
    found: list[OpenTransaction] = getattr(_inherited, "transactions", [])
    return found


def _carry_transactions_into_threads() -> None:
    """Let the work that is given to a thread know the transactions of the thread that gives it."""
    submit, start = concurrent.futures.ThreadPoolExecutor.submit, threading.Thread.start

    def submit_work(pool: Any, work: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        return submit(pool, _wrap(work), *args, **options)

    def start_thread(thread: Any) -> None:
        # The worker of a pool outlives the transaction; its work brings its own.
        if getattr(thread, "_target", None) is not concurrent.futures.thread._worker:  # type: ignore[attr-defined]
            thread.run = _wrap(thread.run)
        start(thread)

    concurrent.futures.ThreadPoolExecutor.submit = submit_work  # type: ignore[method-assign]
    threading.Thread.start = start_thread  # type: ignore[method-assign]


def _wrap(work: Callable[..., Any]) -> Callable[..., Any]:
    """Return the work with this thread's open transactions; the same work if there are none."""
    transactions = _find_own_transactions() + _get_inherited()
    if not transactions:
        return work

    def run(*args: Any, **options: Any) -> Any:
        before, _inherited.transactions = _get_inherited(), transactions
        try:
            return work(*args, **options)
        finally:
            _inherited.transactions = before

    return run


def open_transaction_of_test() -> Any:
    """Return a block `atomic` that belongs to a test and not to the product: calls are allowed in it."""
    from django.db import transaction

    block: Any = transaction.atomic()
    block._from_testcase = True
    return block
