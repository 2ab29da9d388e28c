"""Test seals over events: every committed event is sealed once, and every later change is found (promise X6)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import DatabaseError, connection
from psycopg import sql

from accelerators import conductor
from accelerators.audit import retention, sealing, verification
from accelerators.domain.hash_chain import SealKind
from accelerators.domain.states import EventSource
from accelerators.models import Event, Seal
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report
from tests.support.seals import create_seals, record_events

pytestmark = pytest.mark.django_db(transaction=True)


@contextmanager
def open_connection() -> Iterator[psycopg.Connection[Any]]:
    """Open a database connection besides Django's."""
    params = connection.get_connection_params()
    wanted = {key: params[key] for key in ("dbname", "user", "password", "host", "port") if key in params}
    with psycopg.connect(**wanted) as other:
        yield other


@contextmanager
def open_connection_without_triggers() -> Iterator[Any]:
    """Open a database connection in which triggers do not run, such as an attacker with superuser rights could use."""
    with open_connection() as other:
        other.execute("SET session_replication_role = replica")
        yield other


def list_findings() -> list[tuple[int, int, str]]:
    return [(one.seal, one.event, one.text) for one in verification.verify_seals().findings]


def get_event_id(name: str) -> int:
    return Event.objects.get(subject_name=name).pk


def test_committed_events_are_sealed_once_and_uncommitted_ones_hold_back_later_ones(transactional_db: None) -> None:
    record_events("a")
    with open_connection() as late:
        late.execute(
            "INSERT INTO accelerators_event (source, actor, request_id, action, subject_type, subject_name, host,"
            " changes, reason) VALUES ('system', 'late', '', 'device.late', 'device', 'late', '', '{}', '')"
        )
        record_events("b", "c")
        (first,) = create_seals()
        assert first.events == 1, "what came after the one that is not committed yet waits for it"
        assert verification.verify_seals().unsealed == 2
        late.commit()
    record_events("d")
    assert sum(one.events for one in create_seals()) == 5 == Event.objects.count()
    assert verification.verify_seals().unsealed == 0 and not list_findings()
    before = Event.objects.get(subject_name="late")
    assert sealing.find_seal_of_event(before) == Seal.objects.get(number=2) and before.pk < get_event_id("b")


def test_many_events_are_sealed_in_pieces_of_a_given_size(transactional_db: None) -> None:
    record_events(*(f"e{number}" for number in range(11)))
    apply_report(get_or_create_host(), make_driver_report(make_card(1), make_card(2)))
    made = create_seals(4)
    assert [one.events for one in made] == [4, 4, 4, 2] and create_seals(4) == made
    assert [one.number for one in made] == [1, 2, 3, 4]
    done = verification.verify_seals()
    assert (done.seals, done.events, done.findings) == (4, 14, [])
    assert verification.verify_seals(2, 3).events == 8


FORGERIES: dict[str, tuple[str, str]] = {
    "a reason is changed": (
        "UPDATE accelerators_event SET reason = 'it was somebody else' WHERE subject_name = 'e5'",
        "event {e5} was changed, under seal №2",
    ),
    "a time is changed": (
        "UPDATE accelerators_event SET at = at + interval '1 microsecond' WHERE subject_name = 'e0'",
        "event {e0} was changed, under seal №1",
    ),
    "one is deleted": (
        "DELETE FROM accelerators_event WHERE subject_name = 'e5'",
        "event {e6} is in the place of an event that is gone, under seal №2",
    ),
    "the last of a seal is deleted": (
        "DELETE FROM accelerators_event WHERE subject_name = 'e3'",
        "the last events under seal №1",
    ),
    "one is put in": (
        "INSERT INTO accelerators_event (id, tx, at, source, actor, request_id, action, subject_type, subject_name,"
        " host, changes, reason) SELECT -1, tx, at, source, actor, request_id, action, subject_type, 'new', host,"
        " changes, reason FROM accelerators_event WHERE subject_name = 'e0'",
        "event -1 was inserted, under seal №1",
    ),
    "one is put in front of all, with the id 0": (
        "INSERT INTO accelerators_event (id, tx, at, source, actor, request_id, action, subject_type, subject_name,"
        " host, changes, reason) SELECT 0, -1, at, source, actor, request_id, action, subject_type, 'new', host,"
        " changes, reason FROM accelerators_event WHERE subject_name = 'e0'",
        "event 0 was inserted: no transaction wrote it",
    ),
    "two change places": (
        "UPDATE accelerators_event SET id = CASE subject_name WHEN 'e1' THEN {e2} ELSE {e1} END"
        " WHERE subject_name IN ('e1', 'e2')",
        "event {e1} was changed, under seal №1",
    ),
    "one is said to be later": (
        "UPDATE accelerators_event SET tx = tx + 1000000 WHERE subject_name = 'e9'",
        "the last events under seal №3",
    ),
    "a seal is changed": (
        "UPDATE accelerators_seal SET sealed_at = sealed_at - interval '1 day' WHERE number = 2",
        "seal №2 does not fit",
    ),
    "a seal is deleted": ("DELETE FROM accelerators_seal WHERE number = 2", "seal №2 is gone"),
    "a seal is made anew, with its events": (
        "UPDATE accelerators_seal SET hash = repeat('0', 64) WHERE number = 1",
        "seal №1 does not fit",
    ),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_verification_finds_and_names_each_kind_of_forgery(transactional_db: None, what: str) -> None:
    record_events(*(f"e{number}" for number in range(10)))
    create_seals(4)
    ids = {name: get_event_id(name) for name in (f"e{number}" for number in range(10))}
    assert not list_findings()
    statement, expected = (text.format(**ids) for text in FORGERIES[what])
    with open_connection_without_triggers() as other:
        other.execute(sql.SQL(statement))
    (number, event, text), *_ = list_findings()
    assert text.startswith(expected)
    assert number == 0 or f"seal №{number}" in text
    assert event == 0 or f"event {event}" in text
    with pytest.raises(SystemExit) as ended:
        call_command("verify_events", stdout=StringIO())
    assert ended.value.code == 1


def test_a_cut_tail_and_a_remade_chain_are_found_with_anchors_kept_elsewhere(
    transactional_db: None, tmp_path: Path
) -> None:
    record_events(*(f"e{number}" for number in range(10)))
    create_seals(4)
    anchor_file = tmp_path / "anchors"
    anchor_file.write_text(run_verify_events("--anchor"))
    assert "they match" in run_verify_events("--seal-file", str(anchor_file))
    with open_connection_without_triggers() as other:
        other.execute("DELETE FROM accelerators_event WHERE id > %s", [get_event_id("e7")])
        other.execute("DELETE FROM accelerators_seal WHERE number = 3")
    assert "they match" in run_verify_events()
    assert "seal №3" in run_verify_events("--seal-file", str(anchor_file), fails=True)
    record_events("another")
    create_seals()
    verification_result = json.loads(run_verify_events("--json", "--seal-file", str(anchor_file), fails=True))
    assert (
        not verification_result["ok"]
        and "computed again" in verification_result["findings"][0]["text"]
        and verification_result["events"] == 9
    )


@pytest.mark.parametrize("text", ["", "1 abc\n", "1 " + "0" * 64 + "\n1 " + "1" * 64])
def test_invalid_anchor_files_are_refused(transactional_db: None, tmp_path: Path, text: str) -> None:
    (tmp_path / "anchors").write_text(text)
    for wrong in (["--seal-file", str(tmp_path / "anchors")], ["--seal-file", str(tmp_path)], ["--anchor"]):
        with pytest.raises(CommandError):
            call_command("verify_events", *wrong, stdout=StringIO())


def run_verify_events(*options: str, fails: bool = False) -> str:
    out = StringIO()
    try:
        call_command("verify_events", *options, stdout=out)
    except SystemExit:
        assert fails
    else:
        assert not fails
    return out.getvalue()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE accelerators_seal SET hash = ''",
        "DELETE FROM accelerators_seal",
        "TRUNCATE accelerators_seal",
        "TRUNCATE accelerators_event",
        "DELETE FROM accelerators_event",
    ],
)
def test_X6_the_database_refuses_to_change_or_delete_events_and_seals(transactional_db: None, statement: str) -> None:
    record_events("a")
    create_seals()
    with open_connection() as other:
        other.execute("ALTER TABLE accelerators_event ENABLE TRIGGER accelerators_kept")
        other.execute("ALTER TABLE accelerators_seal ENABLE TRIGGER accelerators_kept")
        with pytest.raises(psycopg.errors.RestrictViolation, match="append-only"):
            other.execute(sql.SQL(statement))
        other.rollback()


@pytest.fixture
def months() -> Iterator[Callable[[str, int], None]]:
    """Return `months(month, count)`, which creates that many events of a past month in a partition of its own."""
    made = []

    def make(month: str, count: int) -> None:
        table = f"accelerators_event_{month.replace('-', '_')}"
        made.append(table)
        with conductor.writing(), connection.cursor() as cursor:
            cursor.execute(
                f"CREATE TABLE {table} PARTITION OF accelerators_event FOR VALUES FROM ('{month}-01 00:00+00')"
                f" TO ('{month}-28 00:00+00')"
            )
            cursor.execute(
                "INSERT INTO accelerators_event (at, source, actor, request_id, action, subject_type, subject_name,"
                " host, changes, reason) SELECT %s::timestamptz, 'system', 'old', '', 'device.old', 'device', '', '',"
                " '{}', '' FROM generate_series(1, %s)",
                [f"{month}-02 00:00+00", count],
            )

    yield make
    with connection.cursor() as cursor:
        for table in made:
            cursor.execute(f"DROP TABLE IF EXISTS {table}")


def test_retention_drops_whole_sealed_months_and_the_remaining_seals_still_verify(
    months: Callable[[str, int], None], settings: Any, tmp_path: Path
) -> None:
    months("2024-01", 5)
    months("2024-02", 3)
    record_events("now")
    assert [(one.month, one.events) for one in create_seals()][:2] == [("2024-01", 5), ("2024-02", 3)]
    (tmp_path / "anchors").write_text(run_verify_events("--anchor"))
    assert retention.drop_oldest_month() is False, "by default events are kept for ever"
    settings.KEYS = replace(settings.KEYS, event_retention_months=3)
    assert not retention.drop_oldest_month(datetime(2024, 4, 30, tzinfo=UTC)), "January is the third month before April"
    assert retention.drop_oldest_month(datetime(2024, 5, 1, tzinfo=UTC))
    assert retention.drop_oldest_month() and not retention.drop_oldest_month()
    assert not Event.objects.filter(action="device.old").exists()
    dropped_events = Event.objects.filter(action="events.dropped").order_by("id")
    assert [(one.subject_name, one.changes["events"]) for one in dropped_events] == [
        ("2024-01", [5, 0]),
        ("2024-02", [3, 0]),
    ]
    create_seals()
    assert "8 dropped by retention" in run_verify_events("--seal-file", str(tmp_path / "anchors"))
    with open_connection_without_triggers() as other:
        other.execute(
            "INSERT INTO accelerators_event (tx, source, actor, request_id, action, subject_type, subject_name, host,"
            " changes, reason) SELECT tx, 'system', 'me', '', 'device.old', 'device', '', '', '{}', ''"
            " FROM accelerators_seal WHERE month = '2024-01'"
        )
    assert "was inserted" in run_verify_events(fails=True)


def test_a_month_that_is_dropped_during_the_verification_is_no_finding(
    months: Callable[[str, int], None], settings: Any
) -> None:
    settings.KEYS = replace(settings.KEYS, event_retention_months=3)
    months("2024-01", 5)
    months("2024-02", 3)
    create_seals()

    def drop_all_months(_done: int, _of: int) -> None:
        """Drop both months after the first seal was verified."""
        while retention.drop_oldest_month():
            pass

    result = verification.verify_seals(progress=drop_all_months)
    assert not Event.objects.filter(action="device.old").exists()
    assert (result.findings, result.events, result.dropped) == ([], 5, 3)


def test_retention_keeps_a_month_that_is_unsealed_or_does_not_match_its_seal(
    months: Callable[[str, int], None], settings: Any
) -> None:
    settings.KEYS = replace(settings.KEYS, event_retention_months=3)
    months("2024-01", 5)
    assert retention.drop_oldest_month() is False, "it is not sealed"
    create_seals()
    with open_connection_without_triggers() as other:
        other.execute("DELETE FROM accelerators_event WHERE id = (SELECT max(id) FROM accelerators_event)")
    assert retention.drop_oldest_month() is False and Event.objects.count() == 4


def test_retention_gives_up_while_events_are_being_written_and_drops_the_month_later(
    months: Callable[[str, int], None], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.KEYS = replace(settings.KEYS, event_retention_months=3)
    monkeypatch.setattr(retention, "LOCK_TIMEOUT", "50ms")
    months("2024-01", 1)
    create_seals()
    with open_connection() as other:
        other.execute("LOCK TABLE accelerators_event IN ROW EXCLUSIVE MODE")
        assert retention.drop_oldest_month() is False
    assert not Event.objects.filter(action="events.dropped").exists() and not list_findings()
    assert retention.drop_oldest_month()


def test_after_renumbering_a_restored_database_with_lower_transaction_numbers_seals_again(
    transactional_db: None,
) -> None:
    record_events("a")
    far = 10**12
    with open_connection_without_triggers() as other:
        other.execute("UPDATE accelerators_event SET tx = %s", [far])
    assert not create_seals(), "to us it is not finished"
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT accelerators_event_renumber()")
            cursor.execute("SELECT accelerators_event_renumber()")
        record_events("b")
        assert Event.objects.get(subject_name="b").tx > far
        assert sum(one.events for one in create_seals()) == 2 and not list_findings()
    finally:
        with connection.cursor() as cursor:
            cursor.execute(
                "CREATE OR REPLACE FUNCTION accelerators_event_ahead() RETURNS bigint"
                " LANGUAGE sql STABLE AS 'SELECT 0::bigint'"
            )


def test_adding_a_seal_with_an_existing_number_is_refused_by_the_database(transactional_db: None) -> None:
    record_events("a")
    (first,) = create_seals()
    chain = replace(sealing.open_chain(first), last=Seal(number=0, hash="0" * 64))
    with pytest.raises(DatabaseError), conductor.writing():
        sealing.append_seal(chain, SealKind.EVENTS, first.month, tx=1, event=1, events=1, digest="")


@pytest.mark.slow
def test_the_program_in_the_manual_verifies_seals_and_finds_a_forgery(transactional_db: None, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "audit.md").read_text()
    program = tmp_path / "check.py"
    program.write_text(page.split("```python\n")[1].split("```")[0])
    record_events("plain", 'quoted "\\ \t', "Größe № 😀\x7f")
    with conductor.writing():
        odd = {"größe": [1.50, {"b": [], "aa": None, "c\n": 1e300}], "z": [True, "\u2028"]}
        conductor.record_event(
            "device.odd", EventSource.PERSON, "o'hara", host=get_or_create_host(), changes=odd, reason="why\x01"
        )
    create_seals(3)
    done = run_program_of_the_manual(program)
    assert (done.returncode, done.stdout) == (0, f"2 seals fit; the newest is {sealing.get_newest_seal().hash}\n"), (
        done.stderr
    )
    with open_connection_without_triggers() as other:
        other.execute("UPDATE accelerators_event SET changes = '{}' WHERE actor = 'o''hara'")
    assert run_program_of_the_manual(program).stderr == "the events of seal 2 are not those that were sealed\n"


def run_program_of_the_manual(program: Path) -> subprocess.CompletedProcess[str]:
    params = connection.get_connection_params()
    wanted = {key: params[key] for key in ("dbname", "user", "password", "host", "port") if key in params}
    command = [sys.executable, str(program), psycopg.conninfo.make_conninfo("", **wanted)]
    command.append(Seal.objects.get(number=1).key)
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_verification_that_begins_behind_a_missing_seal_names_that_seal_only(transactional_db: None) -> None:
    record_events(*(f"e{number}" for number in range(10)))
    create_seals(2)
    with open_connection_without_triggers() as other:
        other.execute("DELETE FROM accelerators_seal WHERE number = 3")
    assert verification.verify_seals(4).findings[0].text == "seal №3 is gone"


@pytest.mark.parametrize(
    ("gone", "last", "text", "number"),
    [
        ([3], 3, "seal №3 is gone", 3),
        ([3], 9, "seal №3 is gone", 3),
        ([2, 3], 3, "seals №2 to №3 are gone", 3),
        ([2, 3], None, "seals №2 to №3 are gone", 3),
        ([1, 2, 3], 2, "seals №1 to №2 are gone", 2),
    ],
)
def test_missing_seals_are_named_once_and_their_events_are_not_called_inserted(
    transactional_db: None, gone: list[int], last: int | None, text: str, number: int
) -> None:
    record_events(*(f"e{number}" for number in range(10)))
    create_seals(2)
    with open_connection_without_triggers() as other:
        other.execute("DELETE FROM accelerators_seal WHERE number = ANY(%s)", [gone])
    findings = verification.verify_seals(last=last).findings
    assert (findings[0].text, findings[0].seal) == (text, number)
    does_not_fit = [f"seal №{number + 1} does not fit: it was changed, or does not follow №{gone[0] - 1}"]
    assert [finding.text for finding in findings[1:]] == (does_not_fit if last in (None, 9) else [])
