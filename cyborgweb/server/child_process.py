"""A child process of the supervisor: forwards its output to the log, restarts it with back-off, and stops it."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds before the restart after the first, second, … death in a row; the last value is for all later deaths."""
STABLE_AFTER_S = 30.0
"""If a process ran for more than this many seconds, its death counts as the first one again."""


def log_line(process_name: str, text: str) -> None:
    """Write one line to the readable log on stderr: the time, the process `process_name`, and the text."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {process_name:<8} | {text}\n")
    sys.stderr.flush()


@dataclass
class ChildProcess:
    """A supervised process. Call `start` once, then `keep_running` in every round: it restarts a dead process.

    `deaths` counts the deaths in a row; after a run of more than STABLE_AFTER_S seconds, the count starts again at 1.
    `started_at` and `next_start_at` are times of the monotonic clock; `next_start_at` is None unless a restart is
    scheduled. `partial_line` is output without its line end yet.
    """

    name: str
    command: list[str]
    environment: dict[str, str]
    fds: tuple[int, ...]
    selector: selectors.BaseSelector
    cwd: Path
    process: subprocess.Popen[bytes] | None = None
    deaths: int = 0
    started_at: float = 0.0
    next_start_at: float | None = None
    partial_line: bytes = field(default=b"", repr=False)

    def start(self) -> None:
        """Start the child process now, in its own session, and register its output with the selector."""
        self.started_at, self.next_start_at, self.partial_line = time.monotonic(), None, b""
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=self.fds,
            env=self.environment,
            cwd=self.cwd,
            start_new_session=True,
        )
        assert self.process.stdout
        os.set_blocking(self.process.stdout.fileno(), False)
        self.selector.register(self.process.stdout, selectors.EVENT_READ, self)

    def get_uptime_s(self) -> float:
        """Return the seconds since the child process was started; 0 while there is none."""
        return time.monotonic() - self.started_at if self.process else 0.0

    def forward_output(self) -> None:
        """Copy the process's new complete lines of output to the log. Does not block.

        An incomplete line is kept for the next call, of a very long one only the last 8 KB.
        """
        if self.process is None or self.process.stdout is None:
            return
        try:
            data = os.read(self.process.stdout.fileno(), 65536)
        except BlockingIOError:
            return
        if not data:
            self.selector.unregister(self.process.stdout)
            self.process.stdout.close()
            self.process.stdout = None
        *lines, self.partial_line = (self.partial_line + data).split(b"\n")
        self.partial_line = self.partial_line[-8192:]
        for line in lines:
            if text := line.decode(errors="replace").rstrip():
                log_line(self.name, text)

    def keep_running(self) -> None:
        """If the child has died, kill the rest of its session and schedule a restart; if a restart is due, start it."""
        if self.process is not None and self.process.poll() is not None:
            code = self.process.returncode
            self.kill()  # the processes that are left in its session
            self.deaths = 1 if self.get_uptime_s() > STABLE_AFTER_S else self.deaths + 1
            pause = BACKOFF_S[min(self.deaths, len(BACKOFF_S)) - 1]
            self._close_output()
            self.next_start_at = time.monotonic() + pause
            log_line(self.name, f"ended with {code}; starting it again in {pause:g} s")
        if self.next_start_at is not None and time.monotonic() >= self.next_start_at:
            self.start()

    def kill(self) -> None:
        """Send SIGKILL to the process group of the child's session, if there is a child. Does not wait."""
        if self.process is not None:
            _signal_group(self.process.pid, signal.SIGKILL)

    def stop(self, timeout_s: float) -> None:
        """Send SIGTERM to the child, wait up to `timeout_s` seconds, then send SIGKILL to its process group.

        Returns when the process has ended.
        """
        if self.process is None:
            return
        self.process.terminate()
        end = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < end:
            self.forward_output()
            time.sleep(0.02)
        self.kill()
        self.process.wait()
        self.forward_output()
        self._close_output()

    def _close_output(self) -> None:
        """Close the process's output and forget the process. Output that has not been read yet is lost."""
        if self.process is not None and self.process.stdout is not None:
            self.selector.unregister(self.process.stdout)
            self.process.stdout.close()
        self.process = None


def _signal_group(group: int, sig: int) -> None:
    """Send a signal to a process group. Do nothing if the group has no process any more."""
    try:
        os.killpg(group, sig)
    except ProcessLookupError:
        return
