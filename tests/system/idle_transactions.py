"""Watch PostgreSQL for transactions of the product that stay open while they run no statement."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from tests.system.product import Product

IDLE_S = 2.5
"""Longer than any computation between two statements of a transaction, shorter than the answer of a slow service."""
INTERVAL_S = 0.2
IDLE = """
SELECT query FROM pg_stat_activity WHERE datname = 'cyborg' AND state = 'idle in transaction'
  AND state_change < clock_timestamp() - make_interval(secs => %s)
"""


@contextmanager
def watch_for_idle_transactions(product: Product) -> Iterator[set[str]]:
    """Yield a set to which a thread adds the last statement of each transaction that was idle for `IDLE_S`.

    The thread adds its own errors, too, so an empty set means that every look succeeded.
    """
    found: set[str] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(INTERVAL_S):
            try:
                found.update(query for (query,) in product.rows(IDLE, IDLE_S))
            except psycopg.Error as error:
                found.add(f"the watch failed: {error}")

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
