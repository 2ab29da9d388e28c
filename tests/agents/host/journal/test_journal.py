"""Tests of the journal after restarts, kills, power cuts, full disks and corruption."""

from __future__ import annotations

import resource
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agents import wire
from agents.host.journal.journal import JOURNAL_FILE, WrongHostError, open_journal, read_known_host
from drivers.inventory import DriverReport
from tests.agents.host.fake_gateway import driver_report


def make_content(number: int) -> tuple[DriverReport, ...]:
    return (driver_report(keys=[f"card{number}"], model="m" * 40),)


@contextmanager
def full_disk() -> Iterator[None]:
    """Stop files from growing, which is the nearest thing to a full disk that needs no privilege."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_restart_keeps_the_report_and_raises_the_epoch(tmp_path: Path) -> None:
    first = open_journal(tmp_path, "h", clock=lambda: 1000.0)
    assert first.epoch == 1000
    assert first.record_report(make_content(1))
    assert not first.record_report(make_content(1))
    assert first.report is not None
    digest = first.report.hash
    first.close()
    second = open_journal(tmp_path, "h", clock=lambda: 1000.0)
    assert second.epoch == 1001
    assert second.report is not None
    assert (second.report.hash, second.report.epoch, second.acknowledged) == (digest, 1001, False)
    assert second.report.drivers == make_content(1)
    second.acknowledge_report(second.report.seq)
    second.close()
    assert open_journal(tmp_path, "h", clock=lambda: 5.0).acknowledged


def test_the_journal_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, "h")
    journal.record_report(make_content(1))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert set(modes) == {JOURNAL_FILE, f"{JOURNAL_FILE}-wal", f"{JOURNAL_FILE}-shm"}
    assert set(modes.values()) == {0o600}


def test_acknowledging_an_older_report_does_not_acknowledge_the_newer_one(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, "h")
    journal.record_report(make_content(1))
    journal.record_report(make_content(2))
    assert journal.report is not None
    journal.acknowledge_report(journal.report.seq - 1)
    assert not journal.acknowledged


def test_a_report_offered_again_gets_the_next_number_and_keeps_it_after_a_restart(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, "h")
    journal.record_report(make_content(1))
    assert journal.report is not None
    journal.acknowledge_report(1)
    assert journal.renumber_report(journal.report).seq == 2
    journal.close()
    again = open_journal(tmp_path, "h")
    assert (again.seq, again.acknowledged) == (2, False), "nobody has acknowledged it under this number"


def test_the_epoch_rises_even_when_the_journal_was_deleted(tmp_path: Path) -> None:
    first = open_journal(tmp_path, "h", clock=lambda: 1000.0)
    first.close()
    (tmp_path / JOURNAL_FILE).unlink()
    assert open_journal(tmp_path, "h", clock=lambda: 1002.0).epoch > first.epoch


def test_raising_the_epoch_also_raises_that_of_the_report(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, "h", clock=lambda: 10.0)
    journal.record_report(make_content(1))
    journal.raise_epoch(5000)
    assert journal.report is not None
    assert (journal.epoch, journal.report.epoch) == (5001, 5001)
    with pytest.raises(ValueError, match="out of range"):
        journal.raise_epoch(2**53)
    journal.close()
    assert open_journal(tmp_path, "h", clock=lambda: 10.0).epoch == 5002


def test_the_address_of_the_gateway_is_stored_and_the_secret_of_the_token_is_not(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, "h")
    journal.store_gateway("https://gw:1", "ab", "the-secret")
    journal.store_gateway("https://gw:1", "ab", "")
    journal.close()
    again = open_journal(tmp_path, "h")
    assert (again.gateway.address, again.gateway.fingerprint) == ("https://gw:1", "ab")
    assert again.has_joined_with("the-secret")
    assert not again.has_joined_with("another")
    assert b"the-secret" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


def test_a_joined_state_directory_is_refused_for_another_host(tmp_path: Path) -> None:
    open_journal(tmp_path, "early").close()
    journal = open_journal(tmp_path, "h1")  # Allowed, because the host `early` never joined.
    journal.store_gateway("http://gw:1", "", "s")
    journal.close()
    assert read_known_host(tmp_path) == "h1"
    with pytest.raises(WrongHostError, match="belongs to the host h1, this one is h2"):
        open_journal(tmp_path, "h2")


def test_first_values_belong_to_one_device_of_one_driver(tmp_path: Path) -> None:
    log = open_journal(tmp_path, "h").command_log
    for owner in (("d1", "card1"), ("d1", "card2"), ("d2", "card1")):
        log.store_first_value(*owner, "/sys/numvfs", " of ".join(owner))
    assert log.get_first_values("d1", "card1") == {"/sys/numvfs": "d1 of card1"}
    log.delete_first_values("d1", "card1")
    assert not log.get_first_values("d1", "card1")
    assert log.get_first_values("d1", "card2") == {"/sys/numvfs": "d1 of card2"}
    assert log.get_first_values("d2", "card1") == {"/sys/numvfs": "d2 of card1"}


@pytest.mark.slow
def test_a_write_ahead_log_cut_at_any_byte_opens_at_a_committed_state(tmp_path: Path) -> None:
    live = tmp_path / "live"
    live.mkdir()
    journal = open_journal(live, "h", clock=lambda: 1.0)
    seen = {(0, "", False)}
    for number in range(1, 6):
        journal.record_report(make_content(number))
        assert journal.report is not None
        seen.add((journal.seq, journal.report.hash, False))
        journal.acknowledge_report(journal.seq)
        seen.add((journal.seq, journal.report.hash, True))
    database, log = (live / JOURNAL_FILE).read_bytes(), (live / f"{JOURNAL_FILE}-wal").read_bytes()
    lengths = sorted({*range(0, len(log), max(1, len(log) // 100)), *range(0, 100, 7), len(log)})
    reached = []
    for length in lengths:
        cut = tmp_path / "cut"
        cut.mkdir()
        (cut / JOURNAL_FILE).write_bytes(database)
        (cut / f"{JOURNAL_FILE}-wal").write_bytes(log[:length])
        with open_cut_journal(cut) as (state, names):
            assert state in seen
            assert not [name for name in names if "corrupt" in name]
        reached.append(state[0])
        shutil.rmtree(cut)
    assert reached == sorted(reached), "a longer log never holds less"
    assert reached[-1] == 5
    journal.close()


def test_a_journal_file_cut_anywhere_opens_and_a_corrupt_one_is_kept_aside(tmp_path: Path) -> None:
    live = tmp_path / "live"
    live.mkdir()
    journal = open_journal(live, "h", clock=lambda: 1.0)
    journal.record_report(make_content(1))
    journal.close()
    whole = (live / JOURNAL_FILE).read_bytes()
    for length in range(0, len(whole), max(257, len(whole) // 50)):
        cut = tmp_path / "cut"
        cut.mkdir()
        (cut / JOURNAL_FILE).write_bytes(whole[:length])
        with open_cut_journal(cut) as (state, names):
            assert state[0] in (0, 1)
            kept = [name for name in names if "corrupt" in name]
            assert state[0] == 1 or kept or length == 0
        shutil.rmtree(cut)


@contextmanager
def open_cut_journal(directory: Path) -> Iterator[tuple[tuple[int, str, bool], list[str]]]:
    journal = open_journal(directory, "h", clock=lambda: 1.0)
    try:
        digest = journal.report.hash if journal.report else ""
        yield (journal.seq, digest, journal.acknowledged), [path.name for path in directory.iterdir()]
        assert journal.record_report(make_content(99)), "and it can be written"
    finally:
        journal.close()


@pytest.mark.parametrize("rubbish", [b"rubbish" * 1000, b"SQLite format 3\0" + b"\xff" * 8000])
def test_a_corrupt_journal_is_kept_aside_and_a_new_one_is_created(
    tmp_path: Path, rubbish: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        (tmp_path / JOURNAL_FILE).write_bytes(rubbish)
        journal = open_journal(tmp_path, "h", clock=lambda: 77.0)
        assert (journal.epoch, journal.report) == (77, None)
        journal.close()
    kept = [path for path in tmp_path.iterdir() if "corrupt" in path.name]
    assert [path.read_bytes() for path in kept] == [rubbish, rubbish]
    assert "a new one is created" in caplog.text


def test_a_database_of_another_program_is_moved_aside(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / JOURNAL_FILE) as connection:
        connection.execute("CREATE TABLE notes (id)")
    connection.close()
    assert open_journal(tmp_path, "h").report is None
    assert [path for path in tmp_path.iterdir() if "corrupt" in path.name]


def test_a_journal_write_on_a_full_disk_raises_and_can_be_repeated(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(sqlite3.OperationalError):
        open_journal(tmp_path, "h")
    journal = open_journal(tmp_path, "h")
    journal.record_report(make_content(1))
    with full_disk():
        with pytest.raises(sqlite3.OperationalError):
            journal.record_report(make_content(2))
        with pytest.raises(sqlite3.OperationalError):
            journal.acknowledge_report(1)
        assert journal.acknowledged, "known until the process ends"
    assert journal.record_report(make_content(2))
    assert journal.report is not None
    assert (journal.seq, journal.report.seq) == (2, 2)


WRITER_SCRIPT = """
import sys
from pathlib import Path
from agents.host.journal.journal import open_journal
from tests.agents.host.fake_gateway import driver_report
journal = open_journal(Path(sys.argv[1]), "h")
number = 0
while True:
    number += 1
    journal.record_report((driver_report(keys=[f"{sys.argv[2]}-{number}"]),))
    print(journal.epoch, journal.seq, journal.report.hash, flush=True)
    if number % 3 == 0:
        journal.acknowledge_report(journal.seq)
"""


@pytest.mark.system
def test_a_killed_writer_never_gives_one_report_number_to_two_contents(tmp_path: Path) -> None:
    told: dict[tuple[int, int], str] = {}
    for turn in range(6):
        command = [sys.executable, "-c", WRITER_SCRIPT, str(tmp_path), str(turn)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(3 + 5 * turn)]
            process.send_signal(signal.SIGKILL)
            lines += process.stdout.readlines()
        assert process.returncode == -signal.SIGKILL, "the writer ended before it was killed"
        complete = [line.split() for line in lines if line.endswith("\n")]
        assert complete
        for epoch, seq, digest in complete:
            assert told.setdefault((int(epoch), int(seq)), digest) == digest
        last = max(told)
        journal = open_journal(tmp_path, "h", clock=time.time)
        assert journal.epoch > last[0]
        assert journal.seq >= last[1], "what was told is in the journal"
        journal.close()


def test_an_unchanged_report_is_a_new_one_after_a_reboot_and_the_old_one_keeps_its_boot(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, "h")
    journal.boot_id = "boot-1"
    assert journal.record_report(make_content(1))
    assert not journal.record_report(make_content(1))
    journal.close()
    again = open_journal(tmp_path, "h")
    again.boot_id = "boot-2"
    assert again.report is not None and again.report.boot_id == "boot-1", "nothing was reported since the reboot"
    first_hash = again.report.hash
    assert again.renumber_report(again.report).boot_id == "boot-1"
    assert again.record_report(make_content(1))
    assert again.report.boot_id == "boot-2"
    assert again.report.hash == wire.hash_report_content(make_content(1), "boot-2") != first_hash


def test_a_journal_of_the_release_before_is_read_with_its_report(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, "h")
    journal.record_report(make_content(1))
    journal.close()
    with sqlite3.connect(tmp_path / JOURNAL_FILE) as connection:
        connection.execute("ALTER TABLE journal DROP COLUMN boot")
    connection.close()
    again = open_journal(tmp_path, "h")
    assert again.report is not None
    assert (again.report.drivers, again.report.boot_id) == (make_content(1), "")
