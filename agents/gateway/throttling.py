"""Who may begin a handshake now, when the others are to come back, and over what time reports are spread.

Asked by `gateway` on the event loop before anything is verified or looked up; `spool.Writer` tells what it took. Pure.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WINDOW_S = 1.0
"""The rate is measured over as long."""
ON_THE_WAY_S = 1.0
"""Who has a challenge is expected for so long: what nobody comes back with is no place taken."""
SHARE, LEAST_SHARE = 16, 8
"""Once half of the places are taken, one address keeps at most this part of them for who has not come yet, and never
less than so many: challenges cost whoever asks for them nothing, and many hosts may share an address."""
SLOWEST, AT_FIRST = 50.0, 400.0
"""Handshakes a second: the least that is assumed, and what is, before anything was measured."""
OVERBOOKED = 2.0
"""So many more are asked to come back than were let in. To be sent away again costs little, an empty place much: agents
add a back-off of their own, and some never come."""
LONGEST_S = 30
"""Nobody is sent away for longer."""
CALM_S, DEEP_S, MOST_S = 1.0, 20.0, 30.0
"""What the disk takes in CALM_S, and the merge in DEEP_S, is not spread; nothing over more than MOST_S."""

Clock = Callable[[], float]


class Admission:
    """Handshakes under way are bounded by `limit`, sockets by `connections`. Who gets in is chance: nobody starves.

    The refused are given places one after the other, as fast as others were let in of late: they do not come back
    together.
    """

    def __init__(
        self, limit: int, connections: int, clock: Clock = time.monotonic, draw: Callable[[], float] = random.random
    ) -> None:
        self.limit, self.connections = limit, connections
        self.rate = AT_FIRST
        self.inside = self.refused = 0
        """Handshakes that wait for the database now, and how many were ever sent away."""
        self._clock, self._draw = clock, draw
        self._coming: deque[tuple[float, str]] = deque()
        self._since = self._last = clock()
        self._let_in, self._refused_before = 0, 0

    def ask(self, address: str) -> int:
        """A challenge is asked for from `address`: 0, or the seconds to come back in.

        Sockets do not count here: who fetches an image asks as well, and opens none.
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
        kept = sum(1 for _, other in self._coming if other == address)
        return kept >= max(LEAST_SHARE, self.limit // SHARE)

    def come(self, connected: int, address: str) -> int:
        """An upgrade is asked for while `connected` sockets are open: the same. Who was given a challenge in time finds
        the place kept."""
        if kept := next((one for one in self._coming if one[1] == address), None):
            self._coming.remove(kept)
        if self.inside >= self.limit or connected + self.inside >= self.connections:
            return self.place()
        return 0

    @contextmanager
    def handshake(self) -> Iterator[None]:
        """Around what waits for the database; one that ends without an error was let in."""
        self.inside += 1
        try:
            yield
            self._let_in += 1
            self._measure(self._clock())
        finally:
            self.inside -= 1

    def place(self) -> int:
        """The next free one for who is sent away, in whole seconds, as Retry-After has them."""
        now = self._clock()
        self.refused += 1
        self._measure(now)
        self._last = max(self._last, now) + 1 / (self.rate * OVERBOOKED)
        if self._last - now > LONGEST_S:
            self._last = now + LONGEST_S
            return 1 + int(self._draw() * LONGEST_S)
        return 1 + int(self._last - now + self._draw())

    def _measure(self, now: float) -> None:
        """While some are refused, what is let in is all that can be; while none is, more may be possible."""
        took = now - self._since
        if took < WINDOW_S:
            return
        found = self._let_in / took
        if found > self.rate:
            self.rate = (self.rate + found) / 2
        elif self.refused > self._refused_before:  # slowly: a second in which all came at once lets in nobody
            self.rate = max(SLOWEST, (3 * self.rate + found) / 4)
        elif found > self.rate / 2:
            self.rate *= 1.25
        self._since, self._let_in, self._refused_before = now, 0, self.refused


class Spread:
    """Over how many seconds who connects now is to spread its report: 0 while disk and merge keep up.

    `stored` and `looked` are called by the writer's thread, the others on the event loop: each only sets a number.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._expected, self._at = 0.0, clock()
        self._stored_rate, self._merged_rate, self._merge_s = 1000.0, 300.0, 0.0
        self._first: tuple[float, int] | None = None

    def welcome(self) -> float:
        """One more has connected: what it is to be told, in seconds."""
        self._fade()
        self._expected += 1
        return min(MOST_S, max(0.0, self._expected / self._stored_rate - CALM_S, self._merge_s - DEEP_S))

    def reported(self) -> None:
        """One of the expected reports has come."""
        self._expected = max(0.0, self._expected - 1)

    def stored(self, reports: int, seconds: float) -> None:
        """So many reports took so long to reach the disk."""
        if reports >= 10:  # of few the commit itself is measured
            self._stored_rate = max(1.0, (self._stored_rate + reports / max(seconds, 1e-6)) / 2)

    def looked(self, first: int | None, last: int | None) -> None:
        """The numbers of the oldest and the newest report that wait to be merged; None: nothing waits."""
        now, before = self._clock(), self._first
        if first is None or last is None:
            self._first, self._merge_s = None, 0.0
            return
        self._first = now, first
        if before is None or now <= before[0]:
            return
        if first != before[1]:  # while hosts with faults go first, the oldest stays, and says nothing of the pace
            self._merged_rate = max(1.0, (self._merged_rate + (first - before[1]) / (now - before[0])) / 2)
        self._merge_s = (last - first + 1) / self._merged_rate

    def _fade(self) -> None:
        """Who has nothing new to report is forgotten: half of the expected in every DEEP_S / 4."""
        now = self._clock()
        self._expected *= 0.5 ** ((now - self._at) / (DEEP_S / 4))
        self._at = now
