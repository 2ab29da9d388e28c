"""`manage.py prepare`: migrate the database, and create the first login and a join token.

The supervisor runs it at every start.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import time
from pathlib import Path
from typing import Any

from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db import OperationalError, connection
from psycopg.conninfo import make_conninfo
from psycopg.errors import DeadlockDetected, LockNotAvailable

from accelerators import conductor
from accelerators.devices import admission_rules
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusedError
from accelerators.domain.states import EventSource
from accelerators.models import AdmissionRule, Event, Host
from accelerators.runtime import jobs
from agents import authentication
from agents.host.settings import AgentSettings, determine_host_names
from cyborgweb.database import libpq
from cyborgweb.server import backup
from cyborgweb.settings.keys import get_keys
from drivers.configuration import load_configuration
from drivers.files import write_private

MIGRATION_LOCK = 0x6D696772
MAX_MIGRATION_TRIES, MIGRATION_RETRY_S = 60, 1.0
"""How often a migration that cannot get its locks, or ends in a deadlock, is retried, and the seconds between tries.

Waiting longer for a lock instead would block the requests that are being served meanwhile.
"""


class Command(BaseCommand):
    """Migrate the database, and create the first login and a join token."""

    help = "Migrate the database, create the first login and a join token for this machine's agent, and print JSON."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the address for a join token, and whether to create the sample rule."""
        parser.add_argument(
            "--address",
            help="address at which this machine's agent reaches the server; without it, no join token is created",
        )
        parser.add_argument(
            "--sample-rules",
            action="store_true",
            help="create an admission rule for fake devices, if the installation is new",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Migrate the database, create what is missing, and print one line of JSON for the supervisor.

        Its keys are `login` (who can log in first, without a password), `login_file` (the file with the first login,
        '' if there is none), `login_is_new` (whether this call created the user), `join` (a new join token; '' without
        `--address`), `jobs` (each job's cluster, lock class and lock id) and `dsn` (the database's connection string,
        with its password). Raises CommandError if a restore was interrupted, and CommandError or OperationalError
        if the database cannot be migrated.
        """
        try:
            backup.refuse_unfinished_restore()
        except backup.BackupError as error:
            raise CommandError(str(error)) from None
        _migrate_database()
        if options["sample_rules"]:
            _create_sample_rule()
        path = get_keys().state_path / "first-login"
        with_keystone = get_keys().auth == "keystone"
        is_new = not with_keystone and _create_first_login(path)
        has_file = not with_keystone and path.exists()
        facts = {
            "login": "log in with your name and password in Keystone"
            if with_keystone
            else "log in as an existing user",
            "login_file": str(path) if has_file else "",
            "login_is_new": is_new,
            "join": _create_join_token(options["address"]) if options["address"] else "",
            "jobs": {name: (job.cluster, jobs.LOCK_CLASS, jobs.lock_id(name)) for name, job in jobs.JOBS.items()},
            "dsn": make_conninfo("", **libpq.get_connection_parameters()),
        }
        self.stdout.write(json.dumps(facts))


def _migrate_database() -> None:
    """Run the migrations under an advisory lock that this process keeps until it ends.

    The lock also prevents two processes from creating a first login. Waiting is done by retrying, not inside a
    statement: a waiting statement holds a snapshot, and an index built concurrently would wait for that snapshot.
    Raises CommandError if another process holds the lock for MAX_MIGRATION_TRIES × MIGRATION_RETRY_S seconds,
    OperationalError if a migration still cannot get its locks after that time, or fails otherwise.
    """
    for remaining_tries in range(MAX_MIGRATION_TRIES, -1, -1):
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_try_advisory_lock(%s)", [MIGRATION_LOCK])
            has_lock = cursor.fetchone()[0]
        try:
            if has_lock:
                call_command("migrate", verbosity=0, interactive=False, stdout=sys.stderr, skip_checks=True)
                return
        except OperationalError as error:
            if not (isinstance(error.__cause__, (LockNotAvailable, DeadlockDetected)) and remaining_tries):
                raise
        time.sleep(MIGRATION_RETRY_S)
    raise CommandError("another process has been migrating this database for a minute: check what it waits for")


def _create_first_login(path: Path) -> bool:
    """If there is no user yet, create the superuser `admin` with a new password and return True; otherwise False.

    `admin / PASSWORD` is written to the file `path`, which only its owner can read, and nowhere else. If a process
    ended after it had written the file and before it had created the user, the user gets the password of the file.
    """
    users = get_user_model()
    if users.objects.exists():
        return False
    stored = path.read_text().strip() if path.exists() else ""
    password = stored.partition(" / ")[2] or secrets.token_urlsafe(12)
    write_private(path, f"admin / {password}\n".encode())
    users.objects.create_superuser("admin", password=password)
    changes = {"is_superuser": [None, True]}
    conductor.record_event("user.created", EventSource.SYSTEM, "prepare", subject=(None, "admin"), changes=changes)
    return True


def _create_sample_rule() -> None:
    """Create an admission rule that makes devices of `fake_driver` ready, if the installation is new.

    Does nothing if there is a rule or a host, or if a rule was ever deleted, so that a deleted rule does not come back.
    """
    if AdmissionRule.objects.exists() or Host.objects.exists() or Event.objects.filter(action="rule.deleted").exists():
        return
    values = {"name": "fake-devices", "driver": "fake_driver", "action": "ready"}
    admission_rules.create_rule(values, Caller("prepare", "", frozenset(), ""), EventSource.SYSTEM)


def _create_join_token(address: str) -> str:
    """Create a join token for the agent of this machine, and return its text.

    `address` is where the agent reaches the server. The token is valid for CYBORG_JOIN_TOKEN_HOURS hours. An event is
    recorded. Returns '' while the host is being removed: its agent is then refused until it is gone.
    """
    host, _ = determine_host_names(load_configuration(AgentSettings, os.environ), None, "")
    try:
        return authentication.create_join_token(
            host, address=address, hours=get_keys().join_token_hours, created_by=authentication.AUTOMATIC_CREATOR
        )
    except RefusedError as refused:
        sys.stderr.write(f"No join token was made for the agent of this machine: {refused.text}\n")
        return ""
