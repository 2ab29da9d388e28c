"""The base class of the enumerations that people see. Each member declares its value, its tone and its label once;
choices of models, filters and forms, and the badges of the console, come from there.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Literal, Self

Tone = Literal["good", "busy", "calm", "warn", "bad"]
"""The tone of a badge. `console.css` has the colour of each tone, `accelerators.ui.badges` its glyph."""


class Choice(StrEnum):
    """A value as the database and the API have it, with the tone of its badge and its label for people.

    Members are declared as `READY = "ready", "good"`, or as `READY = "ready", "good", "Offered"` if the label differs
    from the value. The default tone is `calm`.
    """

    tone: Tone
    label: str

    def __new__(cls, value: str, tone: Tone = "calm", label: str = "") -> Self:
        """Make a member; `label` defaults to the value."""
        member = str.__new__(cls, value)
        member._value_, member.tone, member.label = value, tone, label or value
        return member

    @classmethod
    def choices(cls) -> list[tuple[str, str]]:
        """Return value and label of each member, in the form that Django's `choices` has."""
        return list_choices(cls)


def list_choices(words: Iterable[str]) -> list[tuple[str, str]]:
    """Return each word with its label, in the form that Django's `choices` has; plain text is its own label."""
    return [(str(word), getattr(word, "label", word)) for word in words]
