"""Detect that settings were changed since the caller read them: compare the generation that the caller has seen."""

from __future__ import annotations

from collections.abc import Sequence

from accelerators.domain.errors import RefusalReason, RefusedError


class ChangedMeanwhileError(RefusedError):
    """A change was refused because it is based on an older generation. The answer to the caller shows the present one.

    For a change on several hosts, `hosts` has the names of those where the driver was changed.
    """

    def __init__(self, text: str, hosts: Sequence[str] = ()) -> None:
        super().__init__(RefusalReason.CONFLICT, text)
        self.hosts = tuple(hosts)


def refuse_if_changed(subject: str, present: int, seen: int | None, hosts: Sequence[str] = ()) -> None:
    """Raise ChangedMeanwhileError if the present generation of `subject` is not `seen`; do nothing if that is None."""
    if seen is not None and seen != present:
        text = f"{subject} is at generation {present} now, not {seen}: somebody changed it."
        raise ChangedMeanwhileError(f"{text} Read it again, then send generation {present}.", hosts)
