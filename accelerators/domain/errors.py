"""What the room refuses to do, and why. Raised by `binding`, `profiles`, `lifecycle`; each API has its statuses."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The kind of a refusal."""

    UNKNOWN = "unknown"
    """What is named is not there, or not the caller's."""
    NONE_FREE = "none free"
    """Nothing that could be given is free."""
    STATE = "state"
    """Its state does not allow this."""
    CONFLICT = "conflict"
    """Something else is in the way."""
    INVALID = "invalid"
    """It makes no sense as it is."""
    DUPLICATE = "duplicate"
    """A uuid that is taken."""
    SERVICE_TOKEN = "service token"
    """Only another service may ask for this."""
    HELD = "held"
    """Somebody uses it."""
    AWAY = "away"
    """Who would have to answer cannot be asked now."""


class Refused(Exception):
    """`text` is one sentence for the person who asked; it names no more than what they named."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason, self.text = reason, text
