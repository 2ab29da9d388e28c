"""The words for hardware that every room shares: frozen structs, no behaviour.

Drivers make them, the agent sends them (`agents.wire`), the conductor stores them (`accelerators.domain.diff`).
Sizes are bounded here because a report comes from a host that may be hostile (promise X5).
Shapes follow upstream's driver objects (contract sections 5.1, 6.3, 8.1), plus health `status`. What has its default is
not sent: that makes a report a fifth smaller.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.json import Decoder

_info = Decoder(dict[str, str])
WORD = r"^[A-Za-z0-9_.:-]+$"
Word = Annotated[str, Meta(min_length=1, max_length=64, pattern=WORD)]
"""An identifier: driver name, attribute key."""
Name = Annotated[str, Meta(min_length=1, max_length=255)]
"""A name people read: host, deployable, model, device key."""
Text = Annotated[str, Meta(max_length=4096)]
"""Free text or a JSON document as a string: board info, reasons."""
Count = Annotated[int, Meta(ge=0, le=65_535)]

PciAddress = Annotated[str, Meta(max_length=32, pattern=r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")]

DeviceType = Literal["GPU", "FPGA", "AICHIP", "QAT", "NIC", "SSD"]
HandleType = Literal["PCI", "MDEV", "TEST_PCI", "DEV"]
Health = Literal["ok", "degraded", "failed", "unknown"]
BackendKind = Literal["pci", "mdev", "accel-class", "firmware", "remote"]
ServiceName = Literal["passthrough", "sriov", "mdev", "program", "firmware", "reset", "health", "stats"]


class Attribute(Struct, frozen=True, omit_defaults=True, gc=False):
    """`rc` names the resource class; keys that start with `trait` name traits (contract 6.3)."""

    key: Annotated[str, Meta(min_length=1, max_length=64)]
    value: Annotated[str, Meta(max_length=1024)]

    def __post_init__(self) -> None:
        if not _is_word(self.key):
            raise ValueError(f"Expected `str` matching regex {WORD!r}")


@lru_cache(maxsize=4096)
def _is_word(key: str) -> bool:
    """Keys repeat in every deployable of every report: a regular expression for each was a third of its decoding."""
    return re.search(WORD, key) is not None


class AttachHandle(Struct, frozen=True, omit_defaults=True, gc=False):
    """One assignable unit. `info` is canonical JSON (sorted keys, string values): its bytes are its identity."""

    attach_type: HandleType
    info: Annotated[str, Meta(min_length=2, max_length=255)]

    def __post_init__(self) -> None:
        if not _is_info(self.info):
            raise ValueError("Expected `str` that is a JSON object of strings")


@lru_cache(maxsize=4096)
def _is_info(text: str) -> bool:
    """A report names the same handles again and again."""
    try:
        _info.decode(text)
    except ValueError:
        return False
    return True


class Deployable(Struct, frozen=True, omit_defaults=True, gc=False):
    """The part of a device that is a resource provider; `name` is the provider's name (contract 6.2)."""

    name: Name
    num_accelerators: Count
    attributes: Annotated[tuple[Attribute, ...], Meta(max_length=64)] = ()
    handles: Annotated[tuple[AttachHandle, ...], Meta(max_length=1024)] = ()
    driver_name: Annotated[str, Meta(max_length=100)] = ""


class Device(Struct, frozen=True, omit_defaults=True, gc=False):
    """A card. `key` is its identity on the host: `serial:…`, else `pci:dddd:bb:dd.f`, else `<driver>:…`.

    `address` is the PCI address of the management function, None for what is not on PCI.
    `vendor` and `model` are the exact strings that upstream shows for the same hardware. `to_install` is what its
    driver would do to make it ready, a line a step, '' when nothing has to be done; `acts` what can be asked of its
    driver, words with blanks between them. `changeable` are the words of a layout that its driver takes, in the same
    form, and `sized_by` the one of them whose value is the number of handles; '' where that cannot be chosen.
    `backend` names the part of its driver that found it, '' for a driver that has no backends. `bridges` are the
    addresses of the PCI bridges above it, root first, blanks between them.
    """

    key: Name
    type: DeviceType
    vendor: Name
    model: Name
    address: PciAddress | None = None
    std_board_info: Text = ""
    vendor_board_info: Text = ""
    status: Health = "ok"
    status_reason: Text = ""
    numa_node: Annotated[int, Meta(ge=-1, le=4095)] = -1
    kernel_driver: Annotated[str, Meta(max_length=64)] = ""
    deployables: Annotated[tuple[Deployable, ...], Meta(max_length=256)] = ()
    to_install: Text = ""
    acts: Annotated[str, Meta(max_length=255)] = ""
    changeable: Annotated[str, Meta(max_length=255)] = ""
    sized_by: Annotated[str, Meta(max_length=64)] = ""
    backend: Annotated[str, Meta(max_length=64)] = ""
    bridges: Annotated[str, Meta(max_length=255)] = ""


class Fault(Struct, frozen=True, omit_defaults=True, gc=False):
    """Something a driver or the agent could not take for a device, said so that a person can act on it."""

    subject: Name
    reason: Text


class Sample(Struct, frozen=True, omit_defaults=True, gc=False):
    """Load of one device at one moment: broadcast, never stored. Units are part of the metric's name.

    `utilization_percent` (0 to 100), `memory_used_bytes`, `memory_total_bytes`, `temperature_celsius` (of further
    sensors `temperature_celsius_1` …), `power_watts`; counters since the device's start: `errors_correctable_total`,
    `errors_nonfatal_total`, `errors_fatal_total`. Others are numbers to show.
    """

    key: Name
    metric: Word
    value: float


class Service(Struct, frozen=True, omit_defaults=True, gc=False):
    """Something a backend can do, as found at run time: `version` of the interface it has for it, `reason` why it is
    unavailable, `limits` in words and numbers of its own (`total_vfs`, `methods`)."""

    name: ServiceName
    version: Annotated[str, Meta(max_length=64)] = "1"
    state: Literal["ready", "unavailable"] = "ready"
    reason: Annotated[str, Meta(max_length=1024)] = ""
    limits: Annotated[dict[Word, Annotated[str, Meta(max_length=255)]], Meta(max_length=32)] = {}


class Backend(Struct, frozen=True, omit_defaults=True, gc=False):
    """A part of a driver that answers by itself. With an `error` the driver names none of its devices; the agent tells
    those it had before (shown stale)."""

    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]
    kind: BackendKind
    labels: Annotated[dict[Word, Annotated[str, Meta(max_length=255)]], Meta(max_length=64)] = {}
    error: Text = ""
    services: Annotated[tuple[Service, ...], Meta(max_length=16)] = ()


class DriverReport(Struct, frozen=True, omit_defaults=True, gc=False):
    """What one driver answered. `error` empty means *ok*: `devices` is then its complete list, but for those of
    `backends` with an error.

    With an error the driver names no devices; the agent tells those it had before (shown stale). The last three fields
    are the agent's: the driver's own version, why it does not answer ('' when it is asked, else `quarantined`,
    `disabled` or `absent`), and the generation of the wish it runs by, 0 where the host's own configuration decides.
    """

    driver: Word
    error: Text = ""
    devices: Annotated[tuple[Device, ...], Meta(max_length=4096)] = ()
    faults: Annotated[tuple[Fault, ...], Meta(max_length=256)] = ()
    backends: Annotated[tuple[Backend, ...], Meta(max_length=256)] = ()
    version: Annotated[str, Meta(max_length=64)] = ""
    state: Annotated[str, Meta(max_length=16)] = ""
    generation: Annotated[int, Meta(ge=0, le=2**53)] = 0
