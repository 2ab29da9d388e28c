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

SHARE = 0.6
"""The part of a call's deadline that may be used for reading; the rest is for sending the answer."""
MAX_HANGING = 4
"""Nothing more is read while this many readings have not ended."""
MAX_PER_DEVICE = 64
SLOW = "its load could not be read in time: is the device stuck?"

Checked = Callable[[tuple[Sample, ...]], tuple[Sample, ...]]
"""A function that validates samples before they are sent and returns them; it raises Failed."""


class Gauge:
    """Reads the load of one driver's devices. `checked` validates the samples before they are sent."""

    def __init__(self, driver: Driver, checked: Checked) -> None:
        self._driver, self._checked = driver, checked
        self._late: list[Reading] = []
        self._last = ""
        """The next reading starts with the device after this one, so that every device has its turn."""

    def read(self, machine: Machine, settings: Settings, asks: tuple[Ask, ...]) -> Load:
        """Return the samples that can be read within SHARE of the machine's deadline.

        `unread` of the result names the devices that failed or hang, with the reason. Devices that were not reached in
        time are in neither list; the next call starts with them. Nothing is raised for a device.
        """
        self._late = [one for one in self._late if one.is_alive()]
        hanging = {one.at for one in self._late}
        faults = [Fault(key, SLOW) for key in sorted(hanging)]
        if len(self._late) >= MAX_HANGING:
            return Load(unread=tuple(faults))
        first = next((place for place, ask in enumerate(asks, 1) if ask.key == self._last), 0)
        wanted = [ask for ask in (*asks[first:], *asks[:first]) if ask.key not in hanging]
        reading = Reading(wanted, lambda ask: self._one(machine, settings, ask))
        reading.start()
        reading.join(SHARE * machine.deadline_s)
        reading.over, self._last = True, reading.done or reading.at
        if reading.is_alive():
            self._late.append(reading)
            faults.append(Fault(reading.at, SLOW))
        return Load(tuple(reading.samples), at_most((*faults, *reading.faults)))

    def _one(self, machine: Machine, settings: Settings, ask: Ask) -> tuple[Sample, ...]:
        """Return the samples of one device without values that are NaN or infinite.

        Raises whatever the driver raises, and Failed for too many samples or invalid ones.
        """
        told = self._driver.stats(machine, settings, ask)
        if len(told) > MAX_PER_DEVICE:
            raise Failed(f"it returned {len(told)} samples of this device, more than {MAX_PER_DEVICE}")
        samples = self._checked(tuple(one for one in told if math.isfinite(one.value)))
        if any(one.key != ask.key for one in samples):
            raise Failed("it returned samples of another device")
        return samples


class Reading(threading.Thread):
    """One round through the devices, in a thread.

    `at` is the key of the device being read, `done` the key of the last one that was read.
    Setting `over` ends the round after the present device.
    """

    def __init__(self, asks: list[Ask], one: Callable[[Ask], tuple[Sample, ...]]) -> None:
        super().__init__(daemon=True)
        self._asks, self._one = asks, one
        self.at, self.done, self.over = "", "", False
        self.samples: list[Sample] = []
        self.faults: list[Fault] = []

    def run(self) -> None:
        """Read the devices one after the other. threading calls it."""
        for ask in self._asks:
            if self.over or len(self.samples) + MAX_PER_DEVICE > MAX_SAMPLES:
                return
            self.at = ask.key
            try:
                self.samples += self._one(ask)
            except Exception as error:  # noqa: BLE001 - only this device's load is lost, and a fault reports it
                text = str(error) if isinstance(error, DriverError) else f"it raised {type(error).__name__}: {error}"
                self.faults.append(Fault(ask.key, text))
            self.done = ask.key
