"""What a mutant is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One place and one operator. `number` counts the nodes of the file, `variant` the changes of that node."""

    area: str
    path: str
    line: int
    end_line: int
    operator: str
    number: int
    variant: int

    @property
    def key(self) -> str:
        """Its identity in the state file."""
        return f"{self.path}:{self.line}:{self.number}:{self.operator}:{self.variant}"
