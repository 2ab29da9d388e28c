"""When the load of this host's devices is read, and what of it is told: once a minute, often while somebody looks.

Run by `main` next to the link. `session` says when there is a gateway, hands on its wishes (`wire.Watch`) and takes
what was read last. Samples are the first thing to be shed: one that nobody takes before the next is forgotten, a driver
that does something else or is slow is left out of a round, and without a gateway nothing is read at all.
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
"""Between two rounds while nobody looks."""
SHORTEST_S, LONGEST_WISH_S = 0.5, 300.0
"""The bounds of a wish: between two rounds, and for how long."""
QUIET = 4.0
"""A driver is left alone for so many times as long as it took, so that sampling never fills its days."""
MAX_METRICS = 64
"""What `wire.DeviceLoad` holds of one device."""
PAUSE_S, LONGEST_PAUSE_S = 60.0, 3600.0
"""A driver that failed is left alone for the first, doubled with every failure up to the second."""


class Metered(Protocol):
    """One driver in its own process: `drivers.isolation.runner.DriverProcess`."""

    async def samples(self, asks: Sequence[Ask]) -> tuple[Sample, ...]:
        """The load of these devices; none when the driver is busy. Raises DriverError."""


@dataclass
class Timetable:
    """When the next round is due, `due`: arithmetic without a clock. All times are seconds on one clock."""

    due: float = math.inf
    _phase: float | None = None
    _begun: float = -math.inf
    _every: float = REST_S
    _until: float = -math.inf

    def connected(self, now: float, spread: float) -> None:
        """There is a gateway. `spread`, in [0, 1), is this host's place in the minute: a thousand do not send at once,
        not even after all were watched together."""
        self._phase, self._until = now + spread * REST_S, -math.inf
        self.due = self._phase

    def lost(self) -> None:
        """There is none any more, and what it wished is forgotten."""
        self._phase, self.due = None, math.inf

    def wished(self, now: float, wish: wire.Watch) -> None:
        """At once, though never sooner than `SHORTEST_S` after the last; the wish takes the place of the one before.
        Whoever only looks on does not have it read more often."""
        every, until = min(max(wish.every_s, SHORTEST_S), REST_S), now + min(max(wish.for_s, 0.0), LONGEST_WISH_S)
        looks_on = every == self._every and now <= self._until < until - SHORTEST_S
        self._every, self._until = every, until
        if not looks_on:
            self.due = max(now, self._begun + SHORTEST_S)
        elif self.due < math.inf:
            self.due = min(self.due, max(now, self._begun + every))

    def begins(self, now: float) -> None:
        """A round begins; until it ends only a wish makes the next one due."""
        self._begun, self.due = now, math.inf

    def ended(self, now: float) -> None:
        """The next one: what fell into this one's time is left out."""
        if self._phase is None:
            return
        watched = self._begun + self._every * max(1, math.ceil((now - self._begun) / self._every))
        resting = self._phase + REST_S * (math.floor((now - self._phase) / REST_S) + 1)
        self.due = min(self.due, watched if watched <= self._until else resting)


@dataclass
class Manners:
    """How a driver is spared: not asked before `free`, after `failures` in a row."""

    free: float = -math.inf
    failures: int = 0

    def answered(self, began: float, now: float) -> None:
        """It may be asked as often as its answers are quick."""
        self.free, self.failures = now + QUIET * (now - began), 0

    def failed(self, now: float) -> float:
        """It is left alone; for how many seconds."""
        pause = min(PAUSE_S * 2.0 ** min(self.failures, 16), LONGEST_PAUSE_S)
        self.free, self.failures = now + pause, self.failures + 1
        return pause


@dataclass
class Meter:
    """Reads the devices that `report` shows by the `drivers` that run now; `on_news` is called when there is more."""

    drivers: Mapping[str, Metered]
    report: Callable[[], wire.Report | None]
    on_news: Callable[[], None] = field(default=lambda: None)
    draw: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        self._table = Timetable()
        self._manners: WeakKeyDictionary[Metered, Manners] = WeakKeyDictionary()
        """By process: a driver that is run anew, with other settings, begins anew."""
        self._newest: wire.Samples | None = None
        self._moved = asyncio.Event()
        self._cut = False

    def connected(self) -> None:
        """There is a gateway that takes samples from now on."""
        self._newest = None
        self._table.connected(self._now(), self.draw())
        self._moved.set()

    def lost(self) -> None:
        """There is none: nothing is read."""
        self._table.lost()
        self._moved.set()

    def watch(self, wish: wire.Watch) -> None:
        """What the gateway wants until the next wish."""
        self._table.wished(self._now(), wish)
        self._moved.set()

    def take(self) -> wire.Samples | None:
        """The newest round, once: whoever takes it sends it now or not at all."""
        newest, self._newest = self._newest, None
        return newest

    def frame(self, samples: wire.Samples, max_bytes: int) -> str:
        """The message in at most so many bytes, the last devices left out where they do not fit."""
        max_bytes = min(max_bytes, wire.MAX_SAMPLES)
        kept = len(samples.loads)
        while True:
            text = wire.encode(wire.Samples(samples.loads[:kept]))
            if (size := len(text.encode())) <= max_bytes or not kept:
                break
            kept = min(kept - 1, kept * max_bytes // size)
        cut = len(samples.loads) - kept
        if cut and not self._cut:
            log.warning("the load of %d devices is not told: %d bytes are what the gateway takes", cut, max_bytes)
        self._cut = bool(cut)
        return text

    async def run(self) -> None:
        """One round after the other, each when it is due; ends only by being cancelled."""
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
        """All drivers at once, each in its own process; also an empty round is told, for somebody may wait for it."""
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
        manners = self._manners.setdefault(driver, Manners())
        began = self._now()
        if began < manners.free:
            return ()
        try:
            samples = await driver.samples([Ask(one.key, backend=one.backend) for one in told.devices])
        except DriverError as error:
            log.warning("%s; its load is not asked for in the next %.0f s", error, manners.failed(self._now()))
            return ()
        manners.answered(began, self._now())
        asked = {one.key for one in told.devices}  # what else its process says would cost this host its connection
        return tuple(one for one in samples if one.key in asked and math.isfinite(one.value))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
