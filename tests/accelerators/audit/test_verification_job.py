"""Test the job that verifies the seals over events regularly: what it finds, and that it goes on where it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from django.core.management import call_command
from django.db import DatabaseError

from accelerators.audit import sealing, verification, verification_job
from accelerators.audit import status as status_module
from accelerators.audit.verification_job import Progress
from accelerators.models import AuditStatus, Seal
from accelerators.runtime import database_clock
from cyborgweb.monitoring.backlog import read_backlog
from tests.accelerators.audit.test_signed_seals import CHANGE_E5, execute
from tests.support.seals import create_seals, record_events

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def state_dir(settings: Any, tmp_path: Path) -> Path:
    """Give the job and the process that seals a state directory of their own."""
    settings.KEYS = replace(settings.KEYS, state_dir=str(tmp_path))
    return tmp_path


@pytest.fixture
def verified_counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each verification adds how many seals it has verified."""
    counts: list[int] = []
    verify: Callable[..., verification.VerificationResult] = verification.verify_seals

    def verify_and_count(*args: Any, **options: Any) -> verification.VerificationResult:
        result = verify(*args, **options)
        counts.append(result.seals)
        return result

    monkeypatch.setattr(verification_job, "verify_seals", verify_and_count)
    return counts


def make_seals(*names: str) -> None:
    """Record one event with each of these names, and seal each by itself."""
    for name in names:
        record_events(name)
        create_seals()


def run_after(seconds: float = verification_job.CHECK_EVERY_S) -> AuditStatus:
    """Run the job as if its last runs were this time ago; return what it has stored."""
    path = verification_job.settings.KEYS.state_path / verification_job.PROGRESS_FILE
    if path.exists():
        progress = read_progress()
        progress.checked_at -= seconds
        progress.pass_began_at -= seconds
        path.write_bytes(msgspec.json.encode(progress))
    verification_job.run()
    return AuditStatus.objects.get()


def read_progress() -> Progress:
    path = verification_job.settings.KEYS.state_path / verification_job.PROGRESS_FILE
    return msgspec.json.decode(path.read_bytes(), type=Progress)


def test_new_seals_are_verified_once_and_all_seals_once_a_day(verified_counts: list[int]) -> None:
    make_seals("e1", "e2", "e3")
    status = run_after()
    assert (status.verified_number, status.findings, verified_counts) == (3, 0, [3])
    assert status.verified_at and abs((database_clock.now() - status.verified_at).total_seconds()) < 60
    verification_job.run()
    assert verified_counts == [3], "it is not due yet"
    make_seals("e4")
    run_after()
    assert verified_counts == [3, 2], "the last verified seal and the new one"
    run_after(verification_job.PASS_EVERY_S)
    assert verified_counts == [3, 2, 1, 4]


def test_a_run_ends_in_time_and_the_next_one_goes_on(
    verified_counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_seals("e1", "e2", "e3")
    first_status = run_after()
    make_seals("e4", "e5")
    monkeypatch.setattr(verification_job, "TIME_LIMIT_S", -1.0)
    status = run_after()
    assert (status.verified_number, verified_counts) == (3, [3, 0])
    assert status.verified_at == first_status.verified_at, "the newest seal is not verified"
    monkeypatch.undo()
    assert run_after().verified_number == 5


def test_a_changed_event_is_found_by_each_run_until_it_is_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    make_seals("e4", "e5", "e6")
    run_after()
    execute(CHANGE_E5)()
    assert run_after().findings == 0, "only new seals are verified between two passes"
    status = run_after(verification_job.PASS_EVERY_S)
    assert status.findings == 1 and "was changed, under seal №2" in status.finding
    assert "events do not match their seals: event" in caplog.text
    make_seals("e7")
    assert run_after().findings == 1
    execute("UPDATE accelerators_event SET reason = '' WHERE subject_name = 'e5'")()
    assert run_after().findings == 0
    assert read_progress().pass_number == 4


def test_the_last_verified_seal_is_an_anchor_that_shows_that_the_end_was_cut_off() -> None:
    make_seals("e1", "e2", "e3")
    run_after()
    execute(
        "DELETE FROM accelerators_event WHERE subject_name = 'e3'; DELETE FROM accelerators_seal WHERE number = 3"
    )()
    assert "the end of the chain was cut off" in run_after().finding
    make_seals("e4", "e5")
    assert "seal №3 differs from the one that was kept elsewhere" in run_after().finding
    assert read_progress().number == 4, "later seals are verified"
    make_seals("e6")
    assert "seal №3 differs from the one that was kept elsewhere" in run_after().finding, "the mark is kept"


def test_the_kept_anchors_are_compared_and_an_unusable_file_is_reported(settings: Any, state_dir: Path) -> None:
    make_seals("e1", "e2")
    anchor_path = state_dir / "anchors"
    settings.KEYS = replace(settings.KEYS, audit_anchor_file=str(anchor_path))
    assert f"CYBORG_AUDIT_ANCHOR_FILE: {anchor_path} cannot be read" in run_after().finding
    seal = Seal.objects.get(number=2)
    anchor_path.write_text(f"2 {seal.hash} {seal.key}\n")
    assert run_after().findings == 0
    anchor_path.write_text(f"2 {seal.hash} {seal.key}\n7 {seal.hash} {seal.key}\n")
    assert "seal №7" in run_after().finding


def test_a_key_that_replaced_a_lost_one_is_trusted_where_it_seals_or_is_named(settings: Any, state_dir: Path) -> None:
    make_seals("e1")
    run_after()
    settings.KEYS.audit_key_path.unlink()
    call_command("seal_events", "--begin-again", "--reason", "lost")
    make_seals("e2")
    assert run_after().findings == 0, "this process has the key"
    new_key = sealing.get_newest_seal().key
    settings.KEYS = replace(settings.KEYS, audit_key_file="off")
    assert "trust begins again at seal №2" in run_after().finding
    settings.KEYS = replace(settings.KEYS, audit_trusted_keys=(new_key,))
    assert run_after().findings == 0


def test_a_damaged_file_of_progress_is_logged_and_all_is_verified_again(
    state_dir: Path, verified_counts: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    make_seals("e1", "e2")
    (state_dir / verification_job.PROGRESS_FILE).write_bytes(b"{")
    verification_job.run()
    assert "is damaged" in caplog.text and verified_counts == [2]


def test_a_finding_does_not_hold_back_the_verification_of_later_seals() -> None:
    make_seals("e4", "e5", "e6")
    execute(CHANGE_E5)()
    assert "was changed, under seal №2" in run_after().finding
    make_seals("e7", "e8")
    status = run_after()
    assert (status.verified_number, status.findings) == (5, 1)
    run_after(verification_job.PASS_EVERY_S)
    progress = read_progress()
    assert (progress.number, progress.pass_number, [*progress.marks]) == (5, 5, [5])
    execute("UPDATE accelerators_event SET reason = '' WHERE subject_name = 'e5'")()
    assert run_after().findings == 0


def test_more_findings_than_one_run_reports_do_not_hold_back_later_seals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "MAX_FINDINGS", 2)
    make_seals("e4", "e5", "e6", "e7", "e8")
    execute("UPDATE accelerators_event SET reason = 'another' WHERE subject_name IN ('e5', 'e6', 'e7')")()
    run_after()
    run_after()
    status = run_after()
    assert (status.verified_number, status.findings) == (5, 3)


def test_an_error_of_the_job_is_shown_as_a_finding_until_it_works_again(monkeypatch: pytest.MonkeyPatch) -> None:
    make_seals("e1", "e2")
    with monkeypatch.context() as broken:
        broken.setattr(verification, "SELECT_SEALED_EVENTS", "SELECT 1/0 WHERE %s + %s + %s + %s + %s > -10")
        with pytest.raises(DatabaseError):
            verification_job.run()
    status = AuditStatus.objects.get()
    assert (status.findings, status.finding.splitlines()[0]) == (1, "the verification failed: division by zero")
    assert run_after().findings == 0


def test_what_was_verified_is_stored_before_the_pass_over_the_whole_chain_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_seals("e4", "e5", "e6")
    run_after()
    verify: Callable[..., verification.VerificationResult] = verification.verify_seals

    def be_killed_in_the_pass(first: int, last: int | None, *args: Any, **options: Any) -> Any:
        if last is not None:
            raise SystemExit("killed")
        return verify(first, last, *args, **options)

    make_seals("e7")
    monkeypatch.setattr(verification_job, "verify_seals", be_killed_in_the_pass)
    with pytest.raises(SystemExit):
        run_after(verification_job.PASS_EVERY_S)
    assert read_progress().number == AuditStatus.objects.get().verified_number == 4


def test_a_node_without_findings_does_not_hide_those_of_another_node(monkeypatch: pytest.MonkeyPatch) -> None:
    store = status_module.store_verification
    monkeypatch.setattr(status_module, "get_node", lambda: "node1")
    store(7, ["event 5 was changed", "event 6 was changed"], True)
    monkeypatch.setattr(status_module, "get_node", lambda: "node2")
    store(7, [], True)
    audit = read_backlog().audit
    assert audit and (audit.findings, audit.finding) == (2, "event 5 was changed")
    execute("UPDATE accelerators_auditstatus SET updated_at = now() - interval '2 days' WHERE node = 'node1'")()
    store(7, [], True)
    audit = read_backlog().audit
    assert audit and audit.findings == 0, "node1 is gone"


def test_a_refusal_of_one_node_is_shown_only_while_no_other_node_seals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_module, "get_node", lambda: "node1")
    status_module.store_refusal("there is no key")
    audit = read_backlog().audit
    assert audit and audit.refusal == "there is no key" and audit.refused_since
    monkeypatch.setattr(status_module, "get_node", lambda: "node2")
    status_module.store_refusal("")
    audit = read_backlog().audit
    assert audit and audit.refusal == ""
    assert AuditStatus.objects.get(node="node1").refusal == "there is no key"
    execute("UPDATE accelerators_auditstatus SET sealed_at = now() - interval '11 minutes' WHERE node = 'node2'")()
    audit = read_backlog().audit
    assert audit and audit.refusal == "there is no key"
    status_module.store_refusal("")
    audit = read_backlog().audit
    assert audit and audit.refusal == "", "the time of the last success is renewed"


def test_a_restore_is_logged_once_and_stored_for_the_overview(caplog: pytest.LogCaptureFixture) -> None:
    make_seals("e1")
    call_command("seal_events", "--restored", "--reason", "the backup of noon")
    run_after()
    assert "notice about the seals: the database was restored at" in caplog.text
    audit = read_backlog().audit
    assert audit and audit.restored_at and "'the backup of noon'" in audit.restore
    caplog.clear()
    make_seals("e2")
    assert run_after().findings == 0
    assert "notice" not in caplog.text


def test_without_its_file_the_job_takes_only_a_trusted_key_as_the_first_one(settings: Any, state_dir: Path) -> None:
    make_seals("e1")
    first_key = sealing.get_newest_seal().key
    settings.KEYS = replace(settings.KEYS, audit_trusted_keys=("0" * 64,))
    assert f"has the key {first_key}, which you do not trust" in run_after().finding
    settings.KEYS = replace(settings.KEYS, audit_trusted_keys=(first_key,))
    assert run_after().findings == 0
