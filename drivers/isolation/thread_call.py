"""Call a function that reads hardware in a thread, and wait for its result only as long as wanted.

A read of a stuck device may never return from the kernel, and a thread that waits in it cannot be killed. A driver's
process uses this instead of `drivers.isolation.threads`, because it has no event loop and stays small without asyncio.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from drivers.errors import DriverError, Failed

T = TypeVar("T")


class ThreadCall(threading.Thread, Generic[T]):
    """One question, in a daemon thread. When the thread has ended, `get_result` returns or raises the outcome.

    `question` is the name of the question in messages. `function` is called in the thread and returns the answer.
    """

    def __init__(self, question: str, function: Callable[[], T]) -> None:
        super().__init__(daemon=True)
        self.question, self._function = question, function
        self._results: list[T] = []
        self._error: DriverError | None = None

    def run(self) -> None:
        """Call the function, and keep its result or its error; nothing is raised. Call `start`, not this method."""
        try:
            self._results.append(self._function())
        except DriverError as error:
            self._error = error if str(error) else type(error)("it gave no reason")
        except BaseException as error:  # noqa: BLE001 - an error in a thread must not affect others
            self._error = Failed(f"it raised {type(error).__name__}: {error}")

    def has_ended_within(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds until the thread has ended; return whether it has ended."""
        self.join(max(0.0, timeout_s))
        return not self.is_alive()

    def get_result(self) -> T:
        """Return what the function returned. Call this once only, after the thread has ended: the result is not kept.

        Raises the DriverError that the function raised, and Failed for any other error of the function.
        """
        if self._error is not None:
            raise self._error
        return self._results.pop()  # the last question is kept, but not its answer, which may be large
