"""What a driver wants done to the host: plain data. A driver only says it; the agent's core checks it and does it.

Made by drivers (`drivers.base`), carried by `drivers.isolation.driver_main` and `drivers.isolation.runner`, done by
`agents.host.execution.executor`
through `drivers.isolation.host_writer`. A path is written as on a host: `/sys/…`, or `/state/…`, the driver's own
directory in the agent's state.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from msgspec import Meta, Struct

from drivers.inventory import AttachHandle, Fault, Health, Name, Sample, Text

Path = Annotated[str, Meta(max_length=512, pattern=r"^/(sys|state|dev)(/(?!\.\.?(/|$))[^/\x00]+)+$")]
"""Absolute, without `.` and `..`."""
Value = Annotated[str, Meta(max_length=4096)]

Act = Literal["install", "uninstall", "attach", "detach", "program", "partition", "reset"]
"""What a driver may be asked to plan. All are idempotent: what is so already needs no step."""
DESTRUCTIVE: frozenset[Act] = frozenset({"uninstall", "program", "partition", "reset"})
"""Refused while anybody holds the device (promise S1)."""
MAX_SAMPLES = 8192
"""Numbers in one answer; which devices they are of goes round."""


class Check(Struct, frozen=True, omit_defaults=True):
    """Something that is so: a file's text without white space around it, or a link's last name; '' when absent."""

    path: Path
    value: Value
    link: bool = False


class Write(Struct, frozen=True, omit_defaults=True):
    """One value into one file. Files of `/state` are made when they are not there, elsewhere they must be; an empty
    value removes a file of `/state`."""

    path: Path
    value: Value


class Step(Struct, frozen=True, omit_defaults=True):
    """One touch of the host. `does` says it to people.

    Before it, every one of `expect` must be so and none of the nodes in `idle` be open anywhere, else nothing is
    touched.
    `image` puts the command's image at `write.path`: `copy` as the content of that file of `/state`, `firmware` by the
    kernel's upload class (Documentation/ABI/testing/sysfs-class-firmware), of which it is the directory.
    After it, every one of `seen` must become so within `timeout_s` seconds, which also bounds the write itself.
    `undo` takes it back, in order, when a later step fails.
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
    """The steps in order; none when everything is as wanted. `said` tells the operator what will be so then."""

    steps: Annotated[tuple[Step, ...], Meta(max_length=256)] = ()
    said: Text = ""


def within(path: str, globs: Iterable[str]) -> bool:
    """Whether one of the globs takes the path. `*` does not match a slash: each part is matched by itself."""
    parts = path.split("/")
    return any(
        len(patterns) == len(parts) and all(map(fnmatchcase, parts, patterns))
        for patterns in (glob.split("/") for glob in globs)
    )


def stray(plan: Plan, globs: Iterable[str]) -> str:
    """The first path that the plan, or its undoing, would write outside the globs; '' when there is none."""
    writes = (write for step in plan.steps for write in (step.write, *step.undo))
    return next((write.path for write in writes if not within(write.path, globs)), "")


class Image(Struct, frozen=True, omit_defaults=True):
    """A bitstream or firmware as the agent has it: checked bytes in a local file. `properties` are Glance's."""

    path: Annotated[str, Meta(max_length=4096)]
    size: Annotated[int, Meta(ge=0)]
    sha256: Annotated[str, Meta(min_length=64, max_length=64)]
    name: Annotated[str, Meta(max_length=255)] = ""
    properties: dict[str, str] = {}


class Ask(Struct, frozen=True, omit_defaults=True):
    """What an act is about. `key` is the device's, `backend` the one that has it ('' of a driver without any); the rest
    as the act needs it.

    attach, detach: `handle`, its `uuid` (an mdev gets it) and the `consumer` (an instance's uuid).
    program: `image`, `deployable` (a name). install, partition: `layout`, words of the driver's (`vfs`: `4`).
    uninstall: `first`, what the files that were written for this device held before (path → value).
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


class Signal(Struct, frozen=True, omit_defaults=True):
    """One reading behind a verdict of health; `limit` is where it becomes bad, `source` the file it was read from."""

    name: Annotated[str, Meta(max_length=64)]
    value: Annotated[str, Meta(max_length=255)]
    unit: Annotated[str, Meta(max_length=16)] = ""
    limit: Annotated[str, Meta(max_length=64)] = ""
    source: Annotated[str, Meta(max_length=512)] = ""


class Vitals(Struct, frozen=True, omit_defaults=True):
    """How a device is, and why one thinks so."""

    status: Health
    reason: Text = ""
    signals: Annotated[tuple[Signal, ...], Meta(max_length=64)] = ()
    samples: Annotated[tuple[Sample, ...], Meta(max_length=64)] = ()


class Load(Struct, frozen=True, omit_defaults=True):
    """What many devices have to do now; `unread` says which of them could not be asked, and why."""

    samples: Annotated[tuple[Sample, ...], Meta(max_length=MAX_SAMPLES)] = ()
    unread: Annotated[tuple[Fault, ...], Meta(max_length=256)] = ()
