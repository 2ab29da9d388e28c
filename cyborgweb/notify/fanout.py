"""The job `messages`: write exactly one delivery of each new event for every subscription that matches it.

Events are read in the order of the transactions that wrote them, and only those older than the oldest transaction that
is still running. An event that has a low number and is committed late is therefore neither skipped nor read twice. The
deliveries and the position of the reader are written in one transaction. A batch costs two statements, whatever the
number of events and subscriptions.
"""

from __future__ import annotations

from typing import Any

from django.db import connection

from accelerators.runtime import jobs
from accelerators.runtime.after_commit import call_after_commit
from cyborgweb.models.event_types import JOB_BY_WAY
from cyborgweb.models.notify import Reader
from cyborgweb.notify import owners

JOB_NAME = "messages"
MAX_EVENTS = 1000
"""Events per statement. If a hundred subscriptions want all of them, a batch writes a hundred thousand rows."""

SELECT_OLDEST_TRANSACTION = (
    "SELECT coalesce(min(xact_start), now()) FROM pg_stat_activity WHERE datname = current_database()"
)
"""Start of the oldest running transaction. No event that is not yet visible can be older. Must be queried before
FAN_OUT_EVENTS, whose snapshot sets the horizon. Plain SQL, because it reads a view of PostgreSQL's statistics.
"""

_KINDS_OF_EVENT = """array_remove(ARRAY[
  CASE WHEN e.action = 'request.bound' THEN 'request.bound' WHEN e.action = 'request.bind_failed' THEN 'request.failed'
    WHEN e.action = 'request.unbound' OR e.action = 'request.deleted' AND e.changes -> 'state' ->> 0 = 'Bound'
    THEN 'request.unbound' END,
  CASE WHEN e.subject_type = 'device' AND e.changes -> 'state' ->> 1 IN ('ready', 'failed', 'missing', 'quarantined')
    THEN 'device.' || (e.changes -> 'state' ->> 1) END,
  CASE WHEN e.subject_type = 'device' AND e.changes -> 'status' ->> 0 <> e.changes -> 'status' ->> 1
    THEN 'device.health' END], NULL)"""

_NEW_EVENTS = f"""
moment AS (
  SELECT pg_snapshot_xmin(s)::text::bigint AS horizon, pg_snapshot_xmax(s)::text::bigint AS next
  FROM pg_current_snapshot() s
), new AS MATERIALIZED (
  SELECT x.transaction, e.id, e.at, e.action, e.subject, e.subject_name, e.host, e.changes, e.reason, k.kinds
  FROM accelerators_event e CROSS JOIN moment m
  CROSS JOIN LATERAL (SELECT m.next - (m.next - e.xmin::text::bigint) %% 4294967296 AS transaction) x
  CROSS JOIN LATERAL (SELECT {_KINDS_OF_EVENT} AS kinds) k
  WHERE e.at >= %(since)s AND e.subject_type IN ('request', 'device') AND k.kinds <> ARRAY[]::text[]
    AND x.transaction < m.horizon AND (%(transaction)s > m.next OR (x.transaction, e.id) > (%(transaction)s, %(event)s))
  ORDER BY x.transaction, e.id LIMIT %(batch)s
)"""

_MESSAGE_DATA = """
requests AS MATERIALIZED (
  -- A request that was deleted is known by what its events say of its project: found by subject, not from the newest.
  SELECT n.*, coalesce(q.project_id, (
      SELECT coalesce(c.changes -> 'project_id' ->> 1, c.changes -> 'project_id' ->> 0) FROM accelerators_event c
      WHERE c.subject = n.subject AND jsonb_exists(c.changes, 'project_id')
      ORDER BY c.at + interval '0' DESC, c.id DESC LIMIT 1
    )) AS project, d.type, coalesce(q.label, '') AS label,
    coalesce(q.instance_uuid::text, n.changes -> 'instance_uuid' ->> 0) AS instance
  FROM new n LEFT JOIN accelerators_acceleratorrequest q ON q.uuid = n.subject
  LEFT JOIN accelerators_deployable y ON y.id = q.deployable_id LEFT JOIN accelerators_device d ON d.id = y.device_id
  WHERE n.action LIKE 'request.%%'
), devices AS MATERIALIZED (
  SELECT n.*, d.id AS device, d.type, d.vendor, d.model, d.subsystem,
    coalesce(n.changes -> 'state' ->> 1, d.state) AS state,
    coalesce(n.changes -> 'status' ->> 1, d.status) AS status, d.status_reason
  FROM new n JOIN accelerators_device d ON d.uuid = n.subject WHERE n.action LIKE 'device.%%'
), held AS MATERIALIZED (
  SELECT v.id, v.at, v.kinds, v.host, q.project_id AS project, v.type, array_agg(q.label) AS labels,
    jsonb_build_object('device', v.subject, 'type', v.type, 'vendor', v.vendor, 'model', v.model,
      'subsystem', v.subsystem, 'state', v.state, 'health', v.status,
      'requests', jsonb_agg(q.uuid ORDER BY q.id)) AS data
  FROM devices v JOIN accelerators_deployable y ON y.device_id = v.device
  JOIN accelerators_attachhandle t ON t.deployable_id = y.id
  JOIN accelerators_acceleratorrequest q ON q.attach_handle_id = t.id AND q.updated_at <= v.at
  GROUP BY v.id, v.at, v.kinds, v.host, v.subject, v.type, v.vendor, v.model, v.subsystem, v.state,
    v.status, q.project_id
), seen AS MATERIALIZED (
  -- What each project may see of what happened, and (everything) what who runs accelerators sees.
  SELECT r.id, r.at, r.kinds, r.host, r.project, r.type, ARRAY[r.label] AS labels, jsonb_build_object(
    'request', r.subject, 'project', r.project, 'profile', r.subject_name, 'instance', r.instance, 'host', r.host,
    'label', r.label, 'state', r.changes -> 'state' ->> 1, 'reason', r.reason) AS data, every.one AS everything
  FROM requests r CROSS JOIN (VALUES (false), (true)) AS every(one)
  UNION ALL SELECT h.id, h.at, h.kinds, h.host, h.project, h.type, h.labels, h.data, false FROM held h
  UNION ALL
  SELECT v.id, v.at, v.kinds, v.host, NULL, v.type,
    (SELECT array_agg(label) FROM held h, unnest(h.labels) AS l(label) WHERE h.id = v.id),
    jsonb_build_object('device', v.subject, 'name', v.subject_name, 'type', v.type, 'vendor', v.vendor,
    'model', v.model, 'subsystem', v.subsystem, 'host', v.host, 'state', v.state, 'health', v.status,
    'reason', CASE WHEN jsonb_exists(v.changes, 'status')
      THEN coalesce(nullif(v.status_reason, ''), v.reason) ELSE v.reason END), true
  FROM devices v
)"""

_INSERT_DELIVERIES = """
put AS (
  INSERT INTO cyborgweb_delivery (message, subscription_id, event, kind, at, data, progress, reader, delivered_at)
  SELECT gen_random_uuid(), s.id, z.id, k.kind, z.at, z.data,
    CASE s.way WHEN 'inbox' THEN 'delivered' ELSE 'waiting' END, CASE s.way WHEN 'inbox' THEN s.person ELSE '' END,
    CASE s.way WHEN 'inbox' THEN now() END
  FROM seen z JOIN cyborgweb_subscription s ON s.standing = 'active'
    AND (s.way <> 'email' OR s.confirmed_at IS NOT NULL)
    AND (s.scope = 'cloud') = z.everything AND (z.everything OR s.project_id = z.project)
    AND z.kinds && s.kinds::text[] AND z.at >= s.created_at
    AND (s.host = '' OR z.host LIKE translate(replace(s.host, '_', '\\_'), '*?', '%%_'))
    AND (s.type = '' OR s.type = z.type) AND (s.label = '' OR s.label = ANY(z.labels))
  LEFT JOIN auth_user u ON u.id = s.user_id
  CROSS JOIN LATERAL (SELECT kind FROM unnest(z.kinds) WITH ORDINALITY AS w(kind, place) WHERE kind = ANY(s.kinds)
    ORDER BY place LIMIT 1) k
  WHERE s.user_id IS NULL OR u.is_active
  ON CONFLICT (subscription_id, event) DO NOTHING RETURNING subscription_id
), moved AS (
  UPDATE cyborgweb_reader r SET
    transaction = CASE WHEN c.many THEN l.transaction ELSE m.horizon END, event = CASE WHEN c.many THEN l.id ELSE 0 END,
    since = CASE WHEN c.many THEN r.since ELSE %(under_way)s END
  FROM moment m CROSS JOIN (SELECT count(*) = %(batch)s AS many FROM new) c
  LEFT JOIN LATERAL (SELECT transaction, id FROM new ORDER BY transaction DESC, id DESC LIMIT 1) l ON true
  RETURNING c.many
)"""
FAN_OUT_EVENTS = f"""WITH {_NEW_EVENTS}, {_MESSAGE_DATA}, {_INSERT_DELIVERIES} SELECT coalesce(bool_or(many), false),
  ARRAY(SELECT DISTINCT way FROM cyborgweb_subscription WHERE id IN (SELECT subscription_id FROM put)) FROM moved"""
"""Reads one batch of events, decides what each project and the operators may see of them, writes the deliveries and
moves the reader, all in one statement. Returns whether there may be more events, and the delivery ways that now have
work.

Plain SQL, because every part must see the same snapshot of transactions, and the ORM would need several statements.
"""


def run() -> None:
    """Run the job `messages`: call `fan_out_batch` until no event is left. Each batch has its own transaction. Before,
    it ends the subscriptions whose owner may not have them any more.
    """
    owners.end_lost_by_users()
    jobs.run_steps(JOB_NAME, fan_out_batch)


def fan_out_batch() -> bool:
    """Write the deliveries of at most `MAX_EVENTS` new events, and store the new position in `Reader`.

    After the commit, the delivery jobs that got work are woken. Returns True if there may be more events. Must run in a
    transaction.
    """
    reader, _ = Reader.objects.get_or_create(pk=1)
    position: dict[str, Any] = {"transaction": reader.transaction, "event": reader.event, "since": reader.since}
    with connection.cursor() as cursor:
        cursor.execute(SELECT_OLDEST_TRANSACTION)
        (under_way,) = cursor.fetchone()
        cursor.execute(FAN_OUT_EVENTS, position | {"batch": MAX_EVENTS, "under_way": under_way})
        may_be_more, ways = cursor.fetchone()
    for way in JOB_BY_WAY.keys() & set(ways):
        call_after_commit(jobs.enqueue_job, JOB_BY_WAY[way])
    return bool(may_be_more)
