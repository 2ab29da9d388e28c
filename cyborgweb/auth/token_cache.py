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
from cyborgweb.errors import CyborgwebError

log = logging.getLogger(__name__)

VALID_CACHE_S = 300.0
"""Seconds for which a valid answer is cached: a revoked token is refused after this time at the latest."""
UNKNOWN_CACHE_S = 15.0
"""Seconds for which it is cached that Keystone does not know a token."""
UNREACHABLE_PAUSE_S = 5.0
"""Seconds without any question after Keystone was unreachable. Then one request asks; the others fail without waiting
for it."""
PROBE_TIMEOUT_S = 30.0
"""Seconds after which another request asks, if that one request has no answer yet."""
MAX_ENTRIES = 10_000
"""Valid tokens, and also unknown tokens, that one cache holds at most; the oldest entry is dropped first."""


class TokenCheckUnavailableError(CyborgwebError):
    """Keystone gave no answer about a token. `reason` is one line.

    `unreachable` is True if the network or Keystone itself failed, and False for every other reason: a refused service
    user, throttling, an unreadable answer, or an unusable configuration.
    """

    def __init__(self, reason: str, unreachable: bool) -> None:
        super().__init__(reason)
        self.reason, self.unreachable = reason, unreachable


@dataclass(frozen=True, slots=True)
class TokenResult:
    """Keystone's answer about a token. `caller` is None if Keystone does not know it; `expires_at` is a UNIX time."""

    caller: Caller | None
    expires_at: float


UNKNOWN_TOKEN = TokenResult(None, 0.0)
ValidateToken = Callable[[str, bool], TokenResult]
"""A function (token, allow_expired) that asks Keystone about a token. Raises TokenCheckUnavailableError."""
_CacheKey = tuple[bytes, bool]


class TokenCache:
    """Finds the caller of a token, from the cache or from Keystone. Thread-safe.

    Concurrent calls for one token ask Keystone once. An answer about a known token is cached for 300 s, but never
    beyond the token's expiry; the answer that a token is unknown is cached for 15 s. While Keystone is unreachable, an
    old answer about a known token stays valid until the token expires.
    """

    def __init__(
        self,
        validate: ValidateToken,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        max_entries: int = MAX_ENTRIES,
    ) -> None:
        self._validate, self._clock, self._monotonic, self._max_entries = validate, clock, monotonic, max_entries
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        # Two tables, so that a flood of invented tokens evicts no valid one. Values: the answer, when it gets stale.
        self._valid: dict[_CacheKey, tuple[TokenResult, float]] = {}
        self._unknown: dict[_CacheKey, tuple[TokenResult, float]] = {}
        self._pending: dict[_CacheKey, Future[TokenResult]] = {}
        self._last_failure: TokenCheckUnavailableError | None = None
        self._retry_at = 0.0

    def find_caller(self, token: str, allow_expired: bool = False) -> Caller | None:
        """Return the token's caller; None if Keystone does not know the token or it has expired.

        Asks Keystone, and waits for the answer, if the cache has no fresh one. `allow_expired` is for tokens that come
        with a valid service token: Keystone then accepts them for longer. Raises TokenCheckUnavailableError.
        """
        key = blake2b(token.encode(), key=self._secret, digest_size=16).digest(), allow_expired
        result = self._get_cached(key) or self._ask_once(key, token)
        return None if not allow_expired and self._clock() >= result.expires_at else result.caller

    def _get_cached(self, key: _CacheKey) -> TokenResult | None:
        """Return Keystone's cached answer if it is fresh, or if its token has expired (then no question is needed).

        Otherwise return None. Does not ask Keystone.
        """
        result, fresh_until = self._valid.get(key) or self._unknown.get(key) or (UNKNOWN_TOKEN, 0.0)
        is_expired = not key[1] and result.caller is not None and self._clock() >= result.expires_at
        return result if is_expired or self._monotonic() < fresh_until else None

    def _ask_once(self, key: _CacheKey, token: str) -> TokenResult:
        """Ask Keystone once per token at a time: the first thread asks, the others wait and get the same result or the
        same TokenCheckUnavailableError.
        """
        with self._lock:
            if result := self._get_cached(key):
                return result
            future = self._pending.get(key)
            if is_first := future is None:
                future = self._pending[key] = Future()
        if not is_first:
            return future.result()
        try:
            result = self._ask_and_cache(key, token)
            future.set_result(result)
        except BaseException as error:
            future.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._pending[key]
        return result

    def _ask_and_cache(self, key: _CacheKey, token: str) -> TokenResult:
        """Ask Keystone, cache its answer and return it. If Keystone is unreachable, return an old answer whose token
        has not expired; otherwise raise TokenCheckUnavailableError.
        """
        try:
            result = self._ask_unless_paused(token, key[1])
        except TokenCheckUnavailableError as failure:
            cached, _ = self._valid.get(key, (UNKNOWN_TOKEN, 0.0))
            if failure.unreachable and self._clock() < cached.expires_at:
                return cached
            raise
        with self._lock:
            self._valid.pop(key, None)
            self._unknown.pop(key, None)
            entries, ttl_s = (self._valid, VALID_CACHE_S) if result.caller else (self._unknown, UNKNOWN_CACHE_S)
            while len(entries) >= self._max_entries:
                del entries[next(iter(entries))]
            entries[key] = result, self._monotonic() + ttl_s
        return result

    def _ask_unless_paused(self, token: str, allow_expired: bool) -> TokenResult:
        """Ask Keystone and remember whether it could be reached. Raises TokenCheckUnavailableError.

        For `UNREACHABLE_PAUSE_S` seconds after Keystone was unreachable, Keystone is not asked and the error is raised
        at once. Then one thread asks; the others still get the error until that thread has an answer, for at most
        `PROBE_TIMEOUT_S` seconds.
        """
        with self._lock:
            if failure := self._last_failure:
                if self._monotonic() < self._retry_at:
                    raise TokenCheckUnavailableError(failure.reason, failure.unreachable)
                self._retry_at = self._monotonic() + PROBE_TIMEOUT_S if failure.unreachable else 0.0
        try:
            result = self._validate(token, allow_expired)
        except TokenCheckUnavailableError as failure:
            with self._lock:
                is_first_failure, self._last_failure = self._last_failure is None, failure
                # No pause if Keystone answered, even with a refusal: it is quick, and no odd token must cause a pause.
                self._retry_at = self._monotonic() + UNREACHABLE_PAUSE_S if failure.unreachable else 0.0
            if is_first_failure:
                log.warning("Tokens cannot be validated: %s", failure.reason)
            raise
        if self._last_failure:
            self._last_failure = None
            log.warning("Keystone validates tokens again")
        return result
