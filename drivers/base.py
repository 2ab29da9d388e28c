"""The interface that every driver implements: the `Driver` base class and the result of its `discover` method.

A driver knows one kind of hardware and never changes the host itself. It reads the host through the Machine that it is
given, and it returns every change as the steps of a Plan; the agent executes them. The process that runs a driver
cannot write to the host (`drivers.isolation.sandbox`). docs/writing-a-driver.md explains this with an example.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, NamedTuple

from msgspec import Struct, ValidationError, convert

from drivers.errors import Invalid, Unsupported
from drivers.inventory import MAX_FAULTS, Backend, Device, Fault, HandleType, Sample, Scope
from drivers.machine import Machine
from drivers.plan import Act, Ask, Plan, Vitals

API = 1
"""Version of the protocol between the agent and a driver's process."""
WIDE_ACTS: frozenset[Act] = frozenset({"uninstall", "partition", "reset"})
"""Acts that may affect more devices than the one they are ordered for.

All other acts are also ordered automatically, where no person could confirm the effect on other devices. A driver whose
`install` or `program` affects several devices must therefore report them as one device."""

Settings = dict[str, object]


class Findings(NamedTuple):
    """The result of `Driver.discover`: all devices, all faults, and the state of each backend.

    `devices` is the complete list: a device that is not in it counts as missing. `faults` name what the driver could
    not use as a device. `backends` is empty for a driver that has none. A backend with an error lists no devices; the
    agent then keeps the devices that this backend had before.
    """

    devices: tuple[Device, ...] = ()
    faults: tuple[Fault, ...] = ()
    backends: tuple[Backend, ...] = ()


class Driver:
    """Base class of all drivers; a subclass supports one kind of hardware.

    The class is instantiated without arguments, and the instance runs in a process of its own. All methods read the
    present state of the machine and change nothing. They raise the errors of `drivers.errors`, whose texts are shown to
    the operator. A method that plans a change raises Busy if somebody uses the device, so nothing is touched.
    """

    name: ClassVar[str]
    version: ClassVar[str] = "1"
    subsystems: ClassVar[tuple[str, ...]] = ()
    """Kernel subsystems whose uevents may change the result of `discover`; the agent then calls it again."""
    watched: ClassVar[tuple[str, ...]] = ()
    """Keys of the driver's settings whose values are file paths; a change of such a file also causes a `discover`."""
    writes: ClassVar[tuple[str, ...]] = ()
    """Globs that cover every path its steps may write. `*` does not match a slash."""
    acts: ClassVar[tuple[Act, ...]] = ()
    """Acts that the driver can plan. Any other act is refused with Unsupported before the driver is called."""
    matches: ClassVar[tuple[str, ...]] = ()
    """Globs of kernel modaliases of the hardware that it takes; empty if only its settings select the hardware."""
    settings_type: ClassVar[type[Struct] | None] = None
    """The struct that describes its settings; the manifest has its JSON schema. None: it does not describe them."""
    resource_classes: ClassVar[tuple[str, ...]] = ()
    """All resource classes of its devices. If any are declared, a device with another one becomes a Fault."""
    handle_types: ClassVar[tuple[HandleType, ...]] = ()
    """All types of its attach handles. If any are declared, a device with another one becomes a Fault."""
    min_kernel: ClassVar[str] = ""
    """The oldest Linux kernel that it can use, such as `6.2`; '' for any. An older kernel is reported as a lack."""
    affects: ClassVar[Mapping[Act, Scope]] = {}
    """The scope of each act that affects more than the device it is ordered for. Only acts in WIDE_ACTS may be named.

    The conductor shows the other devices before the act is confirmed, and refuses the act while one of them is held."""

    def check_settings(self, settings: Settings) -> None:
        """Raise Invalid if the driver cannot use these settings on any machine; read nothing of this one.

        By default they must fit `settings_type`. The conductor calls this method before it stores settings; the other
        methods raise the same error.
        """
        if self.settings_type is not None:
            try:
                convert(settings, self.settings_type)
            except ValidationError as error:
                raise Invalid(f"the settings of {self.name} are not usable: {error}") from None

    def probe(self, machine: Machine, settings: Settings) -> tuple[str, ...]:
        """Return what this host lacks for full use of the driver, such as a kernel module or a privilege.

        Each reason is a sentence; the tuple is empty if nothing is missing (the default). The missing things are only
        shown: the driver is used all the same.
        """
        return ()

    def discover(self, machine: Machine, settings: Settings) -> Findings:
        """Return all devices of this driver on the machine. Subclasses must implement this method.

        An unusable device becomes a Fault in the result. Do not raise an exception for it: that would hide all other
        devices. Raise a DriverError only if no result is possible at all, for example because the settings are
        unusable.
        """
        raise NotImplementedError

    def health(self, machine: Machine, settings: Settings, ask: Ask) -> Vitals:
        """Return the health of the device `ask.key` and the readings behind it. Must take at most one second.

        Raises Gone if the device is absent, and Unsupported if the driver has no readings (the default).
        """
        raise Unsupported(f"{self.name} has no readings of health beyond what it reports")

    def stats(self, machine: Machine, settings: Settings, ask: Ask) -> tuple[Sample, ...]:
        """Return the present load of the device `ask.key`; the default is no samples.

        It is called once a minute for each device, and every second while somebody watches. In `ask` only `key`,
        `backend` and `address` are set. All devices together have about one second: a device that is not read in that
        time has no samples in this round. Values that are NaN or infinite are dropped.
        """
        return ()

    def release(self) -> None:
        """Forget the pauses after failures of the hardware, because an operator wants another attempt now.

        It is called before the next method, when the host gets the command `rescan`. The default has no pauses.
        """

    def install(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan how to make the device ready to be offered, as the settings describe it; `ask.layout` overrides them.

        A plan can use only what exists now. Steps that depend on the result of other steps belong into the next plan:
        after the steps of `install`, `uninstall` or `partition` are executed, the method is called again, until its
        plan has no steps. At most four plans with steps are executed; if more are needed, the act fails. The default
        has no steps.
        """
        return Plan()

    def uninstall(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan how to restore the state that the device had before the agent first changed it (`ask.first`).

        The agent calls it again after each plan, as it calls `install`, until the plan is empty. The act is also
        complete if this method raises Gone after the steps of a plan, or if its plan has the same steps as the one
        before and everything in their `seen` is true. Raises Unsupported unless the driver overrides it.
        """
        raise self._unsupported_error("uninstall")

    def attach(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan how to prepare `ask.handle` for `ask.consumer`; no steps if it is already prepared for this consumer.

        The default has no steps: the handle needs nothing on the host.
        """
        return Plan()

    def detach(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan how to remove what `attach` created; no steps if it no longer exists. The default has no steps.

        It must also succeed when the device is gone or another one is at its address: until then, the handle is kept
        back. The detach of a `PCI` handle also asks whether a guest still uses its function. The agent finds that out
        itself after this method, for every driver, and also if this method raises Gone.
        """
        return Plan()

    def program(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan how to load `ask.image` into the device.

        Raises Invalid if the image is made for other hardware, and Unsupported unless the driver overrides it.
        """
        raise self._unsupported_error("program")

    def partition(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan how to divide the device as `ask.layout` describes. Raises Unsupported unless overridden."""
        raise self._unsupported_error("partition")

    def reset(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Plan how to return the device to its power-on state. Raises Unsupported unless the driver overrides it."""
        raise self._unsupported_error("reset")

    def _unsupported_error(self, act: str) -> Unsupported:
        """Return, without raising it, the error which says that this driver cannot do `act`."""
        return Unsupported(f"{self.name} cannot {act} a device")


def at_most(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """Return the faults without duplicates, at most MAX_FAULTS of them.

    If there are more, the last fault of the result states how many were left out.
    """
    unique_faults = tuple(dict.fromkeys(faults))
    if len(unique_faults) <= MAX_FAULTS:
        return unique_faults
    omitted = len(unique_faults) - MAX_FAULTS + 1
    return (*unique_faults[: MAX_FAULTS - 1], Fault("…", f"and {omitted} more faults"))
