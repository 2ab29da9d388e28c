"""Plans: the changes that a driver wants made to the host, as plain data.

A driver only returns a plan. Its process sends the plan to the agent (`drivers.isolation.driver_main` and
`drivers.isolation.runner`); the agent checks it (`agents.host.execution.preflight`) and executes it
(`agents.host.execution.plan_runner`), writing through `drivers.isolation.host_writer`. Paths are written as on a host:
`/sys/…`, or `/state/…` for the driver's own directory in the agent's state.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from msgspec import Meta, Struct

from drivers.inventory import AttachHandle, Fault, Health, Name, Sample, Text

MDEV_DEFINITIONS = "/etc/mdevctl.d"
"""The directory in which mdevctl keeps definitions of mediated devices: PARENT/UUID, a file each. libvirt's driver for
node devices stores what Nova defines there, and watches the directory (README of mdevctl; node_device_udev.c)."""
Path = Annotated[str, Meta(max_length=512, pattern=r"^/(sys|state|dev|etc/mdevctl\.d)(/(?!\.\.?(/|$))[^/\x00]+)+$")]
"""An absolute path below /sys, /state, /dev or MDEV_DEFINITIONS, without `.` and `..`."""
Value = Annotated[str, Meta(max_length=4096)]

Act = Literal["install", "uninstall", "attach", "detach", "program", "partition", "reset"]
"""The acts that a driver may be asked to plan. All are idempotent: if the wanted state exists, the plan is empty."""
DESTRUCTIVE: frozenset[Act] = frozenset({"uninstall", "program", "partition", "reset"})
"""Acts that are refused while the device has a holder (promise S1)."""
Lifetime = Literal["volatile", "flash"]
"""How long the device keeps what `program` has loaded: until a reset, an uninstall, a reboot or a loss of power
(`volatile`), or until it is programmed again (`flash`)."""
DEVICE_SCOPE = "device"
"""The scope of an act that affects the device alone."""
MAX_SAMPLES = 8192
"""Maximum samples in one answer. If devices have more, later rounds start with the devices that were left out."""


class Check(Struct, frozen=True, omit_defaults=True):
    """A condition: the path has this value.

    The value is the text of a file without surrounding white space or, with `link`, the last component of a symbolic
    link's target. An empty value means that the file or link is absent or empty.
    """

    path: Path
    value: Value
    link: bool = False


class Write(Struct, frozen=True, omit_defaults=True):
    """Write one value to one file.

    A file below `/state` is created if it does not exist, and an empty value removes it. A file below MDEV_DEFINITIONS
    can only be removed, by an empty value. Elsewhere the file must exist.
    """

    path: Path
    value: Value


class Step(Struct, frozen=True, omit_defaults=True):
    """One change of the host; `does` describes it for people.

    Before the write, every check in `expect` must hold, and no process may have a device node of `idle` open; otherwise
    the step is not begun, and the act fails.
    `image` writes the command's image instead of `write.value`. With `copy` the image becomes the content of the
    file `write.path` below `/state`. With `firmware` the image is uploaded through the kernel's firmware upload class
    (Documentation/ABI/testing/sysfs-class-firmware), and `write.path` is the directory of the class device.
    After the write, every check in `seen` must hold within `timeout_s` seconds, counted from the start of the write;
    the write itself has the same limit.
    `undo` holds the writes that revert the step, in order. If a check of `seen` does not come true, or a later step
    fails, the steps that were done are undone, the last one first. If a step cannot be undone because somebody uses
    what it made, the steps before it stay, too. A step whose own write failed is not undone. After a time-out with
    unknown outcome nothing is undone.
    """

    does: Annotated[str, Meta(min_length=1, max_length=500)]
    write: Write
    image: Literal["", "copy", "firmware"] = ""
    expect: Annotated[tuple[Check, ...], Meta(max_length=16)] = ()
    idle: Annotated[tuple[Path, ...], Meta(max_length=64)] = ()
    seen: Annotated[tuple[Check, ...], Meta(max_length=64)] = ()
    undo: Annotated[tuple[Write, ...], Meta(max_length=16)] = ()
    timeout_s: Annotated[float, Meta(gt=0, le=600)] = 10.0


class Plan(Struct, frozen=True, omit_defaults=True):
    """The steps of an act, in order; empty if the device is already as wanted.

    `said` is a text for the operator that describes the state after the last step. `lifetime` matters for `program`
    only.
    """

    steps: Annotated[tuple[Step, ...], Meta(max_length=256)] = ()
    said: Text = ""
    lifetime: Lifetime = "volatile"


def within(path: str, globs: Iterable[str]) -> bool:
    """Return whether one of the globs matches the path. `*` does not match a slash: each component matches alone."""
    parts = path.split("/")
    return any(
        len(patterns) == len(parts) and all(map(fnmatchcase, parts, patterns))
        for patterns in (glob.split("/") for glob in globs)
    )


def stray(plan: Plan, globs: Iterable[str]) -> str:
    """Return the first path that a step or its `undo` would write and that no glob matches; '' if there is none."""
    writes = (write for step in plan.steps for write in (step.write, *step.undo))
    return next((write.path for write in writes if not within(write.path, globs)), "")


def get_affected_prefix(scope: str, address: str | None) -> str | None:
    """Return how the PCI addresses of all devices begin that an act with this scope affects; '' for the whole host.

    `scope` is a `drivers.inventory.Scope`, or a word of a newer release, which counts as the whole host. Returns None
    if the act affects the device alone. A device without a PCI address has no slot or bus, so every scope beyond the
    device is the host.
    """
    if scope == DEVICE_SCOPE:
        return None
    if scope == "card" and address:
        return address.rpartition(".")[0] + "."
    if scope == "bus" and address:
        return address.rpartition(":")[0] + ":"
    return ""


class Image(Struct, frozen=True, omit_defaults=True):
    """A bitstream or firmware in a local file of the agent, with verified content; `properties` come from Glance."""

    path: Annotated[str, Meta(max_length=4096)]
    size: Annotated[int, Meta(ge=0)]
    sha256: Annotated[str, Meta(min_length=64, max_length=64)]
    name: Annotated[str, Meta(max_length=255)] = ""
    properties: dict[str, str] = {}


class Ask(Struct, frozen=True, omit_defaults=True):
    """The arguments of a call about one device: its `key`, its `backend` ('' if the driver has none), and more per act.

    `address` is the PCI address at which the agent has reported the device, '' if it is not known: the serial number in
    a key can be unreadable now, or another function's too.
    attach, detach: `handle`, its `uuid` (a mediated device gets this uuid) and the `consumer` (an instance's uuid).
    program: `image` and `deployable` (a name).
    install, partition: `layout`, keys and values that the driver defines (`vfs`: `4`).
    uninstall: `first`, the values that files below /sys had before the agent first wrote them for this device (path →
    value).
    """

    key: Name
    deployable: Annotated[str, Meta(max_length=255)] = ""
    handle: AttachHandle | None = None
    uuid: Annotated[str, Meta(max_length=36)] = ""
    consumer: Annotated[str, Meta(max_length=36)] = ""
    layout: dict[str, str] = {}
    first: dict[str, str] = {}
    image: Image | None = None
    backend: Annotated[str, Meta(max_length=64)] = ""
    address: Annotated[str, Meta(max_length=32)] = ""


class Signal(Struct, frozen=True, omit_defaults=True):
    """One reading that explains a device's health.

    `limit` is the critical or best possible value to compare with; `source` is the file that was read.
    """

    name: Annotated[str, Meta(max_length=64)]
    value: Annotated[str, Meta(max_length=255)]
    unit: Annotated[str, Meta(max_length=16)] = ""
    limit: Annotated[str, Meta(max_length=64)] = ""
    source: Annotated[str, Meta(max_length=512)] = ""


class Vitals(Struct, frozen=True, omit_defaults=True):
    """The health of a device, its reason, the readings behind it, and samples of its load."""

    status: Health
    reason: Text = ""
    signals: Annotated[tuple[Signal, ...], Meta(max_length=64)] = ()
    samples: Annotated[tuple[Sample, ...], Meta(max_length=64)] = ()


class Load(Struct, frozen=True, omit_defaults=True):
    """The present load of many devices; `unread` names the devices whose load could not be read, with the reason."""

    samples: Annotated[tuple[Sample, ...], Meta(max_length=MAX_SAMPLES)] = ()
    unread: Annotated[tuple[Fault, ...], Meta(max_length=256)] = ()
