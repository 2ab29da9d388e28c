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
from agents.host.backoff import wait_for_event
from drivers.errors import DriverError
from drivers.inventory import DriverReport, Sample
from drivers.plan import Ask

log = logging.getLogger("cyborg.meter")

IDLE_INTERVAL_S = 60.0
"""Seconds between two rounds while nobody watches."""
MIN_INTERVAL_S, MAX_WATCH_S = 0.5, 300.0
"""Limits of a Watch message: the shortest interval between two rounds, and the longest duration, in seconds."""
PAUSE_FACTOR = 4.0
"""After an answer a driver is not sampled for this many times the duration of that answer.

So sampling takes at most a fifth of its time.
"""
MAX_METRICS = 64
"""Largest number of values that `wire.DeviceLoad` may hold for one device."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 60.0, 3600.0
"""Back-off in seconds for a driver that failed: the first pause, and the limit up to which each failure doubles it."""


class SampleSource(Protocol):
    """One driver in its own process: `drivers.isolation.runner.DriverProcess`."""

    async def samples(self, asks: Sequence[Ask]) -> tuple[Sample, ...]:
        """Return the load of these devices, an empty tuple while the driver is busy. Raises DriverError."""


@dataclass
class SamplingSchedule:
    """Computes when the next round is due (`due`, infinity for never) without reading a clock itself.

    All times are seconds on the caller's clock.
    """

    due: float = math.inf
    _phase: float | None = None
    _round_began: float = -math.inf
    _interval_s: float = IDLE_INTERVAL_S
    _watch_end: float = -math.inf

    def on_connect(self, now: float, phase_fraction: float) -> None:
        """Start the schedule on a new connection, and forget the watch of the one before.

        `phase_fraction`, in [0, 1), is this host's place in the minute: it keeps a thousand hosts from sending at once,
        even after all of them were watched at the same time.
        """
        self._phase, self._watch_end = now + phase_fraction * IDLE_INTERVAL_S, -math.inf
        self.due = self._phase

    def on_disconnect(self) -> None:
        """Stop the schedule, because the connection is lost."""
        self._phase, self.due = None, math.inf

    def on_watch(self, now: float, watch: wire.Watch) -> None:
        """Make a round due at once, at the earliest MIN_INTERVAL_S after the last one began; replace the former Watch.

        A Watch that only prolongs the current watch, with the same interval, does not cause an extra round.
        """
        interval_s, watch_end = (
            min(max(watch.every_s, MIN_INTERVAL_S), IDLE_INTERVAL_S),
            now + min(max(watch.for_s, 0.0), MAX_WATCH_S),
        )
        is_prolonged = interval_s == self._interval_s and now <= self._watch_end < watch_end - MIN_INTERVAL_S
        self._interval_s, self._watch_end = interval_s, watch_end
        if not is_prolonged:
            self.due = max(now, self._round_began + MIN_INTERVAL_S)
        elif self.due < math.inf:
            self.due = min(self.due, max(now, self._round_began + interval_s))

    def on_round_start(self, now: float) -> None:
        """Note that a round begins; until it ends, only a Watch makes another one due."""
        self._round_began, self.due = now, math.inf

    def on_round_end(self, now: float) -> None:
        """Schedule the next round after one has ended; times that passed during the round are skipped.

        While a Watch is in force, rounds follow its interval. Otherwise there is one round a minute, at this host's own
        time within the minute.
        """
        if self._phase is None:
            return
        next_watched = self._round_began + self._interval_s * max(
            1, math.ceil((now - self._round_began) / self._interval_s)
        )
        next_idle = self._phase + IDLE_INTERVAL_S * (math.floor((now - self._phase) / IDLE_INTERVAL_S) + 1)
        self.due = min(self.due, next_watched if next_watched <= self._watch_end else next_idle)


@dataclass
class SamplingBackoff:
    """Limits how often one driver is sampled: not before `not_before`; `failures` counts consecutive failures."""

    not_before: float = -math.inf
    failures: int = 0

    def record_answer(self, started_at: float, now: float) -> None:
        """Note an answer: pause for PAUSE_FACTOR times its duration, and reset the failures."""
        self.not_before, self.failures = now + PAUSE_FACTOR * (now - started_at), 0

    def record_failure(self, now: float) -> float:
        """Note a failure; return the back-off in seconds, which doubles with each failure from FIRST_BACKOFF_S to
        MAX_BACKOFF_S."""
        pause = min(FIRST_BACKOFF_S * 2.0 ** min(self.failures, 16), MAX_BACKOFF_S)
        self.not_before, self.failures = now + pause, self.failures + 1
        return pause


@dataclass
class HostLoadSampler:
    """Samples the devices in the last report (`get_last_report()`) with the drivers that run now (`drivers`).

    `notify_sender` is called after each round; `draw_fraction` returns a random number in [0, 1).
    """

    drivers: Mapping[str, SampleSource]
    get_last_report: Callable[[], wire.Report | None]
    notify_sender: Callable[[], None] = field(default=lambda: None)
    draw_fraction: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        self._schedule = SamplingSchedule()
        self._backoffs: WeakKeyDictionary[SampleSource, SamplingBackoff] = WeakKeyDictionary()
        """Limits by driver object, so that a driver that was restarted with other settings has no pause."""
        self._newest_samples: wire.Samples | None = None
        self._schedule_changed = asyncio.Event()
        self._was_cut = False

    def on_connect(self) -> None:
        """Start sampling for a new connection; drop samples from before it."""
        self._newest_samples = None
        self._schedule.on_connect(self._now(), self.draw_fraction())
        self._schedule_changed.set()

    def on_disconnect(self) -> None:
        """Stop sampling, because the connection is lost."""
        self._schedule.on_disconnect()
        self._schedule_changed.set()

    def on_watch(self, watch: wire.Watch) -> None:
        """Take samples at the interval of the Watch message, until its duration is over or another Watch arrives."""
        self._schedule.on_watch(self._now(), watch)
        self._schedule_changed.set()

    def take_samples(self) -> wire.Samples | None:
        """Return the newest round and forget it; None when there is no new one. The caller sends it now or drops it."""
        newest, self._newest_samples = self._newest_samples, None
        return newest

    def encode_samples(self, samples: wire.Samples, max_bytes: int) -> str:
        """Encode the samples in at most `max_bytes` bytes (and wire.MAX_SAMPLES_BYTES); drop the last devices to fit.

        Logs a warning when devices are cut off and none were the last time.
        """
        max_bytes = min(max_bytes, wire.MAX_SAMPLES_BYTES)
        kept_count = len(samples.loads)
        while True:
            text = wire.encode_message(wire.Samples(samples.loads[:kept_count]))
            if (size := len(text.encode())) <= max_bytes or not kept_count:
                break
            kept_count = min(kept_count - 1, kept_count * max_bytes // size)
        cut_count = len(samples.loads) - kept_count
        if cut_count and not self._was_cut:
            log.warning("a message has at most %d bytes; devices whose load is left out: %d", max_bytes, cut_count)
        self._was_cut = bool(cut_count)
        return text

    async def run(self) -> None:
        """Run each round when it is due. Runs until it is cancelled."""
        while True:
            self._schedule_changed.clear()
            wait = self._schedule.due - self._now()
            if wait > 0:
                await wait_for_event(self._schedule_changed, wait)
                continue
            self._schedule.on_round_start(self._now())
            self._newest_samples = await self._sample_all()
            self._schedule.on_round_end(self._now())
            self.notify_sender()

    async def _sample_all(self) -> wire.Samples:
        """Sample all drivers that have devices, in parallel; return the result even when it is empty.

        An empty round is sent too, because somebody may be waiting for it.
        """
        report = self.get_last_report()
        driver_reports = [one for one in report.drivers if one.devices and one.driver in self.drivers] if report else []
        values: dict[str, dict[str, float]] = {}
        for samples in await asyncio.gather(
            *(self._sample_driver(self.drivers[one.driver], one) for one in driver_reports)
        ):
            for sample in samples:
                device_values = values.setdefault(sample.key, {})
                if sample.metric in device_values or len(device_values) < MAX_METRICS:
                    device_values[sample.metric] = sample.value
        return wire.Samples(tuple(wire.DeviceLoad(*one) for one in values.items()))

    async def _sample_driver(self, driver: SampleSource, report: DriverReport) -> tuple[Sample, ...]:
        """Sample one driver's devices; return an empty tuple while it pauses, or when it fails (which is logged)."""
        backoff = self._backoffs.setdefault(driver, SamplingBackoff())
        started_at = self._now()
        if started_at < backoff.not_before:
            return ()
        try:
            samples = await driver.samples(
                [Ask(one.key, backend=one.backend, address=one.address or "") for one in report.devices]
            )
        except DriverError as error:
            log.warning("%s; its load is not sampled for the next %.0f s", error, backoff.record_failure(self._now()))
            return ()
        backoff.record_answer(started_at, self._now())
        # Samples of other devices, or infinite ones, are dropped: for them the gateway would close the connection.
        device_keys = {one.key for one in report.devices}
        return tuple(one for one in samples if one.key in device_keys and math.isfinite(one.value))

    def _now(self) -> float:
        """Return the time of the event loop's clock in seconds."""
        return asyncio.get_running_loop().time()
