"""The parent's end of the pipes to a child process: send lines, receive lines in bounded memory, and kill the child.

The child is a driver (`drivers.isolation.runner`) or a write worker (`drivers.isolation.host_writer`). A child that
sends too much is killed: at most MAX_LINES unread lines are kept, each of at most the size of one answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from typing import cast

MAX_STDERR = 1024 * 1024
"""Maximum bytes on stderr per request; more is an error. The last TAIL bytes are kept for error messages."""
TAIL = 2048
MAX_LINES = 16
"""Maximum unread lines of answers; a correct driver has one, or two when it starts."""
LAST_WORDS_S = 0.2
"""How long output is still read after the process has ended: the end of a process may be reported before its output."""
REAP_S = 2.0
"""How long after SIGKILL, in seconds, a process that has not ended counts as stuck in the kernel."""


class PipeError(Exception):
    """Communication with the process is no longer possible; the text states the reason."""


class Pipe(asyncio.SubprocessProtocol):
    """The connection to one child process.

    Call `begin` before each request, send it with `send`, and read answers with `line`.
    `max_line` is the maximum size of an answer in bytes. `introduced` is for the owner of this object: whether the
    process has sent its manifest.
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
        """Store the transport and the process id. asyncio calls it when the process has started."""
        self._transport = cast(asyncio.SubprocessTransport, transport)
        self.pid = self._transport.get_pid()

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        """Collect output of the process; kill the process if it sends too much. asyncio calls it."""
        piece = cast(bytes, data)
        if fd == 2:
            self._tail = (self._tail + piece)[-TAIL:]
            self._complained += len(piece)
            if self._complained > MAX_STDERR:
                self._break(f"it sent too much: more than {MAX_STDERR} bytes on stderr in one call")
            return
        self._unread += piece
        *lines, rest = self._unread.split(b"\n")
        self._unread = bytearray(rest)
        self._lines.extend(bytes(line) for line in lines)
        if len(self._unread) > self._max_line or any(len(line) > self._max_line for line in lines):
            self._break(f"it sent too much: an answer of more than {self._max_line} bytes")
        elif len(self._lines) > MAX_LINES:
            self._break("it sent too much: answers without a request")
        self._arrived.set()

    def process_exited(self) -> None:
        """Kill the processes it started, and mark the pipe as ended. asyncio calls it when the process is reaped."""
        self._kill_group()  # done at once, while no other process can have got the same id
        self.exited.set()
        if self._closed >= {1, 2}:
            self._ended()
        else:
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._ended)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Note that this output has ended. asyncio calls it."""
        self._closed.add(fd)
        if self._closed >= {1, 2} and self.exited.is_set():
            self._ended()

    def begin(self) -> None:
        """Prepare for a new request: forget what was written to stderr before it."""
        self._complained = 0
        self._tail = b""

    def send(self, line: bytes) -> None:
        """Write one line to the process without waiting; nothing is raised if the process does not read it."""
        stdin = self._transport.get_pipe_transport(0) if self._transport else None
        if stdin is not None:
            cast(asyncio.WriteTransport, stdin).write(line + b"\n")

    async def line(self) -> bytes:
        """Wait for the next line that the process wrote and return it. There is no deadline; the caller sets one.

        Raises PipeError if the process sent too much, or if it ended and all its lines are read.
        """
        while not self._lines or self._broken.startswith("it sent too much"):
            if self._broken:
                raise PipeError(self._broken)
            self._arrived.clear()
            await self._arrived.wait()
        return self._lines.popleft()

    def complaint(self) -> str:
        """Return the last line on stderr since `begin`, printable and at most 500 characters."""
        lines = self._tail.decode(errors="replace").strip().splitlines()
        return "".join(char if char.isprintable() else " " for char in lines[-1][-500:]) if lines else ""

    async def kill(self) -> bool:
        """Send SIGKILL to the process and its process group; return False if it has not ended within REAP_S."""
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
        """Mark the pipe as broken and kill a process that still runs. The first reason is kept, for it is the cause."""
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
