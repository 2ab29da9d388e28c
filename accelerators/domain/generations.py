"""Detect that settings were changed since the caller read them: compare the generation that the caller has seen."""

from __future__ import annotations

from collections.abc import Sequence

from accelerators.domain.errors import RefusalReason, RefusedError


class GenerationError(RefusedError):
    """A change was refused because of the generation on which it is based. The answer shows the present version.

    For a change of a driver, `hosts` has the names of the hosts where it has this version.
    """

    def __init__(self, reason: RefusalReason, text: str, hosts: Sequence[str] = ()) -> None:
        super().__init__(reason, text)
        self.hosts = tuple(hosts)


class ChangedMeanwhileError(GenerationError):
    """A change was refused because it is based on an older generation."""

    def __init__(self, text: str, hosts: Sequence[str] = ()) -> None:
        super().__init__(RefusalReason.CONFLICT, text, hosts)


class NoGenerationError(GenerationError):
    """A change was refused because it does not say on which generation it is based."""

    def __init__(self, text: str, hosts: Sequence[str] = ()) -> None:
        super().__init__(RefusalReason.NO_GENERATION, text, hosts)


def refuse_if_changed(subject: str, present: int, seen: int | None, hosts: Sequence[str] = ()) -> None:
    """Raise ChangedMeanwhileError if the present generation of `subject` is not `seen`; do nothing if that is None."""
    if seen is not None and seen != present:
        text = f"{subject} is at generation {present} now, not {seen}: somebody changed it."
        raise ChangedMeanwhileError(f"{text} Read it again, then send generation {present}.", hosts)


def require_generation(subject: str, present: int, seen: int | None, hosts: Sequence[str] = ()) -> int:
    """Return `seen`, the generation that the caller names. Raise NoGenerationError if it is None."""
    if seen is None:
        text = f"{subject} is at generation {present} now. Send the generation that you have read, as `generation`"
        raise NoGenerationError(f"{text}, so that you do not overwrite the change of somebody else.", hosts)
    return seen
