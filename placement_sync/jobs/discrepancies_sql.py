"""SQL statements of the job `faults`. Each processes a whole batch of hosts."""

SELECT_DUE_HOSTS = """
SELECT host_id, looked_at, statement_timestamp() FROM placement_sync_tree
WHERE compared_at IS NULL OR looked_at > compared_at OR compare_at <= statement_timestamp()
ORDER BY coalesce(compare_at, looked_at), host_id LIMIT %(count)s
"""

SELECT_PROVIDERS = """
SELECT w.uuid::text, w.host_id, w.seen ->> 'name', (w.seen ->> 'generation')::bigint, w.claims::text,
  (SELECT p.device_id FROM accelerators_deployable p WHERE p.rp_uuid = w.uuid
    ORDER BY p.missing_since NULLS FIRST LIMIT 1),
  EXISTS (SELECT FROM accelerators_deployable p JOIN accelerators_acceleratorrequest q ON q.deployable_id = p.id
    WHERE p.rp_uuid = w.uuid AND q.state = 'Bound')
FROM placement_sync_writtenprovider w WHERE w.host_id = ANY(%(hosts)s) AND w.seen IS NOT NULL ORDER BY w.uuid
"""

SELECT_HOLDINGS = """
SELECT q.uuid::text, d.host_id, q.device_rp_uuid::text, p.name, d.id, q.instance_uuid::text, q.state = 'Bound',
  coalesce(q.updated_at, q.created_at),
  CASE WHEN d.state IN ('missing', 'failed') THEN 'the device is ' || d.state || ': ' || d.state_reason
    WHEN d.status = 'failed' THEN 'the device has failed: ' || d.status_reason
    WHEN p.missing_since IS NOT NULL OR t.missing_since IS NOT NULL THEN 'what it holds is missing from the device'
    ELSE '' END
FROM accelerators_device d JOIN accelerators_deployable p ON p.device_id = d.id
JOIN accelerators_attachhandle t ON t.deployable_id = p.id
JOIN accelerators_acceleratorrequest q ON q.attach_handle_id = t.id
WHERE d.host_id = ANY(%(hosts)s) AND q.state IN ('BindStarted', 'Bound') AND q.instance_uuid IS NOT NULL
  AND q.device_rp_uuid IS NOT NULL ORDER BY q.id
"""

UPDATE_CLAIMS = """
UPDATE placement_sync_writtenprovider w SET claims = x.claims
FROM jsonb_to_recordset(%(rows)s::jsonb) AS x(uuid uuid, claims jsonb) WHERE w.uuid = x.uuid
"""

MARK_HOSTS_COMPARED = """
UPDATE placement_sync_tree t SET compared_at = x.looked_at,
  compare_at = CASE WHEN x.again THEN statement_timestamp() + make_interval(secs => %(again_s)s) END
FROM jsonb_to_recordset(%(rows)s::jsonb) AS x(host bigint, looked_at timestamptz, again boolean)
WHERE t.host_id = x.host
"""

INVALIDATE_CLAIMS = """
UPDATE placement_sync_writtenprovider SET claims = jsonb_set(claims, '{generation}', '-1')
WHERE host_id = ANY(%(hosts)s) AND claims IS NOT NULL
"""
