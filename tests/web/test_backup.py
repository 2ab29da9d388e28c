"""What a backup holds, what is refused, and what makes a restored database safe to start on.

The whole way, with the product and its agents: `tests/system/test_restore.py`.
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
from accelerators.workflows import command_results
from cyborgweb.database.postgres import PostgresError, program
from cyborgweb.models import Maintenance
from cyborgweb.server import after_restore, backup
from tests.accelerators.test_bind_commands import bound, ends, handle, one_open, state

__all__ = ["handle"]
pytestmark = pytest.mark.django_db
OLGA = Caller("olga", "", frozenset(), "")
PAST = datetime.now(UTC) - timedelta(hours=1)


def settle() -> None:
    after_restore.settle(OLGA, "restored from the backup of noon")


def test_a_backup_is_a_private_folder_with_the_database_and_the_secret_key(tmp_path: Path) -> None:
    told: list[int] = []
    made = tmp_path / "made"
    about = backup.take(made, told.append)
    assert {path.name for path in made.iterdir()} == {"backup.json", "database.dump", "secret-key"}
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert all(stat.S_IMODE((made / name).stat().st_mode) == 0o600 for name in ("database.dump", *about.files))
    lists = [program("pg_restore", about.postgresql), "--list", made / backup.DUMP]
    listed = subprocess.run(lists, capture_output=True, text=True, check=True).stdout
    assert "TABLE DATA public accelerators_acceleratorrequest" in listed
    assert backup.read(made) == about
    with pytest.raises(backup.BackupError, match="exists already"):
        backup.take(made, told.append)


def test_what_is_no_backup_or_of_a_later_release_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="is not a backup"):
        call_command("restore", str(tmp_path))
    later = {"taken_at": "2026-11-22T00:00:00Z", "postgresql": 17, "migrations": ["accelerators.9999_x"], "files": []}
    (tmp_path / backup.ABOUT).write_text(json.dumps(later))
    with pytest.raises(CommandError, match=r"by a later release, which has the migration accelerators\.9999_x"):
        call_command("restore", str(tmp_path))
    (tmp_path / backup.ABOUT).write_text("{}")
    with pytest.raises(CommandError, match="is not a backup of this release"):
        call_command("restore", str(tmp_path))


def test_nothing_is_restored_over_another_database() -> None:
    backup.has_tables(wanted=True)
    with pytest.raises(backup.BackupError, match="a backup is never restored over another database"):
        backup.has_tables(wanted=False)


def test_a_program_that_is_too_old_is_named_with_what_to_install() -> None:
    with pytest.raises(PostgresError, match="no pg_dump of PostgreSQL 99 or later found: apt install"):
        program("pg_dump", 99)


def test_L2_a_bind_that_was_under_way_waits_for_its_agent_however_old_the_backup_is(handle: AttachHandle) -> None:
    (request,) = bound()
    attach = one_open("attach")
    with conductor.writing():
        Command.objects.update(start_by=PAST, end_by=PAST)
        AcceleratorRequest.objects.update(deadline=PAST)
        conductor.record("test.aged", "system", "a test")
    settle()
    command_results.expire()
    binding.expire()
    assert state(request) == ("BindStarted", "")
    assert not Command.objects.filter(op="detach").exists(), "what the instance has by now would be taken away"
    ends(attach)
    assert state(request) == ("Bound", "")
    told = Event.objects.get(action="database.restored")
    assert (told.actor, told.changes) == ("olga", {"binds waiting for their agents": [None, 1]})


def test_no_number_is_given_out_twice_nobody_is_logged_in_and_all_is_read_only(
    handle: AttachHandle, client: Client, django_user_model: Any
) -> None:
    client.force_login(django_user_model.objects.create_superuser("olga"))
    bound()
    number = one_open("attach").id
    seen = client.get("/api/devices/").headers["ETag"]
    settle()
    assert not Session.objects.exists()
    assert "restored from the backup of noon" in Maintenance.objects.get().reason
    bound()
    assert Command.objects.latest("id").id > number + after_restore.AHEAD
    client.force_login(django_user_model.objects.get())
    assert client.get("/api/devices/", headers={"if-none-match": seen}).status_code == 200
    settle()
    assert Maintenance.objects.count() == 1
