"""The parent's end of a driver's pipe: lines in bounded memory, complaints kept short, an end that is certain.

Used by `drivers.isolation.runner` alone. Nothing that a driver writes can make this hold more than one answer's bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from typing import cast

MAX_STDERR = 1024 * 1024
"""Bytes a driver may complain per call before that is a flood; of them the last `TAIL` are kept for the reason."""
TAIL = 2048
MAX_LINES = 16
"""Unread lines of answers; a well-behaved driver has one, or two at its start."""
LAST_WORDS_S = 0.2
"""How long the end of a process waits for what is still in its pipe: the kernel tells of both in any order."""
REAP_S = 2.0
"""How long SIGKILL may take before the process counts as stuck in the kernel."""


class Broken(Exception):
    """The process can no longer be talked to; the text says why."""


class Pipe(asyncio.SubprocessProtocol):
    """One process of one driver. `begin` before each question; `line` gives the answers or raises Broken.

    `introduced` is its user's: whether the process has said what it is.
    """

    def __init__(self, max_line: int) -> None:
        self.exited = asyncio.Event()
        self.killed = False
        self.introduced = False
        self.pid = 0
        self._max_line = max_line
        self._transport: asyncio.SubprocessTransport | None = None
        self._unread = bytearray()
        self._lines: deque[bytes] = deque()
        self._arrived = asyncio.Event()
        self._complained = 0
        self._tail = b""
        self._broken = ""
        self._closed: set[int] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the process has started."""
        self._transport = cast(asyncio.SubprocessTransport, transport)
        self.pid = self._transport.get_pid()

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        """asyncio: it wrote something."""
        piece = cast(bytes, data)
        if fd == 2:
            self._tail = (self._tail + piece)[-TAIL:]
            self._complained += len(piece)
            if self._complained > MAX_STDERR:
                self._break(f"it flooded: more than {MAX_STDERR} bytes of messages in one call")
            return
        self._unread += piece
        *lines, rest = self._unread.split(b"\n")
        self._unread = bytearray(rest)
        self._lines.extend(bytes(line) for line in lines)
        if len(self._unread) > self._max_line or any(len(line) > self._max_line for line in lines):
            self._break(f"it flooded: an answer of more than {self._max_line} bytes")
        elif len(self._lines) > MAX_LINES:
            self._break("it flooded: answers nobody asked for")
        self._arrived.set()

    def process_exited(self) -> None:
        """asyncio: it is gone and reaped."""
        self._kill_group()  # what it started; now, while its number is surely nobody else's
        self.exited.set()
        if self._closed >= {1, 2}:
            self._ended()
        else:
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._ended)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """asyncio: nothing more comes out of this pipe."""
        self._closed.add(fd)
        if self._closed >= {1, 2} and self.exited.is_set():
            self._ended()

    def begin(self) -> None:
        """A new question: complaints and stray answers of the last one do not count against it."""
        self._complained = 0
        self._tail = b""

    def send(self, line: bytes) -> None:
        """Write one line; a process that does not read shows by not answering."""
        stdin = self._transport.get_pipe_transport(0) if self._transport else None
        if stdin is not None:
            cast(asyncio.WriteTransport, stdin).write(line + b"\n")

    async def line(self) -> bytes:
        """The next line it wrote; raises Broken when it ended or flooded."""
        while not self._lines or self._broken.startswith("it flooded"):
            if self._broken:
                raise Broken(self._broken)
            self._arrived.clear()
            await self._arrived.wait()
        return self._lines.popleft()

    def complaint(self) -> str:
        """The last line of what it wrote to stderr."""
        lines = self._tail.decode(errors="replace").strip().splitlines()
        return "".join(char if char.isprintable() else " " for char in lines[-1][-500:]) if lines else ""

    async def kill(self) -> bool:
        """SIGKILL it and all it started; False when the kernel does not let it go in time."""
        self.killed = True
        if not self.exited.is_set():
            self._kill_group()
        try:
            async with asyncio.timeout(REAP_S):
                await self.exited.wait()
        except TimeoutError:
            return False
        if self._transport:
            self._transport.close()
        return True

    def _ended(self) -> None:
        code = self._transport.get_returncode() if self._transport else None
        self._break(f"it ended by itself ({_how(code)})")

    def _break(self, reason: str) -> None:
        """The first reason is the true one. A flood is stopped at its source at once."""
        self._broken = self._broken or reason
        self._arrived.set()
        if not self.exited.is_set() and not self.killed:
            self.killed = True
            self._lines.clear()
            self._unread.clear()
            self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def _how(code: int | None) -> str:
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"
