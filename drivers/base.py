"""What a driver is. Written to by driver authors; read by `drivers.isolation.driver_main`, which runs them.

A driver knows one kind of hardware and does nothing itself: it reads through the Machine it is given, and what is to be
changed it plans as steps. Its process cannot write (`drivers.isolation.sandbox`).
docs/writing-a-driver.md teaches it with an example.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, NamedTuple

from drivers.errors import Unsupported
from drivers.inventory import Backend, Device, Fault, Sample
from drivers.machine import Machine
from drivers.plan import Act, Ask, Plan, Vitals

API = 1
"""The version of this protocol."""
MAX_FAULTS = 256
"""The bound of `DriverReport.faults`."""

Settings = dict[str, object]


class Findings(NamedTuple):
    """Everything a driver sees: its complete list of devices, what it could not take for one, and how its backends
    are, if it has any: of one with an error it lists no devices, and those known before are kept."""

    devices: tuple[Device, ...] = ()
    faults: tuple[Fault, ...] = ()
    backends: tuple[Backend, ...] = ()


class Driver:
    """Knowledge of one kind of hardware, made without arguments, run in a process of its own. Subclass it.

    All methods look at the machine as it is now and change nothing. They raise the errors of `drivers.errors`, whose
    sentences the operator reads: Busy before anything is touched when somebody uses the device.
    """

    name: ClassVar[str]
    version: ClassVar[str] = "1"
    subsystems: ClassVar[tuple[str, ...]] = ()
    """Kernel subsystems whose uevents may change what it sees."""
    watched: ClassVar[tuple[str, ...]] = ()
    """Keys of its settings that name files which, when changed, do the same."""
    writes: ClassVar[tuple[str, ...]] = ()
    """Globs of every path its steps may write. `*` does not match a slash."""
    acts: ClassVar[tuple[Act, ...]] = ()
    """What it can plan; nothing else is asked of it."""

    def probe(self, machine: Machine, settings: Settings) -> tuple[str, ...]:
        """Why this host cannot be used to the full (a kernel module, a privilege is missing); nothing when it can."""
        return ()

    def discover(self, machine: Machine, settings: Settings) -> Findings:
        """Look at the whole machine. One bad device is a Fault, never an exception for all.

        Raises DriverError when nothing at all can be said, such as for unusable settings.
        """
        raise NotImplementedError

    def health(self, machine: Machine, settings: Settings, ask: Ask) -> Vitals:
        """How the device `ask.key` is, with what was read; at most a second. Raises Gone when it is not there."""
        raise Unsupported(f"{self.name} has no readings of health beyond what it reports")

    def stats(self, machine: Machine, settings: Settings, ask: Ask) -> tuple[Sample, ...]:
        """The load of the device `ask.key` now: asked once a minute, every second while somebody looks.

        Of `ask` only the key and the backend count. A second for all devices together; one that takes longer is left
        out, as is a number that is none.
        """
        return ()

    def install(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Make the device ready to be offered as the settings, or `ask.layout` over them, want it.

        A plan is made from what is there now, so what rests on its outcome comes in the next one: `install` and
        `partition` are asked again when their plan is done until no step is left, at most four times in all.
        """
        return Plan()

    def uninstall(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Back to how the device was before it was first touched (`ask.first`)."""
        raise self._unable("uninstall")

    def attach(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Prepare `ask.handle` for `ask.consumer`; done already for this consumer: no step."""
        return Plan()

    def detach(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Take back what `attach` made; not there any more: no step."""
        return Plan()

    def program(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Put `ask.image` into the device. Raises Invalid for an image that is not for it."""
        raise self._unable("program")

    def partition(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Divide the device as `ask.layout` says."""
        raise self._unable("partition")

    def reset(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Put the device back into its power-on state."""
        raise self._unable("reset")

    def _unable(self, act: str) -> Unsupported:
        return Unsupported(f"{self.name} cannot {act} a device")


def at_most(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """The faults, each once, bounded as a report bounds them: the last one then counts the rest."""
    known = tuple(dict.fromkeys(faults))
    if len(known) <= MAX_FAULTS:
        return known
    rest = len(known) - MAX_FAULTS + 1
    return (*known[: MAX_FAULTS - 1], Fault("…", f"and {rest} more faults"))
