"""Throttle agents that connect or send a lot, and spread the reports of agents that have connected.

`TokenBuckets` gives each host its share. `HandshakeThrottle` decides whether a handshake may begin now, and when a
refused agent should come back. The gateway asks it on the event loop before it verifies or looks up anything.
`ReportJitter` computes the time over which new agents spread their reports, from what `writer.DatabaseWriter` measures.
All are pure: no input or output, no database.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

RATE_WINDOW_S = 1.0
"""Seconds over which the rate of handshakes is measured."""
CHALLENGE_HOLD_S = 1.0
"""Seconds for which a place is kept for a client that was given a challenge; then it counts as not coming."""
ADDRESS_SHARE, MIN_ADDRESS_PLACES = 16, 8
"""Once more than half of the places are taken, one address can have at most 1/ADDRESS_SHARE of all places kept for its
challenges, but always MIN_ADDRESS_PLACES. Asking for challenges costs a client nothing, so one address must not take
all places; but many hosts may share an address."""
MIN_RATE, INITIAL_RATE = 50.0, 400.0
"""Handshakes per second: the lowest rate that is assumed, and the rate before the first measurement."""
BURST_S = 120.0
"""A host may at once send the reports, and the bytes of reports, of this many seconds at the highest lasting rate. A
host that boots, or whose devices are plugged in and out, then does not wait."""
URGENT_PER_S, MAX_URGENT = 1 / 60, 3
"""The number of urgent reports of one host that are treated as urgent per second, and at once. Further ones wait until
it is their host's turn. Without this limit, a host whose held device fails again and again would always be first."""
OVERBOOKING_FACTOR = 2.0
"""Factor by which more agents are asked to come back per second than were admitted. To refuse an agent again costs
little, and an empty place costs much; agents add a back-off of their own, and some never come back."""
MAX_RETRY_AFTER_S = 30
"""Maximum seconds after which a refused agent is asked to come back (plus at most 1 s for rounding)."""
MAX_DISK_DELAY_S, MAX_MERGE_DELAY_S, MAX_JITTER_S = 1.0, 20.0, 30.0
"""Seconds. Reports are not spread if the disk can store them within MAX_DISK_DELAY_S and the merge needs at most
MAX_MERGE_DELAY_S; they are never spread over more than MAX_JITTER_S."""

MAX_DEBT = 2
"""A bucket is never emptier than MAX_DEBT times what was last taken from it, so that a host waits a bounded time."""

Clock = Callable[[], float]


class TokenBuckets:
    """A token bucket for each host. A bucket holds at most `capacity` tokens, and gains `rate` of them a second.

    The buckets of a gateway outlive connections, so that a host gains nothing by connecting again.
    """

    def __init__(self, rate: float, capacity: float, clock: Clock = time.monotonic) -> None:
        self.rate, self.capacity = rate, capacity
        self._clock = clock
        self._levels: dict[int, tuple[float, float]] = {}
        """Host id → number of tokens, and when it was computed. A number below 0 is a debt."""

    def take(self, host_id: int, amount: float) -> float:
        """Take tokens, more than there are if need be; return the seconds to wait until earlier debts are paid."""
        level = self._compute_level(host_id)
        self._levels[host_id] = max(level - amount, -MAX_DEBT * amount), self._clock()
        return max(0.0, -level / self.rate)

    def try_take(self, host_id: int) -> bool:
        """Take one token and return True; return False, and take nothing, if there is none."""
        if (level := self._compute_level(host_id)) < 1:
            return False
        self._levels[host_id] = level - 1, self._clock()
        return True

    def _compute_level(self, host_id: int) -> float:
        """Return how many tokens the bucket of a host has now."""
        level, computed_at = self._levels.get(host_id, (self.capacity, 0.0))
        return min(self.capacity, level + (self._clock() - computed_at) * self.rate)


class HandshakeThrottle:
    """Limits the handshakes in progress to `max_handshakes`, and the open sockets to `max_connections`.

    Refused agents get return times one after the other, at the rate at which agents were admitted lately, so that they
    do not come back together. The agents that are admitted are chosen at random, so that no agent starves.
    """

    def __init__(
        self,
        max_handshakes: int,
        max_connections: int,
        clock: Clock = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.max_handshakes, self.max_connections = max_handshakes, max_connections
        self.rate = INITIAL_RATE
        self.in_progress = self.refused_count = 0
        """The number of handshakes that wait for the database now, and the number of refusals ever."""
        self._clock, self._draw = clock, draw
        self._kept_places: deque[tuple[float, str]] = deque()
        self._window_start = self._last_return_at = clock()
        self._admitted_in_window, self._refused_before_window = 0, 0

    def admit_challenge(self, address: str) -> int:
        """Return 0 if a request for a challenge is admitted, or the seconds for Retry-After if it is refused.

        An admitted request keeps one of the `max_handshakes` places, for at most CHALLENGE_HOLD_S seconds. While more
        than half of the places are taken, an address that keeps its share of them (ADDRESS_SHARE) is refused. The limit
        of open sockets does not count here: an agent that fetches an image asks for a challenge as well, and opens no
        socket.
        """
        now = self._clock()
        while self._kept_places and self._kept_places[0][0] < now - CHALLENGE_HOLD_S:
            self._kept_places.popleft()
        under_way = self.in_progress + len(self._kept_places)
        if under_way >= self.max_handshakes or (
            under_way > self.max_handshakes // 2 and self._has_used_its_share(address)
        ):
            return self.schedule_return()
        self._kept_places.append((now, address))
        return 0

    def _has_used_its_share(self, address: str) -> bool:
        """Return whether as many places are kept for this address as one address may have (see ADDRESS_SHARE)."""
        place_count = sum(1 for _, other in self._kept_places if other == address)
        return place_count >= max(MIN_ADDRESS_PLACES, self.max_handshakes // ADDRESS_SHARE)

    def admit_upgrade(self, connected: int, address: str) -> int:
        """Decide about an upgrade request while `connected` sockets are open: return 0 or the seconds for Retry-After.

        A place that was kept with a challenge for this address is used up.
        """
        if kept_place := next((place for place in self._kept_places if place[1] == address), None):
            self._kept_places.remove(kept_place)
        if self.in_progress >= self.max_handshakes or connected + self.in_progress >= self.max_connections:
            return self.schedule_return()
        return 0

    @contextmanager
    def count_handshake(self) -> Iterator[None]:
        """Count a handshake in `in_progress` while the block runs, because it waits for the database.

        If the block ends without an error, the handshake counts as admitted; `rate` follows the admitted ones.
        """
        self.in_progress += 1
        try:
            yield
            self._admitted_in_window += 1
            self._update_rate(self._clock())
        finally:
            self.in_progress -= 1

    def schedule_return(self) -> int:
        """Count a refusal, and return after how many whole seconds the agent should come back (for Retry-After).

        The result is 1 to MAX_RETRY_AFTER_S + 1.
        """
        now = self._clock()
        self.refused_count += 1
        self._update_rate(now)
        self._last_return_at = max(self._last_return_at, now) + 1 / (self.rate * OVERBOOKING_FACTOR)
        if self._last_return_at - now > MAX_RETRY_AFTER_S:
            self._last_return_at = now + MAX_RETRY_AFTER_S
            return 1 + int(self._draw() * MAX_RETRY_AFTER_S)
        return 1 + int(self._last_return_at - now + self._draw())

    def _update_rate(self, now: float) -> None:
        """Update `rate` from the handshakes admitted since the last measurement, at most once per RATE_WINDOW_S.

        While agents are refused, the admitted ones are all that is possible, so the rate follows them down. While none
        is refused, more may be possible, so the rate grows.
        """
        elapsed = now - self._window_start
        if elapsed < RATE_WINDOW_S:
            return
        measured = self._admitted_in_window / elapsed
        if measured > self.rate:
            self.rate = (self.rate + measured) / 2
        elif (
            self.refused_count > self._refused_before_window
        ):  # slowly: in a second in which all come at once, none is admitted
            self.rate = max(MIN_RATE, (3 * self.rate + measured) / 4)
        elif measured > self.rate / 2:
            self.rate *= 1.25
        self._window_start, self._admitted_in_window, self._refused_before_window = now, 0, self.refused_count


class ReportJitter:
    """Computes the seconds over which new agents should spread their reports; 0 while disk and merge keep up.

    The writer thread calls `update_stored_rate` and `update_merge_time`, the event loop calls the other methods. No
    lock is needed, because the methods only set numbers.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._expected_reports, self._decayed_at = 0.0, clock()
        self._stored_rate, self._merged_rate, self._merge_s = 1000.0, 300.0, 0.0
        self._oldest_seen: tuple[float, int] | None = None

    def choose_jitter(self) -> float:
        """Count an agent that connects, and return the seconds over which it should spread its report (for Welcome).

        The result is 0 to MAX_JITTER_S.
        """
        self._decay_expected_reports()
        self._expected_reports += 1
        return min(
            MAX_JITTER_S,
            max(0.0, self._expected_reports / self._stored_rate - MAX_DISK_DELAY_S, self._merge_s - MAX_MERGE_DELAY_S),
        )

    def count_report(self) -> None:
        """Count a report that has arrived: `choose_jitter` then expects one report less."""
        self._expected_reports = max(0.0, self._expected_reports - 1)

    def update_stored_rate(self, reports: int, seconds: float) -> None:
        """Update the rate at which reports reach the disk: `reports` were stored within `seconds`.

        Batches of fewer than 10 reports are ignored.
        """
        if reports >= 10:  # with fewer, the time is mostly that of the commit itself
            self._stored_rate = max(1.0, (self._stored_rate + reports / max(seconds, 1e-6)) / 2)

    def update_merge_time(self, oldest_id: int | None, newest_id: int | None) -> None:
        """Update the seconds that the merge needs for all spooled reports.

        `oldest_id` and `newest_id` are the ids of the oldest and the newest of them, None if there are none. The rate
        of the merge is measured by how fast the oldest id grows between two calls.
        """
        now, previous = self._clock(), self._oldest_seen
        if oldest_id is None or newest_id is None:
            self._oldest_seen, self._merge_s = None, 0.0
            return
        self._oldest_seen = now, oldest_id
        if previous is None or now <= previous[0]:
            return
        if (
            oldest_id != previous[1]
        ):  # while hosts with faults are merged first, the oldest report stays, so that its id shows no rate
            self._merged_rate = max(1.0, (self._merged_rate + (oldest_id - previous[1]) / (now - previous[0])) / 2)
        self._merge_s = (newest_id - oldest_id + 1) / self._merged_rate

    def _decay_expected_reports(self) -> None:
        """Halve the number of expected reports every MAX_MERGE_DELAY_S / 4: agents without changes send none."""
        now = self._clock()
        self._expected_reports *= 0.5 ** ((now - self._decayed_at) / (MAX_MERGE_DELAY_S / 4))
        self._decayed_at = now
