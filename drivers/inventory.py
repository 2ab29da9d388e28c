"""The data types that describe hardware in all packages: frozen structs without behaviour.

Drivers create them, the agent sends them (`agents.wire`), and the conductor stores them (`accelerators.domain.diff`).
All sizes are bounded here because a report comes from a host that may be hostile (promise X5). The fields follow
upstream's driver objects (contract sections 5.1, 6.3, 8.1), with health `status` added. Fields that have their default
value are not sent, which makes a report a fifth smaller.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.json import Decoder

_info_decoder = Decoder(dict[str, str])
WORD = r"^[A-Za-z0-9_.:-]+$"
Word = Annotated[str, Meta(min_length=1, max_length=64, pattern=WORD)]
"""An identifier, such as a driver name or a metric."""
Name = Annotated[str, Meta(min_length=1, max_length=255)]
"""A name that people read, such as a host, a deployable, a model or a device key."""
MAX_TEXT, MAX_FAULTS = 4096, 256
"""Maximum characters of a Text, and maximum number of faults in a report."""
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
"""Free text, such as a reason, or a JSON document as a string, such as board info."""
Count = Annotated[int, Meta(ge=0, le=65_535)]

PciAddress = Annotated[str, Meta(max_length=32, pattern=r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")]

PciSubsystem = Annotated[str, Meta(max_length=9, pattern=r"^([0-9a-f]{4}:[0-9a-f]{4})?$")]
"""The PCI ids of a subsystem's vendor and model; '' if there is none or it is unknown."""

DeviceType = Literal["GPU", "FPGA", "AICHIP", "QAT", "NIC", "SSD"]
HandleType = Literal["PCI", "MDEV", "TEST_PCI", "DEV"]
Health = Literal["ok", "degraded", "failed", "unknown"]
BackendKind = Literal["pci", "mdev", "accel-class", "firmware", "remote"]
Scope = Literal["device", "card", "bus", "host"]
"""The devices that an act on one device may affect: this device alone, all devices of its PCI slot (domain, bus and
device number), all devices of its PCI bus, or all devices of the host."""
ServiceName = Literal["passthrough", "sriov", "mdev", "program", "firmware", "reset", "health", "stats"]


class Attribute(Struct, frozen=True, omit_defaults=True, gc=False):
    """One attribute of a deployable.

    The value of the key `rc` is the resource class; values of keys that start with `trait` are traits (contract 6.3).
    """

    key: Annotated[str, Meta(min_length=1, max_length=64)]
    value: Annotated[str, Meta(max_length=1024)]

    def __post_init__(self) -> None:
        """Raise ValueError if the key is no identifier (WORD)."""
        if not _is_word(self.key):
            raise ValueError(f"Expected `str` matching regex {WORD!r}")


@lru_cache(maxsize=4096)
def _is_word(key: str) -> bool:
    """Return whether the key is a valid identifier.

    Results are cached because the same keys occur in every deployable of every report; matching the regular expression
    for each took a third of the decoding time.
    """
    return re.search(WORD, key) is not None


class AttachHandle(Struct, frozen=True, omit_defaults=True, gc=False):
    """One assignable unit of a deployable.

    `info` is canonical JSON (sorted keys, string values), because two handles are the same if their bytes are equal.
    Only that it is a JSON object of strings is checked.
    `in_use` is `guest` if a guest uses it, `unknown` if the driver cannot tell without disturbing a guest that starts,
    and '' if no guest can use it now. The conductor reads it only if the device's `acts` name `detach`: a driver that
    answers the question at a detach also reports it here, and of any other driver '' says nothing.
    """

    attach_type: HandleType
    info: Annotated[str, Meta(min_length=2, max_length=255)]
    in_use: Annotated[str, Meta(max_length=16)] = ""

    def __post_init__(self) -> None:
        """Raise ValueError if `info` is no JSON object of strings."""
        if not _is_info(self.info):
            raise ValueError("Expected `str` that is a JSON object of strings")


@lru_cache(maxsize=4096)
def _is_info(text: str) -> bool:
    """Return whether the text is a JSON object of strings; cached because reports repeat the same handles."""
    try:
        _info_decoder.decode(text)
    except ValueError:
        return False
    return True


class Deployable(Struct, frozen=True, omit_defaults=True, gc=False):
    """The part of a device that is a resource provider in Placement; `name` is the provider's name (contract 6.2)."""

    name: Name
    num_accelerators: Count
    attributes: Annotated[tuple[Attribute, ...], Meta(max_length=64)] = ()
    handles: Annotated[tuple[AttachHandle, ...], Meta(max_length=1024)] = ()
    driver_name: Annotated[str, Meta(max_length=100)] = ""


class Device(Struct, frozen=True, omit_defaults=True, gc=False):
    """A card.

    `key` identifies it on the host: `serial:…`, else `pci:dddd:bb:dd.f`, else `sys:…` with the directory below
    /sys/devices of a device that is not on PCI (`sys:platform/ff706000.fpga`), else `<driver>:…`.
    `address` is the PCI address of its management function, None for a device that is not on PCI. The agent writes only
    to files of this function, or of the directory in the key.
    `vendor` and `model` are the exact strings that upstream shows for the same hardware.
    `to_install` lists what the driver would do to make it ready, one step per line; '' if nothing has to be done.
    `acts` lists what the driver can be asked to do with it, separated by blanks.
    `changeable` lists the layout keys that the driver accepts for it, separated by blanks; `sized_by` is the layout key
    whose value is the number of handles, '' if that number cannot be chosen.
    `backend` names the backend that found it, '' if the driver has no backends.
    `bridges` lists the addresses of the PCI bridges above it, root first, separated by blanks.
    `physical_function` is the PCI address of its card's function if `address` is a virtual function of it.
    `subsystem` has the PCI ids by which the maker of the board identifies it, such as `10de:1533`.
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
    physical_function: PciAddress | None = None
    subsystem: PciSubsystem = ""


class Fault(Struct, frozen=True, omit_defaults=True, gc=False):
    """Something that the driver or the agent could not use as a device; the reason tells a person what to do."""

    subject: Name
    reason: Text


class Sample(Struct, frozen=True, omit_defaults=True, gc=False):
    """One metric of one device's load at one moment; samples are broadcast and never stored.

    The unit is part of the metric's name. Known metrics: `utilization_percent` (0 to 100), `memory_used_bytes`,
    `memory_total_bytes`, `temperature_celsius` (further sensors: `temperature_celsius_1` …), `power_watts`, and the
    counters since the device's start `errors_correctable_total`, `errors_nonfatal_total`, `errors_fatal_total`. Other
    metrics are allowed and are only displayed.
    """

    key: Name
    metric: Word
    value: float


class Service(Struct, frozen=True, omit_defaults=True, gc=False):
    """Something a backend can do on this host, as found at run time.

    `version` is the version of the interface, `reason` states why the service is unavailable, and `limits` holds keys
    and values that each service defines (`total_vfs`, `methods`).
    """

    name: ServiceName
    version: Annotated[str, Meta(max_length=64)] = "1"
    state: Literal["ready", "unavailable"] = "ready"
    reason: Annotated[str, Meta(max_length=1024)] = ""
    limits: Annotated[dict[Word, Annotated[str, Meta(max_length=255)]], Meta(max_length=32)] = {}


class Backend(Struct, frozen=True, omit_defaults=True, gc=False):
    """A part of a driver that succeeds or fails on its own.

    If it has an `error`, the driver lists none of its devices; the agent reports the devices it had before, which are
    shown as stale.
    """

    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]
    kind: BackendKind
    labels: Annotated[dict[Word, Annotated[str, Meta(max_length=255)]], Meta(max_length=64)] = {}
    error: Text = ""
    services: Annotated[tuple[Service, ...], Meta(max_length=16)] = ()


class DriverDeclaration(Struct, frozen=True, omit_defaults=True, gc=False):
    """The declaration of a driver about itself, for operators and for the conductor. Each field may be empty.

    `matches` are globs of kernel modaliases (`pci:v000010DEd*bc03*`) of the hardware that it takes; empty if only its
    settings select the hardware. `resource_classes` and `handle_types` are all that its devices may have. `min_kernel`
    is the oldest usable kernel, such as `6.2`. `affects` maps an act to its Scope, if this is not the device alone.
    The types are wide, so that a conductor can read what a newer agent declares.
    """

    matches: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    resource_classes: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    handle_types: Annotated[tuple[Word, ...], Meta(max_length=16)] = ()
    min_kernel: Annotated[str, Meta(max_length=16)] = ""
    affects: Annotated[dict[Word, Word], Meta(max_length=16)] = {}


class DriverReport(Struct, frozen=True, omit_defaults=True, gc=False):
    """The result of one driver's `discover`.

    If `error` is empty, the driver is *ok* and `devices` is its complete list, without the devices of `backends` that
    have an error. If `error` is set, the driver lists no devices, and the agent reports those it had before, which are
    shown as stale.

    The agent fills the last four fields. `version` is the driver's version. `state` is '' if the agent asks the driver,
    else the reason why it does not: `quarantined`, `disabled` or `absent`. `generation` is the generation of the
    desired driver set that the host applies, 0 if the host's own configuration decides. `declares` is what the driver
    declares about itself, None if nothing is known.
    """

    driver: Word
    error: Text = ""
    devices: Annotated[tuple[Device, ...], Meta(max_length=4096)] = ()
    faults: Annotated[tuple[Fault, ...], Meta(max_length=MAX_FAULTS)] = ()
    backends: Annotated[tuple[Backend, ...], Meta(max_length=256)] = ()
    version: Annotated[str, Meta(max_length=64)] = ""
    state: Annotated[str, Meta(max_length=16)] = ""
    generation: Annotated[int, Meta(ge=0, le=2**53)] = 0
    declares: DriverDeclaration | None = None
