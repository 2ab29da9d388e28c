"""The words of the product, and the life cycle of requests as a table. Pure; check constraints are made from them.

The life cycle of devices is `actions`.
"""

from __future__ import annotations

from enum import StrEnum


class DeviceType(StrEnum):
    """What kind of card (upstream's types, contract section 5)."""

    GPU = "GPU"
    FPGA = "FPGA"
    AICHIP = "AICHIP"
    QAT = "QAT"
    NIC = "NIC"
    SSD = "SSD"


class Health(StrEnum):
    """What the hardware says of itself."""

    OK = "ok"
    DEGRADED = "degraded"
    FAILED = "failed"
    UNKNOWN = "unknown"


class HandleType(StrEnum):
    """How a handle reaches an instance (contract section 5.1)."""

    PCI = "PCI"
    MDEV = "MDEV"
    TEST_PCI = "TEST_PCI"
    DEV = "DEV"


class Origin(StrEnum):
    """Who wrote an attribute. Reports change only the agent's own."""

    AGENT = "agent"
    OPERATOR = "operator"
    CONDUCTOR = "conductor"
    """What a device was programmed with."""


class Source(StrEnum):
    """Who is behind an event."""

    PERSON = "person"
    AGENT = "agent"
    API = "api"
    RULE = "rule"
    SYSTEM = "system"


class DeviceState(StrEnum):
    """What the operator lets a device be used for."""

    INACTIVE = "inactive"
    INSTALLING = "installing"
    READY = "ready"
    MAINTENANCE = "maintenance"
    FAILED = "failed"
    QUARANTINED = "quarantined"
    MISSING = "missing"
    RETIRED = "retired"


class Drain(StrEnum):
    """What becomes of a draining device when its last request is gone."""

    MAINTENANCE = "maintenance"
    RETIRED = "retired"


class Admission(StrEnum):
    """What a rule makes of a device that is found."""

    READY = "ready"
    INACTIVE = "inactive"
    QUARANTINED = "quarantined"


class RequestState(StrEnum):
    """The life of an accelerator request (contract section 4.1, without its unreachable states)."""

    INITIAL = "Initial"
    BIND_STARTED = "BindStarted"
    BOUND = "Bound"
    BIND_FAILED = "BindFailed"
    UNBOUND = "Unbound"


class CommandState(StrEnum):
    """The life of a command to an agent."""

    PREPARING = "preparing"
    """Its image is being fetched."""
    QUEUED = "queued"
    """To be told to the agent, or told and not taken yet."""
    TAKEN = "taken"
    """In the agent's journal."""
    STARTED = "started"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    REFUSED = "refused"
    """Nothing was touched."""
    EXPIRED = "expired"
    """It was not begun in time, and never will be."""
    UNKNOWN = "unknown"
    """It was begun, and how it ended cannot be told."""


class BulkState(StrEnum):
    """The life of what is asked of many devices at once."""

    DRAFT = "draft"
    """The set is chosen, nobody has confirmed it."""
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"


class Outcome(StrEnum):
    """What became of one device that something was asked of."""

    MOVED = "moved"
    UNCHANGED = "unchanged"
    """It was so already."""
    REFUSED = "refused"


class DriverState(StrEnum):
    """How a driver on a host was seen."""

    OK = "ok"
    FAILED = "failed"
    QUARANTINED = "quarantined"
    """It broke again and again, and is started no more until somebody says so."""
    DISABLED = "disabled"
    """It is wanted there, and not to run."""
    ABSENT = "absent"
    """It is not run there; its package may be installed."""


class RolloutOp(StrEnum):
    """What is asked of a driver on hosts."""

    INSTALL = "install"
    UPDATE = "update"
    UNINSTALL = "uninstall"


class RolloutState(StrEnum):
    """How a rollout stands; `stopped` by a failure, `cancelled` by a person: no further host is begun.

    One that goes on whatever fails is `done` in the end.
    """

    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    CANCELLED = "cancelled"


class StepState(StrEnum):
    """How one host of a rollout stands."""

    WAITING = "waiting"
    ORDERED = "ordered"
    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"


_R = RequestState
REQUEST_MOVES: dict[RequestState, frozenset[RequestState]] = {
    _R.INITIAL: frozenset({_R.BIND_STARTED, _R.UNBOUND}),
    _R.BIND_STARTED: frozenset({_R.BOUND, _R.BIND_FAILED, _R.UNBOUND}),
    _R.BOUND: frozenset({_R.UNBOUND}),
    _R.BIND_FAILED: frozenset({_R.UNBOUND}),
    _R.UNBOUND: frozenset({_R.BIND_STARTED}),
}


BINDABLE = tuple(state.value for state, to in REQUEST_MOVES.items() if _R.BIND_STARTED in to)
"""The states in which a request may be bound, in the order in which upstream names them."""

RESOLVED = (_R.BOUND.value, _R.BIND_FAILED.value)
"""Nothing more is going to happen by itself (contract section 4.1)."""


_C = CommandState
ENDED = frozenset({_C.SUCCEEDED, _C.FAILED, _C.REFUSED, _C.EXPIRED, _C.UNKNOWN})
"""A command in one of these is over."""


class IllegalMove(ValueError):
    """A step the life cycle does not have; the text says which are possible."""
