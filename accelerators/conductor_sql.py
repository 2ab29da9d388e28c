"""SQL of the conductor: write many events or intents in one statement, on the hot path of every merge."""

from __future__ import annotations


def build_event_insert(rows: str, at: str = "clock_timestamp()") -> str:
    """Build the statement that inserts an event for each row of the SELECT `rows`. No other statement inserts events.

    `rows` has the columns source, actor, request_id, action, subject, subject_name, host, changes and reason. NULL
    stands for the source 'agent' and for an empty request id. The type of the subject is the first word of the action.
    `at` is the SQL expression of the time, over the rows `e`.
    Statements of requests and commands contain this one, so that a bind or a batch of commands does not need a second
    statement for its events.
    """
    return f"""INSERT INTO accelerators_event (at, source, actor, request_id, action, subject_type, subject,
  subject_name, host, changes, reason)
SELECT {at}, coalesce(e.source, 'agent'), e.actor, coalesce(e.request_id, ''), e.action,
  split_part(e.action, '.', 1), e.subject, left(e.subject_name, 255), e.host, e.changes, e.reason
FROM ({rows}) e"""


INSERT_EVENTS = build_event_insert("""SELECT * FROM jsonb_to_recordset(%s::jsonb) AS x(source text, actor text,
  request_id text, action text, subject uuid, subject_name text, host text, changes jsonb, reason text)""")
"""Insert events that are passed as one JSON array; `conductor.build_event` builds its elements."""

UPSERT_INTENTS = """
INSERT INTO accelerators_intent AS t (uuid, kind, key, payload, attempts, last_error)
SELECT gen_random_uuid(), x.kind, x.key, x.payload, 0, ''
FROM jsonb_to_recordset(%s::jsonb) AS x(kind text, key text, payload jsonb)
ON CONFLICT (kind, key) DO UPDATE SET payload = excluded.payload, next_at = now(), updated_at = now()
"""
"""Raise intents in one statement. A merge raises hundreds: it is raw SQL for the reason given in `merge_sql`."""
INSERT_MISSING_INTENTS = UPSERT_INTENTS.partition("ON CONFLICT")[0] + "ON CONFLICT (kind, key) DO NOTHING\n"
"""Raise intents like UPSERT_INTENTS, but leave those that exist as they are."""
