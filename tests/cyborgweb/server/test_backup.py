"""Test what a backup contains, which restores are refused, and how a restored database is prepared for its first start.

`tests/system/test_restore.py` plays a backup and a restore with the whole product and its agents.
"""

from __future__ import annotations

import errno
import json
import stat
import subprocess
import threading
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from django.contrib.sessions.models import Session
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.migrations.recorder import MigrationRecorder
from django.test import Client

from accelerators import conductor
from accelerators.audit import sealing
from accelerators.domain.caller import Caller
from accelerators.models import AcceleratorRequest, AttachHandle, Command, Event, Seal
from accelerators.requests import binding
from accelerators.runtime import database_clock
from accelerators.workflows import command_endings
from cyborgweb.database.postgres import PostgresError, find_client_program
from cyborgweb.management.commands import prepare
from cyborgweb.models import Maintenance
from cyborgweb.server import after_restore, backup
from cyborgweb.settings.keys import Keys
from drivers.files import write_private
from tests.accelerators.requests.test_bind_commands import (
    answer_command,
    create_and_bind,
    get_open_command,
    get_state_and_fault,
    handle,
)

__all__ = ["handle"]
pytestmark = pytest.mark.django_db
OLGA = Caller("olga", "", frozenset(), "")
PAST_TIME = datetime.now(UTC) - timedelta(hours=1)


def settle_restored_database() -> str:
    return after_restore.prepare_restored_database(OLGA, "restored from the backup of noon")


@pytest.mark.slow
def test_a_backup_is_a_private_folder_with_the_database_and_the_secret_key(tmp_path: Path) -> None:
    told: list[int] = []
    made = tmp_path / "made"
    about = backup.create_backup(made, told.append)
    assert {path.name for path in made.iterdir()} == {"backup.json", "database.dump", "secret-key"}
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert all(stat.S_IMODE((made / name).stat().st_mode) == 0o600 for name in ("database.dump", *about.files))
    lists = [find_client_program("pg_restore", about.postgresql), "--list", made / backup.DUMP_FILE]
    listed = subprocess.run(lists, capture_output=True, text=True, check=True).stdout
    assert "TABLE DATA public accelerators_acceleratorrequest" in listed
    assert backup.read_description(made) == about
    with pytest.raises(backup.BackupError, match="exists already"):
        backup.create_backup(made, told.append)


def test_restoring_a_folder_that_is_no_backup_or_of_a_later_release_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="is not a backup"):
        call_command("restore", str(tmp_path))
    later = {"taken_at": "2026-11-22T00:00:00Z", "postgresql": 17, "migrations": ["accelerators.9999_x"], "files": []}
    (tmp_path / backup.DESCRIPTION_FILE).write_text(json.dumps(later))
    with pytest.raises(CommandError, match=r"by a later release, which has the migration accelerators\.9999_x"):
        call_command("restore", str(tmp_path))
    (tmp_path / backup.DESCRIPTION_FILE).write_text("{}")
    with pytest.raises(CommandError, match="is not a backup of this release"):
        call_command("restore", str(tmp_path))


def test_of_two_backups_into_one_folder_at_the_same_time_the_second_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, refusals, folders = tmp_path / "nightly", [], []

    def back_up_too() -> None:
        try:
            backup.create_backup(folder, lambda size: None)
        except backup.BackupError as error:
            refusals.append(str(error))
        finally:
            connection.close()

    def dump(*_: object) -> None:
        if not folders:
            folders.append(folder)
            second = threading.Thread(target=back_up_too, daemon=True)
            second.start()
            second.join(20)

    monkeypatch.setattr(backup, "_run_client_program", dump)
    backup.create_backup(folder, lambda size: None)
    assert refusals == [f"another backup is being written to {folder}: wait for its end, or name another folder"]
    assert backup.read_description(folder)
    with pytest.raises(backup.BackupError, match="exists already"):
        backup.create_backup(folder, lambda size: None)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty state directory, beside a backup that has only a secret key."""
    state = tmp_path / "state"
    state.mkdir()
    for module in (backup, prepare):
        monkeypatch.setattr(module, "get_keys", lambda: Keys(state_dir=str(state)))
    (tmp_path / backup.SECRET_KEY_FILE).write_text("key of the backup")
    return state


def restore(folder: Path) -> None:
    backup.restore_dump(folder, backup.BackupDescription(PAST_TIME, 17, (), (backup.SECRET_KEY_FILE,)))


def test_a_backup_without_its_secret_key_is_not_restored(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[str] = []
    monkeypatch.setattr(backup, "_run_client_program", lambda name, *_: programs.append(name))
    (state.parent / backup.SECRET_KEY_FILE).unlink()
    with pytest.raises(backup.BackupError, match=r"secret-key cannot be read .*: No such file .*Nothing was restored"):
        restore(state.parent)
    assert programs == [] and not [*state.iterdir()]


def test_a_restore_that_cannot_put_back_the_secret_key_says_how_to_go_on(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, content: bytes) -> None:
        if path.name == backup.SECRET_KEY_FILE:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(backup, "_run_client_program", lambda *_: None)
    monkeypatch.setattr(backup, "write_private", write)
    with pytest.raises(backup.BackupError, match=r"No space left .*run this command again: manage.py restore"):
        restore(state.parent)


@pytest.mark.parametrize("is_killed", [True, False])
@pytest.mark.slow
def test_L2_the_product_does_not_start_on_a_database_whose_restore_was_interrupted(
    state: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    def run(*_: object) -> None:
        raise KeyboardInterrupt if is_killed else backup.BackupError("pg_restore failed: the file is damaged")

    monkeypatch.setattr(backup, "_run_client_program", run)
    with pytest.raises(KeyboardInterrupt if is_killed else backup.BackupError):
        restore(state.parent)
    if is_killed:
        with pytest.raises(CommandError, match=rf"a restore of {state.parent} was interrupted: run `manage.py restore"):
            call_command("prepare")
    settle_restored_database()
    call_command("prepare", stdout=StringIO())


def test_a_restore_puts_the_secret_key_back_and_may_be_started(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup, "_run_client_program", lambda *_: None)
    restore(state.parent)
    assert (state / backup.SECRET_KEY_FILE).read_text() == "key of the backup"
    with pytest.raises(backup.BackupError, match="was interrupted"):
        backup.refuse_unfinished_restore()
    settle_restored_database()
    backup.refuse_unfinished_restore()


def describe_backup_of_this_database(folder: Path) -> backup.BackupDescription:
    """Write the description of a backup that the test's database can have been restored from, and return it."""
    applied = tuple(sorted(".".join(one) for one in MigrationRecorder(connection).applied_migrations()))
    description = backup.BackupDescription(datetime.now(UTC), 17, applied, (backup.SECRET_KEY_FILE,))
    (folder / backup.DESCRIPTION_FILE).write_bytes(msgspec.json.encode(description))
    return description


@pytest.fixture
def interrupted(state: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A restore that ended between `pg_restore` and the writing of the files. Return the list of later client programs.

    The secret key in the state directory is another one, as Django's settings create it when there is none.
    """
    programs: list[str] = []
    monkeypatch.setattr(backup, "keep_database_running", lambda exclusive: nullcontext())
    monkeypatch.setattr(backup, "refuse_other_connections", lambda: None)
    monkeypatch.setattr(backup, "_run_client_program", lambda *_: None)
    (state / backup.SECRET_KEY_FILE).write_text("new key")

    def write(path: Path, content: bytes) -> None:
        if path.name == backup.SECRET_KEY_FILE:
            raise KeyboardInterrupt
        write_private(path, content)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(backup, "write_private", write)
        backup.restore_dump(state.parent, describe_backup_of_this_database(state.parent))
    monkeypatch.setattr(backup, "_run_client_program", lambda name, *_: programs.append(name))
    return programs


@pytest.mark.slow
def test_L2_a_restore_interrupted_before_the_secret_key_was_put_back_is_finished_by_the_same_command(
    state: Path, interrupted: list[str]
) -> None:
    with pytest.raises(CommandError, match=rf"run `manage.py restore {state.parent}` again"):
        call_command("prepare")
    call_command("restore", str(state.parent), stdout=StringIO())
    assert (state / backup.SECRET_KEY_FILE).read_text() == "key of the backup"
    assert interrupted == [], "the database was restored a second time"
    assert Event.objects.get(action="database.restored").reason.startswith("restored from the backup of ")
    call_command("prepare", stdout=StringIO())


def test_L2_after_an_interrupted_restore_the_option_loaded_is_refused_because_it_would_lose_the_secret_key(
    state: Path, interrupted: list[str]
) -> None:
    with pytest.raises(CommandError, match=rf"run `manage.py restore {state.parent}` again"):
        call_command("restore", "--loaded", stdout=StringIO())
    with pytest.raises(CommandError, match="was interrupted"):
        call_command("prepare")
    assert not Event.objects.filter(action="database.restored").exists()


@pytest.mark.parametrize("other", ["database", "backup", "tables"])
def test_an_interrupted_restore_is_not_finished_with_another_backup_or_database(
    state: Path, interrupted: list[str], monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    if other == "database":
        monkeypatch.setattr(backup, "IDENTIFY_DATABASE", "SELECT '7/16384'")
    elif other == "backup":
        describe_backup_of_this_database(state.parent)
    else:  # tables that `manage.py migrate` created after a restore that was interrupted before it loaded the dump
        MigrationRecorder(connection).migration_qs.update(applied=datetime.now(UTC))
    with pytest.raises(CommandError, match="a backup is never restored over another database"):
        call_command("restore", str(state.parent), stdout=StringIO())
    assert (state / backup.SECRET_KEY_FILE).read_text() == "new key"


def test_L2_a_pg_restore_that_is_killed_after_its_commit_leaves_the_restore_unfinished(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object) -> None:
        raise backup.BackupError("pg_restore failed: ")

    monkeypatch.setattr(backup, "_run_client_program", run)
    with pytest.raises(backup.BackupError, match="pg_restore failed"):
        restore(state.parent)  # the test's database has tables, as if the dump had been loaded
    with pytest.raises(backup.BackupError, match="was interrupted"):
        backup.refuse_unfinished_restore()
    monkeypatch.setattr(backup, "COUNT_TABLES", "SELECT 0")
    monkeypatch.setattr(backup, "COUNT_OTHER_CONNECTIONS", "SELECT 0")
    with pytest.raises(backup.BackupError, match="pg_restore failed"):
        restore(state.parent)
    backup.refuse_unfinished_restore()


def test_restoring_over_a_database_with_tables_is_refused() -> None:
    backup.require_tables(expected=True)
    with pytest.raises(backup.BackupError, match="a backup is never restored over another database"):
        backup.require_tables(expected=False)


def test_a_missing_postgresql_program_is_named_with_what_to_install() -> None:
    with pytest.raises(PostgresError, match="no pg_dump of PostgreSQL 99 or later found: apt install"):
        find_client_program("pg_dump", 99)


def test_L2_after_a_restore_a_started_bind_waits_for_its_agent_despite_passed_deadlines(handle: AttachHandle) -> None:
    (request,) = create_and_bind()
    attach = get_open_command("attach")
    with conductor.writing():
        Command.objects.update(start_by=PAST_TIME, end_by=PAST_TIME)
        AcceleratorRequest.objects.update(deadline=PAST_TIME)
        conductor.record_event("test.aged", "system", "a test")
    settle_restored_database()
    command_endings.end_late_commands()
    binding.fail_overdue_binds()
    assert get_state_and_fault(request) == ("BindStarted", "")
    assert not Command.objects.filter(op="detach").exists(), "what the instance has by now would be taken away"
    answer_command(attach)
    assert get_state_and_fault(request) == ("Bound", "")
    restore_event = Event.objects.get(action="database.restored")
    assert (restore_event.actor, restore_event.changes) == ("olga", {"binds waiting for their agents": [None, 1]})


@pytest.mark.slow
def test_a_signed_seal_records_a_restore_with_its_actor_and_reason(settings: Any, tmp_path: Path) -> None:
    settings.KEYS = replace(settings.KEYS, audit_key_file=str(tmp_path / "audit.pem"))
    seal = Seal(
        number=7, month="2026-11", tx=-1, event=0, events=0, digest="", hash="0" * 64, sealed_at=database_clock.now()
    )
    with conductor.writing():
        seal.save(force_insert=True)
    settle_restored_database()
    mark = Seal.objects.latest("number")
    details = json.loads(mark.details)
    assert (mark.kind, details["after"], details["by"]) == ("restored", 7, "olga")
    assert mark.number > 7 + sealing.SKIPPED_BY_RESTORE
    assert "restored from the backup of noon" in details["reason"]
    (tmp_path / "audit.pem").unlink()
    assert "cannot be read" in settle_restored_database()


@pytest.mark.slow
def test_a_second_restore_of_the_same_backup_uses_no_number_of_the_first_one() -> None:
    read = "SELECT nextval(pg_get_serial_sequence('accelerators_command', 'id')), (SELECT min(value) FROM generation)"
    found = []
    with connection.cursor() as cursor:
        for _ in range(2):
            cursor.execute("SELECT setval(pg_get_serial_sequence('accelerators_command', 'id'), 5)")
            cursor.execute("UPDATE generation SET value = 5")
            settle_restored_database()
            found.append(cursor.execute(read).fetchone())
    first, second = found
    assert second[0] > first[0] + 1 and second[1] > first[1] + 1


@pytest.mark.slow
def test_after_a_restore_numbers_are_not_reused_sessions_end_and_all_is_read_only(
    handle: AttachHandle, client: Client, django_user_model: Any
) -> None:
    client.force_login(django_user_model.objects.create_superuser("olga"))
    create_and_bind()
    number = get_open_command("attach").id
    seen = client.get("/api/devices/").headers["ETag"]
    settle_restored_database()
    assert not Session.objects.exists()
    assert "restored from the backup of noon" in Maintenance.objects.get().reason
    create_and_bind()
    assert Command.objects.latest("id").id > number + after_restore.SEQUENCE_SKIP
    client.force_login(django_user_model.objects.get())
    assert client.get("/api/devices/", headers={"if-none-match": seen}).status_code == 200
    settle_restored_database()
    assert Maintenance.objects.count() == 1
