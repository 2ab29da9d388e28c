"""The identity of one mutant."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One place and one operator: node `number` of the file is changed by variant `variant` of the operator."""

    area: str
    path: str
    line: int
    end_line: int
    operator: str
    number: int
    variant: int

    @property
    def key(self) -> str:
        """Return the key of the mutant in the state files."""
        return f"{self.path}:{self.line}:{self.number}:{self.operator}:{self.variant}"
