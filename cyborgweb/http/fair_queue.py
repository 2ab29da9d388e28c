"""Gives the threads of a process to requests so that one client cannot keep the others waiting.

It is used on the event loop only and needs no lock.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cyborgweb.http.refusals import RefusedRequestError


class FairQueue:
    """Distributes `threads` threads. At most `places` further requests wait for a thread.

    A free thread goes to the clients that wait in turn, whatever number of requests each of them has. One client can
    have all threads but `kept_free` of them. If all places are taken, the client with the most waiting requests must
    give way to clients with fewer.
    """

    def __init__(self, threads: int, places: int, kept_free: int = 0) -> None:
        self._threads, self._places, self._max_of_client = threads, places, threads - kept_free
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """For each client that waits, its requests, the oldest first. The first client is the next one to get a thread
        if it may have one more."""
        self.running_requests = self.waiting_requests = 0

    def check(self, client: str, is_body_complete: bool) -> None:
        """Raise RefusedRequestError 503 if a further request of this client can neither run nor wait."""
        if self._can_run(client) or self.waiting_requests < self._places:
            return
        own, largest = self._count_waiting(client), self._count_waiting(self._find_largest_client())
        if own + 1 < largest:
            return
        is_alone = self.running_requests + self.waiting_requests == self._running[client] + own
        if own < largest or is_alone:
            raise RefusedRequestError(503, is_body_complete)
        raise RefusedRequestError(503, is_body_complete, over_share=client)

    @asynccontextmanager
    async def take_thread(self, client: str) -> AsyncIterator[None]:
        """Wait until a thread is free for this client, and count it as taken until the block ends.

        The body of the request must be complete. Raises RefusedRequestError 503 if no place is free, and also later, if
        the place is needed for a client that has fewer requests.
        """
        self.check(client, is_body_complete=True)
        if self._can_run(client):
            self._start(client)
        else:
            await self._wait_for_turn(client)
        try:
            yield
        finally:
            self._end(client)

    def _can_run(self, client: str) -> bool:
        """Return whether a thread is free that this client may have."""
        return self.running_requests < self._threads and self._running[client] < self._max_of_client

    def _count_waiting(self, client: str) -> int:
        """Return how many requests of this client wait."""
        return len(self._waiting.get(client, ()))

    def _find_largest_client(self) -> str:
        """Return the client with the most waiting requests, '' if none waits."""
        return max(self._waiting, key=lambda client: len(self._waiting[client]), default="")

    async def _wait_for_turn(self, client: str) -> None:
        """Wait until `_end` has given a thread to this request. If all places are taken, take one from the client with
        the most waiting requests, whose newest request is refused.
        """
        if self.waiting_requests >= self._places:
            largest = self._find_largest_client()
            refused = self._pop_waiting(largest, newest=True)
            if not refused.done():
                refused.set_exception(RefusedRequestError(503, True, over_share=largest))
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self.waiting_requests += 1
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.done() and turn.exception() is None:
                self._end(client)
            elif turn in self._waiting.get(client, ()):
                self._remove_waiting(client, turn)
            raise

    def _pop_waiting(self, client: str, newest: bool = False) -> asyncio.Future[None]:
        """Remove and return the oldest or newest waiting request of a client, which becomes the last in turn."""
        turns = self._waiting.pop(client)
        turn = turns.pop() if newest else turns.popleft()
        if turns:
            self._waiting[client] = turns
        self.waiting_requests -= 1
        return turn

    def _remove_waiting(self, client: str, turn: asyncio.Future[None]) -> None:
        """Remove a request that was cancelled while it waited."""
        self._waiting[client].remove(turn)
        if not self._waiting[client]:
            del self._waiting[client]
        self.waiting_requests -= 1

    def _start(self, client: str) -> None:
        """Count one thread as taken by this client."""
        self.running_requests += 1
        self._running[client] += 1

    def _end(self, client: str) -> None:
        """Count one thread of this client as free, and give it to the next client in turn that may have one more."""
        self.running_requests -= 1
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        while waiting := next((other for other in self._waiting if self._can_run(other)), None):
            turn = self._pop_waiting(waiting)
            if not turn.done():  # a request that was cancelled is done
                self._start(waiting)
                turn.set_result(None)
