"""Read the load of many devices in one call, in bounded time, even if one device hangs.

`Driver.stats` is code of a driver's author that reads hardware: it may raise, return wrong data, be slow, or hang in
the kernel for ever. Load is the least important result of a driver, so such a failure must not affect anything else.
The devices are read one after the other in a thread, and when the time is over the samples read so far are returned. A
device that hangs blocks only that thread: it is skipped until the thread has ended; other devices and calls go on.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from drivers.base import Driver, Settings, at_most
from drivers.errors import DriverError, Failed
from drivers.inventory import Fault, Sample
from drivers.machine import Machine
from drivers.plan import MAX_SAMPLES, Ask, Load

READING_SHARE = 0.6
"""The part of a call's deadline that may be used for reading; the rest is for sending the answer."""
MAX_HANGING_ROUNDS = 4
"""Nothing more is read while this many readings have not ended."""
MAX_PER_DEVICE = 64
SLOW_REASON = "its load could not be read in time: is the device stuck?"

SampleValidator = Callable[[tuple[Sample, ...]], tuple[Sample, ...]]
"""A function that validates samples before they are sent and returns them; it raises Failed."""


class LoadSampler:
    """Reads the load of one driver's devices. `validate` validates the samples before they are sent."""

    def __init__(self, driver: Driver, validate: SampleValidator) -> None:
        self._driver, self._validate = driver, validate
        self._unfinished_rounds: list[SamplingRound] = []
        self._last_key = ""
        """The key of the last device read; the next call starts after it, so that every device has its turn."""

    def read_load(self, machine: Machine, settings: Settings, asks: tuple[Ask, ...]) -> Load:
        """Return the samples that can be read within READING_SHARE of the machine's deadline.

        `unread` of the result names the devices that failed or hang, with the reason. Devices that were not reached in
        time are neither in `samples` nor in `unread`; the next call starts with them. Nothing is raised for a device.
        """
        self._unfinished_rounds = [one for one in self._unfinished_rounds if one.is_alive()]
        hanging_keys = {one.current_key for one in self._unfinished_rounds}
        faults = [Fault(key, SLOW_REASON) for key in sorted(hanging_keys)]
        if len(self._unfinished_rounds) >= MAX_HANGING_ROUNDS:
            return Load(unread=tuple(faults))
        start = next((position for position, ask in enumerate(asks, 1) if ask.key == self._last_key), 0)
        selected = [ask for ask in (*asks[start:], *asks[:start]) if ask.key not in hanging_keys]
        sampling_round = SamplingRound(selected, lambda ask: self._read_device(machine, settings, ask))
        sampling_round.start()
        sampling_round.join(READING_SHARE * machine.deadline_s)
        sampling_round.is_cancelled, self._last_key = True, sampling_round.last_read_key or sampling_round.current_key
        if sampling_round.is_alive():
            self._unfinished_rounds.append(sampling_round)
            faults.append(Fault(sampling_round.current_key, SLOW_REASON))
        return Load(tuple(sampling_round.samples), at_most((*faults, *sampling_round.faults)))

    def _read_device(self, machine: Machine, settings: Settings, ask: Ask) -> tuple[Sample, ...]:
        """Return the samples of one device without values that are NaN or infinite.

        Raises whatever the driver raises, and Failed for too many samples or invalid ones.
        """
        raw_samples = self._driver.stats(machine, settings, ask)
        if len(raw_samples) > MAX_PER_DEVICE:
            raise Failed(f"it returned {len(raw_samples)} samples of this device, more than {MAX_PER_DEVICE}")
        samples = self._validate(tuple(one for one in raw_samples if math.isfinite(one.value)))
        if any(one.key != ask.key for one in samples):
            raise Failed("it returned samples of another device")
        return samples


class SamplingRound(threading.Thread):
    """One round through the devices, in a thread.

    `current_key` is the key of the device being read, `last_read_key` the key of the last one whose reading has ended.
    Setting `is_cancelled` ends the round after the present device. The round also ends when another device could exceed
    MAX_SAMPLES.
    """

    def __init__(self, asks: list[Ask], read_device: Callable[[Ask], tuple[Sample, ...]]) -> None:
        super().__init__(daemon=True)
        self._asks, self._read_device = asks, read_device
        self.current_key, self.last_read_key, self.is_cancelled = "", "", False
        self.samples: list[Sample] = []
        self.faults: list[Fault] = []

    def run(self) -> None:
        """Read the devices one after the other; a device that cannot be read becomes a fault. threading calls it."""
        for ask in self._asks:
            if self.is_cancelled or len(self.samples) + MAX_PER_DEVICE > MAX_SAMPLES:
                return
            self.current_key = ask.key
            try:
                self.samples += self._read_device(ask)
            except Exception as error:  # noqa: BLE001 - only this device's load is lost, and a fault reports it
                text = str(error) if isinstance(error, DriverError) else f"it raised {type(error).__name__}: {error}"
                self.faults.append(Fault(ask.key, text))
            self.last_read_key = ask.key
