"""Test that a client with many requests cannot keep others waiting, neither for a thread nor for a place to wait."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborgweb.http.fair_queue import FairQueue
from cyborgweb.http.refusals import SHARE_MESSAGE, RefusedRequestError


class Requests:
    """Requests to one FairQueue. `order` are the clients in the order in which they got a thread."""

    def __init__(self, threads: int, places: int, kept_free: int = 0) -> None:
        self.queue = FairQueue(threads, places, kept_free)
        self.order: list[str] = []
        self.refused: list[tuple[str, str]] = []
        self.ends: list[tuple[str, asyncio.Event]] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def send(self, *clients: str) -> None:
        """Send one request of each of these clients, one after the other."""
        for client in clients:
            self.tasks.append(asyncio.create_task(self._run(client)))
            for _ in range(3):
                await asyncio.sleep(0)

    async def _run(self, client: str) -> None:
        try:
            async with self.queue.take_thread(client):
                self.order.append(client)
                self.ends.append((client, asyncio.Event()))
                await self.ends[-1][1].wait()
        except RefusedRequestError as refused:
            self.refused.append((client, refused.over_share))

    async def end(self, position: int = 0) -> None:
        """End one of the requests that run, and wait until the next one has begun."""
        self.ends.pop(position)[1].set()
        for _ in range(3):
            await asyncio.sleep(0)

    async def end_all(self) -> None:
        """End all requests."""
        while self.ends:
            await self.end()
        await asyncio.gather(*self.tasks)
        assert self.queue.running_requests == self.queue.waiting_requests == 0


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(story())


def test_clients_get_threads_in_turn() -> None:
    async def story() -> None:
        requests = Requests(threads=1, places=10)
        await requests.send("a", "a", "a", "a", "b", "c", "b")
        await requests.end_all()
        assert requests.order == ["a", "a", "b", "c", "a", "b", "a"]

    run(story)


def test_the_last_threads_are_kept_for_other_clients() -> None:
    async def story() -> None:
        requests = Requests(threads=4, places=10, kept_free=1)
        await requests.send("a", "a", "a", "a", "a", "b")
        assert requests.order == ["a", "a", "a", "b"]
        await requests.end(3)
        assert requests.order == ["a", "a", "a", "b"], "the thread of b is not for a"
        await requests.end()
        assert requests.order == ["a", "a", "a", "b", "a"]
        await requests.end_all()

    run(story)


def test_if_all_places_are_taken_the_client_with_the_most_requests_gives_way() -> None:
    async def story() -> None:
        requests = Requests(threads=1, places=4)
        await requests.send("a", "a", "a", "a", "a")
        await requests.send("b", "b")
        assert requests.refused == [("a", "a"), ("a", "a")]
        await requests.send("a", "b")
        assert requests.refused[2:] == [("a", "a"), ("b", "b")], "each would have more than the other"
        await requests.end_all()
        assert sorted(requests.order) == ["a", "a", "a", "b", "b"]

    run(story)


def test_a_client_that_is_alone_is_not_blamed() -> None:
    async def story() -> None:
        requests = Requests(threads=1, places=1)
        await requests.send("a", "a", "a")
        assert requests.refused == [("a", "")]
        await requests.end_all()

    run(story)


def test_a_request_that_would_be_refused_is_refused_before_its_body_is_read() -> None:
    async def story() -> None:
        requests = Requests(threads=1, places=4)
        await requests.send("a", "a", "a", "a", "a")
        requests.queue.check("b", is_body_complete=False)
        with pytest.raises(RefusedRequestError) as refused:
            requests.queue.check("a", is_body_complete=False)
        assert refused.value.status == 503 and not refused.value.is_body_complete
        await requests.send("b", "b")
        with pytest.raises(RefusedRequestError, match=SHARE_MESSAGE):
            requests.queue.check("a", is_body_complete=False)
        await requests.end_all()

    run(story)


def test_a_request_that_is_cancelled_while_it_waits_leaves_its_place_and_takes_no_thread() -> None:
    async def story() -> None:
        requests = Requests(threads=1, places=2)
        await requests.send("a", "a", "b")
        requests.tasks.pop(1).cancel()
        await asyncio.sleep(0)
        assert requests.queue.waiting_requests == 1
        requests.ends[0][1].set()
        requests.tasks.pop(1).cancel()  # before the thread is given to b
        await requests.end_all()
        assert requests.order == ["a"]
        await requests.send("a", "b")
        await requests.end()
        requests.tasks.pop().cancel()  # after the thread was given to b
        requests.ends.clear()
        await asyncio.sleep(0)
        await requests.end_all()

    run(story)


def test_many_addresses_with_one_request_each_give_way_to_a_project_until_it_has_half_of_the_places() -> None:
    async def story() -> None:
        requests = Requests(threads=1, places=8)
        await requests.send(*(f"address {number}" for number in range(9)))
        assert requests.queue.waiting_requests == 8
        await requests.send("address new")
        assert requests.refused == [("address new", "")], "a tie is nobody's fault"
        await requests.send(*["project p"] * 5)
        assert [client.partition(" ")[0] for client, _ in requests.refused[1:]] == ["address"] * 4 + ["project"]
        assert {over_share for _, over_share in requests.refused[:5]} == {""}
        await requests.end_all()
        assert requests.order.count("project p") == 4

    run(story)


def test_projects_leave_addresses_their_half_of_the_places() -> None:
    async def story() -> None:
        requests = Requests(threads=1, places=4)
        await requests.send(*["project p"] * 5)
        await requests.send("address a", "address b", "address c")
        assert requests.refused == [("project p", "project p")] * 2 + [("address c", "")]
        await requests.end_all()

    run(story)


def test_addresses_never_have_the_last_thread_and_one_address_leaves_one_to_others() -> None:
    async def story() -> None:
        requests = Requests(threads=4, places=10, kept_free=1)
        await requests.send("address a", "address a", "address a", "address b", "address c")
        assert requests.order == ["address a", "address a", "address b"]
        await requests.send("project p")
        assert requests.order[3:] == ["project p"]
        await requests.end(3)
        assert len(requests.order) == 4, "the thread of the project is not for an address"
        await requests.end_all()

    run(story)


def test_a_client_whose_newest_request_is_evicted_keeps_its_turn() -> None:
    async def story() -> None:
        requests = Requests(threads=1, places=4)
        await requests.send("x", "a", "a", "a", "a", "b", "c")
        assert requests.refused == [("a", "a")] * 2
        await requests.end_all()
        assert requests.order == ["x", "a", "b", "c", "a"]

    run(story)


def test_an_upload_that_loses_its_place_has_a_body_that_is_not_complete() -> None:
    async def story() -> None:
        queue = FairQueue(threads=1, places=2)
        async with queue.take_thread("x"):
            uploads = [asyncio.create_task(queue.take_thread("a", is_body_complete=False).__aenter__()) for _ in "12"]
            await asyncio.sleep(0)
            other = asyncio.create_task(queue.take_thread("b").__aenter__())
            with pytest.raises(RefusedRequestError) as refused:
                await uploads[1]
            assert not refused.value.is_body_complete
            other.cancel()
            uploads[0].cancel()
            await asyncio.gather(other, uploads[0], return_exceptions=True)

    run(story)


CLIENTS = ["project a", "project b", "address a", "address b"]


@given(st.lists(st.tuples(st.sampled_from(CLIENTS), st.booleans()), max_size=60), st.integers(1, 8), st.integers(0, 5))
def test_no_thread_is_idle_while_a_client_waits_that_may_have_it(
    steps: list[tuple[str, bool]], threads: int, places: int
) -> None:
    async def story() -> None:
        kept_free = threads // 4
        requests = Requests(threads, places, kept_free)
        for client, ends_one in steps:
            await requests.send(client)
            if ends_one and requests.ends:
                await requests.end()
            running = Counter(client for client, _ in requests.ends)
            assert requests.queue.running_requests == running.total() <= threads
            assert requests.queue.waiting_requests <= places
            assert all(count <= threads - kept_free for count in running.values())
            waiting = requests.queue._waiting
            of_addresses = sum(count for name, count in running.items() if name.startswith("address"))
            assert of_addresses <= threads - (kept_free > 0)
            for name in waiting:
                kept = 2 if kept_free == 1 and name.startswith("address") else kept_free
                is_last_kept = name.startswith("address") and of_addresses == threads - (kept_free > 0)
                assert running.total() == threads or running[name] == threads - kept or is_last_kept
        await requests.end_all()
        assert len(requests.order) + len(requests.refused) == len(steps)

    run(story)
