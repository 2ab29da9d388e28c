"""Gives the threads of a process to requests so that one client cannot keep the others waiting.

It is used on the event loop only and needs no lock.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sized
from contextlib import asynccontextmanager

from cyborgweb.http.refusals import RefusedRequestError


class FairQueue:
    """Distributes `threads` threads. At most `places` further requests wait for a thread.

    A free thread goes to the clients that wait in turn, whatever number of requests each of them has. One client can
    have all threads but `kept_free` of them. If all places are taken, the client with the most waiting requests must
    give way to clients with fewer.

    Clients that are known only by their address (`address …`) could be one attacker with many addresses. So they give
    way to projects, whose tokens were accepted: together they keep at most half of the places if projects need the
    others, and if `kept_free` is not 0, they never have the last thread, and one address leaves one to other addresses.
    """

    def __init__(self, threads: int, places: int, kept_free: int = 0) -> None:
        self._threads, self._places, self._max_of_client = threads, places, threads - kept_free
        self._max_of_addresses = threads - 1 if kept_free else threads
        self._max_of_address = min(self._max_of_client, max(1, threads - 2)) if kept_free else threads
        self._places_of_addresses = places - places // 2
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """For each client that waits, its requests, the oldest first. The first client is the next one to get a thread
        if it may have one more."""
        self.running_requests = self.waiting_requests = 0

    def check(self, client: str, is_body_complete: bool) -> None:
        """Raise RefusedRequestError 503 if a further request of this client can neither run nor wait."""
        if self._can_run(client) or self.waiting_requests < self._places or self._find_victim(client):
            return
        own, largest = self._count_waiting(client), self._count_waiting(_find_largest(self._waiting))
        is_alone = self.running_requests + self.waiting_requests == self._running[client] + own
        if own <= 1 or own < largest or is_alone:
            raise RefusedRequestError(503, is_body_complete)
        raise RefusedRequestError(503, is_body_complete, over_share=client)

    @asynccontextmanager
    async def take_thread(self, client: str, is_body_complete: bool = True) -> AsyncIterator[None]:
        """Wait until a thread is free for this client, and count it as taken until the block ends.

        Raises RefusedRequestError 503, with `is_body_complete`, if no place is free, and also later, if the place is
        needed for another client.
        """
        self.check(client, is_body_complete)
        if self._can_run(client):
            self._start(client)
        else:
            await self._wait_for_turn(client, is_body_complete)
        try:
            yield
        finally:
            self._end(client)

    def _can_run(self, client: str) -> bool:
        """Return whether a thread is free that this client may have."""
        if self.running_requests >= self._threads:
            return False
        if not _is_address(client):
            return self._running[client] < self._max_of_client
        of_addresses = sum(count for other, count in self._running.items() if _is_address(other))
        return of_addresses < self._max_of_addresses and self._running[client] < self._max_of_address

    def _count_waiting(self, client: str) -> int:
        """Return how many requests of this client wait."""
        return len(self._waiting.get(client, ()))

    def _find_victim(self, client: str) -> str:
        """Return the client whose newest waiting request must give its place to one of `client`, '' if there is none.

        This is the client with the most waiting requests, if it has more than `client` would have. If addresses have
        more than their places, a project takes one from the largest of them in any case, and an address can take one
        only from another address.
        """
        addresses = {other: turns for other, turns in self._waiting.items() if _is_address(other)}
        of_addresses = sum(map(len, addresses.values()))
        if not _is_address(client) and of_addresses > self._places_of_addresses:
            return _find_largest(addresses)
        is_address_over = _is_address(client) and of_addresses >= self._places_of_addresses
        largest = _find_largest(addresses if is_address_over else self._waiting)
        return largest if self._count_waiting(client) + 1 < self._count_waiting(largest) else ""

    async def _wait_for_turn(self, client: str, is_body_complete: bool) -> None:
        """Wait until `_end` has given a thread to this request. If all places are taken, take that of the newest
        request of the client that `_find_victim` returns; it is refused.
        """
        if self.waiting_requests >= self._places:
            victim = self._find_victim(client)
            over_share = victim if self._count_waiting(victim) > 1 else ""
            evicted = self._pop_newest(victim)
            if not evicted.done():
                evicted.set_exception(RefusedRequestError(503, over_share=over_share))
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self.waiting_requests += 1
        try:
            await turn
        except RefusedRequestError as refused:
            refused.is_body_complete = is_body_complete
            raise
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.done() and turn.exception() is None:
                self._end(client)
            elif turn in self._waiting.get(client, ()):
                self._remove_waiting(client, turn)
            raise

    def _pop_oldest(self, client: str) -> asyncio.Future[None]:
        """Remove and return the oldest waiting request of a client. The client then waits behind all others."""
        turns = self._waiting.pop(client)
        turn = turns.popleft()
        if turns:
            self._waiting[client] = turns
        self.waiting_requests -= 1
        return turn

    def _pop_newest(self, client: str) -> asyncio.Future[None]:
        """Remove and return the newest waiting request of a client. The client's turn stays the same."""
        turn = self._waiting[client].pop()
        if not self._waiting[client]:
            del self._waiting[client]
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
            turn = self._pop_oldest(waiting)
            if not turn.done():  # a request that was cancelled is done
                self._start(waiting)
                turn.set_result(None)


def _is_address(client: str) -> bool:
    """Return whether this client is known only by its address."""
    return client.startswith("address ")


def _find_largest(waiting: Mapping[str, Sized]) -> str:
    """Return the client with the most waiting requests, '' if none waits."""
    return max(waiting, key=lambda client: len(waiting[client]), default="")
