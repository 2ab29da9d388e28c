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

from drivers.errors import DriversBaseError

MAX_STDERR = 1024 * 1024
"""Maximum bytes on stderr per request; more is an error. The last MAX_STDERR_TAIL bytes are kept for error messages."""
MAX_STDERR_TAIL = 2048
MAX_LINES = 16
"""Maximum unread lines of answers; a correct driver has one, or two when it starts."""
DRAIN_S = 0.2
"""How long output is still read after the process has ended: the end of a process may be reported before its output."""
REAP_S = 2.0
"""How long after SIGKILL, in seconds, a process that has not ended counts as stuck in the kernel."""


class PipeError(DriversBaseError):
    """Communication with the process is no longer possible; the text states the reason."""


class ChildPipe(asyncio.SubprocessProtocol):
    """The connection to one child process.

    Call `begin_request` before each request, send it with `send_line`, and read answers with `read_line`.
    `max_line` is the maximum size of an answer in bytes. `has_manifest` is for the owner of this object: whether the
    process has sent its manifest.
    """

    def __init__(self, max_line: int) -> None:
        self.exited = asyncio.Event()
        self.killed = False
        self.has_manifest = False
        self.pid = 0
        self._max_line = max_line
        self._transport: asyncio.SubprocessTransport | None = None
        self._partial_line = bytearray()
        self._unread_lines: deque[bytes] = deque()
        self._data_arrived = asyncio.Event()
        self._stderr_bytes = 0
        self._stderr_tail = b""
        self._failure_reason = ""
        self._closed_fds: set[int] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport and the process id. asyncio calls it when the process has started."""
        self._transport = cast(asyncio.SubprocessTransport, transport)
        self.pid = self._transport.get_pid()

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        """Collect output of the process; kill the process if it sends too much. asyncio calls it."""
        chunk = cast(bytes, data)
        if fd == 2:
            self._stderr_tail = (self._stderr_tail + chunk)[-MAX_STDERR_TAIL:]
            self._stderr_bytes += len(chunk)
            if self._stderr_bytes > MAX_STDERR:
                self._mark_failed(f"it sent too much: more than {MAX_STDERR} bytes on stderr in one call")
            return
        self._partial_line += chunk
        *lines, rest = self._partial_line.split(b"\n")
        self._partial_line = bytearray(rest)
        self._unread_lines.extend(bytes(line) for line in lines)
        if len(self._partial_line) > self._max_line or any(len(line) > self._max_line for line in lines):
            self._mark_failed(f"it sent too much: an answer of more than {self._max_line} bytes")
        elif len(self._unread_lines) > MAX_LINES:
            self._mark_failed("it sent too much: answers without a request")
        self._data_arrived.set()

    def process_exited(self) -> None:
        """Kill the processes that the child started, and mark the pipe as ended.

        The pipe is marked when both outputs have ended, or after DRAIN_S. asyncio calls this when the child is reaped.
        """
        self._kill_group()  # done at once, while no other process can have got the same id
        self.exited.set()
        if self._closed_fds >= {1, 2}:
            self._mark_ended()
        else:
            asyncio.get_running_loop().call_later(DRAIN_S, self._mark_ended)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Note that one of the child's outputs has ended. asyncio calls it.

        If both outputs have ended and the child has exited, mark the pipe as ended.
        """
        self._closed_fds.add(fd)
        if self._closed_fds >= {1, 2} and self.exited.is_set():
            self._mark_ended()

    def begin_request(self) -> None:
        """Prepare for a new request: forget what was written to stderr before it."""
        self._stderr_bytes = 0
        self._stderr_tail = b""

    def send_line(self, line: bytes) -> None:
        """Write one line to the process without waiting; nothing is raised if the process does not read it."""
        stdin = self._transport.get_pipe_transport(0) if self._transport else None
        if stdin is not None:
            cast(asyncio.WriteTransport, stdin).write(line + b"\n")

    async def read_line(self) -> bytes:
        """Wait for the next line that the process wrote and return it. There is no deadline; the caller sets one.

        Raises PipeError if the process sent too much, or if it ended and all its lines are read.
        """
        while not self._unread_lines or self._failure_reason.startswith("it sent too much"):
            if self._failure_reason:
                raise PipeError(self._failure_reason)
            self._data_arrived.clear()
            await self._data_arrived.wait()
        return self._unread_lines.popleft()

    def get_last_stderr_line(self) -> str:
        """Return the last line on stderr since `begin_request`, printable and at most 500 characters."""
        lines = self._stderr_tail.decode(errors="replace").strip().splitlines()
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

    def _mark_ended(self) -> None:
        """Mark the pipe as broken because the process ended by itself; the reason names its exit status or signal."""
        code = self._transport.get_returncode() if self._transport else None
        self._mark_failed(f"it ended by itself ({_describe_exit(code)})")

    def _mark_failed(self, reason: str) -> None:
        """Mark the pipe as broken and kill a process that still runs. The first reason is kept, for it is the cause.

        When a running process is killed, the lines that were not read are dropped.
        """
        self._failure_reason = self._failure_reason or reason
        self._data_arrived.set()
        if not self.exited.is_set() and not self.killed:
            self.killed = True
            self._unread_lines.clear()
            self._partial_line.clear()
            self._kill_group()

    def _kill_group(self) -> None:
        """Send SIGKILL to the process group of the child; do nothing if the group no longer exists."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def _describe_exit(code: int | None) -> str:
    """Return how a process ended, in words; a negative code is the number of a signal, as asyncio reports it."""
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"
