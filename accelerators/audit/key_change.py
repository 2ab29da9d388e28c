"""Replace the key that signs seals, and begin again with a new key after the old one was lost."""

from __future__ import annotations

from pathlib import Path

from django.conf import settings

from accelerators import conductor
from accelerators.audit import sealing, signing
from accelerators.audit.sealing import SealChain
from accelerators.audit.signing import AuditKeyError
from accelerators.domain.hash_chain import SealKind
from accelerators.domain.states import EventSource
from accelerators.models import Seal

MAX_REASON = 1024
"""Maximum length of the reason of a change."""


def replace_key(new_path: Path, operator: str, reason: str) -> Seal:
    """Let the key in `new_path` sign from the next seal on; return the seal that introduces it, signed by the present
    key.

    The key is created if there is no such file. Nothing is sealed until CYBORG_AUDIT_KEY_FILE has this key. Raises
    AuditKeyError if the present key may not sign, or if the new one is the same.
    """
    with conductor.writing():
        chain = sealing.open_chain(sealing.get_newest_seal())
        if not chain.last.signature:
            raise AuditKeyError("there is no signed seal yet: put the new key in place of the present one")
        new_key = signing.get_public_key(signing.create_key(new_path))
        if new_key == signing.get_public_key(chain.key):
            raise AuditKeyError(f"{new_path} has the key that signs already")
        return _record_key(chain, new_key, "audit.key_replaced", operator, reason)


def begin_again(operator: str, reason: str) -> Seal:
    """Let the key of CYBORG_AUDIT_KEY_FILE sign from now on, without a signature of the old key; return the seal that
    introduces it. Verification reports it until the person who verifies trusts the new key.

    It also lets the key go on after forged seals, because of which nothing is sealed. Verification goes on to report
    those. The key is created if there is no such file. Raises AuditKeyError if there is no signed seal, or if
    this key can seal without it.
    """
    path = settings.KEYS.audit_key_path
    if path is None:
        raise AuditKeyError("CYBORG_AUDIT_KEY_FILE is off: name the file of the new key")
    with conductor.writing():
        last = sealing.get_newest_seal()
        if not sealing.list_possible_seals().exclude(signature="").exists():
            raise AuditKeyError("no seal is signed yet: the first seal begins with the key, nothing was lost")
        key = signing.create_key(path)
        if sealing.get_next_key(last) == signing.get_public_key(key) and _can_seal(last):
            raise AuditKeyError(f"{path} has the key that signs already: nothing was lost")
        chain = SealChain(last, key)
        skipped = max(0, sealing.get_highest_number(above=last.number) - last.number)
        return _record_key(chain, signing.get_public_key(key), "audit.key_lost", operator, reason, skipped)


def _can_seal(last: Seal) -> bool:
    """Return whether this process can append a seal to the chain that ends with `last`."""
    try:
        sealing.open_chain(last)
    except AuditKeyError:
        return False
    return True


def _record_key(chain: SealChain, new_key: str, action: str, operator: str, reason: str, skipped: int = 0) -> Seal:
    """Append the seal that introduces `new_key`, with an event; in the caller's transaction. `skipped` as in
    `append_seal`."""
    details = {"new_key": new_key, "reason": reason[:MAX_REASON], "by": operator}
    changes = {"key": [sealing.get_next_key(chain.last), new_key]}
    conductor.record_event(
        action, EventSource.SYSTEM, operator, subject=(None, "seals"), changes=changes, reason=reason[:MAX_REASON]
    )
    return sealing.append_mark(chain, SealKind.KEY, details, skipped=skipped)
