"""The reasons for which a bind fails, as a bounded set, with advice for each."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from accelerators.domain.errors import RefusalReason, RefusedError


class BindFailure(StrEnum):
    """The reasons for which a bind fails.

    The values are stable codes for programs: the log, the events and the label `reason` of the metric
    `cyborg_bind_failures_total` have them.
    """

    UNKNOWN_PROVIDER = "unknown_provider"
    """No device has the resource provider that Nova chose."""
    OTHER_HOST = "other_host"
    """The resource provider belongs to a device of another host."""
    NONE_FREE = "none_free"
    """All units of the provider are held, or released and not confirmed."""
    NOT_OFFERED = "not_offered"
    """The device is not ready, or its health is failed."""
    BUSY = "busy"
    """A command uses the device alone."""
    DEVICE_NODE = "device_node"
    """The units of the device are device nodes, which no guest gets."""
    IMAGE_CONFLICT = "image_conflict"
    """The device would have to be programmed, but somebody else uses it, or needs another image."""
    INVALID_GROUP = "invalid_group"
    """The request's group of the device profile cannot be bound."""
    HOST_FAILED = "host_failed"
    """The host refused the command of the bind, or failed to carry it out."""
    DEADLINE = "deadline"
    """The bind was not finished before its deadline."""
    UNKNOWN_REQUEST = "unknown_request"
    """There is no such request, or the caller may not see it. Nothing was changed."""
    INSTANCE_HAS_REQUESTS = "instance_has_requests"
    """The instance already has requests. Nothing was changed."""
    WRONG_STATE = "wrong_state"
    """The state of the request does not allow a bind. Nothing was changed."""
    CONTENTION = "contention"
    """Other transactions kept the units locked for too long. Nothing was changed."""


REFUSAL_BY_FAILURE: Mapping[BindFailure, RefusalReason] = {
    BindFailure.UNKNOWN_PROVIDER: RefusalReason.NOT_FOUND,
    BindFailure.OTHER_HOST: RefusalReason.NOT_FOUND,
    BindFailure.NONE_FREE: RefusalReason.NONE_FREE,
    BindFailure.NOT_OFFERED: RefusalReason.NONE_FREE,
    BindFailure.BUSY: RefusalReason.NONE_FREE,
    BindFailure.DEVICE_NODE: RefusalReason.NONE_FREE,
    BindFailure.IMAGE_CONFLICT: RefusalReason.NONE_FREE,
    BindFailure.INVALID_GROUP: RefusalReason.INVALID,
    BindFailure.UNKNOWN_REQUEST: RefusalReason.NOT_FOUND,
    BindFailure.INSTANCE_HAS_REQUESTS: RefusalReason.INVALID,
    BindFailure.WRONG_STATE: RefusalReason.WRONG_STATE,
    BindFailure.CONTENTION: RefusalReason.UNAVAILABLE,
}
"""The reason of the refusal for each failure that the caller of a bind is answered with."""

ADVICE: Mapping[BindFailure, str] = {
    BindFailure.UNKNOWN_PROVIDER: "Placement offers a provider that no device has: the list of contradictions names it,"
    " or nova-scheduler still knows one that was deleted meanwhile.",
    BindFailure.OTHER_HOST: "Compare the host's name here with its compute provider in Placement, and look whether the"
    " card was moved to another host.",
    BindFailure.NONE_FREE: "Placement offers more units than are free: look at the contradictions, and at units that"
    " are released and not confirmed.",
    BindFailure.NOT_OFFERED: "Placement still offers a device that is not offered here: look whether Placement is"
    " behind.",
    BindFailure.BUSY: "A command uses the device: wait until it has ended, or look why it takes so long.",
    BindFailure.DEVICE_NODE: "No guest gets a device node: delete its provider from Placement.",
    BindFailure.IMAGE_CONFLICT: "Requests for different images meet on one device: let their profiles require different"
    " traits.",
    BindFailure.INVALID_GROUP: "Correct the device profile.",
    BindFailure.HOST_FAILED: "Read the host's answer and the log of its agent.",
    BindFailure.DEADLINE: "Look whether the host's agent is up and why it answers slowly.",
    BindFailure.UNKNOWN_REQUEST: "The client binds requests that were deleted meanwhile, or that its project may not"
    " see: find the request id in the client's log.",
    BindFailure.INSTANCE_HAS_REQUESTS: "The instance still has requests of an earlier bind: look at them in the list of"
    " requests, and in the log of Nova why they were not deleted.",
    BindFailure.WRONG_STATE: "The client binds requests that are bound or being bound already: look whether it sends a"
    " bind again after a time-out.",
    BindFailure.CONTENTION: "Many binds compete for the last free units, and Nova tries other hosts by itself: if it"
    " goes on, offer more units.",
}
"""Advice for the operator, for each failure."""


class BindRefusedError(RefusedError):
    """A bind was refused because of `failure`."""

    def __init__(self, failure: BindFailure, text: str) -> None:
        super().__init__(REFUSAL_BY_FAILURE[failure], text)
        self.failure = failure
