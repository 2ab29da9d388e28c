"""Compute the hashes of the chain of seals over events, and find the first event that does not fit its seal.

docs/audit.md describes the computation for those who want to verify events without this product.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from datetime import datetime
from enum import StrEnum
from itertools import zip_longest

FIRST_PREVIOUS_HASH = "0" * 64
"""The value of `SealContent.previous_hash` in the first seal, which has no predecessor."""
MARK_BYTES = 4
"""Number of bytes of each event's digest that are stored with its seal."""


class SealKind(StrEnum):
    """The kinds of seals, by the fact that they record."""

    EVENTS = "events"
    """The seal covers events. Seals of releases that did not sign have no kind; they cover events, or record a drop."""
    DROP = "drop"
    """The events of a month were dropped by retention."""
    KEY = "key"
    """The key was replaced: the next seal must be signed with the new key."""
    RESTORED = "restored"
    """The database was restored from a backup: the seals between the one before and this one were lost."""


@dataclass(frozen=True)
class SealContent:
    """The values of a seal that its hash and its signature cover, in this order.

    `previous_hash` is the hash of the previous seal, `sealed_at` is ISO 8601 in UTC with microseconds; the others are
    columns of `accelerators_seal`. The last three are '' if the seal is not signed; then the hash does not cover them.
    """

    number: int
    previous_hash: str
    month: str
    tx: int
    event: int
    events: int
    digest: str
    drops: str
    sealed_at: str
    kind: str = ""
    details: str = ""
    key: str = ""

    @property
    def text(self) -> bytes:
        """The bytes that are hashed and signed: the values as a JSON array in UTF-8."""
        values = astuple(self)
        return json.dumps(values if self.key else values[:-3], ensure_ascii=False).encode()

    @property
    def hash(self) -> str:
        """The hash of the seal: sha256, in hex, of its text."""
        return hashlib.sha256(self.text).hexdigest()


def get_oldest_month_to_keep(now: datetime, months: int) -> str:
    """Return the oldest month to keep, as YYYY-MM: the month of `now` and the `months` before it are kept."""
    year, month = divmod(now.year * 12 + now.month - 1 - months, 12)
    return f"{year:04d}-{month + 1:02d}"


def digest_events(event_digests: Iterable[bytes]) -> str:
    """Return the digest of a seal's events: sha256, in hex, of their own sha256 digests joined in their order."""
    return hashlib.sha256(b"".join(event_digests)).hexdigest()


def join_marks(event_digests: Iterable[bytes]) -> bytes:
    """Return the first MARK_BYTES bytes of each event's digest, joined. They are stored with the seal, so that
    `find_first_mismatch` can find an event that was changed."""
    return b"".join(event[:MARK_BYTES] for event in event_digests)


def find_first_mismatch(stored_marks: bytes, event_digests: Sequence[bytes]) -> int | None:
    """Return the index of the first event whose digest differs from `stored_marks`, None if all agree.

    None is no proof, because a mark has only MARK_BYTES bytes. The index may be one past the last event: then the
    events from there on are gone.
    """
    stored_parts = [stored_marks[at : at + MARK_BYTES] for at in range(0, len(stored_marks), MARK_BYTES)]
    pairs = enumerate(zip_longest(stored_parts, (event[:MARK_BYTES] for event in event_digests)))
    return next((index for index, (mark, event) in pairs if mark != event), None)
