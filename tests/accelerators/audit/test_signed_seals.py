"""Test that seals cannot be forged with the application's own database role: only the key signs them (promise X6)."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

import psycopg
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import DatabaseError, connection, transaction

from accelerators import conductor
from accelerators.audit import retention, sealing, signing, verification
from accelerators.audit.sealing import SealChain
from accelerators.audit.signing import AuditKeyError
from accelerators.domain import hash_chain
from accelerators.domain.hash_chain import SealKind
from accelerators.models import AuditStatus, Event, Seal, Tick
from accelerators.runtime import database_clock, jobs
from tests.support.seals import create_seals, record_events

pytestmark = pytest.mark.django_db(transaction=True)
SEAL_COLUMNS = "number, month, tx, event, events, digest, drops, sealed_at, hash, marks, kind, details, key, signature"
FORGER_KEY = Ed25519PrivateKey.generate()
"""A key that an attacker made."""


@pytest.fixture(autouse=True)
def key_file(settings: Any, tmp_path: Path) -> Path:
    """Give the process that seals an own file for its key, which does not exist yet; return its path."""
    path = tmp_path / "keys" / "audit.pem"
    settings.KEYS = replace(settings.KEYS, audit_key_file=str(path))
    return path


@pytest.fixture
def month_with_events() -> Iterator[str]:
    """Create the partition of January 2024 with five events, which are sealed; return its name."""
    table = "accelerators_event_2024_01"
    with conductor.writing(), connection.cursor() as cursor:
        cursor.execute(
            f"CREATE TABLE {table} PARTITION OF accelerators_event FOR VALUES FROM ('2024-01-01 00:00+00')"
            " TO ('2024-02-01 00:00+00')"
        )
        cursor.execute(
            "INSERT INTO accelerators_event (at, source, actor, request_id, action, subject_type, subject_name, host,"
            " changes, reason) SELECT '2024-01-02 00:00+00', 'system', 'old', '', 'device.old', 'device', '', '', '{}',"
            " '' FROM generate_series(1, 5)"
        )
    create_seals()
    yield table
    with connection.cursor() as cursor:
        cursor.execute(f"DROP TABLE IF EXISTS {table}")


@contextmanager
def triggers_off() -> Iterator[Any]:
    """Open a connection of the application's own database role, which may switch off triggers as it owns the tables."""
    params = connection.get_connection_params()
    wanted = {key: params[key] for key in ("dbname", "user", "password", "host", "port") if key in params}
    with psycopg.connect(**wanted) as other:
        for word in ("DISABLE", "ENABLE"):
            other.execute(f"ALTER TABLE accelerators_event {word} TRIGGER accelerators_event_frozen")
            for trigger in ("frozen", "signed", "unsigned"):
                other.execute(f"ALTER TABLE accelerators_seal {word} TRIGGER accelerators_seal_{trigger}")
            if word == "DISABLE":
                yield other


def write_seal(other: Any, seal: Seal) -> None:
    """Write a seal in place of the one with its number, if there is one."""
    values = [getattr(seal, name) for name in SEAL_COLUMNS.split(", ")]
    other.execute("DELETE FROM accelerators_seal WHERE number = %s", [seal.number])
    marks = ", ".join(["%s"] * len(values))
    other.execute(f"INSERT INTO accelerators_seal ({SEAL_COLUMNS}) VALUES ({marks})", values)


def append_forged(kind: SealKind | str, signed: bool, details: str = "", drops: str = "", month: str = "") -> None:
    """Append a seal without events as an attacker does: unsigned, or with a key of the attacker's own."""
    last = Seal.objects.order_by("-number")[0]
    seal = Seal(
        number=last.number + 1, month=month or last.month, tx=last.tx, event=last.event, events=0, drops=drops,
        digest=hash_chain.digest_events(()), sealed_at=datetime.now(UTC), kind=kind, details=details,
        key=signing.get_public_key(FORGER_KEY) if signed else "",
    )  # fmt: skip
    link = sealing.build_link(seal, last.hash)
    seal.hash, seal.signature = link.hash, FORGER_KEY.sign(link.text).hex() if signed else ""
    with triggers_off() as other:
        write_seal(other, seal)


def remake_chain(signed: bool) -> None:
    """Compute the whole chain again from the present events, unsigned or with a key of the attacker's own."""
    key, previous_tx, previous_event, previous_hash = signing.get_public_key(FORGER_KEY), -1, 0, "0" * 64
    seals = list(Seal.objects.order_by("number"))
    with triggers_off() as other:
        for seal in seals:
            limits = [previous_tx, previous_event, seal.tx, seal.event, 10_000]
            digests = [bytes(row[1]) for row in other.execute(verification.SELECT_SEALED_EVENTS, limits).fetchall()]
            seal.events, seal.digest, seal.key = len(digests), hash_chain.digest_events(digests), key if signed else ""
            seal.marks, seal.kind = hash_chain.join_marks(digests), seal.kind if signed else ""
            link = sealing.build_link(seal, previous_hash)
            seal.hash, seal.signature = link.hash, FORGER_KEY.sign(link.text).hex() if signed else ""
            write_seal(other, seal)
            previous_tx, previous_event, previous_hash = seal.tx, seal.event, seal.hash


def execute(statement: str) -> Callable[[], None]:
    """Return a forgery that executes this SQL."""

    def forge() -> None:
        with triggers_off() as other:
            other.execute(statement)

    return forge


def make_drop_of_month(signed: bool) -> Callable[[], None]:
    """Return a forgery that lets January 2024 vanish with a seal that says that it was dropped by retention."""

    def forge() -> None:
        justified = json.dumps({"retention_months": 3, "events": 5})
        append_forged(SealKind.DROP if signed else "", signed, justified if signed else "", "2024-01")
        execute("DROP TABLE accelerators_event_2024_01")()

    return forge


def begin_again_with_own_key_and_drop() -> None:
    key = signing.get_public_key(FORGER_KEY)
    append_forged(SealKind.KEY, True, json.dumps({"new_key": key, "reason": "lost", "by": "me"}))
    make_drop_of_month(signed=True)()


def restore_older_database() -> None:
    """Remove the newest events and seals, as an older copy of the database lacks them; the product then goes on."""
    execute(
        "DELETE FROM accelerators_event WHERE subject_name IN ('e8', 'e9');"
        "DELETE FROM accelerators_seal WHERE number = (SELECT max(number) FROM accelerators_seal)"
    )()
    record_events("another")
    create_seals()


def add_seal_number_0_and_hide_an_event_behind_it() -> None:
    """Insert an event that lies between the first seal and a seal №0 before it, so that no seal's range has it."""
    execute(
        "INSERT INTO accelerators_seal (number, month, tx, event, events, digest, drops, sealed_at, hash, marks, kind,"
        " details, key, signature) SELECT 0, month, 0, 1000000000000000, 0, '', '', sealed_at, repeat('0', 64), '',"
        " 'events', '', key, 'x' FROM accelerators_seal WHERE number = 1;"
        "INSERT INTO accelerators_event (id, tx, source, actor, request_id, action, subject_type, subject_name, host,"
        " changes, reason) VALUES (77, 0, 'system', 'me', '', 'device.odd', 'device', 'hidden', '', '{}', '')"
    )()


NEST_DETAILS = "UPDATE accelerators_seal SET kind = 'key', details = repeat('[', 100000) WHERE number = 2"
CHANGE_E5 = "UPDATE accelerators_event SET reason = 'it was somebody else' WHERE subject_name = 'e5'"
FORGERIES: dict[str, tuple[Callable[[], None], str]] = {
    "forged drop without signature": (make_drop_of_month(signed=False), "does not prove that 2024-01 was dropped"),
    "forged drop with another key": (make_drop_of_month(signed=True), "does not prove that 2024-01 was dropped"),
    "forged drop after a key of the attacker": (begin_again_with_own_key_and_drop, "trust begins again at seal №5"),
    "forged seal without signature": (lambda: append_forged("", signed=False), "seal №5 is not signed with the key"),
    "forged seal with another key": (
        lambda: append_forged(SealKind.EVENTS, signed=True),
        "seal №5 is not signed with the key",
    ),
    "signature of another seal": (
        execute("UPDATE accelerators_seal SET signature = (SELECT signature FROM accelerators_seal WHERE number = 2)"),
        "seal №1 is not signed with the key",
    ),
    "changed event": (execute(CHANGE_E5), "was changed, under seal №3"),
    "changed event in a chain computed again without signatures": (
        lambda: (execute(CHANGE_E5)(), remake_chain(signed=False)),
        "the chain was computed again, and signed with another key (none instead",
    ),
    "replaced key: changed event in a chain signed with another key": (
        lambda: (execute(CHANGE_E5)(), remake_chain(signed=True)),
        "the chain was computed again, and signed with another key",
    ),
    "removed event": (
        execute("DELETE FROM accelerators_event WHERE subject_name = 'e5'"),
        "is in the place of an event that is gone, under seal №3",
    ),
    "removed partition": (execute("DROP TABLE accelerators_event_2024_01"), "the last events under seal №1"),
    "reordered events": (
        execute(
            "UPDATE accelerators_event e SET id = o.id FROM accelerators_event o WHERE (e.subject_name, o.subject_name)"
            " IN (('e1', 'e2'), ('e2', 'e1'))"
        ),
        "was changed, under seal №2",
    ),
    "restored older database": (restore_older_database, "seal №4 differs from the one that was kept elsewhere"),
    "deleted tail": (
        execute(
            "DELETE FROM accelerators_event WHERE subject_name IN ('e8', 'e9');"
            "DELETE FROM accelerators_seal WHERE number = 4"
        ),
        "seal №4 (",
    ),
    "event hidden behind a seal №0": (add_seal_number_0_and_hide_an_event_behind_it, "seal №0 is forged"),
    "details of a seal nested too deeply": (execute(NEST_DETAILS), "seal №2 does not fit"),
    "seal at no time": (
        execute("UPDATE accelerators_seal SET sealed_at = 'infinity' WHERE number = 2"),
        "seal №2 is forged",
    ),
    "newest seal at no time": (
        execute("UPDATE accelerators_seal SET sealed_at = '-infinity' WHERE number = 4"),
        "seal №4 is forged",
    ),
    "seal with a negative number of events": (
        execute("UPDATE accelerators_seal SET events = -5 WHERE number = 2"),
        "seal №2 is forged",
    ),
    "seal with more events than any": (
        execute("UPDATE accelerators_seal SET events = 2000000000 WHERE number = 2"),
        "seal №2 is forged",
    ),
    "truncated": (execute("DELETE FROM accelerators_event; DELETE FROM accelerators_seal"), "seal №4 ("),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_X6_a_verification_with_an_anchor_finds_what_the_applications_role_forged(
    month_with_events: str, tmp_path: Path, forgery: str
) -> None:
    record_events(*(f"e{number}" for number in range(10)))
    assert len(create_seals(4)) == 4
    anchors = tmp_path / "anchors"
    anchors.write_text(run("verify_events", "--anchor"))
    assert anchors.read_text().split()[2] == Seal.objects.get(number=4).key
    assert "they match" in run("verify_events", "--seal-file", str(anchors))
    forge, expected = FORGERIES[forgery]
    forge()
    shown = run("verify_events", "--seal-file", str(anchors), fails=True)
    assert expected in shown, shown


def test_a_drop_of_events_younger_than_the_recorded_retention_is_found(month_with_events: str, settings: Any) -> None:
    settings.KEYS = replace(settings.KEYS, event_retention_months=3)
    now = datetime.now(UTC)
    too_young = (now.year - 2024) * 12 + now.month - 1
    chain = sealing.open_chain(sealing.get_newest_seal())
    with conductor.writing():
        sealing.append_mark(chain, SealKind.DROP, {"retention_months": too_young, "events": 5}, drops="2024-01")
    execute("DROP TABLE accelerators_event_2024_01")()
    assert f"is not justified: retention of {too_young} months, 5 of 5 sealed events" in run(
        "verify_events", fails=True
    )


def test_a_drop_of_more_events_than_were_sealed_is_found(month_with_events: str) -> None:
    chain = sealing.open_chain(sealing.get_newest_seal())
    with conductor.writing():
        sealing.append_mark(chain, SealKind.DROP, {"retention_months": 3, "events": 6}, drops="2024-01")
    assert "6 of 5 sealed events" in run("verify_events", fails=True)


def test_a_drop_by_retention_records_what_justifies_it(month_with_events: str, settings: Any) -> None:
    settings.KEYS = replace(settings.KEYS, event_retention_months=3)
    assert retention.drop_oldest_month()
    drop = sealing.get_newest_seal()
    assert (drop.kind, drop.drops, json.loads(drop.details)) == (
        "drop",
        "2024-01",
        {"retention_months": 3, "events": 5},
    )
    assert "5 dropped by retention" in run("verify_events")


def test_X6_a_database_whose_clock_is_ahead_does_not_end_a_retention(
    month_with_events: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.KEYS = replace(settings.KEYS, event_retention_months=1200)
    monkeypatch.setattr(database_clock, "_difference_s", time.time() - time.monotonic() + 200 * 365 * 86_400)
    assert not retention.drop_oldest_month()
    record_events("later")
    assert create_seals()[-1].sealed_at <= datetime.now(UTC)


def test_X6_a_function_of_the_applications_role_does_not_replace_the_databases_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(database_clock, "_measured_at", float("-inf"))
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql"
            " AS $$ SELECT timestamptz '2200-01-01' $$; SET LOCAL search_path = public, pg_catalog"
        )
        database_clock.refresh()
        transaction.set_rollback(True)
    assert database_clock.now().year < 2200


def test_events_of_a_dropped_month_that_appear_later_are_not_excused_by_its_drop(
    month_with_events: str, settings: Any
) -> None:
    settings.KEYS = replace(settings.KEYS, event_retention_months=3)
    assert retention.drop_oldest_month()
    execute(
        "INSERT INTO accelerators_event (at, source, actor, request_id, action, subject_type, subject_name, host,"
        " changes, reason) VALUES ('2024-01-02', 'system', 'old', '', 'device.old', 'device', 'late', '', '{}', '')"
    )()
    create_seals()
    assert "they match" in run("verify_events")
    execute("DELETE FROM accelerators_event WHERE subject_name = 'late'")()
    assert "the last events under seal" in run("verify_events", fails=True)


def test_nothing_is_sealed_after_a_forged_seal_or_without_the_right_key(key_file: Path) -> None:
    record_events("a")
    create_seals()
    record_events("b")
    right = key_file.rename(key_file.with_name("right.pem"))
    with pytest.raises(AuditKeyError, match="cannot be read"):
        sealing.seal_oldest_events()
    assert not key_file.exists(), "a second key was created although seals are signed"
    signing.create_key(key_file)
    with pytest.raises(AuditKeyError, match="another key"):
        sealing.seal_oldest_events()
    shutil.copy(right, key_file)
    key_file.chmod(0o640)
    with pytest.raises(AuditKeyError, match="other users"):
        sealing.seal_oldest_events()
    key_file.chmod(0o600)
    execute("UPDATE accelerators_seal SET sealed_at = sealed_at - interval '1 day'")()
    with pytest.raises(AuditKeyError, match="forged"):
        sealing.seal_oldest_events()
    execute("UPDATE accelerators_seal SET sealed_at = sealed_at + interval '1 day'")()
    append_forged("", signed=False)
    with pytest.raises(AuditKeyError, match="seals before it are"):
        sealing.seal_oldest_events()
    assert Seal.objects.count() == 2


def test_X6_nothing_is_sealed_after_a_seal_with_which_a_strange_key_introduces_ours() -> None:
    record_events("a")
    create_seals()
    record_events("b")
    ours = run("seal_events", "--show-key").strip()
    append_forged(SealKind.KEY, True, json.dumps({"new_key": ours, "reason": "lost", "by": "me"}))
    with pytest.raises(AuditKeyError, match="№2, is forged"):
        sealing.seal_oldest_events()
    assert Seal.objects.count() == 2


@pytest.mark.parametrize("seals_between", [0, 1])
def test_X6_nothing_is_sealed_after_strange_keys_of_which_the_last_introduces_ours(seals_between: int) -> None:
    """The last of these seals is valid by itself: the key that is in force by the seal before it has signed it."""
    record_events("a")
    create_seals()
    record_events("b")
    ours, theirs = run("seal_events", "--show-key").strip(), signing.get_public_key(FORGER_KEY)
    append_forged(SealKind.KEY, True, json.dumps({"new_key": theirs, "reason": "lost", "by": "me"}))
    for _ in range(seals_between):
        append_forged(SealKind.EVENTS, signed=True)
    append_forged(SealKind.KEY, True, json.dumps({"new_key": ours, "reason": "found again", "by": "me"}))
    retention.run()
    assert Seal.objects.count() == 3 + seals_between, "nothing was sealed"
    status = AuditStatus.objects.get()
    assert status.refusal.startswith(f"seal №2 brings the key {theirs}") and status.refused_since
    with pytest.raises(CommandError, match="somebody has written seals with keys that are not yours"):
        run("seal_events")
    run("seal_events", "--begin-again", "--reason", "the intruder is gone")
    retention.run()
    assert Seal.objects.latest("number").kind == SealKind.EVENTS
    assert (AuditStatus.objects.get().refusal, AuditStatus.objects.get().refused_since) == ("", None)
    assert f"! trust begins again at seal №2 with the key {theirs}" in run("verify_events", fails=True)
    with pytest.raises(CommandError, match="nothing was lost"):
        run("seal_events", "--begin-again", "--reason", "again")


def test_X6_a_strange_key_is_found_although_the_new_key_has_signed_no_seal_yet(key_file: Path, tmp_path: Path) -> None:
    record_events("a")
    create_seals()
    new_file, theirs = tmp_path / "new.pem", signing.get_public_key(FORGER_KEY)
    run("seal_events", "--new-key", str(new_file), "--reason", "yearly")
    shutil.copy(new_file, key_file)
    append_forged(SealKind.KEY, True, json.dumps({"new_key": theirs, "reason": "lost", "by": "me"}))
    ours = run("seal_events", "--show-key").strip()
    append_forged(SealKind.KEY, True, json.dumps({"new_key": ours, "reason": "found again", "by": "me"}))
    record_events("b")
    with pytest.raises(AuditKeyError, match=f"seal №3 brings the key {theirs}"):
        sealing.seal_oldest_events()


def test_a_key_that_follows_a_lost_one_may_be_replaced_where_it_is_trusted(
    key_file: Path, tmp_path: Path, settings: Any
) -> None:
    record_events("a")
    create_seals()
    key_file.unlink()
    run("seal_events", "--begin-again", "--reason", "lost")
    second_key, third = run("seal_events", "--show-key").strip(), tmp_path / "third.pem"
    run("seal_events", "--new-key", str(third), "--reason", "yearly")
    shutil.copy(third, key_file)
    with pytest.raises(AuditKeyError, match="CYBORG_AUDIT_TRUSTED_KEYS"):
        sealing.open_chain(sealing.get_newest_seal())
    settings.KEYS = replace(settings.KEYS, audit_trusted_keys=(second_key,))
    create_seals()
    assert Seal.objects.latest("number").kind == SealKind.EVENTS


def test_a_key_that_was_replaced_regularly_may_sign_again(key_file: Path, tmp_path: Path) -> None:
    record_events("a")
    create_seals()
    first, second = tmp_path / "first.pem", tmp_path / "second.pem"
    shutil.copy(key_file, first)
    run("seal_events", "--new-key", str(second), "--reason", "tried another one")
    shutil.copy(second, key_file)
    run("seal_events", "--new-key", str(first), "--reason", "back to the first one")
    shutil.copy(first, key_file)
    record_events("b")
    create_seals()
    assert Seal.objects.latest("number").kind == SealKind.EVENTS


def test_a_restore_is_reported_and_explains_the_anchors_of_the_lost_seals_and_nothing_else(tmp_path: Path) -> None:
    record_events("e1")
    create_seals()
    record_events("e8", "e9")
    create_seals()
    lost_anchor = run("verify_events", "--anchor").strip()
    execute(
        "DELETE FROM accelerators_event WHERE subject_name IN ('e8', 'e9');"
        "DELETE FROM accelerators_seal WHERE number = 2"
    )()
    reason = "restored from the backup of noon"
    run("seal_events", "--restored", "--reason", reason)
    record_events("e10")
    create_seals()
    number = Seal.objects.get(kind=SealKind.RESTORED).number
    assert abs(number / 1000 - time.time()) < 600
    assert [*Seal.objects.order_by("number").values_list("number", flat=True)] == [1, number, number + 1]
    file = tmp_path / "anchors"
    file.write_text(f"{lost_anchor}\n{run('verify_events', '--anchor')}")
    shown = run("verify_events", "--seal-file", str(file))
    assert "they match" in shown
    text = rf"the database was restored at 20\d\d-.* UTC by \S+ \('{reason}'\): what was sealed after seal №1 was lost"
    assert json.loads(run("verify_events", "--json"))["restored"][1].startswith("the database was restored")
    assert re.search(rf"NOTICE: {text}", shown) and re.search(
        rf"NOTICE: seal №2 \(.*kept elsewhere and is gone: {text}", shown
    )
    later_anchor = run("verify_events", "--anchor").split()
    file.write_text(f"{number + 1} {'0' * 64} {later_anchor[2]}\n")
    assert f"seal №{number + 1} differs from the one that was kept" in run(
        "verify_events", "--seal-file", str(file), fails=True
    )


def test_X6_after_a_seal_at_no_time_nothing_is_sealed_and_a_person_can_go_on() -> None:
    record_events("a")
    create_seals()
    record_events("b")
    append_forged(SealKind.EVENTS, signed=True)
    execute("UPDATE accelerators_seal SET sealed_at = 'infinity' WHERE number = 2")()
    retention.run()
    assert AuditStatus.objects.get().refusal.startswith("seal №2 has values that no seal has: it is forged")
    run("seal_events", "--begin-again", "--reason", "the intruder is gone")
    assert "newest seal: 4 " in run("seal_events")
    findings = [line for line in run("verify_events", fails=True).splitlines() if line.startswith("!")]
    assert findings == ["! seal №2 is forged: no seal has such a number, number of events, or time"]


def test_any_error_of_the_job_that_seals_is_shown_until_it_seals_again(monkeypatch: pytest.MonkeyPatch) -> None:
    record_events("a")
    with monkeypatch.context() as broken:
        broken.setattr(sealing, "SELECT_UNSEALED", "SELECT 1/0 WHERE %s + %s + %s + %s > 0")
        with pytest.raises(DatabaseError):
            retention.run()
    assert AuditStatus.objects.get().refusal.startswith("the job failed: division by zero")
    retention.run()
    assert AuditStatus.objects.get().refusal == ""


def test_seals_made_after_one_restore_are_explained_by_a_second_restore_of_the_same_backup(tmp_path: Path) -> None:
    record_events("e1")
    create_seals()
    run("seal_events", "--restored", "--reason", "first try")
    record_events("e8")
    create_seals()
    file = tmp_path / "anchors"
    file.write_text(run("verify_events", "--anchor"))
    execute(
        "DELETE FROM accelerators_event WHERE subject_name = 'e8'; DELETE FROM accelerators_seal WHERE number > 1"
    )()
    run("seal_events", "--restored", "--reason", "second try")
    record_events("e9")
    create_seals()
    shown = run("verify_events", "--seal-file", str(file))
    assert "kept elsewhere and is gone: the database was restored" in shown and "they match" in shown


def test_X6_a_forged_record_of_a_restore_is_found() -> None:
    record_events("a")
    create_seals()
    append_forged(SealKind.RESTORED, True, json.dumps({"after": 1, "reason": "noon", "by": "me"}))
    assert "! seal №2 does not prove a restore: it is forged" in run("verify_events", fails=True)
    with pytest.raises(AuditKeyError):
        sealing.record_restore("me", "noon")


def test_the_job_logs_why_it_seals_nothing_and_does_nothing_if_it_is_switched_off(
    key_file: Path, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    record_events("a")
    retention.run()
    record_events("b")
    key_file.unlink()
    retention.run()
    assert "nothing is sealed: the audit key" in caplog.text
    caplog.clear()
    settings.KEYS = replace(settings.KEYS, audit_key_file="off")
    retention.run()
    assert not caplog.text and Seal.objects.count() == 1
    with pytest.raises(CommandError, match="is off"):
        run("seal_events")


def test_the_command_seals_everything_without_ordering_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command may have another secret key than the clusters, which would refuse its task and count as stuck."""
    monkeypatch.setattr(jobs, "TIME_SLICE_S", 0.0)
    record_events("a")
    assert "newest seal: 1 " in run("seal_events")
    assert not Tick.objects.exists()
    with triggers_off() as other:
        other.execute("SELECT pg_advisory_lock(%s, %s)", [jobs.LOCK_CLASS, jobs.lock_id(sealing.SEALS_JOB)])
        with pytest.raises(CommandError, match="runs at this moment"):
            run("seal_events")


def test_seals_of_the_former_release_are_accepted_up_to_the_first_signed_one(key_file: Path) -> None:
    record_events(*(f"e{number}" for number in range(4)))
    create_seals(2)
    remake_chain(signed=False)  # as the former release made them
    key_file.unlink()
    assert "NOTICE: no seal is signed" in run("verify_events")
    record_events("first of this release")
    first_signed = create_seals()[-1]
    assert first_signed.number == 3 and first_signed.signature and key_file.stat().st_mode & 0o777 == 0o600
    shown = run("verify_events")
    assert "NOTICE: the seals before №3 are not signed" in shown and "they match" in shown
    former = {"month": "2026-11", "tx": 1, "event": 1, "events": 0, "digest": "", "hash": "", "marks": b""}
    with pytest.raises(DatabaseError, match="seals are signed since this upgrade"), conductor.writing():
        Seal.objects.create(number=4, sealed_at=datetime.now(UTC), **former)
    with pytest.raises(DatabaseError, match="append-only"), conductor.writing():
        Seal.objects.filter(number=3).update(signature="")
    execute("UPDATE accelerators_seal SET digest = repeat('0', 64) WHERE number = 1")()
    assert "seal №1 does not fit" in run("verify_events", fails=True)


def test_a_key_is_replaced_by_a_seal_of_the_old_key(key_file: Path, tmp_path: Path) -> None:
    record_events("a")
    create_seals()
    old_key, new_file = run("seal_events", "--show-key").strip(), tmp_path / "new.pem"
    with pytest.raises(CommandError, match="--reason"):
        run("seal_events", "--new-key", str(new_file))
    assert "№2" in run("seal_events", "--new-key", str(new_file), "--reason", "yearly")
    with pytest.raises(CommandError, match="another key"):
        run("seal_events")
    new_file.rename(key_file)
    new_key = run("seal_events", "--show-key").strip()
    shown = run("seal_events")
    assert f"newest seal: 3 {Seal.objects.get(number=3).hash} {new_key}" in shown
    shown = run("verify_events", "--trust-key", old_key)
    assert f"NOTICE: seal №2 replaces the key by {new_key}, signed by the old key" in shown and "they match" in shown
    event = Event.objects.get(action="audit.key_replaced")
    assert event.changes == {"key": [old_key, new_key]} and event.reason == "yearly"
    with pytest.raises(CommandError, match="signs already"):
        run("seal_events", "--new-key", str(key_file), "--reason", "again")
    chain = SealChain(Seal.objects.get(number=3), FORGER_KEY)
    with conductor.writing():
        sealing.append_mark(chain, SealKind.KEY, {"new_key": old_key})
    assert "seal №4 is not signed with the key in force" in run("verify_events", fails=True)


def test_after_a_lost_key_trust_begins_again_where_the_verifier_says_so(key_file: Path) -> None:
    record_events("a")
    with pytest.raises(CommandError, match="nothing was lost"):
        run("seal_events", "--begin-again", "--reason", "lost")
    create_seals()
    with pytest.raises(CommandError, match="nothing was lost"):
        run("seal_events", "--begin-again", "--reason", "lost")
    old_key = run("seal_events", "--show-key").strip()
    key_file.unlink()
    record_events("b")
    with pytest.raises(CommandError, match="cannot be read"):
        run("seal_events")
    run("seal_events", "--begin-again", "--reason", "lost with its disk")
    run("seal_events")
    new_key = run("seal_events", "--show-key").strip()
    text = f"trust begins again at seal №2 with the key {new_key}, which the old key did not sign"
    assert f"! {text}" in run("verify_events", fails=True)
    assert f"! {text}" in run("verify_events", "--trust-key", old_key, fails=True)
    assert "which you do not trust" in run("verify_events", "--trust-key", new_key, fails=True)
    shown = run("verify_events", "--trust-key", old_key, "--trust-key", new_key)
    assert f"NOTICE: {text}; you trust it ('lost with its disk')" in shown and "they match" in shown
    assert Event.objects.get(action="audit.key_lost").changes == {"key": [old_key, new_key]}


def test_a_chain_without_the_trusted_key_fails(transactional_db: None) -> None:
    trusted = signing.get_public_key(FORGER_KEY)
    record_events("a")
    create_seals()
    assert "which you do not trust" in run("verify_events", "--trust-key", trusted, fails=True)
    remake_chain(signed=False)
    assert "no seal is signed with the key that you trust" in run("verify_events", "--trust-key", trusted, fails=True)


@pytest.mark.parametrize("content", [b"", b"no key", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_an_unusable_key_file_is_refused_and_kept(key_file: Path, content: bytes) -> None:
    key_file.parent.mkdir()
    key_file.write_bytes(content)
    key_file.chmod(0o600)
    record_events("a")
    with pytest.raises(AuditKeyError, match="is not an audit key"):
        sealing.seal_oldest_events()
    assert key_file.read_bytes() == content


def run(command: str, *options: str, fails: bool = False) -> str:
    """Run a management command and return what it prints; `fails` says whether it must end with the status 1."""
    out, failed = StringIO(), False
    try:
        call_command(command, *options, stdout=out)
    except SystemExit:
        failed = True
    assert failed == fails, out.getvalue()
    return out.getvalue()
