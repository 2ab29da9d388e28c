"""Run the real `cyborg` command on a pseudo-terminal, as a person does."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CODE = "from cyborgweb.cli.main import main; main()"
DEADLINE_S, RETRY_S = 90.0, 20.0
Terminal = Callable[..., AbstractContextManager["TerminalProgram"]]


class TerminalProgram:
    """A program that runs on a pseudo-terminal; `text` is everything that it has written so far."""

    def __init__(self, pid: int, handle: int) -> None:
        self.pid, self.handle, self.text = pid, handle, ""
        self._seen, self._code = 0, -1

    def read(self) -> bool:
        """Read what the program has written within one second; return False if it has ended."""
        if not select.select([self.handle], [], [], 1.0)[0]:
            return True
        try:
            data = os.read(self.handle, 65_536)
        except OSError:  # the answer of Linux when the program has ended
            return False
        self.text += data.decode()
        return bool(data)

    def expect(self, text: str) -> None:
        """Wait until the program writes `text` after what was expected before; fail after DEADLINE_S seconds."""
        deadline = time.monotonic() + DEADLINE_S
        while (found := self.text.find(text, self._seen)) < 0:
            assert time.monotonic() < deadline, f"{text!r} is not in {self.text[self._seen :]!r}"
            assert self.read() or text in self.text[self._seen :], f"it ended: {self.text!r}"
        self._seen = found + len(text)

    def type(self, text: str) -> None:
        """Type `text`."""
        os.write(self.handle, text.encode())

    def interrupt(self) -> int:
        """Press Ctrl-C, wait until the program has ended and return its exit code; fail after DEADLINE_S seconds.

        The key is pressed again every RETRY_S seconds, because Python's `input` does not notice a signal that arrives
        just before it begins to read.
        """
        return self.end(typed="\x03")

    def end(self, typed: str = "") -> int:
        """Wait until the program has ended and return its exit code; fail after DEADLINE_S seconds.

        `typed` is typed at once, and again every RETRY_S seconds.
        """
        deadline, type_at = time.monotonic() + DEADLINE_S, time.monotonic()
        while True:
            if typed and time.monotonic() >= type_at:
                self.type(typed)
                type_at += RETRY_S
            if not self.read():
                break
            assert time.monotonic() < deadline, f"it still runs: {self.text!r}"
        self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = 0
        return self._code


@contextmanager
def run_on_terminal(
    environment: dict[str, str], *arguments: str, lines: int = 24, columns: int = 200
) -> Iterator[TerminalProgram]:
    """Run `cyborg` with these arguments and variables on a terminal of this size; it is killed if it has not ended."""
    pid, handle = pty.fork()
    if pid == 0:  # pragma: no cover - the child becomes the program
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell starts background jobs with SIGINT ignored
        os.chdir(ROOT)
        os.execve(sys.executable, [sys.executable, "-c", CODE, *arguments], environment)
    fcntl.ioctl(handle, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    program = TerminalProgram(pid, handle)
    try:
        yield program
    finally:
        if program.pid:
            os.kill(program.pid, 9)
            os.waitpid(program.pid, 0)
        os.close(handle)
