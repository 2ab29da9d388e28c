"""Correct claims and forget released handles once for each statement, and quarantine what cannot be corrected.

The triggers of `0002` and `0004` wrote once for each row, even if nothing had to be written, so that a report of many
devices updated the row of its generation as often. A correction that met another claim was dropped without a trace.

The files of `0002` and `0004` stay as they are: a database that has applied them and a new one get the same functions
and triggers from this migration, which replaces them.
"""

from pathlib import Path

from django.db import migrations

LOCK_TABLES = """
SET LOCAL lock_timeout = '3s';
LOCK TABLE accelerators_acceleratorrequest, accelerators_releasedhandle, accelerators_host, accelerators_device,
  accelerators_deployable, accelerators_attachhandle
"""
"""Lock all tables that the migration alters, in the order of `0004`."""


class Migration(migrations.Migration):
    dependencies = [("accelerators", "0005_index_hosts_without_applied_report")]

    operations = [
        migrations.RunSQL(LOCK_TABLES),
        migrations.RunSQL((Path(__file__).with_name("sql") / "claim_corrections.sql").read_text()),
    ]
