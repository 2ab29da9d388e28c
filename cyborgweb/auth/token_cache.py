"""A cache of Keystone's answers about tokens (docs/adr/0004).

It is independent of HTTP. Every web process has its own cache, which stores no tokens, only keyed hashes of them.
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
"""Seconds for which a valid answer is cached: a revoked token is refused after this time at the latest."""
REFUSED_S = 15.0
"""Seconds for which it is cached that Keystone does not know a token."""
PAUSE_S = 5.0
"""Seconds without any question after Keystone was unreachable. Then one request asks; the others fail without waiting
for it."""
TRY_S = 30.0
"""Seconds after which another request asks, if that one request has no answer yet."""
ENTRIES = 10_000
"""Valid tokens, and also unknown tokens, that one cache holds at most; the oldest entry is dropped first."""


class TokenCheckUnavailableError(Exception):
    """Keystone gave no answer about a token. `reason` is one line.

    `unreachable` is True if the network or Keystone itself failed, and False if Keystone rejects the service user or
    our configuration is unusable.
    """

    def __init__(self, why: str, unreachable: bool) -> None:
        super().__init__(why)
        self.why, self.unreachable = why, unreachable


@dataclass(frozen=True, slots=True)
class Judged:
    """Keystone's answer about a token. `caller` is None if Keystone does not know it; `expires_at` is a UNIX time."""

    caller: Caller | None
    expires_at: float


REFUSED = Judged(None, 0.0)
Ask = Callable[[str, bool], Judged]
"""A function (token, allow_expired) that asks Keystone about a token. Raises TokenCheckUnavailableError."""
_Key = tuple[bytes, bool]


class Tokens:
    """Finds the caller of a token, from the cache or from Keystone. Thread-safe.

    Concurrent calls for one token ask Keystone once. A valid answer is cached for 300 s and never beyond the token's
    expiry, a refusal for 15 s. While Keystone is unreachable, an old answer stays valid until the token expires.
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
        # Two tables, so that a flood of invented tokens evicts no valid one. Values: the answer, when it gets stale.
        self._good: dict[_Key, tuple[Judged, float]] = {}
        self._bad: dict[_Key, tuple[Judged, float]] = {}
        self._asking: dict[_Key, Future[Judged]] = {}
        self._failure: TokenCheckUnavailableError | None = None
        self._ask_again_at = 0.0

    def caller(self, token: str, allow_expired: bool = False) -> Caller | None:
        """Return the token's caller; None if Keystone does not know the token or it has expired.

        Asks Keystone, and waits for the answer, if the cache has no fresh one. `allow_expired` is for tokens that come
        with a valid service token: Keystone then accepts them for longer. Raises TokenCheckUnavailableError.
        """
        key = blake2b(token.encode(), key=self._secret, digest_size=16).digest(), allow_expired
        judged = self._remembered(key) or self._shared(key, token)
        return None if not allow_expired and self._clock() >= judged.expires_at else judged.caller

    def _remembered(self, key: _Key) -> Judged | None:
        """Return the cached answer if it is fresh or its token has expired; otherwise None. Does not ask Keystone."""
        judged, new_until = self._good.get(key) or self._bad.get(key) or (REFUSED, 0.0)
        ended = not key[1] and judged.caller is not None and self._clock() >= judged.expires_at
        return judged if ended or self._steady() < new_until else None

    def _shared(self, key: _Key, token: str) -> Judged:
        """Ask Keystone once per token at a time: the first thread asks, the others wait and get the same result."""
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
                # No pause if Keystone answered, even with a refusal: it is quick, and no odd token must cause a pause.
                self._ask_again_at = self._steady() + PAUSE_S if failure.unreachable else 0.0
            if first:
                log.warning("Tokens cannot be validated: %s", failure.why)
            raise
        if self._failure:
            self._failure = None
            log.warning("Keystone validates tokens again")
        return judged
