"""Run work beside a test, in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread


@contextmanager
def running_beside(work: Callable[[Event], object]) -> Iterator[None]:
    """Run `work` in a thread while the block runs; its argument is the event that is set when it has to end."""
    over = Event()
    thread = Thread(target=work, args=(over,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)
