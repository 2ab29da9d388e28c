"""The enumerations of the product, and the life cycle of requests as a table.

The database's check constraints are made from the enumerations. The life cycle of devices is in
`accelerators.domain.device_actions`.
"""

from __future__ import annotations

from accelerators.domain.choices import Choice
from accelerators.domain.errors import AcceleratorsError


class DeviceType(Choice):
    """The kind of a device (upstream's types, contract section 5)."""

    GPU = "GPU"
    FPGA = "FPGA"
    AICHIP = "AICHIP"
    QAT = "QAT"
    NIC = "NIC"
    SSD = "SSD"


class Health(Choice):
    """The health that a device's hardware reports."""

    OK = "ok", "good"
    DEGRADED = "degraded", "warn"
    FAILED = "failed", "bad"
    UNKNOWN = "unknown"


class HandleType(Choice):
    """The ways in which a handle is attached to an instance (contract section 5.1). A DEV handle is a device node; it
    is never bound to an instance."""

    PCI = "PCI"
    MDEV = "MDEV"
    TEST_PCI = "TEST_PCI"
    DEV = "DEV"


class AttributeOrigin(Choice):
    """The writer of an attribute. A report changes only attributes of origin `agent`."""

    AGENT = "agent"
    OPERATOR = "operator"
    CONDUCTOR = "conductor"
    """Written when a device was programmed; says with what."""


class EventSource(Choice):
    """The kind of actor that caused an event."""

    PERSON = "person"
    AGENT = "agent"
    API = "api"
    RULE = "rule"
    SYSTEM = "system"


class DeviceState(Choice):
    """The state of a device in its life cycle: whether it is offered, and if not, why."""

    INACTIVE = "inactive"
    INSTALLING = "installing", "busy"
    READY = "ready", "good"
    MAINTENANCE = "maintenance", "busy"
    FAILED = "failed", "bad"
    QUARANTINED = "quarantined", "warn"
    MISSING = "missing", "warn"
    RETIRED = "retired"


class DrainTarget(Choice):
    """The state that a draining device gets when its last request is gone."""

    MAINTENANCE = "maintenance"
    RETIRED = "retired"


class AdmittedState(Choice):
    """The state that an admission rule gives to a device that is found."""

    READY = "ready"
    INACTIVE = "inactive"
    QUARANTINED = "quarantined"


class RequestState(Choice):
    """The state of an accelerator request (contract section 4.1, without the states that cannot be reached)."""

    INITIAL = "Initial"
    BIND_STARTED = "BindStarted", "busy"
    BOUND = "Bound", "good"
    BIND_FAILED = "BindFailed", "bad"
    UNBOUND = "Unbound"


class CommandState(Choice):
    """The state of a command to an agent."""

    PREPARING = "preparing", "busy"
    """The image that the command needs is being fetched."""
    QUEUED = "queued"
    """The command has to be sent to the agent, or was sent and is not in the agent's journal yet."""
    TAKEN = "taken", "busy"
    """The command is in the agent's journal."""
    STARTED = "started", "busy"
    SUCCEEDED = "succeeded", "good"
    FAILED = "failed", "bad"
    REFUSED = "refused", "warn"
    """The command was not carried out; nothing on the host was changed."""
    EXPIRED = "expired", "warn"
    """The command was not started in time, and will never be started."""
    UNKNOWN = "unknown", "bad"
    """The command was started, but its result is not known."""


NOT_BEGUN_COMMAND_STATES = (CommandState.PREPARING, CommandState.QUEUED)
"""The states of a command that is not in the agent's journal yet."""
BEGUN_COMMAND_STATES = (CommandState.TAKEN, CommandState.STARTED)
"""The states of a command that is in the agent's journal and has not ended."""
OPEN_COMMAND_STATES = (*NOT_BEGUN_COMMAND_STATES, *BEGUN_COMMAND_STATES)
"""The states of a command that has not ended."""


class BulkState(Choice):
    """The state of a bulk action, which does the same to many objects."""

    DRAFT = "draft"
    """The objects are chosen, but nobody has confirmed the action."""
    RUNNING = "running", "busy"
    DONE = "done", "good"
    CANCELLED = "cancelled", "warn"


class BulkTarget(Choice):
    """The kind of the objects of a bulk action."""

    DEVICE = "device"
    ATTACHMENT = "attachment"
    ACCELERATOR = "accelerator"
    """A unit that an instance holds. Its uuid is that of its request."""


class DeviceOutcome(Choice):
    """The result of an action on one device, or on another object of a bulk action."""

    MOVED = "moved", "good"
    UNCHANGED = "unchanged"
    """The object was already in the state that the action leads to."""
    REFUSED = "refused", "bad"


class AgentState(Choice):
    """The state of an agent. The age of its lease decides between UP, LATE and DOWN; the others may not connect."""

    UP = "up", "good"
    LATE = "late", "warn"
    DOWN = "down", "bad"
    REVOKED = "revoked", "bad"
    CLONE = "clone", "bad"
    """Two processes used its key at the same time."""


class DriverState(Choice):
    """The state of a driver on a host, as its agent last reported it."""

    OK = "ok", "good"
    FAILED = "failed", "bad"
    QUARANTINED = "quarantined", "warn"
    """The driver crashed repeatedly. It is not started again until an operator releases it."""
    DISABLED = "disabled"
    """The driver is wanted on this host, but an operator has switched it off."""
    ABSENT = "absent"
    """The driver does not run on this host; its package may still be installed."""


class BackendState(Choice):
    """The state of a backend of a driver on a host."""

    ANSWERING = "answering", "good"
    FAILING = "failing", "bad"
    WAITING = "waiting", "warn"
    """The backend is configured, but the host's agent has not reported it."""
    DISABLED = "disabled"
    """The backend is configured, and it or its driver is disabled; no agent reports it."""


class RolloutOp(Choice):
    """The change that a rollout makes to a driver on its hosts."""

    INSTALL = "install"
    UPDATE = "update"
    UNINSTALL = "uninstall"


class RolloutState(Choice):
    """The state of a rollout. After `stopped` (by a failure) and `cancelled` (by a person) no further host is started.

    A rollout that continues after failures ends as `done`.
    """

    DRAFT = "draft"
    """The hosts are chosen, but nobody has confirmed the rollout."""
    RUNNING = "running", "busy"
    DONE = "done", "good"
    STOPPED = "stopped", "bad"
    CANCELLED = "cancelled", "warn"


class RolloutStepState(Choice):
    """The state of one host of a rollout."""

    WAITING = "waiting"
    ORDERED = "ordered", "busy"
    DONE = "done", "good"
    FAILED = "failed", "bad"
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


class IllegalTransitionError(AcceleratorsError):
    """A device's state does not allow an action. The text is the end of a sentence about the device ("is ready: …") and
    names the actions that are possible, or for `retire` what has to be done first.
    """
