"""Prepares a restored database for use: hosts, OpenStack and callers have a later state than the database.

It must run after `backup.restore_dump`, and also after a restore by other means.
"""

from __future__ import annotations

from django.contrib.sessions.models import Session
from django.core.management import call_command
from django.db import connection

from accelerators import conductor
from accelerators.audit import sealing
from accelerators.audit.signing import AuditKeyError
from accelerators.domain.caller import Caller
from accelerators.domain.diff import RESTORED_BOOT
from accelerators.domain.states import EventSource
from cyborgweb.auth import read_only
from cyborgweb.server import backup

SEQUENCE_SKIP = 1_000_000
"""Minimum of numbers that each sequence skips: agents and callers may still name rows that were numbered after the
backup."""
GENERATION_SKIP = 2**40
"""Minimum that is added to every generation, so that no ETag from before the restore is valid after it."""
ADVANCE_SEQUENCES = """
SELECT setval(format('%%I.%%I', schemaname, sequencename)::regclass,
  greatest(coalesce(last_value, 0) + %s, (extract(epoch FROM clock_timestamp()) * 1000)::bigint))
FROM pg_sequences WHERE schemaname = current_schema() AND data_type = 'bigint'::regtype
"""
"""Lets each sequence go on from the present UNIX time in milliseconds. If the same backup is restored again, the
numbers are above those that were given out after the first restore."""
ADVANCE_GENERATIONS = """
UPDATE generation SET value = greatest(value + %s, (extract(epoch FROM clock_timestamp()) * 1000)::bigint)
"""
"""Lets each generation go on from the present UNIX time in milliseconds, for the same reason."""
EXTENSION = "1 day"
EXTEND_COMMANDS = f"""
UPDATE accelerators_command SET start_by = now() + interval '{EXTENSION}', end_by = now() + interval '{EXTENSION}',
  updated_at = now()
WHERE ended_at IS NULL AND answered_at IS NULL AND op IN ('attach', 'detach')
"""
"""Extends the time limits of unfinished attach and detach commands. Such a command has long ended on its host. The
agent knows the command, does not run it twice, and reports its result. If the command had timed out here before,
an instance would lose the accelerator that it got in the meantime."""
EXTEND_BINDS = f"""
UPDATE accelerators_acceleratorrequest SET deadline = now() + interval '{EXTENSION} 1 minute' WHERE state =
'BindStarted'
"""
"""Extends the deadline of unfinished binds. It is later than the limit of the bind's command, because the command's
result gives the reason if it fails."""
FORGET_BOOTS = "UPDATE accelerators_host SET applied_hash = '', boot_id = %s WHERE boot_id <> ''"
"""Lets the next report of each host be compared in full, and its programs be forgotten, because devices may have been
programmed since the backup. Hosts whose agents send no boot id are left out."""
EXTEND_RELEASES = f"""
UPDATE accelerators_releasedhandle SET ask_until = now() + interval '{EXTENSION}' WHERE ask_until IS NOT NULL
"""
"""Extends the time that released handles may wait for their hosts, so that no device is quarantined before its host was
asked."""


def prepare_restored_database(caller: Caller, reason: str) -> str:
    """Make the restored database safe to start on: migrate it, then change it in one transaction.

    Sequences and generations skip far beyond all values that were given out after the backup. Unfinished binds, attach
    and detach commands get a day to end. The bitstreams that devices were programmed with are forgotten at the next
    report. All login sessions are deleted. The event `database.restored` is recorded with `caller` and `reason`, and a
    signed seal says the same. Then everything is made read only, until a person has checked it, and the product may be
    started. It may be run twice without harm. Returns why the seal could not be made, '' if it was made or no event is
    sealed yet. Raises RefusedError INVALID for an unusable reason, when the other changes are already committed.
    """
    call_command("migrate", verbosity=0, interactive=False, skip_checks=True)
    with conductor.writing():
        with connection.cursor() as cursor:
            cursor.execute(ADVANCE_SEQUENCES, [SEQUENCE_SKIP])
            cursor.execute(ADVANCE_GENERATIONS, [GENERATION_SKIP])
            cursor.execute(EXTEND_COMMANDS)
            cursor.execute(EXTEND_RELEASES)
            cursor.execute(EXTEND_BINDS)
            extended_binds = cursor.rowcount
            cursor.execute(FORGET_BOOTS, [RESTORED_BOOT])
        Session.objects.all().delete()
        changes = {"binds waiting for their agents": [None, extended_binds]} if extended_binds else {}
        conductor.record_event("database.restored", EventSource.SYSTEM, caller.name, changes=changes, reason=reason)
    try:
        sealing.record_restore(caller.name, reason)
        unsealed_because = ""
    except AuditKeyError as error:
        unsealed_because = str(error)
    read_only.switch_read_only(True, caller, reason, EventSource.SYSTEM)
    backup.forget_unfinished_restore()
    return unsealed_because
