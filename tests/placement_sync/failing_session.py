"""A keystoneauth1 session that fails at one call: the process is killed there, or the other service fails.

In some cases the call takes effect before the failure: a process that was killed, or that got no answer, never learns
that it did.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import requests
from keystoneauth1.exceptions import RequestTimeout


class KilledError(BaseException):
    """Simulates kill -9: no handler catches it, and the running transaction is rolled back with the process."""


class Trouble(StrEnum):
    """The kinds of failure of one call. There is no "killed before the call", because that equals "killed after" the
    previous call."""

    KILLED = "killed after the call"
    REFUSED = "503 instead of the call"
    LOST = "time-out after the call"
    RUBBISH = "rubbish after the call"


@dataclass
class TroubledSession:
    """Pass calls on to `session`, but meet `trouble` at call number `trouble_at` (the first is 1; 0 means never).

    After Trouble.KILLED every further call raises KilledError, because a dead process makes no calls.
    """

    session: Any
    trouble_at: int = 0
    trouble: Trouble = Trouble.KILLED
    calls: int = 0
    dead: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def request(self, *words: Any, **more: Any) -> requests.Response:
        """Make one call, or fail as `trouble` says. Raises KilledError or RequestTimeout."""
        with self._lock:
            self.calls += 1
            mine = self.calls == self.trouble_at
            if self.dead:
                raise KilledError
            self.dead = mine and self.trouble is Trouble.KILLED
        answer = requests.Response()
        if not mine or self.trouble is not Trouble.REFUSED:
            answer = self.session.request(*words, **more)
        if not mine:
            return answer
        if self.trouble is Trouble.KILLED:
            raise KilledError
        if self.trouble is Trouble.LOST:
            raise RequestTimeout("no answer")
        answer = requests.Response()
        answer.status_code, answer._content = (200, b"<html>") if self.trouble is Trouble.RUBBISH else (503, b"{}")
        return answer
