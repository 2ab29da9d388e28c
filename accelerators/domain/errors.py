"""The base class of the exceptions of `accelerators`, and those that refuse a request of a caller, or all writes.

All exceptions of this package, each with the module that defines it:

    AcceleratorsError                   accelerators.domain.errors
      RefusedError                      accelerators.domain.errors
        AgentDownError                  accelerators.commands.command_queue
        BindRefusedError                accelerators.domain.bind_failures
        RuleNotConfirmedError           accelerators.admin.admission_rules
        GenerationError                 accelerators.domain.generations
          ChangedMeanwhileError         accelerators.domain.generations
          NoGenerationError             accelerators.domain.generations
      WritesRefusedError                accelerators.domain.errors
      GroupError                        accelerators.domain.groups
      IllegalTransitionError            accelerators.domain.states
      RegistrationError                 accelerators.runtime.registry
      AuditKeyError                     accelerators.audit.signing
      AnchorFileError                   accelerators.audit.anchors
      ImageUnusableError                accelerators.images.download
      ImageServiceUnavailableError      accelerators.images.download
      SeedError                         accelerators.inventory.seed
        RealHostsError                  accelerators.inventory.seed
      ConcurrentUpdateError             accelerators.workflows.attachment_orders
      _HandlesContendedError            accelerators.requests.binding
      ApiError                          accelerators.api.own.errors
        NotConfirmedError               accelerators.api.own.previews
      V2Error                           accelerators.api.v2.faults
      RouterError                       accelerators.api.v2.faults
"""

from __future__ import annotations

from enum import StrEnum


class AcceleratorsError(Exception):
    """Base class of all exceptions of `accelerators`."""


class WritesRefusedError(AcceleratorsError):
    """Callers may write nothing now. The check of `conductor.checking_writes` raises a subclass."""


class RefusalReason(StrEnum):
    """The reasons of refusals.

    The values are stable codes for programs: `/api/` and the `cyborg` command show them, metrics and the outcomes of
    bulk actions store them (at most 16 characters). `docs/cli.md` lists them.
    """

    NOT_FOUND = "not_found"
    """The object that the caller named does not exist, or is not the caller's."""
    NONE_FREE = "none_free"
    """No handle that fits is free."""
    WRONG_STATE = "wrong_state"
    """The state of the accelerator request does not allow this."""
    CONFLICT = "conflict"
    """The current state of the object or of another one does not allow this; for example the name is in use."""
    NO_GENERATION = "no_generation"
    """The change does not say on which generation of the settings it is based."""
    INVALID = "invalid"
    """The arguments are wrong, whatever the state of the objects."""
    DUPLICATE = "duplicate"
    """The uuid that the caller chose is in use."""
    SERVICE_TOKEN = "service_token"
    """Only a caller with a service token may do this."""
    IN_USE = "in_use"
    """The object is in use, for example a device that a request holds."""
    NOT_CONFIRMED = "not_confirmed"
    """The action reaches several hosts or held objects, and must be confirmed with the token of its preview."""
    STALE_PREVIEW = "stale_preview"
    """The token belongs to the preview of another caller, action or set, or the preview is too old or used already."""
    UNAVAILABLE = "unavailable"
    """A service or a lock that is needed is not available now: the caller may retry."""


class RefusedError(AcceleratorsError):
    """The action was refused, for `reason`. `text` is a sentence for the caller; it must not name objects that the
    caller may not see."""

    def __init__(self, reason: RefusalReason, text: str) -> None:
        super().__init__(text)
        self.reason, self.text = reason, text
