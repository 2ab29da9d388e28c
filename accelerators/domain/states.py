"""The enumerations of the product, and the life cycle of requests as a table. The database's check constraints are made
from them.

The life cycle of devices is in `actions`.
"""

from __future__ import annotations

from enum import StrEnum

from accelerators.domain.errors import AcceleratorsError


class DeviceType(StrEnum):
    """The kind of a device (upstream's types, contract section 5)."""

    GPU = "GPU"
    FPGA = "FPGA"
    AICHIP = "AICHIP"
    QAT = "QAT"
    NIC = "NIC"
    SSD = "SSD"


class Health(StrEnum):
    """The health that a device's hardware reports."""

    OK = "ok"
    DEGRADED = "degraded"
    FAILED = "failed"
    UNKNOWN = "unknown"


class HandleType(StrEnum):
    """How a handle is attached to an instance (contract section 5.1). A DEV handle is a device node; it is never bound
    to an instance."""

    PCI = "PCI"
    MDEV = "MDEV"
    TEST_PCI = "TEST_PCI"
    DEV = "DEV"


class AttributeOrigin(StrEnum):
    """The writer of an attribute. A report changes only attributes of origin `agent`."""

    AGENT = "agent"
    OPERATOR = "operator"
    CONDUCTOR = "conductor"
    """Written when a device was programmed; says with what."""


class EventSource(StrEnum):
    """The kind of actor that caused an event."""

    PERSON = "person"
    AGENT = "agent"
    API = "api"
    RULE = "rule"
    SYSTEM = "system"


class DeviceState(StrEnum):
    """The state of a device in its life cycle: whether it is offered, and if not, why."""

    INACTIVE = "inactive"
    INSTALLING = "installing"
    READY = "ready"
    MAINTENANCE = "maintenance"
    FAILED = "failed"
    QUARANTINED = "quarantined"
    MISSING = "missing"
    RETIRED = "retired"


class DrainTarget(StrEnum):
    """The state that a draining device gets when its last request is gone."""

    MAINTENANCE = "maintenance"
    RETIRED = "retired"


class AdmittedState(StrEnum):
    """The state that an admission rule gives to a device that is found."""

    READY = "ready"
    INACTIVE = "inactive"
    QUARANTINED = "quarantined"


class RequestState(StrEnum):
    """The state of an accelerator request (contract section 4.1, without the states that cannot be reached)."""

    INITIAL = "Initial"
    BIND_STARTED = "BindStarted"
    BOUND = "Bound"
    BIND_FAILED = "BindFailed"
    UNBOUND = "Unbound"


class CommandState(StrEnum):
    """The state of a command to an agent."""

    PREPARING = "preparing"
    """The image that the command needs is being fetched."""
    QUEUED = "queued"
    """The command has to be sent to the agent, or was sent and is not in the agent's journal yet."""
    TAKEN = "taken"
    """The command is in the agent's journal."""
    STARTED = "started"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    REFUSED = "refused"
    """The command was not carried out; nothing on the host was changed."""
    EXPIRED = "expired"
    """The command was not started in time, and will never be started."""
    UNKNOWN = "unknown"
    """The command was started, but its result is not known."""


class BulkState(StrEnum):
    """The state of a bulk action, which does the same to many devices."""

    DRAFT = "draft"
    """The devices are chosen, but nobody has confirmed the action."""
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"


class DeviceOutcome(StrEnum):
    """The result of an action on one device."""

    MOVED = "moved"
    UNCHANGED = "unchanged"
    """The device was already in the state that the action leads to."""
    REFUSED = "refused"


class DriverState(StrEnum):
    """The state of a driver on a host, as its agent last reported it."""

    OK = "ok"
    FAILED = "failed"
    QUARANTINED = "quarantined"
    """The driver crashed repeatedly. It is not started again until an operator releases it."""
    DISABLED = "disabled"
    """The driver is wanted on this host, but an operator has switched it off."""
    ABSENT = "absent"
    """The driver does not run on this host; its package may still be installed."""


class RolloutOp(StrEnum):
    """The change that a rollout makes to a driver on its hosts."""

    INSTALL = "install"
    UPDATE = "update"
    UNINSTALL = "uninstall"


class RolloutState(StrEnum):
    """The state of a rollout. After `stopped` (by a failure) and `cancelled` (by a person) no further host is started.

    A rollout that continues after failures ends as `done`.
    """

    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    CANCELLED = "cancelled"


class RolloutStepState(StrEnum):
    """The state of one host of a rollout."""

    WAITING = "waiting"
    ORDERED = "ordered"
    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"


_R = RequestState
REQUEST_TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    _R.INITIAL: frozenset({_R.BIND_STARTED, _R.UNBOUND}),
    _R.BIND_STARTED: frozenset({_R.BOUND, _R.BIND_FAILED, _R.UNBOUND}),
    _R.BOUND: frozenset({_R.UNBOUND}),
    _R.BIND_FAILED: frozenset({_R.UNBOUND}),
    _R.UNBOUND: frozenset({_R.BIND_STARTED}),
}


BINDABLE_STATES = tuple(state.value for state, to in REQUEST_TRANSITIONS.items() if _R.BIND_STARTED in to)
"""The states in which a request may be bound, in the order in which upstream's error message names them."""

BIND_ENDED_STATES = (_R.BOUND.value, _R.BIND_FAILED.value)
"""The states in which the bind of a request has ended (contract section 4.1)."""


_C = CommandState
ENDED_COMMAND_STATES = frozenset({_C.SUCCEEDED, _C.FAILED, _C.REFUSED, _C.EXPIRED, _C.UNKNOWN})
"""The final states of a command."""


class IllegalTransitionError(AcceleratorsError):
    """The life cycle does not allow this action in this state; the text says which actions are possible."""
