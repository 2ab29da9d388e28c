"""Watches PostgreSQL for transactions of the product that are open while nothing is asked of the database."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from tests.system.product import Product

IDLE_S = 2.5
"""Longer than any computation between two statements of a transaction takes, shorter than a slow service's answer."""
INTERVAL_S = 0.2
IDLE = """
SELECT query FROM pg_stat_activity WHERE datname = 'cyborg' AND state = 'idle in transaction'
  AND state_change < clock_timestamp() - make_interval(secs => %s)
"""


@contextmanager
def watch_for_idle_transactions(product: Product) -> Iterator[set[str]]:
    """Yield the last statements of transactions that were idle for `IDLE_S`; a thread adds to them until the end.

    It adds its own failures, too, so that an empty set means that it has looked.
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
