"""The hash chain over events, as values: what a seal is made of, and where events and their seal part. Pure.

Called by `sealing`, which makes seals, and by `proof`, which holds events against them. docs/audit.md has it in words,
for who wants to compute it without us.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from itertools import zip_longest

START = "0" * 64
"""What stands in the first seal for the hash of the seal before."""
MARK = 4
"""So many bytes of each event's digest are kept with its seal."""


@dataclass(frozen=True)
class Link:
    """A seal as it is hashed: these values, in this order. `before` is the hash of the seal before, `sealed_at` ISO
    8601 in UTC with microseconds, the others are columns of `accelerators_seal`."""

    number: int
    before: str
    month: str
    tx: int
    event: int
    events: int
    digest: str
    drops: str
    sealed_at: str

    @property
    def hash(self) -> str:
        """sha256 in hex, of the values as a JSON array in UTF-8."""
        return hashlib.sha256(json.dumps(astuple(self), ensure_ascii=False).encode()).hexdigest()


def digest(events: Iterable[bytes]) -> str:
    """Over a seal's events, each given by its own sha256, in their order."""
    return hashlib.sha256(b"".join(events)).hexdigest()


def marks(events: Iterable[bytes]) -> bytes:
    """What is kept of each event to find the one that does not fit."""
    return b"".join(event[:MARK] for event in events)


def parting(kept: bytes, events: Sequence[bytes]) -> int | None:
    """The first of `events` that is not what `kept` says, by its place from 0 on; None: they are alike, as far as can
    be told. The place may be one behind the last event: what stood there is gone."""
    known = [kept[at : at + MARK] for at in range(0, len(kept), MARK)]
    pairs = enumerate(zip_longest(known, (event[:MARK] for event in events)))
    return next((place for place, (mark, event) in pairs if mark != event), None)
