"""Seals over events: all that is committed, each once; whatever is done to it afterwards is found, and where (X6)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from accelerators.domain.states import Source
from accelerators.models import Event, Seal
from cyborgweb.settings.keys import Keys
from tests.support.reports import a_host, answer, apply, card

pytestmark = pytest.mark.django_db(transaction=True)


def happen(*names: str) -> None:
    """An event each, in one transaction."""
    with conductor.writing():
        conductor.record_all(
            [conductor.event("device.odd", Source.SYSTEM, "test", subject=(None, name)) for name in names]
        )


def seal(most: int = sealing.MOST) -> list[Seal]:
    while sealing.seal(most):
        pass
    return list(Seal.objects.order_by("number"))


@contextmanager
def another() -> Iterator[psycopg.Connection[Any]]:
    """A connection of its own."""
    params = connection.get_connection_params()
    wanted = {key: params[key] for key in ("dbname", "user", "password", "host", "port") if key in params}
    with psycopg.connect(**wanted) as other:
        yield other


@contextmanager
def forger() -> Iterator[Any]:
    """Somebody to whom triggers mean nothing."""
    with another() as other:
        other.execute("SET session_replication_role = replica")
        yield other


def found() -> list[tuple[int, int, str]]:
    return [(one.seal, one.event, one.text) for one in verification.verify().findings]


def named(name: str) -> int:
    return Event.objects.get(subject_name=name).pk


def test_what_is_committed_is_sealed_once_and_what_is_not_waits(transactional_db: None) -> None:
    happen("a")
    with another() as late:
        late.execute(
            "INSERT INTO accelerators_event (source, actor, request_id, action, subject_type, subject_name, host,"
            " changes, reason) VALUES ('system', 'late', '', 'device.late', 'device', 'late', '', '{}', '')"
        )
        happen("b", "c")
        (first,) = seal()
        assert first.events == 1, "what came after the one that is not committed yet waits for it"
        assert verification.verify().unsealed == 2
        late.commit()
    happen("d")
    assert sum(one.events for one in seal()) == 5 == Event.objects.count()
    assert verification.verify().unsealed == 0 and not found()
    before = Event.objects.get(subject_name="late")
    assert sealing.seal_of(before) == Seal.objects.get(number=2) and before.pk < named("b")


def test_any_number_of_events_is_sealed_piece_by_piece(transactional_db: None) -> None:
    happen(*(f"e{number}" for number in range(11)))
    apply(a_host(), answer(card(1), card(2)))
    made = seal(4)
    assert [one.events for one in made] == [4, 4, 4, 2] and seal(4) == made
    assert [one.number for one in made] == [1, 2, 3, 4]
    done = verification.verify()
    assert (done.seals, done.events, done.findings) == (4, 14, [])
    assert verification.verify(2, 3).events == 8


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
def test_a_forgery_is_found_and_named(transactional_db: None, what: str) -> None:
    happen(*(f"e{number}" for number in range(10)))
    seal(4)
    ids = {name: named(name) for name in (f"e{number}" for number in range(10))}
    assert not found()
    statement, expected = (text.format(**ids) for text in FORGERIES[what])
    with forger() as other:
        other.execute(sql.SQL(statement))
    (number, event, text), *_ = found()
    assert text.startswith(expected)
    assert f"seal №{number}" in text
    assert event == 0 or f"event {event}" in text
    with pytest.raises(SystemExit) as ended:
        call_command("verify_events", stdout=StringIO())
    assert ended.value.code == 1


def test_a_cut_tail_and_a_chain_made_anew_are_found_with_what_was_kept_elsewhere(
    transactional_db: None, tmp_path: Path
) -> None:
    happen(*(f"e{number}" for number in range(10)))
    seal(4)
    kept = tmp_path / "anchors"
    kept.write_text(ask("--anchor"))
    assert "they match" in ask("--seal-file", str(kept))
    with forger() as other:
        other.execute("DELETE FROM accelerators_event WHERE id > %s", [named("e7")])
        other.execute("DELETE FROM accelerators_seal WHERE number = 3")
    assert "they match" in ask()
    assert "seal №3" in ask("--seal-file", str(kept), fails=True)
    happen("another")
    seal()
    told = json.loads(ask("--json", "--seal-file", str(kept), fails=True))
    assert not told["ok"] and "computed again" in told["findings"][0]["text"] and told["events"] == 9


@pytest.mark.parametrize("text", ["", "1 abc\n", "1 " + "0" * 64 + "\n1 " + "1" * 64])
def test_what_is_no_anchor_is_refused(transactional_db: None, tmp_path: Path, text: str) -> None:
    (tmp_path / "anchors").write_text(text)
    for wrong in (["--seal-file", str(tmp_path / "anchors")], ["--seal-file", str(tmp_path)], ["--anchor"]):
        with pytest.raises(CommandError):
            call_command("verify_events", *wrong, stdout=StringIO())


def ask(*options: str, fails: bool = False) -> str:
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
def test_X6_the_database_refuses_to_change_what_is_recorded(transactional_db: None, statement: str) -> None:
    happen("a")
    seal()
    with another() as other:
        other.execute("ALTER TABLE accelerators_event ENABLE TRIGGER accelerators_kept")
        other.execute("ALTER TABLE accelerators_seal ENABLE TRIGGER accelerators_kept")
        with pytest.raises(psycopg.errors.RestrictViolation, match="append-only"):
            other.execute(sql.SQL(statement))
        other.rollback()


@pytest.fixture
def months() -> Iterator[Callable[[str, int], None]]:
    """`months(month, count)`: so many events of a month long ago, each in its own partition."""
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


def test_old_months_go_whole_and_what_remains_is_proved(
    months: Callable[[str, int], None], settings: Any, tmp_path: Path
) -> None:
    months("2024-01", 5)
    months("2024-02", 3)
    happen("now")
    assert [(one.month, one.events) for one in seal()][:2] == [("2024-01", 5), ("2024-02", 3)]
    (tmp_path / "anchors").write_text(ask("--anchor"))
    assert retention.drop_oldest() is False, "by default events are kept for ever"
    settings.KEYS = Keys(event_retention_months=3)
    assert not retention.drop_oldest(datetime(2024, 4, 30, tzinfo=UTC)), "January is the third month before April"
    assert retention.drop_oldest(datetime(2024, 5, 1, tzinfo=UTC))
    assert retention.drop_oldest() and not retention.drop_oldest()
    assert not Event.objects.filter(action="device.old").exists()
    told = Event.objects.filter(action="events.dropped").order_by("id")
    assert [(one.subject_name, one.changes["events"]) for one in told] == [("2024-01", [5, 0]), ("2024-02", [3, 0])]
    seal()
    assert "8 dropped by retention" in ask("--seal-file", str(tmp_path / "anchors"))
    with forger() as other:
        other.execute(
            "INSERT INTO accelerators_event (tx, source, actor, request_id, action, subject_type, subject_name, host,"
            " changes, reason) SELECT tx, 'system', 'me', '', 'device.old', 'device', '', '', '{}', ''"
            " FROM accelerators_seal WHERE month = '2024-01'"
        )
    assert "was inserted" in ask(fails=True)


def test_a_month_that_is_not_as_it_was_sealed_is_kept(months: Callable[[str, int], None], settings: Any) -> None:
    settings.KEYS = Keys(event_retention_months=3)
    months("2024-01", 5)
    assert retention.drop_oldest() is False, "it is not sealed"
    seal()
    with forger() as other:
        other.execute("DELETE FROM accelerators_event WHERE id = (SELECT max(id) FROM accelerators_event)")
    assert retention.drop_oldest() is False and Event.objects.count() == 4


def test_a_month_is_dropped_later_when_somebody_is_writing(
    months: Callable[[str, int], None], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.KEYS = Keys(event_retention_months=3)
    monkeypatch.setattr(retention, "PATIENCE", "50ms")
    months("2024-01", 1)
    seal()
    with another() as other:
        other.execute("LOCK TABLE accelerators_event IN ROW EXCLUSIVE MODE")
        assert retention.drop_oldest() is False
    assert not Event.objects.filter(action="events.dropped").exists() and not found()
    assert retention.drop_oldest()


def test_a_database_restored_where_transactions_have_lower_numbers_goes_on_sealing(transactional_db: None) -> None:
    happen("a")
    far = 10**12
    with forger() as other:
        other.execute("UPDATE accelerators_event SET tx = %s", [far])
    assert not seal(), "to us it is not finished"
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT accelerators_event_renumber()")
            cursor.execute("SELECT accelerators_event_renumber()")
        happen("b")
        assert Event.objects.get(subject_name="b").tx > far
        assert sum(one.events for one in seal()) == 2 and not found()
    finally:
        with connection.cursor() as cursor:
            cursor.execute(
                "CREATE OR REPLACE FUNCTION accelerators_event_ahead() RETURNS bigint"
                " LANGUAGE sql STABLE AS 'SELECT 0::bigint'"
            )


def test_who_is_no_forger_cannot_seal_twice(transactional_db: None) -> None:
    happen("a")
    (first,) = seal()
    with pytest.raises(DatabaseError), conductor.writing():
        sealing.add(Seal(number=0, hash="0" * 64), first.month, tx=1, event=1, events=1, digest="")


def test_who_has_only_the_manual_computes_the_same(transactional_db: None, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    program = tmp_path / "check.py"
    program.write_text(page.split("```python\n")[1].split("```")[0])
    happen("plain", 'quoted "\\ \t', "Größe № 😀\x7f")
    with conductor.writing():
        odd = {"größe": [1.50, {"b": [], "aa": None, "c\n": 1e300}], "z": [True, "\u2028"]}
        conductor.record("device.odd", Source.PERSON, "o'hara", host=a_host(), changes=odd, reason="why\x01")
    seal(3)
    done = computed(program)
    assert (done.returncode, done.stdout) == (0, f"2 seals fit; the newest is {sealing.newest().hash}\n"), done.stderr
    with forger() as other:
        other.execute("UPDATE accelerators_event SET changes = '{}' WHERE actor = 'o''hara'")
    assert computed(program).stderr == "the events of seal 2 are not those that were sealed\n"


def computed(program: Path) -> subprocess.CompletedProcess[str]:
    params = connection.get_connection_params()
    wanted = {key: params[key] for key in ("dbname", "user", "password", "host", "port") if key in params}
    command = [sys.executable, str(program), psycopg.conninfo.make_conninfo("", **wanted)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
