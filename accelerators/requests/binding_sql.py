"""SQL statements of `binding`. The parameter `project` is NULL for a caller who sees the requests of every project.

They are raw SQL because they lock rows, or write requests and their events in one statement.
"""

from accelerators.conductor_sql import build_event_insert
from accelerators.domain.offer import IS_OFFERED_SQL

VISIBLE_CONDITION = "(%(project)s::text IS NULL OR q.project_id = %(project)s::text)"
"""Condition: the caller may see the request that is aliased `q` (promise X4)."""

_INSERT_EVENTS = build_event_insert("""
SELECT {source} AS source, %(actor)s::text AS actor, %(request_id)s::text AS request_id,
  'request.' || {action} AS action, m.uuid AS subject, coalesce(m.profile_name, '') AS subject_name,
  coalesce(m.hostname, '') AS host, {changes} AS changes, {reason} AS reason FROM {rows} m""")

INSERT_REQUESTS = f"""
WITH made AS (
  INSERT INTO accelerators_acceleratorrequest (uuid, project_id, state, profile_id, group_id, "group", fault, label)
  SELECT gen_random_uuid(), %(project)s::text, 'Initial', p.id, g.index, p.groups::jsonb -> g.index, '', ''
  FROM accelerators_deviceprofile p CROSS JOIN unnest(%(groups)s::int[]) WITH ORDINALITY AS g(index, place)
  WHERE p.id = %(profile)s::bigint AND p.name = %(name)s::text
    AND p.updated_at IS NOT DISTINCT FROM %(updated_at)s::timestamptz
  ORDER BY g.place RETURNING id, uuid, hostname, %(name)s::text AS profile_name, project_id, group_id
), logged AS ({
    _INSERT_EVENTS.format(
        source="'api'",
        action="'created'",
        changes="jsonb_build_object('state', jsonb_build_array(NULL, 'Initial'),"
        " 'project_id', jsonb_build_array(NULL, m.project_id),"
        " 'group', jsonb_build_array(NULL, m.group_id))",
        reason="''",
        rows="made",
    )
}) SELECT uuid FROM made ORDER BY id
"""
"""Create one request per entry of `groups` (indexes of the profile's groups), each with an event. Creates and returns
nothing if the profile was renamed, changed or deleted since the caller read it."""

LOCK_INSTANCES = "SELECT pg_advisory_xact_lock(%(lock)s::int, hashtext(i)) FROM unnest(%(instances)s::text[]) AS i"
"""Take an advisory lock for each instance until the end of the transaction, so that an instance has one bind at a time.
Pass the ids sorted: then two binds cannot deadlock."""

_SELECT_REQUESTS = """
SELECT q.uuid::text, q.id, q.state, q."group", q.instance_uuid::text, q.attach_handle_id, t.attach_type,
  q.project_id
FROM accelerators_acceleratorrequest q LEFT JOIN accelerators_attachhandle t ON t.id = q.attach_handle_id
"""

LOCK_REQUESTS = (
    f"{_SELECT_REQUESTS} WHERE q.uuid = ANY(%(uuids)s::uuid[]) AND {VISIBLE_CONDITION} ORDER BY q.id FOR UPDATE OF q"
)

"""Lock the requests with these uuids, by id; only those that the caller may see."""

LOCK_REQUESTS_OF_INSTANCE = (
    f"{_SELECT_REQUESTS} WHERE q.instance_uuid = %(instance)s::uuid AND {VISIBLE_CONDITION}"
    " ORDER BY q.id FOR UPDATE OF q"
)
"""Lock the requests of an instance, by id; only those that the caller may see."""

SELECT_INSTANCE_WITH_REQUESTS = f"""
SELECT q.instance_uuid::text FROM accelerators_acceleratorrequest q
WHERE q.instance_uuid = ANY(%(instances)s::uuid[]) AND {VISIBLE_CONDITION} LIMIT 1
"""
"""Return one of these instances that already has a request, if there is one."""

FROM_FREE_HANDLES = f"""
FROM accelerators_attachhandle t
JOIN accelerators_deployable p ON p.id = t.deployable_id JOIN accelerators_device d ON d.id = p.device_id
WHERE p.missing_since IS NULL AND t.missing_since IS NULL AND {IS_OFFERED_SQL} AND d.busy_with IS NULL
  AND t.attach_type <> 'DEV'
  AND NOT EXISTS (SELECT FROM accelerators_acceleratorrequest r WHERE r.attach_handle_id = t.id)
  AND NOT EXISTS (SELECT FROM accelerators_releasedhandle w WHERE w.handle_id = t.id)
"""
"""FROM and WHERE clauses: the handles `t` that a request can get now, with their deployables `p` and devices `d`."""
_RELEASED_HANDLES = "accelerators_releasedhandle w JOIN accelerators_attachhandle u ON u.id = w.handle_id"
OFFERED_COUNT = f"""least({{free}}, greatest(p.num_accelerators - {{held}}
  - CASE WHEN p.id IN (SELECT u.deployable_id FROM {_RELEASED_HANDLES})
    THEN (SELECT count(*) FROM {_RELEASED_HANDLES} WHERE u.deployable_id = p.id) ELSE 0 END, 0))"""
"""Expression: the number of handles of the deployable `p` that requests can still get. It is at most the number that
Placement can still allocate: the deployable's total without the `held` handles and without the released ones, which are
reserved there. More handles than that may be free. The CASE lets the database read the few released handles once, and
count only where there are any."""
_IS_ON_HOST = "d.host_id = (SELECT id FROM accelerators_host WHERE name = %(host)s::text)"
"""Condition: the device `d` is on the host that the bind names."""
_FROM_UNHELD_HANDLES_OF_PROVIDER = f"{FROM_FREE_HANDLES} AND p.rp_uuid = %(rp)s::uuid AND {_IS_ON_HOST}"
"""Like FROM_FREE_HANDLES, for one provider of one host."""
_FROM_FREE_HANDLES_OF_PROVIDER = f"""{_FROM_UNHELD_HANDLES_OF_PROVIDER}
  AND (NOT %(check_claims)s::bool OR NOT EXISTS (
    SELECT FROM accelerators_acceleratorrequest r WHERE r.claim && accelerators_claim_of_handle(t.id)
    UNION ALL SELECT FROM accelerators_releasedhandle w WHERE w.claim && accelerators_claim_of_handle(t.id)))"""
"""Like _FROM_UNHELD_HANDLES_OF_PROVIDER, but `check_claims` also leaves out handles whose PCI function a request holds
through another handle, or that was released through another handle and is not confirmed as unused.

The database refuses to give those anyway (`request_one_per_function`), so the check, which costs up to 0.1 ms a handle,
is needed only to find another handle after such a refusal."""

_LOCK_FREE_HANDLES = f"""
SELECT t.id, t.attach_type, p.id, p.bitstream_id::text, d.id {_FROM_FREE_HANDLES_OF_PROVIDER} ORDER BY t.id LIMIT
%(count)s::bigint FOR NO KEY UPDATE OF t SKIP LOCKED
"""
RESERVE_HANDLES = f"{_LOCK_FREE_HANDLES} FOR SHARE OF d SKIP LOCKED"
"""Lock at most `count` free handles of a provider on its host, and share-lock their devices: a device cannot leave the
offer before the bind is committed. Locked rows are skipped, so the statement never waits for a lock."""
RESERVE_HANDLES_EXCLUSIVELY = f"{_LOCK_FREE_HANDLES} FOR NO KEY UPDATE OF d SKIP LOCKED"
"""Like RESERVE_HANDLES, but lock the devices exclusively, for a bind that may program them: no other bind can use them
until it is committed."""

SELECT_SHORTAGE_FACTS = f"""
SELECT p.id, d.state, d.busy_with IS NOT NULL, (SELECT count(*) {_FROM_FREE_HANDLES_OF_PROVIDER}),
  EXISTS (SELECT FROM accelerators_attachhandle t WHERE t.deployable_id = p.id AND t.attach_type = 'DEV'),
  {_IS_ON_HOST}, d.status,
  (SELECT count(*) FROM accelerators_releasedhandle w JOIN accelerators_attachhandle t ON t.id = w.handle_id
    WHERE t.deployable_id = p.id),
  %(check_claims)s::bool AND EXISTS (SELECT {_FROM_UNHELD_HANDLES_OF_PROVIDER} AND EXISTS (
    SELECT FROM accelerators_acceleratorrequest r WHERE r.claim && accelerators_claim_of_handle(t.id))),
  %(check_claims)s::bool AND EXISTS (SELECT {_FROM_UNHELD_HANDLES_OF_PROVIDER} AND EXISTS (
    SELECT FROM accelerators_releasedhandle w WHERE w.claim && accelerators_claim_of_handle(t.id)))
FROM accelerators_deployable p
JOIN accelerators_device d ON d.id = p.device_id
WHERE p.rp_uuid = %(rp)s::uuid ORDER BY 6 DESC NULLS LAST, p.missing_since NULLS FIRST, d.state <> 'ready'
  LIMIT 1
"""
"""Find out why RESERVE_HANDLES returned too few handles of a provider. Returns the deployable's id, the state of its
device, whether a command uses the device alone, the number of free handles, whether it has device nodes, whether it is
on the host that the bind names (NULL if there is no such host), the device's health, the number of released handles
that wait for their host, and, if `check_claims`, whether a request holds the function of one of its handles through
another device, and whether such a function was released through another device and waits for its host. No row if there
is no such provider."""

MOVE_REQUESTS = f"""
WITH x AS (SELECT x.*, (SELECT hostname FROM accelerators_acceleratorrequest r WHERE r.id = x.id) AS had_hostname
  FROM jsonb_to_recordset(%(rows)s::jsonb) AS x(id bigint, was text, state text, hostname text,
    rp uuid, instance uuid, project text, deployable bigint, handle bigint, wait int, fault text, failure text,
    had_instance uuid, had_handle bigint, had_project text) LIMIT %(count)s::bigint),
moved AS (
  UPDATE accelerators_acceleratorrequest q SET state = x.state, hostname = x.hostname, device_rp_uuid = x.rp,
    instance_uuid = x.instance, project_id = coalesce(x.project, q.project_id), deployable_id = x.deployable,
    attach_handle_id = x.handle, deadline = statement_timestamp() + x.wait * interval '1 second',
    fault = coalesce(x.fault, ''), updated_at = now()
  FROM x WHERE q.id = x.id AND q.state = x.was
  RETURNING q.uuid, x.was, q.state, q.fault, coalesce(q.hostname, x.had_hostname) AS hostname, x.had_instance,
    q.instance_uuid, x.had_handle, q.attach_handle_id, x.had_project, q.project_id,
    x.failure, q.device_rp_uuid,
    (SELECT name FROM accelerators_deviceprofile f WHERE f.id = q.profile_id) AS profile_name)
{
    _INSERT_EVENTS.format(
        source="%(source)s::text",
        action="CASE m.state WHEN 'BindStarted' THEN 'bind_started' WHEN 'BindFailed' THEN 'bind_failed'"
        " ELSE lower(m.state) END",
        changes="jsonb_build_object('state', jsonb_build_array(m.was, m.state),"
        " 'instance_uuid', jsonb_build_array(m.had_instance, m.instance_uuid),"
        " 'attach_handle', jsonb_build_array(m.had_handle, m.attach_handle_id))"
        " || CASE WHEN m.had_project <> m.project_id"
        " THEN jsonb_build_object('project_id', jsonb_build_array(m.had_project, m.project_id))"
        " ELSE jsonb_build_object() END"
        " || CASE WHEN m.failure IS NULL THEN jsonb_build_object()"
        " ELSE jsonb_build_object('failure', jsonb_build_array(NULL, m.failure),"
        " 'device_rp_uuid', jsonb_build_array(NULL, m.device_rp_uuid)) END",
        reason="m.fault",
        rows="moved",
    )
}
"""
"""Move requests (compare-and-set on `was`) and write one event for each request that moved. The row count is the number
of events, so the caller sees whether all requests moved.

The LIMIT removes no rows. It tells the planner that there are few; without it the planner would scan the whole table of
requests."""

DELETE_REQUESTS = f"""
WITH gone AS (
  DELETE FROM accelerators_acceleratorrequest q WHERE q.id = ANY(%(ids)s::bigint[])
  RETURNING q.uuid, q.state, q.hostname, q.instance_uuid, q.attach_handle_id,
    (SELECT name FROM accelerators_deviceprofile f WHERE f.id = q.profile_id) AS profile_name)
{
    _INSERT_EVENTS.format(
        source="'api'",
        action="'deleted'",
        changes="jsonb_build_object('state', jsonb_build_array(m.state, NULL),"
        " 'instance_uuid', jsonb_build_array(m.instance_uuid, NULL),"
        " 'attach_handle', jsonb_build_array(m.attach_handle_id, NULL))",
        reason="''",
        rows="gone",
    )
}
"""

_SELECT_WAITING = """
SELECT q.uuid::text, q.id, q.hostname, q.device_rp_uuid::text, q.instance_uuid::text, q.deployable_id,
  q.attach_handle_id, t.attach_type, p.device_id,
  extract(epoch FROM clock_timestamp() - coalesce(q.updated_at, q.created_at))::float8, q."group"::text
FROM accelerators_acceleratorrequest q JOIN accelerators_attachhandle t ON t.id = q.attach_handle_id
JOIN accelerators_deployable p ON p.id = t.deployable_id WHERE q.state = 'BindStarted'
"""

LOCK_OVERDUE = f"""{_SELECT_WAITING} AND q.deadline < statement_timestamp()
ORDER BY q.id LIMIT %(count)s::bigint FOR UPDATE OF q SKIP LOCKED
"""
"""Lock at most `count` requests in state BindStarted whose deadline has passed; skip those that are locked."""

LOCK_WAITING = f"""{_SELECT_WAITING} AND (q.uuid = ANY(%(uuids)s::uuid[])
  OR q.instance_uuid = ANY(%(instances)s::uuid[]) AND p.device_id = ANY(%(devices)s::bigint[]))
ORDER BY q.id FOR UPDATE OF q
"""
"""Lock the requests in state BindStarted that are in `uuids`, or that belong to one of `instances` and hold a handle of
one of `devices`."""
