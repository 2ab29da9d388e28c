"""Sample the load of this host's devices: once a minute, and more often while somebody watches the host.

The session reports new and lost connections, passes on the gateway's `wire.Watch` messages, and takes the newest
samples to send them. Samples are the first thing to be dropped under pressure: a round that is not taken before the
next one is lost, a driver that is busy or slow is left out of a round, and without a connection nothing is read.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

from agents import wire
from agents.host.backoff import set_or_passed
from drivers.errors import DriverError
from drivers.inventory import DriverReport, Sample
from drivers.plan import Ask

log = logging.getLogger("cyborg.meter")

REST_S = 60.0
"""Seconds between two rounds while nobody watches."""
SHORTEST_S, LONGEST_WISH_S = 0.5, 300.0
"""Limits of a Watch message: the shortest interval between two rounds, and the longest duration, in seconds."""
QUIET = 4.0
"""After an answer a driver is not sampled for this many times the duration of that answer.

So sampling takes at most a fifth of its time.
"""
MAX_METRICS = 64
"""Largest number of values that `wire.DeviceLoad` may hold for one device."""
PAUSE_S, LONGEST_PAUSE_S = 60.0, 3600.0
"""Back-off in seconds for a driver that failed: the first pause, and the limit up to which each failure doubles it."""


class Metered(Protocol):
    """One driver in its own process: `drivers.isolation.runner.DriverProcess`."""

    async def samples(self, asks: Sequence[Ask]) -> tuple[Sample, ...]:
        """Return the load of these devices, an empty tuple while the driver is busy. Raises DriverError."""


@dataclass
class Timetable:
    """Computes when the next round is due (`due`, infinity for never) without reading a clock itself.

    All times are seconds on the caller's clock.
    """

    due: float = math.inf
    _phase: float | None = None
    _begun: float = -math.inf
    _every: float = REST_S
    _until: float = -math.inf

    def connected(self, now: float, spread: float) -> None:
        """Start the schedule on a new connection, and forget the watch of the one before.

        `phase_fraction`, in [0, 1), is this host's place in the minute: it keeps a thousand hosts from sending at once,
        even after all of them were watched at the same time.
        """
        self._phase, self._until = now + spread * REST_S, -math.inf
        self.due = self._phase

    def lost(self) -> None:
        """Stop the schedule, because the connection is lost."""
        self._phase, self.due = None, math.inf

    def wished(self, now: float, wish: wire.Watch) -> None:
        """Make a round due at once, at the earliest MIN_INTERVAL_S after the last one began; replace the former Watch.

        A Watch that only prolongs the current watch, with the same interval, does not cause an extra round.
        """
        every, until = min(max(wish.every_s, SHORTEST_S), REST_S), now + min(max(wish.for_s, 0.0), LONGEST_WISH_S)
        looks_on = every == self._every and now <= self._until < until - SHORTEST_S
        self._every, self._until = every, until
        if not looks_on:
            self.due = max(now, self._begun + SHORTEST_S)
        elif self.due < math.inf:
            self.due = min(self.due, max(now, self._begun + every))

    def begins(self, now: float) -> None:
        """Note that a round begins; until it ends, only a Watch makes another one due."""
        self._begun, self.due = now, math.inf

    def ended(self, now: float) -> None:
        """Schedule the next round after one has ended; times that passed during the round are skipped.

        Rounds follow the watch while it lasts, otherwise this host's place in the minute.
        """
        if self._phase is None:
            return
        watched = self._begun + self._every * max(1, math.ceil((now - self._begun) / self._every))
        resting = self._phase + REST_S * (math.floor((now - self._phase) / REST_S) + 1)
        self.due = min(self.due, watched if watched <= self._until else resting)


@dataclass
class Manners:
    """Limits how often one driver is sampled: not before `not_before`; `failures` counts consecutive failures."""

    free: float = -math.inf
    failures: int = 0

    def answered(self, began: float, now: float) -> None:
        """Note an answer: pause for PAUSE_FACTOR times its duration, and reset the failures."""
        self.free, self.failures = now + QUIET * (now - began), 0

    def failed(self, now: float) -> float:
        """Note a failure; return the back-off in seconds."""
        pause = min(PAUSE_S * 2.0 ** min(self.failures, 16), LONGEST_PAUSE_S)
        self.free, self.failures = now + pause, self.failures + 1
        return pause


@dataclass
class Meter:
    """Samples the devices in the last report (`get_last_report()`) with the drivers that run now (`drivers`).

    `notify_sender` is called after each round; `draw_fraction` returns a random number in [0, 1).
    """

    drivers: Mapping[str, Metered]
    report: Callable[[], wire.Report | None]
    on_news: Callable[[], None] = field(default=lambda: None)
    draw: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        self._table = Timetable()
        self._manners: WeakKeyDictionary[Metered, Manners] = WeakKeyDictionary()
        """Limits by driver object, so that a driver that was restarted with other settings has no pause."""
        self._newest: wire.Samples | None = None
        self._moved = asyncio.Event()
        self._cut = False

    def connected(self) -> None:
        """Start sampling for a new connection; drop samples from before it."""
        self._newest = None
        self._table.connected(self._now(), self.draw())
        self._moved.set()

    def lost(self) -> None:
        """Stop sampling, because the connection is lost."""
        self._table.lost()
        self._moved.set()

    def watch(self, wish: wire.Watch) -> None:
        """Sample as the gateway's message says, until its end or the next such message."""
        self._table.wished(self._now(), wish)
        self._moved.set()

    def take(self) -> wire.Samples | None:
        """Return the newest round and forget it; None when there is no new one. The caller sends it now or drops it."""
        newest, self._newest = self._newest, None
        return newest

    def frame(self, samples: wire.Samples, max_bytes: int) -> str:
        """Encode the samples in at most `max_bytes` bytes (and wire.MAX_SAMPLES_BYTES); drop the last devices to fit.

        Logs a warning when devices are cut off and none were the last time.
        """
        max_bytes = min(max_bytes, wire.MAX_SAMPLES)
        kept = len(samples.loads)
        while True:
            text = wire.encode(wire.Samples(samples.loads[:kept]))
            if (size := len(text.encode())) <= max_bytes or not kept:
                break
            kept = min(kept - 1, kept * max_bytes // size)
        cut = len(samples.loads) - kept
        if cut and not self._cut:
            log.warning("a message has at most %d bytes; devices whose load is left out: %d", max_bytes, cut)
        self._cut = bool(cut)
        return text

    async def run(self) -> None:
        """Run each round when it is due. Runs until it is cancelled."""
        while True:
            self._moved.clear()
            wait = self._table.due - self._now()
            if wait > 0:
                await set_or_passed(self._moved, wait)
                continue
            self._table.begins(self._now())
            self._newest = await self._round()
            self._table.ended(self._now())
            self.on_news()

    async def _round(self) -> wire.Samples:
        """Sample all drivers that have devices, in parallel; return the result even when it is empty.

        An empty round is sent too, because somebody may be waiting for it.
        """
        report = self.report()
        told = [one for one in report.drivers if one.devices and one.driver in self.drivers] if report else []
        values: dict[str, dict[str, float]] = {}
        for samples in await asyncio.gather(*(self._read(self.drivers[one.driver], one) for one in told)):
            for sample in samples:
                of_device = values.setdefault(sample.key, {})
                if sample.metric in of_device or len(of_device) < MAX_METRICS:
                    of_device[sample.metric] = sample.value
        return wire.Samples(tuple(wire.DeviceLoad(*one) for one in values.items()))

    async def _read(self, driver: Metered, told: DriverReport) -> tuple[Sample, ...]:
        """Sample one driver's devices; return an empty tuple while it pauses, or when it fails (which is logged)."""
        manners = self._manners.setdefault(driver, Manners())
        began = self._now()
        if began < manners.free:
            return ()
        try:
            samples = await driver.samples([Ask(one.key, backend=one.backend) for one in told.devices])
        except DriverError as error:
            log.warning("%s; its load is not sampled for the next %.0f s", error, manners.failed(self._now()))
            return ()
        manners.answered(began, self._now())
        # Samples of other devices, or infinite ones, are dropped: for them the gateway would close the connection.
        asked = {one.key for one in told.devices}
        return tuple(one for one in samples if one.key in asked and math.isfinite(one.value))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
