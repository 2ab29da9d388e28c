"""Call one backend: one question at a time, in a thread of its own, with a deadline.

A read of a stuck device may never return from the kernel, and a thread that waits in it cannot be killed. Therefore a
backend has at most one thread: while its last question has not returned, the backend is not asked again. After a late
answer the backend is suspended. Each further late answer doubles the time of the suspension. The other backends are not
affected.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from drivers.errors import Busy, Failed
from drivers.isolation.thread_call import ThreadCall

T = TypeVar("T")

FIRST_PAUSE_S, MAX_PAUSE_S = 2.0, 600.0
"""Seconds for which a backend is not asked after a late answer. Each late answer doubles the pause, from the first
number up to the second; an answer in time sets it back to the first."""
MIN_TIMEOUT_S = 0.05
"""Minimum time-out of a question, in seconds. With less time a question is not asked: a late answer would not show that
the backend is slow."""


class BackendCaller:
    """Asks one backend its questions, one at a time, and suspends it after a late answer. Safe to use from several
    threads.

    `name` is the backend's name in the settings. `suspension` says why the backend is not asked and when it is asked
    again; it is '' while the backend answers in time. The text does not change during a suspension, because each change
    would cause a new report.
    """

    def __init__(self, name: str) -> None:
        self.name, self.suspension = name, ""
        self._lock = threading.Lock()
        self._last_call: ThreadCall[Any] | None = None
        self._pause_s, self._next_attempt_at = FIRST_PAUSE_S, 0.0

    def call(self, question: str, function: Callable[[], T], timeout_s: float) -> T:
        """Ask the backend and return its answer, which must arrive within `timeout_s` seconds.

        If another question is under way, waiting for its end takes a part of this time. Raises Failed, without asking,
        while the backend is suspended; Failed for a late answer (also to the question before), which suspends the
        backend; Failed if no thread can be started; Busy if `timeout_s` is less than MIN_TIMEOUT_S, or if another
        thread's call takes all of it; and the errors of `ThreadCall.get_result`.
        """
        end = time.monotonic() + timeout_s
        if timeout_s < MIN_TIMEOUT_S:
            raise Busy(f"backend {self.name}: no time was left for it, because other backends were too slow")
        if not self._lock.acquire(timeout=timeout_s):
            raise Busy(f"backend {self.name}: another question did not end within {timeout_s:.1f} s")
        try:
            last_call = self._last_call
            if self.suspension and (time.monotonic() < self._next_attempt_at or (last_call and last_call.is_alive())):
                raise self._make_suspension_error()
            if last_call and not last_call.has_ended_within(end - time.monotonic()):
                raise self._suspend(last_call.question, timeout_s)
            call = self._start_call(question, function)
            if not call.has_ended_within(end - time.monotonic()):
                raise self._suspend(question, timeout_s)
            self.suspension, self._pause_s = "", FIRST_PAUSE_S
        finally:
            self._lock.release()
        return call.get_result()

    def call_if_idle(self, question: str, function: Callable[[], T], timeout_s: float) -> T:
        """Ask a question whose answer is not important, such as the load, and return its answer.

        This method does not wait for other questions, and a late answer does not suspend the backend, so that a backend
        does not lose its devices because its load is read slowly. Only if this question still has not returned when a
        later `call` has waited for it in vain, that `call` suspends the backend. Raises Busy while another question has
        not returned; Failed while the backend is suspended, if the answer does not arrive within `timeout_s` seconds,
        or if no thread can be started; and the errors of `ThreadCall.get_result`.
        """
        if not self._lock.acquire(blocking=False):
            raise Busy(f"backend {self.name}: another question has not returned")
        try:
            if self.suspension:
                raise self._make_suspension_error()
            if self._last_call and self._last_call.is_alive():
                raise Busy(f"backend {self.name}: the question {self._last_call.question} has not returned")
            call = self._start_call(question, function)
            if not call.has_ended_within(timeout_s):
                raise Failed(f"backend {self.name}: the question {question} did not return within {timeout_s:.1f} s")
        finally:
            self._lock.release()
        return call.get_result()

    def release(self) -> None:
        """End the pause of a suspended backend, and start with the shortest pause again. Waits for the end of another
        call.

        The backend is asked with the next call, if its last question has returned by then.
        """
        with self._lock:
            self._pause_s, self._next_attempt_at = FIRST_PAUSE_S, 0.0

    def _start_call(self, question: str, function: Callable[[], T]) -> ThreadCall[T]:
        """Start a thread that asks the question; return the call. The lock must be held, and the last question must
        have ended.

        Raises Failed if no thread can be started.
        """
        call = ThreadCall(question, function)
        try:
            call.start()
        except RuntimeError as error:
            raise Failed(f"backend {self.name}: {error}") from None
        self._last_call = call
        return call

    def _suspend(self, question: str, timeout_s: float) -> Failed:
        """Suspend the backend because the answer to `question` is late, and double the next pause; return the error to
        raise.

        The lock must be held. `timeout_s` is for the text only.
        """
        now = datetime.now(UTC)
        next_attempt = now + timedelta(seconds=self._pause_s)
        self._next_attempt_at = time.monotonic() + self._pause_s
        self.suspension = (
            f"it did not answer the question {question} within {timeout_s:.1f} s (its share of"
            f" CYBORG_DRIVER_DEADLINE_S) at {now:%Y-%m-%d %H:%M:%S} UTC: is a device stuck? It is not asked"
            f" again before {next_attempt:%Y-%m-%d %H:%M:%S} UTC (or a rescan), nor before that question has returned;"
            " the other backends are not affected"
        )
        self._pause_s = min(self._pause_s * 2, MAX_PAUSE_S)
        return self._make_suspension_error()

    def _make_suspension_error(self) -> Failed:
        """Return the error which says why the backend is suspended, and until when. It is not raised here."""
        return Failed(f"backend {self.name}: {self.suspension}")
