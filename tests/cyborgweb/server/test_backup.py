"""Test what a backup contains, which restores are refused, and how a restored database is prepared for its first start.

`tests/system/test_restore.py` plays a backup and a restore with the whole product and its agents.
"""

from __future__ import annotations

import json
import stat
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.sessions.models import Session
from django.core.management import CommandError, call_command
from django.test import Client

from accelerators import conductor
from accelerators.domain.caller import Caller
from accelerators.models import AcceleratorRequest, AttachHandle, Command, Event
from accelerators.requests import binding
from accelerators.workflows import command_endings
from cyborgweb.database.postgres import PostgresError, find_client_program
from cyborgweb.models import Maintenance
from cyborgweb.server import after_restore, backup
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


def settle_restored_database() -> None:
    after_restore.prepare_restored_database(OLGA, "restored from the backup of noon")


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
