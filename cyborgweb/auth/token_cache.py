"""Tokens that Keystone has judged, remembered for a while (docs/adr/0004). Asked by `cyborgweb.auth.authentication`.

Knows no HTTP. Every web process has a memory of its own, in which no token stands, only keyed hashes of them.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b

from accelerators.domain.caller import Caller

log = logging.getLogger(__name__)

FRESH_S = 300.0
"""A revoked token is refused after so long at most."""
REFUSED_S = 15.0
PAUSE_S = 5.0
"""When Keystone was unreachable, nobody asks for so long; then one request tries, and the others do not wait for it."""
TRY_S = 30.0
"""How long that one request may take before another one tries."""
ENTRIES = 10_000


class TokenCheckUnavailableError(Exception):
    """Keystone gives no answer about a token. `unreachable`: the network or Keystone itself failed; otherwise it
    refuses to talk to us, or we are not set up for it."""

    def __init__(self, why: str, unreachable: bool) -> None:
        super().__init__(why)
        self.why, self.unreachable = why, unreachable


@dataclass(frozen=True, slots=True)
class Judged:
    """What Keystone said of a token. `expires_at` in seconds since the epoch; no caller: it does not know the token."""

    caller: Caller | None
    expires_at: float


REFUSED = Judged(None, 0.0)
Ask = Callable[[str, bool], Judged]
"""Asks Keystone about a token, expired ones allowed or not. Raises TokenCheckUnavailableError."""
_Key = tuple[bytes, bool]


class Tokens:
    """Who a token stands for. Thread-safe; concurrent questions about one token are one question to Keystone.

    An answer is good for 300 s and never beyond the token's own end; a refusal for 15 s. While Keystone is unreachable
    an old answer goes on being good until the token ends.
    """

    def __init__(
        self,
        ask: Ask,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
        entries: int = ENTRIES,
    ) -> None:
        self._ask, self._clock, self._steady, self._entries = ask, clock, steady, entries
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        # Apart, so that a flood of made-up tokens pushes no good one out. Values: what was said, until when it is new.
        self._good: dict[_Key, tuple[Judged, float]] = {}
        self._bad: dict[_Key, tuple[Judged, float]] = {}
        self._asking: dict[_Key, Future[Judged]] = {}
        self._failure: TokenCheckUnavailableError | None = None
        self._ask_again_at = 0.0

    def caller(self, token: str, allow_expired: bool = False) -> Caller | None:
        """Who it is; None: Keystone does not know the token, or it has ended. Raises TokenCheckUnavailableError.

        `allow_expired` is for tokens that come with a good service token: Keystone then lets them live longer.
        """
        key = blake2b(token.encode(), key=self._secret, digest_size=16).digest(), allow_expired
        judged = self._remembered(key) or self._shared(key, token)
        return None if not allow_expired and self._clock() >= judged.expires_at else judged.caller

    def _remembered(self, key: _Key) -> Judged | None:
        """What is known without asking: an answer that is new enough, or a token that has ended."""
        judged, new_until = self._good.get(key) or self._bad.get(key) or (REFUSED, 0.0)
        ended = not key[1] and judged.caller is not None and self._clock() >= judged.expires_at
        return judged if ended or self._steady() < new_until else None

    def _shared(self, key: _Key, token: str) -> Judged:
        """One question per token at a time: the first to come asks, the others get what it gets."""
        with self._lock:
            if judged := self._remembered(key):
                return judged
            future = self._asking.get(key)
            if mine := future is None:
                future = self._asking[key] = Future()
        if not mine:
            return future.result()
        try:
            judged = self._judged(key, token)
            future.set_result(judged)
        except BaseException as error:
            future.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._asking[key]
        return judged

    def _judged(self, key: _Key, token: str) -> Judged:
        try:
            judged = self._answer(token, key[1])
        except TokenCheckUnavailableError as failure:
            old, _ = self._good.get(key, (REFUSED, 0.0))
            if failure.unreachable and self._clock() < old.expires_at:
                return old
            raise
        with self._lock:
            self._good.pop(key, None)
            self._bad.pop(key, None)
            entries, lasts = (self._good, FRESH_S) if judged.caller else (self._bad, REFUSED_S)
            while len(entries) >= self._entries:
                del entries[next(iter(entries))]
            entries[key] = judged, self._steady() + lasts
        return judged

    def _answer(self, token: str, allow_expired: bool) -> Judged:
        with self._lock:
            if failure := self._failure:
                if self._steady() < self._ask_again_at:
                    raise TokenCheckUnavailableError(failure.why, failure.unreachable)
                self._ask_again_at = self._steady() + TRY_S if failure.unreachable else 0.0
        try:
            judged = self._ask(token, allow_expired)
        except TokenCheckUnavailableError as failure:
            with self._lock:
                first, self._failure = self._failure is None, failure
                # What answers at once, if only with a refusal, needs no pause; and no odd token can bring one about.
                self._ask_again_at = self._steady() + PAUSE_S if failure.unreachable else 0.0
            if first:
                log.warning("tokens cannot be validated: %s", failure.why)
            raise
        if self._failure:
            self._failure = None
            log.warning("Keystone validates tokens again")
        return judged
