"""What events are searched by: the words of their action, actor, host, subject and request id, by their beginnings.

One inverted index: 27 bytes an event, where an index per column took 30 to 80 each. It is built one month after the
other (about 11 s a million events) while events are written, and begun again where it was broken off.
"""

from typing import Any

from django.db import migrations
from django.db.backends.base.schema import BaseDatabaseSchemaEditor

WORDS = """
CREATE OR REPLACE FUNCTION accelerators_event_words(action text, actor text, host text, subject text, request text)
RETURNS tsvector LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
  SELECT array_to_tsvector(array_remove(string_to_array(lower(
    action || ' ' || split_part(action, '.', 2) || ' ' || actor || ' ' || host || ' ' || subject || ' ' || request),
    ' '), ''))
$$
"""
PARENT = """
CREATE INDEX IF NOT EXISTS event_words ON ONLY accelerators_event
  USING gin (accelerators_event_words(action, actor, host, subject_name, request_id))
"""
WITHOUT = """
SELECT i.inhrelid::regclass::text FROM pg_inherits i
WHERE i.inhparent = 'accelerators_event'::regclass AND NOT EXISTS (
  SELECT FROM pg_inherits child JOIN pg_index x ON x.indexrelid = child.inhrelid
  WHERE child.inhparent = 'event_words'::regclass AND x.indrelid = i.inhrelid)
ORDER BY 1
"""
"""Months whose part of the index is not there: one that was made after the index has it by itself."""


def build(apps: Any, schema_editor: BaseDatabaseSchemaEditor) -> None:
    """Month by month, without keeping anybody from writing; what a broken attempt left is made anew."""
    with schema_editor.connection.cursor() as cursor:
        cursor.execute(WORDS)
        cursor.execute(PARENT)
        cursor.execute(WITHOUT)
        for (month,) in cursor.fetchall():
            cursor.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {month}_words")
            cursor.execute(
                f"CREATE INDEX CONCURRENTLY {month}_words ON {month}"
                " USING gin (accelerators_event_words(action, actor, host, subject_name, request_id))"
            )
            cursor.execute(f"ALTER INDEX event_words ATTACH PARTITION {month}_words")


def drop(apps: Any, schema_editor: BaseDatabaseSchemaEditor) -> None:
    """Back."""
    with schema_editor.connection.cursor() as cursor:
        cursor.execute("DROP INDEX IF EXISTS event_words")
        cursor.execute("DROP FUNCTION IF EXISTS accelerators_event_words(text, text, text, text, text)")


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("accelerators", "0012_attachments")]
    operations = [migrations.RunPython(build, drop)]
