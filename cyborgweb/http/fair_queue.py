"""Decides which waiting request gets the next free thread, so that a client with many requests delays mostly itself."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from cyborgweb.http.refusals import RefusedRequestError


@dataclass(frozen=True)
class HttpCaller:
    """Who has sent a request, as far as it is known before authentication: its address, and its token or cookies.

    Both can be shared: all clients of a proxy have its address, and a tenant can have several tokens.
    """

    address: str
    credential: bytes


@dataclass(eq=False, slots=True)
class _WaitingRequest:
    """A request that waits for a thread. `may_begin` gives None, or raises RefusedRequestError."""

    caller: HttpCaller
    may_begin: asyncio.Future[None]
    is_body_complete: bool


def find_caller(scope: Any) -> HttpCaller:
    """Return the caller of a request by its ASGI scope."""
    headers = dict(reversed(scope["headers"]))
    client = scope.get("client")
    return HttpCaller(client[0] if client else "", headers.get(b"x-auth-token") or headers.get(b"cookie") or b"")


class FairQueue:
    """Lets at most `threads` requests run, and at most `max_waiting` wait. For the event loop only.

    A free thread goes to the address with the fewest running requests, among its callers to the one with the fewest,
    and of their requests to the oldest. Of four threads or more, one caller has three quarters at most: the others are
    kept for callers that then need not wait for the end of a long request. While the queue is full, the newest request
    of the caller with the most is refused, so that a caller with few requests is accepted.
    """

    def __init__(self, threads: int, max_waiting: int) -> None:
        self._threads, self._max_waiting = threads, max_waiting
        self._max_of_caller = threads - threads // 4
        self._waiting: list[_WaitingRequest] = []
        self._running: Counter[HttpCaller | str] = Counter()
        """The number of running requests of each caller, and of each address."""
        self._all: Counter[HttpCaller | str] = Counter()
        """The same for all requests, running and waiting."""
        self.running = 0

    @property
    def active(self) -> int:
        """The number of requests that run or wait."""
        return self.running + len(self._waiting)

    def has_place(self, caller: HttpCaller) -> bool:
        """Return whether a request of this caller would be accepted now."""
        if self._may_begin(caller) or len(self._waiting) < self._max_waiting:
            return True
        of_address, of_caller = self._weigh(caller)
        return any(self._weigh(one.caller) > (of_address + 1, of_caller + 1) for one in self._waiting)

    @asynccontextmanager
    async def wait_for_thread(self, caller: HttpCaller, *, is_body_complete: bool) -> AsyncIterator[None]:
        """Wait until a request of this caller may run, and count it as running during the block.

        Raises RefusedRequestError 503 if it may not wait; also later, if callers with fewer requests come.
        """
        self._count(self._all, caller, 1)
        try:
            if self._may_begin(caller):
                self._begin(caller)
            else:
                await self._wait(_WaitingRequest(caller, asyncio.get_running_loop().create_future(), is_body_complete))
            try:
                yield
            finally:
                self._end(caller)
        finally:
            self._count(self._all, caller, -1)

    async def _wait(self, request: _WaitingRequest) -> None:
        """Wait for a thread, which then counts as taken by this request."""
        self._waiting.append(request)
        if len(self._waiting) > self._max_waiting:
            self._refuse_one()
        try:
            await request.may_begin
        except asyncio.CancelledError:
            if request in self._waiting:
                self._waiting.remove(request)
            elif not request.may_begin.cancelled() and request.may_begin.exception() is None:
                self._end(request.caller)
            raise

    def _refuse_one(self) -> None:
        """Refuse the newest waiting request of the caller with the most requests."""
        worst = max(reversed(self._waiting), key=lambda one: self._weigh(one.caller))
        self._waiting.remove(worst)
        worst.may_begin.set_exception(RefusedRequestError(503, worst.is_body_complete))

    def _weigh(self, caller: HttpCaller) -> tuple[int, int]:
        """Return how many requests the caller's address, and the caller, have."""
        return self._all[caller.address], self._all[caller]

    def _may_begin(self, caller: HttpCaller) -> bool:
        """Return whether there is a thread that this caller may take now."""
        return self.running < self._threads and self._running[caller] < self._max_of_caller

    def _begin(self, caller: HttpCaller) -> None:
        self.running += 1
        self._count(self._running, caller, 1)

    def _end(self, caller: HttpCaller) -> None:
        """Count a request as ended, and let the next one begin."""
        self.running -= 1
        self._count(self._running, caller, -1)
        if ready := [one for one in self._waiting if self._may_begin(one.caller)]:
            request = min(ready, key=lambda one: (self._running[one.caller.address], self._running[one.caller]))
            self._waiting.remove(request)
            self._begin(request.caller)
            request.may_begin.set_result(None)

    def _count(self, counts: Counter[HttpCaller | str], caller: HttpCaller, change: int) -> None:
        """Count one request more or less of the caller and its address; forget those that have none."""
        for key in (caller, caller.address):
            counts[key] += change
            if not counts[key]:
                del counts[key]
