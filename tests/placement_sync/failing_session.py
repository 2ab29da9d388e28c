"""A keystoneauth1 session that comes to grief at one call: the process dies there, or the other side fails.

Used by `test_killed`. Whether the call took effect makes the difference that matters: who was killed, and who got no
answer, never hears that it did.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import requests
from keystoneauth1.exceptions import RequestTimeout


class KilledError(BaseException):
    """kill -9: no handler may stop it, and the transaction under way is gone with the process."""


class Trouble(StrEnum):
    """What happens at the call. Killed after one is killed before the next: nothing happens between."""

    KILLED = "killed after the call"
    REFUSED = "503 instead of the call"
    LOST = "time-out after the call"
    RUBBISH = "rubbish after the call"


@dataclass
class TroubledSession:
    """`session` with `trouble` at its `at`-th call (the first is 1; 0: never). A dead process calls nobody any more."""

    session: Any
    trouble_at: int = 0
    trouble: Trouble = Trouble.KILLED
    calls: int = 0
    dead: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def request(self, *words: Any, **more: Any) -> requests.Response:
        """One call."""
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
