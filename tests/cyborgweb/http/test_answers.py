"""Test that an answer that is ended stops, at whatever moment that happens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cyborgweb.http.answers import SMALL_BYTES, AnswerSender
from cyborgweb.http.refusals import ClientDisconnectedError


def test_an_answer_that_is_ended_while_its_part_was_accepted_sends_no_further_part() -> None:
    async def story() -> None:
        sender, parts = AnswerSender(write_s=30.0, buffer_bytes=10 * SMALL_BYTES), list[asyncio.Future[None]]()

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body":
                parts.append(asyncio.get_running_loop().create_future())
                await parts[-1]

        sending = asyncio.create_task(sender.send({}, send, "a", 200, [], b"x" * 8 * SMALL_BYTES))
        while not parts:
            await asyncio.sleep(0)
        (answer,) = sender._waiting
        parts[0].set_result(None)  # the task is woken in the next round of the loop
        answer.end()
        with pytest.raises(ClientDisconnectedError):
            await asyncio.wait_for(sending, 5)
        assert len(parts) == 1 and sender.waiting_bytes == 0

    asyncio.run(story())
