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
"""Seconds before the restart after the first, second, … death in a row; the last one holds for all later deaths."""
STEADY_S = 30.0
"""If a process ran for more than this many seconds, its death counts as the first one again."""


def say(who: str, text: str) -> None:
    """Write one line to the readable log on stderr: the time, the process `who`, and the text."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {who:<8} | {text}\n")
    sys.stderr.flush()


@dataclass
class Child:
    """A supervised process. Call `start` once, then `keep` in every round: it restarts a dead process."""

    name: str
    command: list[str]
    environment: dict[str, str]
    fds: tuple[int, ...]
    selector: selectors.BaseSelector
    cwd: Path
    process: subprocess.Popen[bytes] | None = None
    deaths: int = 0
    started: float = 0.0
    next_start: float | None = None
    unread: bytes = field(default=b"", repr=False)

    def start(self) -> None:
        """Start the process now, in its own session, and register its output with the selector."""
        self.started, self.next_start, self.unread = time.monotonic(), None, b""
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

    def running_for(self) -> float:
        """Return the seconds since the process was started; 0 while there is none."""
        return time.monotonic() - self.started if self.process else 0.0

    def read(self) -> None:
        """Copy the process's new output to the log, line by line. Does not block; of an endless line it keeps 8 KB."""
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
        *lines, self.unread = (self.unread + data).split(b"\n")
        self.unread = self.unread[-8192:]
        for line in lines:
            if text := line.decode(errors="replace").rstrip():
                say(self.name, text)

    def keep(self) -> None:
        """If the process has died, kill the rest of its session and schedule a restart; restart it when that is due."""
        if self.process is not None and self.process.poll() is not None:
            code = self.process.returncode
            self.kill()  # the processes that are left in its session
            self.deaths = 1 if self.running_for() > STEADY_S else self.deaths + 1
            pause = BACKOFF_S[min(self.deaths, len(BACKOFF_S)) - 1]
            self._forget()
            self.next_start = time.monotonic() + pause
            say(self.name, f"ended with {code}; starting it again in {pause:g} s")
        if self.next_start is not None and time.monotonic() >= self.next_start:
            self.start()

    def kill(self) -> None:
        """Send SIGKILL to the process group of its session. Does not wait."""
        if self.process is not None:
            _signal_group(self.process.pid, signal.SIGKILL)

    def stop(self, patience: float) -> None:
        """Send SIGTERM to the process, wait up to `patience` seconds, then send SIGKILL to its process group.

        Returns when the process has ended.
        """
        if self.process is None:
            return
        self.process.terminate()
        end = time.monotonic() + patience
        while self.process.poll() is None and time.monotonic() < end:
            self.read()
            time.sleep(0.02)
        self.kill()
        self.process.wait()
        self.read()
        self._forget()

    def _forget(self) -> None:
        if self.process is not None and self.process.stdout is not None:
            self.selector.unregister(self.process.stdout)
            self.process.stdout.close()
        self.process = None


def _signal_group(group: int, sig: int) -> None:
    try:
        os.killpg(group, sig)
    except ProcessLookupError:
        return
