"""The order in which events are sealed, as an index: built one month after the other while events are written."""

from typing import Any

from django.db import migrations
from django.db.backends.base.schema import BaseDatabaseSchemaEditor

PARENT = "CREATE INDEX IF NOT EXISTS event_order ON ONLY accelerators_event (tx, id)"
WITHOUT = """
SELECT i.inhrelid::regclass::text FROM pg_inherits i
WHERE i.inhparent = 'accelerators_event'::regclass AND NOT EXISTS (
  SELECT FROM pg_inherits child JOIN pg_index x ON x.indexrelid = child.inhrelid
  WHERE child.inhparent = 'event_order'::regclass AND x.indrelid = i.inhrelid)
ORDER BY 1
"""
"""Months whose part of the index is not there: one that was made after the index has it by itself."""


def build(apps: Any, schema_editor: BaseDatabaseSchemaEditor) -> None:
    """Month by month, without keeping anybody from writing; what a broken attempt left is made anew."""
    with schema_editor.connection.cursor() as cursor:
        cursor.execute("SET lock_timeout = '3s'")
        cursor.execute(PARENT)
        cursor.execute("RESET lock_timeout")
        cursor.execute(WITHOUT)
        for (month,) in cursor.fetchall():
            cursor.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {month}_order")
            cursor.execute(f"CREATE INDEX CONCURRENTLY {month}_order ON {month} (tx, id)")
            cursor.execute(f"ALTER INDEX event_order ATTACH PARTITION {month}_order")


def drop(apps: Any, schema_editor: BaseDatabaseSchemaEditor) -> None:
    """Back."""
    with schema_editor.connection.cursor() as cursor:
        cursor.execute("DROP INDEX IF EXISTS event_order")


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("accelerators", "0014_seals")]
    operations = [migrations.RunPython(build, drop)]
