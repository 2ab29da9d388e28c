"""The job `verification`: verify the seals over events regularly.

Each run verifies the seals since the last verified one. Once a day the job begins a pass over the whole chain, because
events that were verified before may have been changed since; a pass goes on in as many runs as it needs. A run has
TIME_LIMIT_S seconds.

The last verified seal is stored in a file in the state directory (PROGRESS_FILE), which nobody can change by SQL. It is
an anchor, too: it shows that the end of the chain was cut off or computed again. The anchors in the file
CYBORG_AUDIT_ANCHOR_FILE are compared as well. Findings are logged, and stored for the console and the metrics. Each run
finds them again until their cause is gone.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec
from django.conf import settings

from accelerators.audit import signing, status
from accelerators.audit.anchors import AnchorFileError, read_anchors
from accelerators.audit.signing import AuditKeyError
from accelerators.audit.verification import Anchor, VerificationResult, verify_seals
from accelerators.models import Seal
from accelerators.runtime import database_clock, jobs
from drivers.files import write_private

log = logging.getLogger(__name__)

VERIFICATION_JOB = "verification"
PROGRESS_FILE = "audit-verified.json"
TIME_LIMIT_S = 20.0
"""Seconds after which a run verifies no further seal. The cluster kills a job after 60 s."""
CHECK_EVERY_S = 300.0
"""Pause between two verifications of the newest seals."""
PASS_EVERY_S = 86_400.0
"""Time between the beginnings of two passes over the whole chain."""


class Progress(msgspec.Struct):
    """How far this machine has verified the chain.

    `number`, `hash` and `key` are those of the last verified seal, 0 and '' if there is none. `first_key` is the public
    key of the first signed seal when it was seen first. `pass_number` is the last seal that the pass over the whole
    chain has verified; the pass began at `pass_began_at`. `checked_at` is when the newest seal had been verified. Times
    are UNIX times of the database's clock.
    """

    number: int = 0
    hash: str = ""
    key: str = ""
    first_key: str = ""
    pass_number: int = 0
    pass_began_at: float = 0.0
    checked_at: float = 0.0


def run() -> None:
    """Run the job `verification` if it is due: verify new seals, and go on with the pass over the whole chain."""
    jobs.clear_tick(VERIFICATION_JOB)
    with jobs.try_connection_lock(VERIFICATION_JOB) as acquired:
        if acquired:
            verify_if_due()


def verify_if_due() -> None:
    """Verify what is due, and store the result. The caller must hold the lock of the job."""
    progress, now = _load_progress(), database_clock.timestamp()
    is_passing = progress.pass_number < progress.number
    if not is_passing and 0 <= now - progress.checked_at < CHECK_EVERY_S:
        return
    give_up_at = time.monotonic() + TIME_LIMIT_S
    anchors, findings = _load_anchors(progress)
    keys = _list_trusted_keys(progress)
    first = max(1, progress.number)
    new_seals = verify_seals(first, None, anchors, trusted_keys=keys, give_up_at=give_up_at)
    findings += [finding.text for finding in new_seals.findings]
    _store_mark(progress, _get_last_good_seal(new_seals, first))
    if not is_passing:
        progress.pass_number, progress.pass_began_at = progress.number, progress.pass_began_at or now
    if new_seals.is_complete:
        progress.checked_at = now
        if not is_passing and not 0 <= now - progress.pass_began_at < PASS_EVERY_S:
            progress.pass_number, progress.pass_began_at = 0, now
        if progress.pass_number < progress.number:
            first, last = progress.pass_number + 1, progress.number
            old_seals = verify_seals(first, last, anchors, trusted_keys=keys, give_up_at=give_up_at)
            findings += [finding.text for finding in old_seals.findings]
            progress.pass_number = max(progress.pass_number, _get_last_good_seal(old_seals, first))
    write_private(settings.KEYS.state_path / PROGRESS_FILE, msgspec.json.encode(progress))
    findings = list(dict.fromkeys(findings))
    for text in findings:
        log.error("events do not match their seals: %s", text)
    status.store_verification(progress.number, findings, new_seals.is_complete)


def _get_last_good_seal(result: VerificationResult, first: int) -> int:
    """Return the number of the last verified seal before the first finding; 0 if there is none from `first` on."""
    numbers = [result.last_verified, *(finding.seal - 1 for finding in result.findings if finding.seal >= first)]
    return min(numbers) if min(numbers) >= first else 0


def _store_mark(progress: Progress, number: int) -> None:
    """Note the seal with this number as the last verified one, if it is later than the one before."""
    if number > progress.number:
        progress.hash, progress.key = Seal.objects.values_list("hash", "key").get(number=number)
        progress.number = number


def _load_anchors(progress: Progress) -> tuple[dict[int, Anchor], list[str]]:
    """Return the kept anchors and the last verified seal by their numbers, and why the kept ones cannot be used."""
    anchors, problems = dict[int, Anchor](), list[str]()
    if path := settings.KEYS.audit_anchor_path:
        try:
            anchors = read_anchors(path)
        except AnchorFileError as error:
            problems.append(f"CYBORG_AUDIT_ANCHOR_FILE: {error}")
    if progress.number:
        anchors.setdefault(progress.number, Anchor(progress.hash, progress.key))
    return anchors, problems


def _list_trusted_keys(progress: Progress) -> list[str]:
    """Return the public keys that this machine trusts, or none while no seal is signed.

    They are the first key that it has seen, that of CYBORG_AUDIT_KEY_FILE, and those of CYBORG_AUDIT_TRUSTED_KEYS.
    """
    if not progress.first_key:
        signed = Seal.objects.exclude(signature="").order_by("number")
        progress.first_key = signed.values_list("key", flat=True).first() or ""
    if not progress.first_key:
        return []
    keys = [progress.first_key, *settings.KEYS.audit_trusted_keys]
    path = settings.KEYS.audit_key_path
    try:
        return [*keys, signing.get_public_key(signing.load_key(path))] if path else keys
    except AuditKeyError:
        return keys


def _load_progress() -> Progress:
    """Return the stored progress; an empty one if there is none, or if the file is damaged (which is logged)."""
    path: Path = settings.KEYS.state_path / PROGRESS_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Progress)
    except FileNotFoundError:
        return Progress()
    except msgspec.MsgspecError as error:
        log.error("%s is damaged, so all seals are verified again: %s", path, error)
        return Progress()
