"""Compute the hashes of the chain of seals over events, and find the first event that does not fit its seal.

docs/audit.md describes the computation for those who want to verify events without this product.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from itertools import zip_longest

START = "0" * 64
"""The value of `Link.before` in the first seal, which has no predecessor."""
MARK = 4
"""Number of bytes of each event's digest that are stored with its seal."""


@dataclass(frozen=True)
class Link:
    """The values of a seal that its hash covers, in this order.

    `before` is the hash of the previous seal, `sealed_at` is ISO 8601 in UTC with microseconds; the others are
    columns of `accelerators_seal`.
    """

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
        """The hash of the seal: sha256, in hex, of the values as a JSON array in UTF-8."""
        return hashlib.sha256(json.dumps(astuple(self), ensure_ascii=False).encode()).hexdigest()


def digest(events: Iterable[bytes]) -> str:
    """Return the digest of a seal's events: sha256, in hex, of their own sha256 digests joined in their order."""
    return hashlib.sha256(b"".join(events)).hexdigest()


def marks(events: Iterable[bytes]) -> bytes:
    """Return the first MARK bytes of each event's digest, joined. They are stored with the seal, so that
    `parting` can find an event that was changed."""
    return b"".join(event[:MARK] for event in events)


def parting(kept: bytes, events: Sequence[bytes]) -> int | None:
    """Return the index of the first event whose digest differs from the marks `kept`, None if all agree.

    None is no proof, because a mark has only MARK bytes. The index may be one past the last event: then the
    events from there on are gone.
    """
    known = [kept[at : at + MARK] for at in range(0, len(kept), MARK)]
    pairs = enumerate(zip_longest(known, (event[:MARK] for event in events)))
    return next((place for place, (mark, event) in pairs if mark != event), None)
