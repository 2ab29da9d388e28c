"""Call one backend: one question at a time, in a thread of its own, with a deadline.

A read of a stuck device may never return from the kernel, and such a thread cannot be killed. Therefore a backend has
at most one thread: while its last question has not returned, the backend is not asked again. After a late answer it is
suspended for a time that doubles with each further one. The other backends are not affected.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, TypeVar

from drivers.errors import Busy, DriverError, Failed

T = TypeVar("T")

FIRST_PAUSE_S, MAX_PAUSE_S = 2.0, 600.0
"""How long a backend is not asked after a late answer, in seconds. It doubles from the first to the longest pause, and
begins anew after an answer in time."""
MIN_TIMEOUT_S = 0.05
"""A question that has less time than this, in seconds, is not asked: its lateness would say nothing of its backend."""


class BackendCall(threading.Thread, Generic[T]):
    """One question to a backend, in a thread. When the thread has ended, `get_result` gives the outcome."""

    def __init__(self, question: str, function: Callable[[], T]) -> None:
        super().__init__(daemon=True)
        self.question, self._function = question, function
        self._results: list[T] = []
        self._error: DriverError | None = None

    def run(self) -> None:
        """Call the function and keep its result or the reason of its failure; raise nothing. threading calls it."""
        try:
            self._results.append(self._function())
        except DriverError as error:
            self._error = error if str(error) else type(error)("it gave no reason")
        except BaseException as error:  # noqa: BLE001 - an error of one backend must not affect the others
            self._error = Failed(f"it raised {type(error).__name__}: {error}")

    def has_ended_within(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds for the end of the thread; return whether it has ended."""
        self.join(max(0.0, timeout_s))
        return not self.is_alive()

    def get_result(self) -> T:
        """Return what the function returned, once. Raises the DriverError that it raised, and Failed for all others."""
        if self._error is not None:
            raise self._error
        return self._results.pop()  # the last question is kept, but not its answer, which may be large


class BackendCaller:
    """The lock, the last question and the health of one backend.

    `name` is the backend's name in the settings. `suspension` says why the backend is not asked and when the next
    attempt is; it is '' while the backend answers in time. The text does not change while it is suspended, because each
    change would cause a new report.
    """

    def __init__(self, name: str) -> None:
        self.name, self.suspension = name, ""
        self._lock = threading.Lock()
        self._last_call: BackendCall[Any] | None = None
        self._pause_s, self._next_attempt_at = FIRST_PAUSE_S, 0.0

    def call(self, question: str, function: Callable[[], T], timeout_s: float) -> T:
        """Ask the backend and return its answer, which must arrive within `timeout_s` seconds.

        A question that another thread has asked may take a part of this time. Raises Failed, without asking, while the
        backend is suspended; Failed for a late answer, which suspends the backend; Busy if `timeout_s` is less than
        MIN_TIMEOUT_S or another question takes all of it; and all errors of the question.
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

        It waits for nothing but its own answer, and a late answer does not suspend the backend, so that a backend never
        loses its devices because its load is read slowly. Raises Busy while another question has not returned, Failed
        while the backend is suspended and for a late answer, and all errors of the question.
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
        """End the pause: the backend is asked again as soon as its last question has returned."""
        with self._lock:
            self._pause_s, self._next_attempt_at = FIRST_PAUSE_S, 0.0

    def _start_call(self, question: str, function: Callable[[], T]) -> BackendCall[T]:
        """Start a question in a thread and return it; the lock must be held, and the last question must have ended.

        Raises Failed if no thread can be started.
        """
        call = BackendCall(question, function)
        try:
            call.start()
        except RuntimeError as error:
            raise Failed(f"backend {self.name}: {error}") from None
        self._last_call = call
        return call

    def _suspend(self, question: str, timeout_s: float) -> Failed:
        """Suspend the backend because an answer is late, and double the next pause; return the error to raise.

        The lock must be held.
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
        """Return, without raising it, the error which says that the backend is suspended, and until when."""
        return Failed(f"backend {self.name}: {self.suspension}")
