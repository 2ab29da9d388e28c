"""Seal events: each seal is a signed hash over the events since the previous seal, and over that seal's hash.

The job `seals` (`retention.run`) makes seals once a minute, in one process, so that writers of events have no extra
work. It seals only events of transactions that are older than every running one (SQL function
`accelerators_event_final`). Events are ordered by transaction and id, so no event can be added between sealed ones
later. A seal is only appended to one that was signed with the same key, so that nobody can have seals signed that were
added or changed by SQL (`open_chain`). A seal has events of one month only: when a month is dropped (`retention`), all
events of its seals are dropped, and none of other seals.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from django.conf import settings
from django.db.models import OuterRef, Q, QuerySet, Subquery, Value
from django.db.models.functions import Coalesce

from accelerators import conductor
from accelerators.audit import signing
from accelerators.audit.signing import AuditKeyError
from accelerators.domain import hash_chain
from accelerators.domain.hash_chain import SealContent, SealKind
from accelerators.models import Event, Seal
from accelerators.runtime import database_clock

log = logging.getLogger(__name__)

SEALS_JOB = "seals"
GO_ON = (
    "Run verify_events; when you know what happened, go on with `manage.py seal_events --begin-again` (docs/audit.md)"
)
SKIPPED_BY_RESTORE = 1_000_000
"""Minimum number of seals that a restore skips: about as many as are made in two years."""
MAX_EVENTS_PER_SEAL = 10_000
"""Maximum number of events per seal."""
IS_POSSIBLE_SEAL = Q(
    number__gte=1,
    events__range=(0, MAX_EVENTS_PER_SEAL),
    sealed_at__range=(datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 1, 1, tzinfo=UTC)),
)
"""Condition that every seal of this product meets. Other rows are forged; Python cannot read some of their times."""
PUBLIC_KEY = re.compile(r"[0-9a-f]{64}")

EVENT_TEXT = """json_build_array(e.id, to_char(e.at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), e.source,
  e.actor, e.request_id, e.action, e.subject_type, e.subject, e.subject_name, e.host, e.changes::text,
  e.reason)::text"""
"""SQL expression of an event's canonical text (docs/audit.md): a JSON array with `, ` between its values."""
EVENT_DIGEST = f"sha256(convert_to({EVENT_TEXT}, 'UTF8'))"
SELECT_FINAL_TX = "SELECT accelerators_event_final()"
"""The transaction number below which all transactions have ended, so that nobody can add events to them any more. It is
raw SQL because the ORM has no call of an SQL function without a table."""
SELECT_UNSEALED = f"""
SELECT e.tx, e.id, to_char(e.at AT TIME ZONE 'UTC', 'YYYY-MM'), {EVENT_DIGEST} FROM accelerators_event e
WHERE (e.tx, e.id) > (%s, %s) AND e.tx < %s ORDER BY e.tx, e.id LIMIT %s
"""
"""Events that can be sealed: those after the last seal, of transactions below that of SELECT_FINAL_TX. It is raw SQL
for the reasons of `verification.SELECT_SEALED_EVENTS`."""


@dataclass(frozen=True)
class SealChain:
    """The newest seal, and the key that signs the next one."""

    last: Seal
    key: Ed25519PrivateKey


def seal_oldest_events(max_events: int = MAX_EVENTS_PER_SEAL) -> bool:
    """Seal the oldest events that are not sealed, at most `max_events` and of one month; return True if there may be
    more.

    The caller must hold the lock of the job. If the database was restored, so that its transaction numbers are lower
    than those of the last seal, this logs an error, continues the numbering of events above the old ones, and returns
    False. Raises AuditKeyError if there is no key that may sign the next seal.
    """
    with conductor.writing():
        last = get_newest_seal()
        cursor = conductor.open_cursor()
        (final,) = cursor.execute(SELECT_FINAL_TX).fetchone()
        if final < last.tx:
            log.error("transaction numbers are lower than those of the last seal: this database was restored")
            cursor.execute("SELECT accelerators_event_renumber()")
            return False
        unsealed = cursor.execute(SELECT_UNSEALED, [last.tx, last.event, final, max_events]).fetchall()
        rows = list(takewhile(lambda row: row[2] == unsealed[0][2], unsealed))
        if not rows:
            return False
        (tx, event, month, _), digests = rows[-1], [row[3] for row in rows]
        columns = {"tx": tx, "event": event, "events": len(rows), "digest": hash_chain.digest_events(digests)}
        made = append_seal(open_chain(last), SealKind.EVENTS, month, marks=hash_chain.join_marks(digests), **columns)
    log.info("sealed %d events: №%d %s", made.events, made.number, made.hash)
    return len(unsealed) == max_events or len(rows) < len(unsealed)


def get_newest_seal() -> Seal:
    """Return the last seal whose values are possible. If there is none, return a seal with number 0 that is not stored;
    the first seal follows it."""
    before_first = Seal(number=0, month="", tx=-1, event=0, events=0, digest="", hash=hash_chain.FIRST_PREVIOUS_HASH)
    return list_possible_seals().order_by("-number").first() or before_first


def list_possible_seals() -> QuerySet[Seal]:
    """Return the seals without those whose values no seal can have (IS_POSSIBLE_SEAL)."""
    return Seal.objects.filter(IS_POSSIBLE_SEAL)


def open_chain(last: Seal) -> SealChain:
    """Return the chain that ends with the seal `last`, with the key of CYBORG_AUDIT_KEY_FILE.

    Creates the key if there is no signed seal yet. Raises AuditKeyError if there is no key, or if `last` was not signed
    with this key, and does not introduce it: then it may be forged, and nothing may be appended. Also raises
    AuditKeyError if `last` introduces this key again, after another key that this one did not introduce, or if there
    is a forged seal after `last` (`list_possible_seals`). Costs two statements, and some more if another key has signed
    `last`.
    """
    path = settings.KEYS.audit_key_path
    if path is None:
        raise AuditKeyError("CYBORG_AUDIT_KEY_FILE is off: this process seals nothing")
    if forged := get_highest_number(above=last.number):
        raise AuditKeyError(f"seal №{forged} has values that no seal has: it is forged. Nothing is sealed. {GO_ON}")
    if not last.signature:
        if list_possible_seals().exclude(signature="").exists():
            raise AuditKeyError(f"seal №{last.number} is not signed, but seals before it are: run verify_events")
        return SealChain(last, signing.create_key(path))
    key = signing.load_key(path)
    if get_next_key(last) != signing.get_public_key(key):
        raise AuditKeyError(
            f"the newest seal, №{last.number}, is signed with another key than that in {path}: copy the right key to"
            f" this file; if it is lost, run `manage.py seal_events --begin-again` (docs/audit.md)"
        )
    previous = list_possible_seals().defer("marks").filter(number__lt=last.number).order_by("-number").first()
    # A seal that introduces our key is signed by the key before it, or, after a loss (`begin_again`), by our key.
    signers = {signing.get_public_key(key), get_next_key(previous) if previous and last.kind == SealKind.KEY else ""}
    previous_hash = previous.hash if previous else hash_chain.FIRST_PREVIOUS_HASH
    if last.key not in signers or not has_valid_signature(last, previous_hash, last.key):
        raise AuditKeyError(f"the newest seal, №{last.number}, is forged. Nothing is sealed. {GO_ON}")
    if last.key != signing.get_public_key(key) and (strange := _find_strange_key(signing.get_public_key(key))):
        raise AuditKeyError(
            f"seal №{strange.number} brings the key {strange.key}, which the key before it did not sign, and a later"
            f" seal brings back the key in {path}: somebody has written seals with keys that are not yours. Nothing is"
            f" sealed. If that key is yours, name it in CYBORG_AUDIT_TRUSTED_KEYS. {GO_ON}"
        )
    return SealChain(last, key)


def _find_strange_key(own_key: str) -> Seal | None:
    """Return the first seal that brings a key which the key in force did not sign, unless CYBORG_AUDIT_TRUSTED_KEYS
    names it; None if there is none.

    Only seals since the first one of `own_key` count, or all signed seals if `own_key` has signed none yet.
    """
    signed = list_possible_seals().defer("marks").exclude(signature="").order_by("number")
    first = signed.filter(key=own_key).first() or signed.first()
    if first is None:
        return None
    key_in_force = get_next_key(first)
    for mark in add_previous_hash(signed.filter(kind=SealKind.KEY, number__gt=first.number)):
        new_key = get_next_key(mark)
        previous_hash: str = mark.previous_hash  # type: ignore[attr-defined]  # it is annotated
        signers = {key_in_force, new_key} if new_key in settings.KEYS.audit_trusted_keys else {key_in_force}
        if not any(has_valid_signature(mark, previous_hash, key) for key in signers):
            return mark
        key_in_force = new_key
    return None


def add_previous_hash(seals: QuerySet[Seal]) -> QuerySet[Seal]:
    """Add the attribute `previous_hash` to the seals: the hash of the seal before each, which need not have the number
    before."""
    before = list_possible_seals().filter(number__lt=OuterRef("number")).order_by("-number")
    previous_hash = Coalesce(Subquery(before.values("hash")[:1]), Value(hash_chain.FIRST_PREVIOUS_HASH))
    return seals.annotate(previous_hash=previous_hash)


def get_highest_number(above: int) -> int:
    """Return the highest number of all rows of seals, forged ones included, 0 if none is above `above`."""
    numbers = Seal.objects.filter(number__gt=above).order_by("-number")
    return numbers.values_list("number", flat=True).first() or 0


def append_seal(chain: SealChain, kind: SealKind, month: str, skipped: int = 0, **columns: Any) -> Seal:
    """Store the seal that follows `chain.last`, with the next number after `skipped` ones, the present time, its hash
    and its signature; return it.

    `columns` are the other columns: `tx`, `event`, `events`, `digest`, and for some kinds `drops`, `details`, `marks`.
    """
    key = signing.get_public_key(chain.key)
    seal = Seal(
        number=chain.last.number + skipped + 1,
        kind=kind,
        month=month,
        sealed_at=read_earlier_clock(),
        key=key,
        **columns,
    )
    link = build_link(seal, chain.last.hash)
    seal.hash, seal.signature = link.hash, chain.key.sign(link.text).hex()
    seal.save(force_insert=True)
    return seal


def read_earlier_clock() -> datetime:
    """Return the present time by the database's clock or by this machine's clock, whichever is earlier.

    A wrong clock of the database server, or an attacker who controls the database, must not be able to date seals in
    the future: a month of events could then be dropped before its retention ends. If one of the clocks is slow, months
    are only dropped later.
    """
    return min(database_clock.now(), datetime.now(UTC))


def append_mark(
    chain: SealChain, kind: SealKind, details: Mapping[str, object], drops: str = "", skipped: int = 0
) -> Seal:
    """Store a seal without events that records something about the chain itself, and return it; `skipped` as in
    `append_seal`."""
    last = chain.last
    columns = {"tx": last.tx, "event": last.event, "events": 0, "digest": hash_chain.digest_events(())}
    return append_seal(chain, kind, last.month, skipped, details=json.dumps(details), drops=drops, **columns)


def record_restore(operator: str, reason: str) -> Seal | None:
    """Append the seal that records that the database was restored, and return it; None if there is no seal yet.

    Its number is the present UNIX time in milliseconds, or if that is lower, SKIPPED_BY_RESTORE above that of the last
    seal of the backup. So the seals that were lost keep their numbers for themselves, even those that were made after
    an earlier restore of the same backup, and an anchor that names one of them is explained. Raises AuditKeyError.
    """
    with conductor.writing():
        last = get_newest_seal()
        if not last.number:
            return None
        details = {"after": last.number, "reason": reason, "by": operator}
        skipped = max(SKIPPED_BY_RESTORE, int(read_earlier_clock().timestamp() * 1000) - last.number - 1)
        return append_mark(open_chain(last), SealKind.RESTORED, details, skipped=skipped)


def get_next_key(seal: Seal) -> str:
    """Return the public key that must sign the seal after this one, '' if this one is not signed."""
    return get_introduced_key(seal) if seal.kind == SealKind.KEY else seal.key


def get_introduced_key(seal: Seal) -> str:
    """Return the public key that a seal of the kind `key` introduces, '' if it names none, as in a forged seal."""
    new_key = read_details(seal).get("new_key")
    return new_key if isinstance(new_key, str) and PUBLIC_KEY.fullmatch(new_key) else ""


def read_details(seal: Seal) -> dict[str, Any]:
    """Return the details of a seal; {} if they are no JSON object, as in a forged seal."""
    try:
        details = json.loads(seal.details or "{}")
    except (ValueError, RecursionError):
        return {}
    return details if isinstance(details, dict) else {}


def has_valid_signature(seal: Seal, previous_hash: str, key: str) -> bool:
    """Return whether a seal that follows the hash `previous_hash` is signed with the public key `key`."""
    return seal.key == key and signing.is_signed_by(key, seal.signature, build_link(seal, previous_hash).text)


def build_link(seal: Seal, previous_hash: str) -> SealContent:
    """Return the values that the hash of a seal covers; `previous_hash` is the hash of the previous seal.

    `hash` of the result is the hash that the seal must have.
    """
    sealed_at = seal.sealed_at.astimezone(UTC).isoformat(timespec="microseconds")
    covered = seal.month, seal.tx, seal.event, seal.events, seal.digest, seal.drops
    return SealContent(seal.number, previous_hash, *covered, sealed_at, seal.kind, seal.details, seal.key)


def find_seal_of_event(event: Event) -> Seal | None:
    """Return the seal that covers an event, None if the event is not sealed yet."""
    is_later = Q(tx=event.tx, event__gte=event.pk) | Q(tx__gt=event.tx)
    return list_possible_seals().filter(is_later, events__gt=0).order_by("number").first()
