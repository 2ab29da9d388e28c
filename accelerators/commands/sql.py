"""SQL statements of `command_queue` and `command_endings`.

They are raw SQL because each writes any number of commands, every one with values of its own, and some also write
devices and events in the same statement. The ORM would need a statement for each table.
"""

from accelerators.conductor_sql import build_event_insert

_INSERT_EVENTS = build_event_insert("""
SELECT {source} AS source, {actor} AS actor, m.request_id, 'command.' || {action} AS action, m.uuid AS subject,
  m.op || ' ' || m.device_name AS subject_name, h.name AS host, {changes} AS changes, {reason} AS reason
FROM {rows} m JOIN accelerators_host h ON h.id = m.host_id {more}""")

INSERT_COMMANDS = f"""
WITH x AS (SELECT * FROM jsonb_to_recordset(%(rows)s::jsonb) AS x(n int, op text, host bigint, device uuid,
    handle bigint, part bigint, arguments jsonb, exclusive bool, request uuid, actor text, reason text, source text,
    start_s int, more_s int) LIMIT %(count)s::bigint),
made AS (
  INSERT INTO accelerators_command (uuid, host_id, device_id, device_name, op, arguments, exclusive, request, actor,
    request_id, reason, state, start_by, end_by, percent, progress, outcome, text, detail, report_epoch, report_seq,
    report_hash)
  SELECT gen_random_uuid(), h.id, d.id, coalesce(left(d.model || ' ' || coalesce(d.address, d.key), 255), ''), x.op,
    jsonb_strip_nulls(jsonb_build_object('driver', d.driver, 'key', d.key, 'deployable', p.name, 'uuid', t.uuid,
      'handle', CASE WHEN t.id IS NULL THEN NULL
        ELSE jsonb_build_object('attach_type', t.attach_type, 'info', t.attach_info) END)) || x.arguments,
    x.exclusive, x.request, x.actor, %(request_id)s::text, x.reason,
    CASE WHEN x.arguments ? 'wanted' THEN 'preparing' ELSE 'queued' END,
    statement_timestamp() + x.start_s * interval '1 second',
    statement_timestamp() + (x.start_s + x.more_s) * interval '1 second', 0, '', '', '', '{{}}', 0, 0, ''
  FROM x LEFT JOIN accelerators_attachhandle t ON t.id = x.handle
  LEFT JOIN accelerators_deployable p ON p.id = coalesce(t.deployable_id, x.part)
  LEFT JOIN accelerators_device d
    ON d.id = coalesce(p.device_id, (SELECT v.id FROM accelerators_device v WHERE v.uuid = x.device))
  JOIN accelerators_host h ON h.id = coalesce(d.host_id, x.host)
  ORDER BY x.n RETURNING *
), busy AS (
  UPDATE accelerators_device d SET busy_with = m.uuid, generation = d.generation + 1, updated_at = now() FROM made m
  WHERE d.id = m.device_id AND m.exclusive
), logged AS ({
    _INSERT_EVENTS.format(
        source="%(source)s::text",
        actor="m.actor",
        action="'ordered'",
        changes="jsonb_build_object('state', jsonb_build_array(NULL, m.state), 'op', jsonb_build_array(NULL, m.op))",
        reason="m.reason",
        rows="made",
        more="",
    )
}) SELECT * FROM made ORDER BY id
"""
"""Insert commands, mark their devices busy, record the events. Device and handle arguments are read from their rows."""

# The next statements select commands by pairs, because an agent can only answer commands of its own host (promise X1).
MARK_TAKEN = """
UPDATE accelerators_command c SET state = 'taken', taken_at = now(), updated_at = now()
FROM unnest(%(hosts)s::bigint[], %(numbers)s::bigint[]) AS x(host, number)
WHERE c.id = x.number AND c.host_id = x.host AND c.state = 'queued'
"""

STORE_PROGRESS = """
UPDATE accelerators_command c SET state = 'started', started_at = coalesce(c.started_at, now()),
  taken_at = coalesce(c.taken_at, now()), percent = x.percent, progress = x.text, updated_at = now()
FROM jsonb_to_recordset(%(rows)s::jsonb) AS x(host bigint, number bigint, percent int, text text)
WHERE c.id = x.number AND c.host_id = x.host AND c.state IN ('queued', 'taken', 'started') AND c.answered_at IS NULL
RETURNING c.uuid::text
"""

_UPDATE_WITH_ANSWERS = """
WITH x AS (SELECT * FROM jsonb_to_recordset(%(rows)s::jsonb) AS x(host bigint, number bigint, outcome text, text text,
  detail jsonb, epoch bigint, seq bigint, hash text))
UPDATE accelerators_command c SET answered_at = now(), updated_at = now(), detail = x.detail, {sets} FROM x
WHERE c.id = x.number AND c.host_id = x.host AND c.answered_at IS NULL AND {which}
"""

STORE_ANSWERS = _UPDATE_WITH_ANSWERS.format(
    sets="outcome = x.outcome, text = x.text, report_epoch = x.epoch, report_seq = x.seq, report_hash = x.hash",
    which="c.state IN ('queued', 'taken', 'started')",
)
"""Store answers. Only the first answer to a command counts, and only if it comes from the command's own host."""

STORE_LATE_ANSWERS = f"""
WITH m AS ({
    _UPDATE_WITH_ANSWERS.format(
        sets="outcome = x.outcome,"
        " text = concat_ws(', ', c.text || '; its agent answered later: ' || x.outcome, nullif(x.text, ''))",
        which="c.state IN ('expired', 'unknown')",
    )
} RETURNING c.*
), logged AS ({
    _INSERT_EVENTS.format(
        source="'agent'",
        actor="h.name",
        action="'answered'",
        changes="jsonb_build_object('outcome', jsonb_build_array(NULL, m.outcome))",
        reason="m.text",
        rows="m",
        more="",
    )
}) SELECT id, outcome FROM m
"""
"""Note answers to commands that have already ended as expired or unknown, with an event each. Nobody waits for them."""

MARK_IMAGE_READY = """
UPDATE accelerators_command c SET state = 'queued', updated_at = now(), progress = '',
  arguments = c.arguments || jsonb_build_object('image', %(image)s::jsonb)
WHERE c.id = %(number)s::bigint AND c.state = 'preparing' AND c.answered_at IS NULL RETURNING c.host_id
"""
"""Add the image to a command's arguments. It returns the host, for which the ORM would need a second statement."""

END_COMMANDS = f"""
WITH x AS (SELECT * FROM jsonb_to_recordset(%(rows)s::jsonb) AS x(id bigint, was text, state text, text text,
  is_repetition bool)),
done AS (
  UPDATE accelerators_command c SET state = x.state, text = x.text, ended_at = clock_timestamp(), updated_at = now(),
    percent = CASE x.state WHEN 'succeeded' THEN 100 ELSE c.percent END
  FROM x WHERE c.id = x.id AND c.ended_at IS NULL RETURNING c.*
), free AS (
  UPDATE accelerators_device d SET busy_with = NULL, updated_at = now() FROM done WHERE d.busy_with = done.uuid
) {
    _INSERT_EVENTS.format(
        source="CASE WHEN m.answered_at IS NULL THEN 'system' ELSE 'agent' END",
        actor="m.actor",
        action="m.state",
        changes="jsonb_build_object('state', jsonb_build_array(x.was, m.state), 'seconds', jsonb_build_array(NULL,"
        " round(extract(epoch FROM m.ended_at - m.created_at), 1)))",
        reason="concat_ws('; ', nullif(m.reason, ''), nullif(m.text, ''))",
        rows="done",
        more="JOIN x ON x.id = m.id AND x.is_repetition IS NOT TRUE",
    )
}"""
"""End commands, free their devices, record the events, except for repeated questions with the same answer as before."""
