"""Callers take turns for the request threads: one with many requests delays and displaces mostly its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from cyborgweb.http.fair_queue import FairQueue, HttpCaller, find_caller
from cyborgweb.http.refusals import RefusedRequestError

HOSTILE, OTHER_TOKEN = HttpCaller("192.0.2.1", b"t1"), HttpCaller("192.0.2.1", b"t2")
NOVA = HttpCaller("192.0.2.9", b"nova")


class Story:
    """Requests at a queue, each of which runs until `end` is called; `begun` and `refused` list their names."""

    def __init__(self, threads: int, max_waiting: int) -> None:
        self.queue = FairQueue(threads, max_waiting)
        self.begun: list[str] = []
        self.refused: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def send(self, name: str, caller: HttpCaller) -> None:
        """Send a request, and let it begin or wait."""
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(name, caller))
        await self.pause()

    async def _run(self, name: str, caller: HttpCaller) -> None:
        try:
            async with self.queue.wait_for_thread(caller, is_body_complete=True):
                self.begun.append(name)
                await self._ends[name].wait()
        except RefusedRequestError as refused:
            assert (refused.status, refused.is_body_complete) == (503, True)
            self.refused.append(name)

    async def end(self, name: str) -> None:
        """End a running request."""
        self._ends[name].set()
        await self.pause()

    async def pause(self) -> None:
        """Let all tasks run until each waits."""
        for _ in range(5):
            await asyncio.sleep(0)

    async def end_all(self) -> None:
        """End all requests; nothing of them is left in the queue."""
        for event in self._ends.values():
            event.set()
        for task in self.tasks.values():
            with suppress(asyncio.CancelledError):
                await task
        assert self.queue.active == 0 and not self.queue._all and not self.queue._running


def play(tell: Callable[[Story], Awaitable[None]], threads: int = 2, max_waiting: int = 4) -> Story:
    """Run a story on an event loop, and return it."""

    async def run() -> Story:
        story = Story(threads, max_waiting)
        await tell(story)
        await story.end_all()
        return story

    return asyncio.run(run())


def test_X5_a_caller_with_few_requests_is_served_before_the_many_of_another_one() -> None:
    async def tell(story: Story) -> None:
        for number in range(5):
            await story.send(f"h{number}", HOSTILE)
        await story.send("nova", NOVA)
        await story.end("h0")

    assert play(tell).begun[:3] == ["h0", "h1", "nova"]


def test_X5_several_tokens_at_one_address_have_one_share_and_take_turns() -> None:
    async def tell(story: Story) -> None:
        callers = [HOSTILE] * 4 + [OTHER_TOKEN, NOVA]
        for name, caller in zip(("h0", "h1", "h2", "h3", "other", "nova"), callers, strict=True):
            await story.send(name, caller)
        await story.end("h0")
        await story.end("h1")

    assert play(tell, threads=3).begun == ["h0", "h1", "h2", "nova", "other", "h3"]


def test_the_requests_of_one_caller_are_served_in_their_order() -> None:
    async def tell(story: Story) -> None:
        for number in range(5):
            await story.send(f"h{number}", HOSTILE)
        for number in range(5):
            await story.end(f"h{number}")

    assert play(tell, threads=1).begun == [f"h{number}" for number in range(5)]


def test_X5_one_caller_leaves_a_quarter_of_the_threads_to_others() -> None:
    async def tell(story: Story) -> None:
        for number in range(5):
            await story.send(f"h{number}", HOSTILE)
        assert story.begun == ["h0", "h1", "h2"]
        await story.send("nova", NOVA)
        assert story.begun[3:] == ["nova"]
        await story.end("nova")
        assert story.begun[4:] == []
        await story.end("h1")
        assert story.begun[4:] == ["h3"]

    play(tell, threads=4)


def test_X5_a_full_queue_refuses_the_newest_request_of_the_caller_with_the_most() -> None:
    async def tell(story: Story) -> None:
        for number in range(6):
            await story.send(f"h{number}", HOSTILE)
        assert not story.queue.has_place(HOSTILE) and story.queue.has_place(NOVA)
        await story.send("nova", NOVA)
        assert story.refused == ["h5"]
        await story.send("h6", HOSTILE)
        assert story.refused == ["h5", "h6"]

    story = play(tell)
    assert "nova" in story.begun and story.refused == ["h5", "h6"]


@pytest.mark.parametrize("is_promised", [False, True])
def test_a_request_that_is_cancelled_while_it_waits_takes_no_thread(is_promised: bool) -> None:
    async def tell(story: Story) -> None:
        for name in ("first", "cancelled", "last"):
            await story.send(name, HOSTILE)
        if is_promised:
            story._ends["first"].set()
            while story.queue.active != 2:
                await asyncio.sleep(0)
        story.tasks["cancelled"].cancel()
        await story.end("first")
        assert story.begun[-1] == "last"

    play(tell, threads=1)


def test_a_caller_is_known_by_its_address_and_its_token_or_cookies() -> None:
    scope = {
        "client": ("192.0.2.1", 9),
        "headers": [(b"cookie", b"c"), (b"x-auth-token", b"t1"), (b"x-auth-token", b"z")],
    }
    assert find_caller(scope) == HOSTILE
    assert find_caller(scope | {"headers": [(b"cookie", b"c")]}) == HttpCaller("192.0.2.1", b"c")
    assert find_caller({"client": None, "headers": []}) == HttpCaller("", b"")
