"""Verify that events are unchanged since they were sealed: compute the digest of each seal from the stored events, the
hash of each seal from the previous one, and verify its signature.

Events that are not sealed yet cannot be verified; they are only counted. Hashes of seals that were kept outside the
database (anchors) also show what the chain alone cannot: that its end was cut off, or that the whole chain was computed
again with another key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from django.db import connection
from django.db.models import Q, Sum

from accelerators.audit.sealing import (
    EVENT_DIGEST,
    IS_POSSIBLE_SEAL,
    build_link,
    get_newest_seal,
    has_valid_signature,
    list_possible_seals,
)
from accelerators.audit.trust import ChainTrust, read_trust
from accelerators.domain import hash_chain
from accelerators.models import Event, Seal

MAX_FINDINGS = 20
"""The verification stops when it has this many findings."""
SELECT_SEALED_EVENTS = f"""
SELECT e.id, {EVENT_DIGEST} FROM accelerators_event e
WHERE (e.tx, e.id) > (%s, %s) AND (e.tx, e.id) <= (%s, %s) ORDER BY e.tx, e.id LIMIT %s
"""
"""The events between two seals, with their digests. It is raw SQL because PostgreSQL computes the digests, and because
the ORM cannot compare rows, which lets the index find the range."""
SELECT_LAST_SEALED_EVENTS = f"""
SELECT l.id, l.digest FROM (SELECT e.tx, e.id, {EVENT_DIGEST} AS digest FROM accelerators_event e
  WHERE (e.tx, e.id) > (%s, %s) AND (e.tx, e.id) <= (%s, %s) ORDER BY e.tx DESC, e.id DESC LIMIT %s) AS l
ORDER BY l.tx, l.id
"""
"""The last events between two seals, with their digests: those of the later seal, if seals between the two are gone."""


@dataclass(frozen=True)
class Anchor:
    """A seal that was kept outside the database: its hash, and the public key that signed it ('' if none is known)."""

    hash: str
    key: str = ""


@dataclass(frozen=True)
class SealFinding:
    """A difference between the events and the seals.

    `event` is 0 if the finding concerns the seal itself; `seal` is 0 if the finding concerns an event before the first
    seal.
    """

    seal: int
    event: int
    text: str


@dataclass
class VerificationResult:
    """The result of a verification: how many seals and events were verified, and the findings.

    Without `findings`, nothing that was verified differs from the seals.
    """

    seals: int = 0
    events: int = 0
    dropped: int = 0
    """Number of sealed events in months that were dropped: only their seals are left."""
    unsealed: int = 0
    """Number of events after the newest seal; counted only if the verification goes to the newest seal."""
    number: int = 0
    hash: str = ""
    key: str = ""
    """`number`, `hash` and public key of the newest seal that is stored. Keep them outside the database, as an anchor
    for later verifications."""
    last_verified: int = 0
    """Number of the last seal that was verified."""
    is_complete: bool = True
    """False if there was no time left for all seals, or if there were too many findings."""
    restored: tuple[datetime, str] | None = None
    """When the database was last restored by a valid seal, and a sentence about it."""
    notices: list[str] = field(default_factory=list)
    """Facts that are not errors, but that the person who verifies must know: seals that are not signed, changes of the
    key, and months that were dropped without a signature."""
    findings: list[SealFinding] = field(default_factory=list)


def verify_seals(
    first: int = 1,
    last: int | None = None,
    anchors: Mapping[int, Anchor] | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
    trusted_keys: Collection[str] = (),
    give_up_at: float = float("inf"),
) -> VerificationResult:
    """Verify the seals from `first` to `last` with their events, by default all; stop when there are MAX_FINDINGS
    findings, or when the monotonic clock is at `give_up_at`.

    `anchors` maps numbers of seals to what was kept of them outside the database. An anchor is compared if its seal is
    verified; a number above that of the newest seal is a finding. `trusted_keys` are public keys that the caller knows
    from elsewhere (`trust.read_trust`). Changes of the key and drops of months are always verified for the whole chain.
    `progress` is called after each seal with the number of events done and the number of all. Only reads, and takes no
    lock; costs about one statement per seal, in which the database computes a sha256 of each event.
    """
    result, newest_seal = VerificationResult(), get_newest_seal()
    result.number, result.hash, result.key = newest_seal.number, newest_seal.hash, newest_seal.key
    run = _Run(read_trust(trusted_keys), anchors or {}, result)
    result.findings += [SealFinding(number, 0, text) for number, text in run.trust.problems]
    result.notices += [text for _, text in run.trust.notices]
    if run.trust.restored_at:
        result.restored = run.trust.restored_at, run.trust.restores[max(run.trust.restores)][1]
    impossible = _find_impossible_seals(first, last, result)
    problems_before = len(result.findings)
    seals = list_possible_seals().filter(number__gte=first, number__lte=newest_seal.number if last is None else last)
    events_total = seals.aggregate(events=Sum("events", default=0))["events"]
    previous = list_possible_seals().filter(number__lt=first).order_by("-number").first() or Seal(
        number=0, tx=-1, event=0, hash=hash_chain.FIRST_PREVIOUS_HASH
    )
    for seal in seals.order_by("number").iterator(chunk_size=500):
        if len(result.findings) - problems_before >= MAX_FINDINGS or time.monotonic() >= give_up_at:
            result.is_complete = False
            break
        if run.trust.restores.get(seal.number, (None, ""))[0] != previous.number:
            _report_gap(previous.number, seal.number, impossible, result)
        _verify_seal(seal, previous, run)
        previous, result.last_verified = seal, seal.number
        progress(result.events + result.dropped, events_total)
    else:
        _report_gap(previous.number, min(newest_seal.number, last or newest_seal.number) + 1, impossible, result)
    for number, anchor in sorted((anchors or {}).items()):
        for restored_number, (last_number, text) in run.trust.restores.items():
            if last_number < number < restored_number:
                result.notices.append(f"seal №{number} ({anchor.hash[:12]}…) was kept elsewhere and is gone: {text}")
        if number > newest_seal.number:
            text = (
                f"seal №{number} ({anchor.hash[:12]}…) was kept elsewhere and is gone: the end of the chain was cut off"
            )
            result.findings.append(SealFinding(number, 0, text))
    if last is None:
        events_from_seal = Event.objects.filter(tx__gte=newest_seal.tx)
        result.unsealed = events_from_seal.exclude(tx=newest_seal.tx, id__lte=newest_seal.event).count()
        # No transaction has a negative number: somebody inserted such an event in front of the first seal.
        inserted_event = Event.objects.filter(tx__lt=0).order_by("tx", "id").values_list("id", flat=True).first()
        if inserted_event is not None:
            text = f"event {inserted_event} was inserted: no transaction wrote it"
            result.findings.append(SealFinding(0, inserted_event, text))
    return result


def _find_impossible_seals(first: int, last: int | None, result: VerificationResult) -> set[int]:
    """Add a finding for each row in this range, and for each with a number below 1, whose values no seal of this
    product has; return their numbers, at most MAX_FINDINGS of them."""
    in_range = Q(number__gte=first) if last is None else Q(number__range=(first, last))
    rows = Seal.objects.filter(Q(number__lt=1) | in_range).exclude(IS_POSSIBLE_SEAL).order_by("number")
    numbers = list(rows.values_list("number", flat=True)[:MAX_FINDINGS])
    for number in numbers:
        text = f"seal №{number} is forged: no seal has such a number, number of events, or time"
        result.findings.append(SealFinding(number, 0, text))
    return set(numbers)


def _report_gap(present: int, next_present: int, impossible: set[int], result: VerificationResult) -> None:
    """Add a finding to `result` if the seals between these two numbers are gone, and not only `impossible`."""
    first, last = present + 1, next_present - 1
    if not all(number in impossible for number in range(first, last + 1)):
        which = f"seal №{last} is" if first == last else f"seals №{first} to №{last} are"
        result.findings.append(SealFinding(last, 0, f"{which} gone"))


@dataclass
class _Run:
    """The inputs of one verification, and its result so far."""

    trust: ChainTrust
    anchors: Mapping[int, Anchor]
    result: VerificationResult


def _verify_seal(seal: Seal, previous: Seal, run: _Run) -> None:
    """Verify one seal and its events; add counts and findings to the result.

    `previous` is the seal before. If seals between the two are gone, an event that was inserted before those of the
    later one is not found, because the events of the gone seals stand there. If events are gone, the marks of the chain
    are read again, because their month may have been dropped during the verification.
    """
    result = run.result
    result.seals += 1
    _verify_link(seal, previous, run)
    statement, count = SELECT_SEALED_EVENTS, seal.events + 1
    if seal.number > previous.number + 1:
        statement, count = SELECT_LAST_SEALED_EVENTS, seal.events
    with connection.cursor() as cursor:
        cursor.execute(statement, [previous.tx, previous.event, seal.tx, seal.event, count])
        rows = cursor.fetchall()
    if seal.events and not rows and not run.trust.is_dropped(seal):
        run.trust.dropped |= read_trust().dropped
    if seal.events and run.trust.is_dropped(seal):
        result.dropped += seal.events
        if rows:
            text = f"event {rows[0][0]} was inserted: those of seal №{seal.number} were dropped with {seal.month}"
            result.findings.append(SealFinding(seal.number, rows[0][0], text))
        return
    result.events += len(rows)
    digests = [bytes(row[1]) for row in rows]
    if len(rows) != seal.events or hash_chain.digest_events(digests) != seal.digest:
        result.findings.append(_find_first_difference(seal, [row[0] for row in rows], digests))


def _verify_link(seal: Seal, previous: Seal, run: _Run) -> None:
    """Verify the hash and the signature of a seal, and compare it with its anchor; add findings to the result."""
    key = run.trust.get_key(seal.number)
    if build_link(seal, previous.hash).hash != seal.hash:
        text = f"seal №{seal.number} does not fit: it was changed, or does not follow №{previous.number}"
        run.result.findings.append(SealFinding(seal.number, 0, text))
    elif (key or seal.key) and not has_valid_signature(seal, previous.hash, key):
        text = f"seal №{seal.number} is not signed with the key in force, {key}: it is forged"
        run.result.findings.append(SealFinding(seal.number, 0, text))
    anchor = run.anchors.get(seal.number)
    if anchor and anchor.hash != seal.hash:
        text = f"seal №{seal.number} differs from the one that was kept elsewhere: the chain was computed again"
        if anchor.key and anchor.key != seal.key:
            text = f"{text}, and signed with another key ({seal.key or 'none'} instead of {anchor.key})"
        run.result.findings.append(SealFinding(seal.number, 0, text))


def _find_first_difference(seal: Seal, ids: list[int], digests: list[bytes]) -> SealFinding:
    """Find the first event of this seal that was changed, inserted or removed since it was sealed; return the finding.

    `ids` and `digests` are those of the seal's events that are stored now. The `event` of the finding is 0 if the
    seal's last events are gone, or if the bytes of the digests that the seal keeps (`marks`) do not show which event
    was changed.
    """
    place = hash_chain.find_first_mismatch(bytes(seal.marks), digests)
    count_text = f"{'more than ' if len(ids) > seal.events else ''}{min(len(ids), seal.events)} found"
    seal_text = f"under seal №{seal.number} ({seal.events} sealed, {count_text})"
    if place is None:
        return SealFinding(seal.number, 0, f"an event {seal_text} was changed")
    if place >= len(ids):
        return SealFinding(seal.number, 0, f"the last events {seal_text} are gone")
    what = "was changed" if len(ids) == seal.events else "was inserted"
    if len(ids) < seal.events:
        what = "is in the place of an event that is gone"
    return SealFinding(seal.number, ids[place], f"event {ids[place]} {what}, {seal_text}")
