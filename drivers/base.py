"""What a driver is. Written to by driver authors; read by `drivers.child`, which runs them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, NamedTuple, Protocol

from drivers.inventory import Device, Fault
from drivers.machine import Machine

MAX_FAULTS = 256
"""The bound of `DriverReport.faults`."""


class Findings(NamedTuple):
    """Everything a driver sees: its complete list of devices, and what it could not take for one."""

    devices: tuple[Device, ...] = ()
    faults: tuple[Fault, ...] = ()


class Driver(Protocol):
    """Knowledge of one kind of hardware, made without arguments, run in a process of its own.

    `subsystems` are the kernel subsystems whose uevents may change what it sees; `watched` are the keys of its settings
    that name files which, when changed, do the same.
    """

    name: ClassVar[str]
    subsystems: ClassVar[tuple[str, ...]]
    watched: ClassVar[tuple[str, ...]]

    def discover(self, machine: Machine, settings: dict[str, object]) -> Findings:
        """Look at the whole machine, change nothing. One bad device is a Fault, never an exception for all.

        Raises DriverError when nothing at all can be said, such as for unusable settings.
        """
        ...


def at_most(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """The faults, each once, bounded as a report bounds them: the last one then counts the rest."""
    known = tuple(dict.fromkeys(faults))
    if len(known) <= MAX_FAULTS:
        return known
    rest = len(known) - MAX_FAULTS + 1
    return (*known[: MAX_FAULTS - 1], Fault("…", f"and {rest} more faults"))
