"""Verify that events are unchanged since they were sealed: compute the digest of each seal from the stored events, and
the hash of each seal from the previous one.

Events that are not sealed yet cannot be verified; they are only counted. Hashes of seals that were kept outside the
database (anchors) also show what the chain alone cannot: that its end was cut off, or that the whole chain was computed
again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from django.db import connection
from django.db.models import Sum

from accelerators.audit.sealing import DIGEST, link, newest
from accelerators.domain import hash_chain
from accelerators.models import Seal

MOST = 20
"""The verification stops when it has this many findings."""
SEALED = f"""
SELECT e.id, {DIGEST} FROM accelerators_event e
WHERE (e.tx, e.id) > (%s, %s) AND (e.tx, e.id) <= (%s, %s) ORDER BY e.tx, e.id LIMIT %s
"""
"""The events between two seals, with their digests."""
BELOW = "SELECT e.id FROM accelerators_event e WHERE e.tx < 0 ORDER BY e.tx, e.id LIMIT 1"
"""Find an event with a negative transaction number. No transaction has one, so somebody inserted it in front of the
first seal."""
UNSEALED = "SELECT count(*) FROM accelerators_event e WHERE (e.tx, e.id) > (%s, %s)"


@dataclass(frozen=True)
class Finding:
    """A difference between the events and the seals. `event` is 0 if it concerns the seal itself; `seal` is 0 if it
    concerns an event before the first seal."""

    seal: int
    event: int
    text: str


@dataclass
class Proof:
    """The result of a verification: how many seals and events were verified, and the findings."""

    seals: int = 0
    events: int = 0
    dropped: int = 0
    """Number of sealed events in months that were dropped: only their seals are left."""
    unsealed: int = 0
    """Number of events after the newest seal; counted only if the verification goes to the newest seal."""
    number: int = 0
    hash: str = ""
    """`number` and `hash` of the newest seal. Keep both outside the database, as an anchor for later verifications."""
    findings: list[Finding] = field(default_factory=list)


def verify(
    first: int = 1,
    last: int | None = None,
    anchors: Mapping[int, str] | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Proof:
    """Verify the seals from `first` to `last` with their events, by default all; stop when there are MAX_FINDINGS
    findings.

    `anchors` maps numbers of seals to hashes that were kept outside the database. `progress` is called after each seal
    with the number of events done and the number of all. Only reads, and takes no lock; costs about one statement per
    seal, in which the database computes a sha256 of each event.
    """
    proof, end = Proof(), newest()
    proof.number, proof.hash = end.number, end.hash
    wanted = Seal.objects.filter(number__gte=first, number__lte=end.number if last is None else last)
    of = wanted.aggregate(events=Sum("events", default=0))["events"]
    before = Seal.objects.filter(number=first - 1).first() or Seal(number=0, tx=-1, event=0, hash=hash_chain.START)
    dropped = set(Seal.objects.exclude(drops="").values_list("drops", flat=True))
    for seal in wanted.order_by("number").iterator(chunk_size=500):
        if len(proof.findings) >= MOST:
            break
        if gone := seal.number - before.number - 1:
            which = f"№{seal.number - 1} is" if gone == 1 else f"№{before.number + 1} to №{seal.number - 1} are"
            proof.findings.append(Finding(seal.number - 1, 0, f"seal {which} gone"))
        _seal(seal, before, anchors or {}, dropped, proof)
        before = seal
        progress(proof.events + proof.dropped, of)
    for number, kept in sorted((anchors or {}).items()):
        if number > end.number:
            text = f"seal №{number} ({kept[:12]}…) was kept elsewhere and is gone: the end of the chain was cut off"
            proof.findings.append(Finding(number, 0, text))
    if last is None:
        with connection.cursor() as cursor:
            cursor.execute(UNSEALED, [end.tx, end.event])
            (proof.unsealed,) = cursor.fetchone()
            cursor.execute(BELOW)
            if below := cursor.fetchone():
                proof.findings.append(Finding(0, below[0], f"event {below[0]} was inserted: no transaction wrote it"))
    return proof


def _seal(seal: Seal, before: Seal, anchors: Mapping[int, str], dropped: set[str], proof: Proof) -> None:
    """Verify one seal and its events; add counts and findings to `result`.

    `previous` is the seal before. `dropped` holds the months that were dropped; a month that was dropped during the
    verification is added.
    """
    proof.seals += 1
    if link(seal, before.hash).hash != seal.hash:
        text = f"seal №{seal.number} does not fit: it was changed, or does not follow №{before.number}"
        proof.findings.append(Finding(seal.number, 0, text))
    if anchors.get(seal.number, seal.hash) != seal.hash:
        text = f"seal №{seal.number} differs from the one that was kept elsewhere: the chain was computed again"
        proof.findings.append(Finding(seal.number, 0, text))
    with connection.cursor() as cursor:
        cursor.execute(SEALED, [before.tx, before.event, seal.tx, seal.event, seal.events + 1])
        rows = cursor.fetchall()
    if seal.events and not rows and seal.month not in dropped and Seal.objects.filter(drops=seal.month).exists():
        dropped.add(seal.month)  # the month was dropped during this verification
    if seal.events and seal.month in dropped:
        proof.dropped += seal.events
        if rows:
            text = f"event {rows[0][0]} was inserted: those of seal №{seal.number} were dropped with {seal.month}"
            proof.findings.append(Finding(seal.number, rows[0][0], text))
        return
    proof.events += len(rows)
    digests = [bytes(row[1]) for row in rows]
    if len(rows) != seal.events or hash_chain.digest(digests) != seal.digest:
        proof.findings.append(_event(seal, [row[0] for row in rows], digests))


def _event(seal: Seal, ids: list[int], digests: list[bytes]) -> Finding:
    """Return the finding about the first event under a seal that does not fit; `ids` and `digests` are of the events
    that are there now."""
    place = hash_chain.parting(bytes(seal.marks), digests)
    there = f"{'more than ' if len(ids) > seal.events else ''}{min(len(ids), seal.events)} found"
    under = f"under seal №{seal.number} ({seal.events} sealed, {there})"
    if place is None:
        return Finding(seal.number, 0, f"an event {under} was changed")
    if place >= len(ids):
        return Finding(seal.number, 0, f"the last events {under} are gone")
    what = "was changed" if len(ids) == seal.events else "was inserted"
    if len(ids) < seal.events:
        what = "is in the place of an event that is gone"
    return Finding(seal.number, ids[place], f"event {ids[place]} {what}, {under}")
