"""The load of many devices at one asking, whatever one of them costs. Used by `drivers.isolation.driver_main`.

`Driver.stats` reads hardware by somebody else's code: it raises, answers rubbish, takes its time, or hangs in the
kernel for good. Load is the least of what a driver says, so it never costs more than itself: the devices are asked one
after the other in a thread, and when the time is over the process answers with what it has. One that hangs holds that
thread and nothing else: it is left out until it has ended, the other devices and all other calls are answered as ever.
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
"""The part of a call's deadline that the reading may take; the rest is for the answer's way."""
MAX_HANGING = 4
"""With so many readings that have not ended nothing more is read."""
MAX_PER_DEVICE = 64
SLOW = "its load could not be read in time: is the device stuck?"

Checked = Callable[[tuple[Sample, ...]], tuple[Sample, ...]]
"""The samples as they may be sent; raises Failed."""


class Gauge:
    """One driver's load. `checked` is the child's check of all that leaves it."""

    def __init__(self, driver: Driver, checked: Checked) -> None:
        self._driver, self._checked = driver, checked
        self._late: list[Reading] = []
        self._last = ""
        """The next reading begins behind this device, so that each has its turn."""

    def read(self, machine: Machine, settings: Settings, asks: tuple[Ask, ...]) -> Load:
        """What can be read within the share; `unread` says which devices failed, and how."""
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
        """Numbers that are none (NaN, infinity) are left out. Raises whatever the driver raises, Failed for rubbish."""
        told = self._driver.stats(machine, settings, ask)
        if len(told) > MAX_PER_DEVICE:
            raise Failed(f"it says {len(told)} numbers of this device, more than {MAX_PER_DEVICE}")
        samples = self._checked(tuple(one for one in told if math.isfinite(one.value)))
        if any(one.key != ask.key for one in samples):
            raise Failed("it says numbers of another device")
        return samples


class Reading(threading.Thread):
    """One round through the devices. `at` is the one it is busy with, `done` the one before; `over` ends it."""

    def __init__(self, asks: list[Ask], one: Callable[[Ask], tuple[Sample, ...]]) -> None:
        super().__init__(daemon=True)
        self._asks, self._one = asks, one
        self.at, self.done, self.over = "", "", False
        self.samples: list[Sample] = []
        self.faults: list[Fault] = []

    def run(self) -> None:
        """threading: the thread's work."""
        for ask in self._asks:
            if self.over or len(self.samples) + MAX_PER_DEVICE > MAX_SAMPLES:
                return
            self.at = ask.key
            try:
                self.samples += self._one(ask)
            except Exception as error:  # noqa: BLE001 - it costs this device's load, and is said
                text = str(error) if isinstance(error, DriverError) else f"it raised {type(error).__name__}: {error}"
                self.faults.append(Fault(ask.key, text))
            self.done = ask.key
