"""Sends answers to clients at their pace, and limits the memory of those that wait.

An answer that is complete in memory needs no thread any more, but its bytes stay until the client has accepted them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from cyborgweb.http.refusals import ClientDisconnectedError, RefusedRequestError

PART_BYTES = 262_144
"""The size of the parts in which our own connections send a large answer. Their deadline applies to each of them."""
SMALL_BYTES = 65_536
"""Answers up to this size are passed to the server at once and are not counted. It is also the size of the parts for
other servers: granian takes several parts that no client has accepted yet."""
RESET_EXTENSION = "cyborg.reset"
"""The ASGI extension of our own connections: `reset` ends the connection at once."""


@dataclass(eq=False)
class _WaitingAnswer:
    """A large answer that is being sent to `client`. `timeout` ends the wait for the client."""

    client: str
    size: int
    timeout: asyncio.Timeout
    extensions: dict[str, Any] = field(default_factory=dict)
    is_ended: bool = False

    def end(self) -> None:
        """End the answer: reset the connection, if the server can do that, and stop waiting for the client."""
        self.is_ended = True
        if RESET_EXTENSION in self.extensions:
            self.extensions[RESET_EXTENSION]["reset"]()
        if not self.timeout.expired():
            self.timeout.reschedule(0.0)


class AnswerSender:
    """Sends the answers of a process. Large ones have `buffer_bytes` together, or one answer at a time if it is larger.

    The client may take `write_s` for each part. Our own listeners disconnect it then; for other servers, which have no
    such deadline, `send` stops waiting after twice this time.
    """

    def __init__(self, write_s: float, buffer_bytes: int) -> None:
        self._write_s, self._buffer_bytes = write_s, buffer_bytes
        self._waiting: dict[_WaitingAnswer, None] = {}
        self.waiting_bytes = 0

    async def send(
        self, scope: Any, send: Any, client: str, status: int, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> None:
        """Send an answer to `client`.

        If it does not fit beside those that wait already, the oldest answer of the client that has the most is ended.
        Raises RefusedRequestError 503 if this client would have the most itself, and ClientDisconnectedError if the
        client does not accept its answer, or if the answer was ended.
        """
        start = {"type": "http.response.start", "status": status, "headers": headers}
        if len(body) <= SMALL_BYTES:
            await send(start)
            await send({"type": "http.response.body", "body": body})
            return
        self._make_room(client, len(body))
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as timeout:
                answer = _WaitingAnswer(client, len(body), timeout, scope.get("extensions") or {})
                self._waiting[answer] = None
                self.waiting_bytes += answer.size
                try:
                    await send(start)
                    part_bytes = PART_BYTES if RESET_EXTENSION in answer.extensions else SMALL_BYTES
                    for begin in range(0, len(body), part_bytes):
                        if answer.is_ended:  # the last part was accepted in the same round of the event loop
                            raise ClientDisconnectedError
                        timeout.reschedule(loop.time() + 2 * self._write_s)
                        part = body[begin : begin + part_bytes]
                        await send({"type": "http.response.body", "body": part, "more_body": True})
                    # This waits until the last part is accepted, too.
                    await send({"type": "http.response.body", "body": b""})
                finally:
                    self._stop_counting(answer)
        except TimeoutError:
            raise ClientDisconnectedError from None

    def _stop_counting(self, answer: _WaitingAnswer) -> None:
        """Count an answer no longer."""
        if answer in self._waiting:
            del self._waiting[answer]
            self.waiting_bytes -= answer.size

    def _make_room(self, client: str, size: int) -> None:
        """End answers of other clients until one of `size` bytes for `client` fits.

        Raises RefusedRequestError 503 if this client would then have the most.
        """
        while self._waiting and self.waiting_bytes + size > self._buffer_bytes:
            bytes_by_client = Counter({client: size})
            for answer in self._waiting:
                bytes_by_client[answer.client] += answer.size
            ((largest, _),) = bytes_by_client.most_common(1)
            if largest == client:
                raise RefusedRequestError(503, is_body_complete=True, over_share=client)
            oldest = next(answer for answer in self._waiting if answer.client == largest)
            self._stop_counting(oldest)
            oldest.end()
