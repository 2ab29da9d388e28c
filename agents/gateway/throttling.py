"""Throttle agents that connect, and spread the reports of agents that have connected.

`HandshakeThrottle` decides whether a handshake may begin now, and when a refused agent should come back. The gateway
asks it on the event loop before it verifies or looks up anything. `ReportJitter` computes the time over which new
agents spread their reports, from what `writer.DatabaseWriter` measures. Both are pure: no input or output, no database.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WINDOW_S = 1.0
"""Seconds over which the rate of handshakes is measured."""
ON_THE_WAY_S = 1.0
"""Seconds for which a place is kept for a client that was given a challenge; then it counts as not coming."""
SHARE, LEAST_SHARE = 16, 8
"""Once more than half of the places are taken, one address can have at most 1/ADDRESS_SHARE of all places kept for its
challenges, but always MIN_ADDRESS_PLACES. Asking for challenges costs a client nothing, so one address must not take
all places; but many hosts may share an address."""
SLOWEST, AT_FIRST = 50.0, 400.0
"""Handshakes per second: the lowest rate that is assumed, and the rate before the first measurement."""
OVERBOOKED = 2.0
"""Factor by which more agents are asked to come back per second than were admitted. To refuse an agent again costs
little, and an empty place costs much; agents add a back-off of their own, and some never come back."""
LONGEST_S = 30
"""Maximum seconds after which a refused agent is asked to come back (plus at most 1 s for rounding)."""
CALM_S, DEEP_S, MOST_S = 1.0, 20.0, 30.0
"""Seconds. Reports are not spread if the disk can store them within MAX_DISK_DELAY_S and the merge needs at most
MAX_MERGE_DELAY_S; they are never spread over more than MAX_JITTER_S."""

Clock = Callable[[], float]


class Admission:
    """Limits the handshakes in progress to `max_handshakes`, and the open sockets to `max_connections`.

    Refused agents get return times one after the other, at the rate at which agents were admitted lately, so that they
    do not come back together. Who is admitted is random, so that no agent starves.
    """

    def __init__(
        self, limit: int, connections: int, clock: Clock = time.monotonic, draw: Callable[[], float] = random.random
    ) -> None:
        self.limit, self.connections = limit, connections
        self.rate = AT_FIRST
        self.inside = self.refused = 0
        """The number of handshakes that wait for the database now, and the number of refusals ever."""
        self._clock, self._draw = clock, draw
        self._coming: deque[tuple[float, str]] = deque()
        self._since = self._last = clock()
        self._let_in, self._refused_before = 0, 0

    def ask(self, address: str) -> int:
        """Decide about a request for a challenge: return 0 and keep a place, or the seconds for Retry-After.

        The limit of open sockets does not count here: an agent that fetches an image asks for a challenge as well, and
        opens no socket.
        """
        now = self._clock()
        while self._coming and self._coming[0][0] < now - ON_THE_WAY_S:
            self._coming.popleft()
        under_way = self.inside + len(self._coming)
        if under_way >= self.limit or (under_way > self.limit // 2 and self._has_its_share(address)):
            return self.place()
        self._coming.append((now, address))
        return 0

    def _has_its_share(self, address: str) -> bool:
        """Return whether as many places are kept for this address as one address may have (see ADDRESS_SHARE)."""
        kept = sum(1 for _, other in self._coming if other == address)
        return kept >= max(LEAST_SHARE, self.limit // SHARE)

    def come(self, connected: int, address: str) -> int:
        """Decide about an upgrade request while `connected` sockets are open: return 0 or the seconds for Retry-After.

        A place that was kept with a challenge for this address is used up.
        """
        if kept := next((one for one in self._coming if one[1] == address), None):
            self._coming.remove(kept)
        if self.inside >= self.limit or connected + self.inside >= self.connections:
            return self.place()
        return 0

    @contextmanager
    def handshake(self) -> Iterator[None]:
        """Count a handshake while it waits for the database. If the block ends without an error, it was admitted."""
        self.inside += 1
        try:
            yield
            self._let_in += 1
            self._measure(self._clock())
        finally:
            self.inside -= 1

    def place(self) -> int:
        """Count a refusal, and return after how many whole seconds the agent should come back (for Retry-After)."""
        now = self._clock()
        self.refused += 1
        self._measure(now)
        self._last = max(self._last, now) + 1 / (self.rate * OVERBOOKED)
        if self._last - now > LONGEST_S:
            self._last = now + LONGEST_S
            return 1 + int(self._draw() * LONGEST_S)
        return 1 + int(self._last - now + self._draw())

    def _measure(self, now: float) -> None:
        """Update `rate` from the handshakes admitted since the last measurement, at most once per RATE_WINDOW_S.

        While agents are refused, the admitted ones are all that is possible, so the rate follows them down. While none
        is refused, more may be possible, so the rate grows.
        """
        took = now - self._since
        if took < WINDOW_S:
            return
        found = self._let_in / took
        if found > self.rate:
            self.rate = (self.rate + found) / 2
        elif self.refused > self._refused_before:  # slowly: in a second in which all come at once, none is admitted
            self.rate = max(SLOWEST, (3 * self.rate + found) / 4)
        elif found > self.rate / 2:
            self.rate *= 1.25
        self._since, self._let_in, self._refused_before = now, 0, self.refused


class Spread:
    """Computes the seconds over which new agents should spread their reports; 0 while disk and merge keep up.

    The writer thread calls `update_stored_rate` and `update_merge_time`, the event loop calls the others. No lock is
    needed, because each only sets numbers.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._expected, self._at = 0.0, clock()
        self._stored_rate, self._merged_rate, self._merge_s = 1000.0, 300.0, 0.0
        self._first: tuple[float, int] | None = None

    def welcome(self) -> float:
        """Count an agent that connects, and return the seconds over which it should spread its report (for Welcome)."""
        self._fade()
        self._expected += 1
        return min(MOST_S, max(0.0, self._expected / self._stored_rate - CALM_S, self._merge_s - DEEP_S))

    def reported(self) -> None:
        """Count a report that has arrived: one less is expected."""
        self._expected = max(0.0, self._expected - 1)

    def stored(self, reports: int, seconds: float) -> None:
        """Update the rate at which reports reach the disk. Batches of fewer than 10 are ignored."""
        if reports >= 10:  # with fewer, the time is mostly that of the commit itself
            self._stored_rate = max(1.0, (self._stored_rate + reports / max(seconds, 1e-6)) / 2)

    def looked(self, first: int | None, last: int | None) -> None:
        """Update how long the merge needs, from the ids of the oldest and newest spooled reports (None: no reports)."""
        now, before = self._clock(), self._first
        if first is None or last is None:
            self._first, self._merge_s = None, 0.0
            return
        self._first = now, first
        if before is None or now <= before[0]:
            return
        if first != before[1]:  # while hosts with faults are merged first, the oldest report stays: it shows no rate
            self._merged_rate = max(1.0, (self._merged_rate + (first - before[1]) / (now - before[0])) / 2)
        self._merge_s = (last - first + 1) / self._merged_rate

    def _fade(self) -> None:
        """Halve the number of expected reports every MAX_MERGE_DELAY_S / 4: agents without changes send none."""
        now = self._clock()
        self._expected *= 0.5 ** ((now - self._at) / (DEEP_S / 4))
        self._at = now
