"""The job `verification`: verify the seals over events regularly.

Each run verifies the seals since the last verified one. Once a day the job begins a pass over the whole chain, because
events that were verified before may have been changed since; a pass goes on in as many runs as it needs. A run has
TIME_LIMIT_S seconds.

The last verified seal is stored in a file in the state directory (PROGRESS_FILE), which nobody can change by SQL. It is
an anchor, too: it shows that the end of the chain was cut off or computed again. The anchors in the file
CYBORG_AUDIT_ANCHOR_FILE are compared as well. Findings are logged, and stored for the console and the metrics. They do
not stop the verification of later seals: they are kept in the file, and each run verifies their seals again, until they
match. An error of the job is stored as a finding.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec
from django.conf import settings

from accelerators.audit import sealing, signing, status
from accelerators.audit.anchors import AnchorFileError, read_anchors
from accelerators.audit.signing import AuditKeyError
from accelerators.audit.verification import Anchor, SealFinding, VerificationResult, verify_seals
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


MAX_KEPT_FINDINGS = 50
"""How many findings are kept between runs. More are found again by the next pass over the whole chain."""

MAX_KEPT_NOTICES = 500
"""How many notices are known to be logged; with more, some are logged in each run."""


class Progress(msgspec.Struct):
    """How far this machine has verified the chain.

    `number` is the last verified seal, 0 if there is none. `marks` are anchors by the numbers of their seals: the last
    verified seal without a finding, and earlier ones of which a finding says that they have changed. `findings` are
    verified again in each run. `notices` have been logged. `first_key` is the public key of the first signed seal when
    it was seen first. `pass_number` is the last seal that the pass over the whole chain has verified; the pass began at
    `pass_began_at`. `checked_at` is when the newest seal had been verified. Times are UNIX times of the database's
    clock.
    """

    number: int = 0
    marks: dict[int, Anchor] = {}
    findings: list[SealFinding] = []
    notices: list[str] = []
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
    """Verify what is due, and store the result. The caller must hold the lock of the job. Stores any error, too, before
    it is raised."""
    try:
        _verify_if_due()
    except Exception as error:
        status.store_failure(f"the verification failed: {error}")
        raise


def _verify_if_due() -> None:
    """Verify the new seals, go on with the pass over the whole chain, then verify the seals with findings again.

    The result is stored after each of these parts, so that it is not lost if a later one is killed.
    """
    progress, now = _load_progress(), database_clock.timestamp()
    is_passing = progress.pass_number < progress.number
    if not is_passing and 0 <= now - progress.checked_at < CHECK_EVERY_S:
        return
    give_up_at = time.monotonic() + TIME_LIMIT_S
    anchors, problems = _load_anchors(progress)
    keys = _list_trusted_keys(progress)
    former_findings = list(progress.findings)
    # If the end of the chain was cut off, its present end is verified.
    first = max(1, min(progress.number, sealing.get_newest_seal().number))
    new_seals = verify_seals(first, None, anchors, trusted_keys=keys, give_up_at=give_up_at)
    problems += [finding.text for finding in new_seals.findings if finding.seal < 1]
    _keep_findings(progress, new_seals, first, new_seals.last_verified)
    _store_mark(progress, first, new_seals.last_verified)
    if not is_passing:
        progress.pass_number, progress.pass_began_at = progress.number, progress.pass_began_at or now
    if new_seals.is_complete:
        progress.checked_at = now
        if not is_passing and not 0 <= now - progress.pass_began_at < PASS_EVERY_S:
            progress.pass_number, progress.pass_began_at = 0, now
    for notice in dict.fromkeys(new_seals.notices):
        if notice not in progress.notices:
            log.warning("notice about the seals: %s", notice)
    progress.notices = new_seals.notices[-MAX_KEPT_NOTICES:]
    _store(progress, problems, new_seals.is_complete)
    if new_seals.is_complete and progress.pass_number < progress.number:
        first, last = progress.pass_number + 1, progress.number
        old_seals = verify_seals(first, last, anchors, trusted_keys=keys, give_up_at=give_up_at)
        _keep_findings(progress, old_seals, first, last if old_seals.is_complete else old_seals.last_verified)
        progress.pass_number = last if old_seals.is_complete else max(progress.pass_number, old_seals.last_verified)
        _store(progress, problems, new_seals.is_complete)
    if new_seals.restored:
        status.store_restore(*new_seals.restored)
    for number in dict.fromkeys(finding.seal for finding in former_findings):
        result = verify_seals(number, number, anchors, trusted_keys=keys, give_up_at=give_up_at)
        if result.is_complete:
            result.findings = [finding for finding in result.findings if finding.seal == number]
            _keep_findings(progress, result, number, number)
    for text in (texts := _store(progress, problems, new_seals.is_complete)):
        log.error("events do not match their seals: %s", text)
    if not texts and former_findings:
        log.info("all seals with findings match their events again")


def _keep_findings(progress: Progress, result: VerificationResult, first: int, last: int) -> None:
    """Replace the kept findings of the seals `first` to `last` by those of a verification of these seals.

    Findings of seals outside are added. Those with a number below 1 concern no seal and are not kept.
    """
    findings = [finding for finding in progress.findings if not first <= finding.seal <= last]
    findings += [finding for finding in result.findings if finding.seal >= 1]
    progress.findings = list(dict.fromkeys(findings))[:MAX_KEPT_FINDINGS]


def _store_mark(progress: Progress, first: int, last: int) -> None:
    """Note `last`, if it is not 0, as the last verified seal, and the last one from `first` on that has no finding as
    an anchor. Keep an older anchor only while its seal has a finding."""
    if not last:
        return
    progress.number, seals_with_findings = last, {finding.seal for finding in progress.findings}
    good_seals = sealing.list_possible_seals().filter(number__range=(first, last)).exclude(pk__in=seals_with_findings)
    newest = good_seals.order_by("-number").values_list("number", "hash", "key").first()
    if newest:
        kept = {number: mark for number, mark in progress.marks.items() if number in seals_with_findings}
        progress.marks = {**kept, newest[0]: Anchor(newest[1], newest[2])}


def _store(progress: Progress, problems: list[str], is_complete: bool) -> list[str]:
    """Store the progress in its file, and what was found for the console; return the sentences of all findings."""
    write_private(settings.KEYS.state_path / PROGRESS_FILE, msgspec.json.encode(progress))
    texts = list(dict.fromkeys([*problems, *(finding.text for finding in progress.findings)]))
    status.store_verification(progress.number, texts, is_complete)
    return texts


def _load_anchors(progress: Progress) -> tuple[dict[int, Anchor], list[str]]:
    """Return the kept anchors and the marks of this machine by their numbers, and why the kept ones cannot be used."""
    anchors, problems = dict[int, Anchor](), list[str]()
    if path := settings.KEYS.audit_anchor_path:
        try:
            anchors = read_anchors(path)
        except AnchorFileError as error:
            problems.append(f"CYBORG_AUDIT_ANCHOR_FILE: {error}")
    return {**progress.marks, **anchors}, problems


def _list_trusted_keys(progress: Progress) -> list[str]:
    """Return the public keys that this machine trusts, or none while no seal is signed.

    They are the first key that it has seen, that of CYBORG_AUDIT_KEY_FILE, and those of CYBORG_AUDIT_TRUSTED_KEYS. If
    the latter names keys, a machine that has seen no first key yet only takes one of them as the first.
    """
    if not progress.first_key:
        signed = sealing.list_possible_seals().exclude(signature="").order_by("number")
        first_key = signed.values_list("key", flat=True).first() or ""
        trusted = settings.KEYS.audit_trusted_keys
        if first_key and trusted and first_key not in trusted:
            return list(trusted)
        progress.first_key = first_key
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
