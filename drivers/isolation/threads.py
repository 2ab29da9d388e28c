"""Run blocking work in a daemon thread, and wait for its result for a limited time.

The work may hang in the kernel, for example while it reads a file of broken hardware. A daemon thread is never joined,
so it delays neither its caller nor the end of the process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable
from typing import Any, Generic, TypeVar

from drivers.errors import Failed, Timeout

T = TypeVar("T")
ItemT = TypeVar("ItemT", bound=Hashable)
READ_TIMEOUT_S = 10.0
"""Seconds for reading a few files of the host: even a read may wait for a lock in the kernel."""


def start_in_thread(work: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Run blocking `work` in a daemon thread, and return the future of its result or exception.

    The future cannot be cancelled. Raises Failed if no thread can be started.
    """
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # from now on it cannot be cancelled, so a late thread may set it

    def run() -> None:
        """Do the work, and set its result or exception."""
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - raised again where the result is awaited
            future.set_exception(error)
        else:
            future.set_result(result)

    try:
        threading.Thread(target=run, daemon=True).start()
    except RuntimeError as error:
        raise Failed(f"no thread can be started: {error}") from None
    return future


def call_in_parallel(
    call: Callable[[ItemT], T], items: Collection[ItemT], deadline_s: float, max_threads: int
) -> dict[ItemT, concurrent.futures.Future[T]]:
    """Make one call for each item, in their order, on at most `max_threads` daemon threads; return the futures by item.

    Returns when all have ended, or after `deadline_s`: then no other call is begun, and those under way go on alone.
    `is_ended` tells whether a future has a result or an exception. Raises Failed if no thread can be started.
    """
    futures: dict[ItemT, concurrent.futures.Future[T]] = {item: concurrent.futures.Future() for item in items}
    waiting = deque(futures.items())

    def make_calls() -> None:
        """Make the calls that wait, one after the other."""
        while waiting:
            try:
                item, future = waiting.popleft()
            except IndexError:  # another thread took the last one
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call(item)
            except BaseException as error:  # noqa: BLE001 - raised again where the result is read
                future.set_exception(error)
            else:
                future.set_result(result)

    for _ in range(min(max_threads, len(futures))):
        start_in_thread(make_calls)
    concurrent.futures.wait(futures.values(), max(0.0, deadline_s))
    for future in futures.values():
        future.cancel()
    return futures


def is_ended(future: concurrent.futures.Future[Any]) -> bool:
    """Return True if the call has ended, with a result or an exception."""
    return future.done() and not future.cancelled()


async def wait_for_result(future: concurrent.futures.Future[T], timeout_s: float) -> T:
    """Return the result of a future of `start_in_thread`. Raises Timeout, and the exception of its work.

    After a time-out the thread goes on alone; the future may be waited for again.
    """
    try:
        async with asyncio.timeout(timeout_s):  # wait_for of 3.11 loses a cancellation that comes with the result
            return await asyncio.wrap_future(future)
    except TimeoutError:
        raise Timeout(f"reading the host took more than {timeout_s:g} s") from None


async def run_in_thread(work: Callable[[], T], timeout_s: float = READ_TIMEOUT_S) -> T:
    """Run blocking `work` in a daemon thread and return its result.

    Raises Timeout, Failed if no thread can be started, and whatever `work` raises. After a time-out the thread goes on
    alone, and its result is dropped.
    """
    return await wait_for_result(start_in_thread(work), timeout_s)


class SharedWork(Generic[T]):
    """Runs the same blocking work for many threads, so that at most one thread at a time does it or hangs in it.

    A result is never older than the question: a caller that comes while the work runs waits until it has ended, and
    shares the next run with the others that wait. A call therefore sees every change that was made before it.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._latest: concurrent.futures.Future[T] | None = None
        """The last run that was begun."""

    def get_result(self, timeout_s: float = READ_TIMEOUT_S) -> T:
        """Return the result of a run that began after this call. Blocks its thread for at most `timeout_s` seconds.

        Raises Timeout, Failed if no thread can be started, and whatever the work raises.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            earlier = self._latest
        if earlier is not None:
            _wait_until_done(earlier, deadline, timeout_s)
        with self._lock:
            begun = self._latest
            if begun is None or begun is earlier:
                begun = self._latest = start_in_thread(self._work)
        _wait_until_done(begun, deadline, timeout_s)
        return begun.result()


def _wait_until_done(future: concurrent.futures.Future[T], deadline: float, timeout_s: float) -> None:
    """Wait until the future is done. Raises Timeout, which names `timeout_s`, at `deadline` on the monotonic clock."""
    if concurrent.futures.wait([future], max(deadline - time.monotonic(), 0)).not_done:
        raise Timeout(f"reading the host took more than {timeout_s:g} s")
