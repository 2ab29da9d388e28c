"""Limit how fast passwords can be guessed at the console's login, and how many threads of a web process logins can
occupy.

Each web process counts for itself, in bounded memory. An attempt counts from its beginning until it has succeeded. One
count is for a name from one address: it stops somebody who guesses. Another is for a name from all addresses: it is
much higher, so that nobody can lock a person out from a few addresses. A third is for an address with all names: it
stops somebody who tries one password with many names. Only the first count applies to a name at an address where it has
logged in lately, so that others cannot lock the person out there. One address has one password checked at a time, so
that one client cannot keep the process from checking the passwords of others.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from django.http import HttpRequest

from cyborgweb.auth.clients import find_address, get_network
from cyborgweb.errors import CyborgwebError
from cyborgweb.settings.keys import get_keys

log = logging.getLogger(__name__)

MAX_FAILURES, MAX_FAILURES_OF_NAME = 10, 100
"""Failed attempts after which a name is refused, from one address and from all addresses."""
MAX_FAILURES_OF_NETWORK = 50
"""Failed attempts after which all names are refused from an address. Many people may share one address."""
FORGET_ALL_S = 600.0
"""Seconds in which as many failed attempts are forgotten, one by one, as are allowed. So a name is refused everywhere
for long only if more than MAX_FAILURES_OF_NAME / MAX_FAILURES addresses go on failing."""
LOG_AGAIN_S = 60.0
"""Seconds in which the refusals by one limit of one key are logged once, so that they do not fill the log."""
MAX_ENTRIES = 5000
"""Names that are counted, and also addresses, and pairs of both, and pairs that have logged in; the one that was used
least recently is dropped."""
MAX_PARALLEL_CHECKS = 2
"""Passwords that a process checks at the same time, so that its other request threads serve others: a check takes much
processor time, or waits for Keystone. For one address it checks one at a time."""
THROTTLED_TEXT = (
    "There were too many failed logins with this name. Wait a minute: then you have one attempt. Logging in from"
    " another address may be possible at once."
)
NETWORK_TEXT = "There were too many failed logins from your address. Wait a minute, then try again."
BUSY_TEXT = "Other passwords are being checked at this moment. Try again in a few seconds."


class LoginThrottledError(CyborgwebError):
    """The password is not checked now. The message says why and what to do."""


V = TypeVar("V")


class _LatestEntries(OrderedDict[object, V]):
    """A dictionary that keeps the MAX_ENTRIES keys that were set last."""

    def __setitem__(self, key: object, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > MAX_ENTRIES:
            self.popitem(last=False)


class _FailureCounts:
    """Failed attempts by key; max_failures of them are forgotten in FORGET_ALL_S. Keeps MAX_ENTRIES keys."""

    def __init__(self, max_failures: int, clock: Callable[[], float]) -> None:
        self._max_failures, self._clock = max_failures, clock
        self._counts: _LatestEntries[tuple[float, float]] = _LatestEntries()
        self._logged_at: _LatestEntries[float] = _LatestEntries()

    def is_full(self, key: object) -> bool:
        """Return whether the key has as many failed attempts as are allowed; such a key is then dropped last."""
        is_full = self._get(key) > self._max_failures - 1
        if is_full:
            self._counts.move_to_end(key)
        return is_full

    def add(self, key: object, number: int) -> None:
        """Add this number of failed attempts; a negative number takes some back."""
        if (count := max(self._get(key) + number, 0.0)) > 0:
            self._counts[key] = count, self._clock()
        else:
            self._counts.pop(key, None)

    def begin_logging(self, key: object) -> bool:
        """Return whether a refusal of the key is logged now: not if this was so within the last LOG_AGAIN_S."""
        now = self._clock()
        if is_due := now - self._logged_at.get(key, -math.inf) >= LOG_AGAIN_S:
            self._logged_at[key] = now
        return is_due

    def _get(self, key: object) -> float:
        """Return the failed attempts of the key that are not forgotten."""
        count, at = self._counts.get(key, (0.0, 0.0))
        return max(count - (self._clock() - at) * self._max_failures / FORGET_ALL_S, 0.0)


class LoginThrottle:
    """Decides whether a password may be checked now. Its methods may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._by_name = _FailureCounts(MAX_FAILURES_OF_NAME, clock)
        self._by_network = _FailureCounts(MAX_FAILURES_OF_NETWORK, clock)
        self._by_name_and_address = _FailureCounts(MAX_FAILURES, clock)
        self._logged_in: _LatestEntries[None] = _LatestEntries()
        self._running: set[str] = set()

    @contextmanager
    def attempt(self, name: str, address: str) -> Iterator[Callable[[bool], None]]:
        """Count a failed attempt to log in, and yield a function that takes it back. Call it unless the password was
        wrong, with whether it was right (and not: could not be checked).

        Raises LoginThrottledError if the name or the address has failed too often, or if too many passwords are being
        checked, or one from this address.
        """
        account, network = name.casefold(), get_network(address)
        pair = account, network
        limits: list[tuple[_FailureCounts, object, str]] = [
            (self._by_name_and_address, pair, THROTTLED_TEXT),
            (self._by_network, network, NETWORK_TEXT),
            (self._by_name, account, THROTTLED_TEXT),
        ]
        with self._lock:
            for counts, key, text in limits[:1] if pair in self._logged_in else limits:
                if counts.is_full(key):
                    if counts.begin_logging(key):
                        log.warning("logins with the name %.64r from %s are refused: too many failed", name, address)
                    raise LoginThrottledError(text)
            if network in self._running or len(self._running) >= MAX_PARALLEL_CHECKS:
                raise LoginThrottledError(BUSY_TEXT)
            self._running.add(network)
            for counts, key, _ in limits:
                counts.add(key, 1)

        def take_back(has_logged_in: bool) -> None:
            """Do not count this attempt as a failed one; remember whether the person has logged in from here."""
            with self._lock:
                for counts, key, _ in limits:
                    counts.add(key, -1)
                if has_logged_in:
                    self._logged_in[pair] = None

        try:
            yield take_back
        finally:
            with self._lock:
                self._running.remove(network)


throttle = LoginThrottle()
"""The throttle of this process."""


def get_client_address(request: HttpRequest) -> str:
    """Return the address of the client of a request (`clients.find_address`)."""
    meta = request.META
    return find_address(str(meta.get("REMOTE_ADDR", "")), str(meta.get("HTTP_X_FORWARDED_FOR", "")), get_keys())
