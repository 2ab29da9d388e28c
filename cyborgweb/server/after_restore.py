"""What a restored database needs before anybody uses it: hosts, OpenStack and callers are of a later hour than it.

Called by `manage.py restore`, after `backup.load`, or alone where somebody restored by other means.
"""

from __future__ import annotations

from django.contrib.sessions.models import Session
from django.core.management import call_command
from django.db import connection

from accelerators import conductor
from accelerators.domain.caller import Caller
from accelerators.domain.states import Source
from cyborgweb.auth import read_only

AHEAD = 1_000_000
"""Numbers of rows that are passed over: those given out after the backup, which agents and callers may still name."""
LATER = 2**40
"""What is added to every generation, so that no ETag of before is one of now."""
NUMBERS = """
SELECT setval(format('%%I.%%I', schemaname, sequencename)::regclass, coalesce(last_value, 0) + %s)
FROM pg_sequences WHERE schemaname = current_schema() AND data_type = 'bigint'::regtype
"""
PATIENCE = "1 day"
ASKED_AGAIN = f"""
UPDATE accelerators_command SET start_by = now() + interval '{PATIENCE}', end_by = now() + interval '{PATIENCE}',
  updated_at = now()
WHERE ended_at IS NULL AND answered_at IS NULL AND op IN ('attach', 'detach')
"""
"""What was under way for instances has long ended on its host. Its agent knows the command, runs none twice, and says
how it ended; were its time over here, what an instance got meanwhile would be taken away from it again."""
WAITS = f"""
UPDATE accelerators_acceleratorrequest SET deadline = now() + interval '{PATIENCE} 1 minute' WHERE state = 'BindStarted'
"""
"""Longer than its command has, whose end says why."""


def settle(by: Caller, reason: str) -> None:
    """Bring it up to this release's tables, and make it safe to start on: numbers and generations go on above all that
    were ever told, binds that were under way wait for their agents, nobody is logged in, and everything is read only
    until a person has looked. Harmless when done twice.
    """
    call_command("migrate", verbosity=0, interactive=False, skip_checks=True)
    with conductor.writing():
        with connection.cursor() as cursor:
            cursor.execute(NUMBERS, [AHEAD])
            cursor.execute("UPDATE generation SET value = value + %s", [LATER])
            cursor.execute(ASKED_AGAIN)
            cursor.execute(WAITS)
            again = cursor.rowcount
        Session.objects.all().delete()
        changes = {"binds waiting for their agents": [None, again]} if again else {}
        conductor.record("database.restored", Source.SYSTEM, by.name, changes=changes, reason=reason)
    read_only.switch(True, by, reason, Source.SYSTEM)
