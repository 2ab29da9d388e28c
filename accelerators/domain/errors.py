"""The error that the modules of `accelerators` raise when they refuse a request of a caller. Each API maps its reason
to an HTTP status."""

from __future__ import annotations

from enum import StrEnum


class RefusalReason(StrEnum):
    """Why something was refused."""

    UNKNOWN = "unknown"
    """The object that the caller named does not exist, or is not the caller's."""
    NONE_FREE = "none free"
    """No handle that fits is free."""
    STATE = "state"
    """The state of the accelerator request does not allow this."""
    CONFLICT = "conflict"
    """The current state of the object or of another one does not allow this; for example the name is in use."""
    INVALID = "invalid"
    """The arguments are wrong, whatever the state of the objects."""
    DUPLICATE = "duplicate"
    """The uuid that the caller chose is in use."""
    SERVICE_TOKEN = "service token"
    """Only a caller with a service token may do this."""
    HELD = "held"
    """The object is in use, for example a device that a request holds."""
    AWAY = "away"
    """A service or a lock that is needed is not available now: the caller may retry."""


class RefusedError(Exception):
    """The action was refused, for `reason`. `text` is a sentence for the caller; it must not name objects that the
    caller may not see."""

    def __init__(self, reason: RefusalReason, text: str) -> None:
        super().__init__(text)
        self.reason, self.text = reason, text
