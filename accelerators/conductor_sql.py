"""SQL of the conductor: write many events or intents in one statement, on the hot path of every merge."""

from __future__ import annotations

INSERT_EVENTS = """
INSERT INTO accelerators_event (at, source, actor, request_id, action, subject_type, subject, subject_name, host,
  changes, reason)
SELECT clock_timestamp(), coalesce(x.source, 'agent'), x.actor, coalesce(x.request_id, ''), x.action, x.subject_type,
  x.subject, x.subject_name, x.host, x.changes, x.reason
FROM jsonb_to_recordset(%s::jsonb) AS x(source text, actor text, request_id text, action text, subject_type text,
  subject uuid, subject_name text, host text, changes jsonb, reason text)
"""

UPSERT_INTENTS = """
INSERT INTO accelerators_intent AS t (uuid, kind, key, payload, attempts, last_error)
SELECT gen_random_uuid(), x.kind, x.key, x.payload, 0, ''
FROM jsonb_to_recordset(%s::jsonb) AS x(kind text, key text, payload jsonb)
ON CONFLICT (kind, key) DO UPDATE SET payload = excluded.payload, next_at = now(), updated_at = now()
"""
