"""Find out which key must have signed each seal, and which months of events were dropped with a valid proof.

The chain itself contains this: the first signed seal has the first key, and seals of the kind `key` replace it. A new
key that the old one did not sign is shown as a finding, unless the person who verifies names it, because whoever can
write to the database can make such a seal with a key of their own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime

from django.db.models import Q, Sum

from accelerators.audit import sealing
from accelerators.domain import hash_chain
from accelerators.domain.hash_chain import SealKind
from accelerators.models import Seal


@dataclass
class ChainTrust:
    """The keys that must have signed the seals, and the dropped months, as read from the chain by `read_trust`.
    `problems` and `notices` are sentences, each with the number of its seal."""

    first_numbers: list[int] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    """`keys[i]` signs the seals from `first_numbers[i]` on."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Each month whose drop is proven → the number of the seal that proves it: seals before it need no events."""
    restores: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Number of each valid seal that records a restore → the number of the seal before it, and a sentence."""
    restored_at: datetime | None = None
    """When the last of them was made."""
    problems: list[tuple[int, str]] = field(default_factory=list)
    notices: list[tuple[int, str]] = field(default_factory=list)

    def get_key(self, number: int) -> str:
        """Return the public key that must have signed the seal with this number, '' if it may be unsigned."""
        place = bisect_right(self.first_numbers, number) - 1
        return self.keys[place] if place >= 0 else ""

    def is_dropped(self, seal: Seal) -> bool:
        """Return whether the events of this seal were dropped with a valid proof."""
        return seal.number < self.dropped.get(seal.month, 0)


def read_trust(trusted_keys: Collection[str] = ()) -> ChainTrust:
    """Read the marks of the whole chain (the seals that record a new key or a dropped month), and verify their
    signatures in order.

    `trusted_keys` are public keys that the caller knows from elsewhere. If there are any, the key of the first signed
    seal must be one of them, as must be each key that the key before it did not sign. Costs three statements, and one
    for each month that was dropped.
    """
    trust = ChainTrust()
    first_signed = sealing.list_possible_seals().exclude(signature="").order_by("number").first()
    if first_signed is None:
        if Seal.objects.exists():
            trust.notices.append((0, "no seal is signed: anyone who can write to the database may have made them"))
        if trusted_keys:
            trust.problems.append((0, "no seal is signed with the key that you trust"))
    else:
        _add_first_key(first_signed, trusted_keys, trust)
    is_mark = ~Q(drops="") | Q(kind__in=(SealKind.DROP, SealKind.KEY, SealKind.RESTORED))
    marks = sealing.list_possible_seals().defer("marks").filter(is_mark).order_by("number")
    for mark in list(sealing.add_previous_hash(marks)):
        previous_hash: str = mark.previous_hash  # type: ignore[attr-defined]  # it is annotated
        if mark.kind == SealKind.RESTORED:
            _add_restore(mark, trust)
        elif mark.kind == SealKind.KEY:
            _add_key(mark, previous_hash, trusted_keys, trust)
        else:
            _add_drop(mark, previous_hash, trust)
    return trust


def _add_first_key(first_signed: Seal, trusted_keys: Collection[str], trust: ChainTrust) -> None:
    """Let the key of the first signed seal be in force from there on. Its signature is verified with the seal."""
    number, key = first_signed.number, first_signed.key
    trust.first_numbers.append(number)
    trust.keys.append(key)
    if number > 1:
        text = f"the seals before №{number} are not signed: they were made by a release that signed none"
        trust.notices.append((number, text))
    if trusted_keys and key not in trusted_keys:
        trust.problems.append((number, f"the first signed seal, №{number}, has the key {key}, which you do not trust"))


def _add_key(mark: Seal, previous_hash: str, trusted_keys: Collection[str], trust: ChainTrust) -> None:
    """Let the new key of a mark be in force, if the key before it, or at least the new key itself, signed the mark."""
    details = sealing.read_details(mark)
    new_key, reason = sealing.get_introduced_key(mark), details.get("reason", "")
    if sealing.has_valid_signature(mark, previous_hash, trust.get_key(mark.number)):
        trust.first_numbers.append(mark.number + 1)
        trust.keys.append(new_key)
        trust.notices.append((mark.number, f"seal №{mark.number} replaces the key by {new_key}, signed by the old key"))
    elif sealing.has_valid_signature(mark, previous_hash, new_key):
        trust.first_numbers.append(mark.number)
        trust.keys.append(new_key)
        text = f"trust begins again at seal №{mark.number} with the key {new_key}, which the old key did not sign"
        if new_key in trusted_keys:
            trust.notices.append((mark.number, f"{text}; you trust it ({reason!r})"))
        else:
            trust.problems.append((mark.number, f"{text}: see docs/audit.md"))


def _add_restore(mark: Seal, trust: ChainTrust) -> None:
    """Accept that the seals before this one were lost in a restore, if it is signed with the key in force."""
    details = sealing.read_details(mark)
    previous = sealing.list_possible_seals().filter(number__lt=mark.number).order_by("-number").first()
    previous_hash = previous.hash if previous else hash_chain.FIRST_PREVIOUS_HASH
    number = previous.number if previous else 0
    if details.get("after") != number or not sealing.has_valid_signature(
        mark, previous_hash, trust.get_key(mark.number)
    ):
        trust.problems.append((mark.number, f"seal №{mark.number} does not prove a restore: it is forged"))
        return
    text = (
        f"the database was restored at {mark.sealed_at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC by"
        f" {details.get('by', '')} ({details.get('reason', '')!r}): what was sealed after seal №{number} was lost, seal"
        f" №{mark.number} goes on"
    )
    trust.restores[mark.number], trust.restored_at = (number, text), mark.sealed_at
    trust.notices.append((mark.number, text))


def _add_drop(mark: Seal, previous_hash: str, trust: ChainTrust) -> None:
    """Accept the drop of a month if it is signed, was due by the recorded retention, and has the number of events that
    were sealed. A drop before the first signed seal is accepted if it has the form of its time."""
    key, month = trust.get_key(mark.number), mark.drops
    if not key and not mark.key:
        trust.dropped[month] = mark.number
        trust.notices.append((mark.number, f"the drop of {month} by seal №{mark.number} is not signed"))
        return
    if not sealing.has_valid_signature(mark, previous_hash, key):
        trust.problems.append(
            (mark.number, f"seal №{mark.number} does not prove that {month} was dropped: it is forged")
        )
        return
    details = sealing.read_details(mark)
    months, events = details.get("retention_months"), details.get("events")
    sealed = (
        sealing.list_possible_seals()
        .filter(month=month, number__lt=mark.number)
        .aggregate(events=Sum("events", default=0))
    )
    is_due = (
        isinstance(months, int) and months > 0 and (month < hash_chain.get_oldest_month_to_keep(mark.sealed_at, months))
    )
    if not is_due or events != sealed["events"]:
        text = f"the drop of {month} by seal №{mark.number} is not justified: retention of {months} months, {events} of"
        trust.problems.append((mark.number, f"{text} {sealed['events']} sealed events"))
        return
    trust.dropped[month] = mark.number
