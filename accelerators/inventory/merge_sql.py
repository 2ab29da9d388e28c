"""SQL statements of `merge.merge_reports`: one that locks, one that loads, one upsert per table, and a few updates.

All rows of a statement are passed as one JSON parameter (measured: 2.4 to 3 times as fast as arrays, 4 times as fast as
the ORM's bulk upsert). `ORDER BY x.n` inserts them in the order in which the driver named them, whatever join order the
planner chooses, because the v2 API lists them by id.
"""

SELECT_ENABLED_RULES = """
SELECT coalesce(json_agg(json_build_array(name, action, host, driver, vendor, model, type) ORDER BY "order", id),
  '[]')::text
FROM accelerators_admissionrule WHERE enabled
"""

LOCK_HOSTS = f"""
WITH locked AS (SELECT FROM accelerators_host WHERE id = ANY(%s) ORDER BY id FOR NO KEY UPDATE)
SELECT ({SELECT_ENABLED_RULES}), (
    SELECT coalesce(json_object_agg(o.provider, h.name), '{{}}')::text
    FROM accelerators_providerowner o JOIN accelerators_host h ON h.id = o.host_id WHERE o.provider = ANY(%s::uuid[]))
FROM (SELECT count(*) FROM locked) AS all_of_them
"""
"""Lock the hosts; return the enabled admission rules, and the owners of these providers (provider → name of its host).

This cannot be part of SELECT_STORED_HOSTS: a statement sees only rows committed before it began, not those of a
transaction for whose lock it waited. `FOR NO KEY UPDATE` still lets others insert rows that refer to a host, such as
commands.
"""

SELECT_LOCKED_HOSTS = """
WITH free_hosts AS (SELECT id FROM accelerators_host WHERE id = ANY(%(hosts)s) FOR NO KEY UPDATE SKIP LOCKED),
  free_devices AS (SELECT id FROM accelerators_device WHERE host_id = ANY(%(hosts)s) FOR NO KEY UPDATE SKIP LOCKED)
SELECT id FROM accelerators_host WHERE id = ANY(%(hosts)s) AND id NOT IN (SELECT id FROM free_hosts)
UNION
SELECT host_id FROM accelerators_device WHERE host_id = ANY(%(hosts)s) AND id NOT IN (SELECT id FROM free_devices)
"""
"""Find the hosts of which another transaction has locked the row, or the row of a device."""

SELECT_STORED_HOSTS = """
SELECT json_build_array(h.id, h.uuid, h.name, h.applied_epoch, h.applied_seq, h.drivers, coalesce((
  SELECT json_agg(json_build_array(d.uuid, d.key, d.state, d.returns_to,
    json_build_array(d.driver, d.type, d.vendor, d.model, d.address, d.std_board_info, d.vendor_board_info,
                     d.numa_node, d.kernel_driver, d.status, d.status_reason, d.to_install, d.acts, d.changeable,
                     d.sized_by, d.backend, d.bridges, d.physical_function, d.subsystem),
    coalesce((
      SELECT json_agg(json_build_array(p.id, p.uuid, p.name, p.num_accelerators, p.driver_name,
        p.missing_since IS NOT NULL,
        coalesce((SELECT json_agg(json_build_array(a.id, a.key, a.value, a.origin))
                  FROM accelerators_attribute a WHERE a.deployable_id = p.id), '[]'),
        coalesce((SELECT json_agg(json_build_array(t.id, t.attach_type, t.attach_info, t.missing_since IS NOT NULL,
                    t.in_use))
                  FROM accelerators_attachhandle t WHERE t.deployable_id = p.id), '[]'),
        p.bitstream_id, p.bitstream_in_flash))
      FROM accelerators_deployable p WHERE p.device_id = d.id), '[]'), d.state_since,
    coalesce((SELECT json_agg(t.attach_info) FROM accelerators_deployable p
              JOIN accelerators_attachhandle t ON t.deployable_id = p.id WHERE p.device_id = d.id AND (
                EXISTS (SELECT FROM accelerators_acceleratorrequest r WHERE r.attach_handle_id = t.id)
                OR EXISTS (SELECT FROM accelerators_releasedhandle w WHERE w.handle_id = t.id))), '[]'),
    d.drain_to))
  FROM accelerators_device d WHERE d.host_id = h.id), '[]'), h.boot_id, h.node, coalesce((
  SELECT json_agg(o.node)
  FROM (VALUES (h.node), (nullif(regexp_replace(h.node, '[^a-zA-Z0-9_-]', '_', 'g'), h.node))) AS own(node)
  JOIN accelerators_host o ON o.node = own.node OR (o.node >= own.node || '_' AND o.node < own.node || '`')
  WHERE o.id <> h.id), '[]'))::text
FROM accelerators_host h WHERE h.id = ANY(%s) AND h.removing_since IS NULL ORDER BY h.id
"""
"""The hosts, their devices, and the nodes that `provider_names.describe_wrong_name` needs.

'`' is the character after '_', so the nodes in that range begin with the host's node and '_'."""

LOCK_DEVICES = "SELECT FROM accelerators_device WHERE uuid = ANY(%s::uuid[]) ORDER BY id FOR NO KEY UPDATE"
"""Lock devices so that no request can be bound to them until the commit. Waits for binds that are not committed."""

SELECT_HELD_DEVICES = """
SELECT DISTINCT d.uuid::text FROM accelerators_device d JOIN accelerators_deployable p ON p.device_id = d.id
JOIN accelerators_attachhandle t ON t.deployable_id = p.id WHERE d.uuid = ANY(%s::uuid[]) AND (
  EXISTS (SELECT FROM accelerators_acceleratorrequest r WHERE r.attach_handle_id = t.id)
  OR EXISTS (SELECT FROM accelerators_releasedhandle w WHERE w.handle_id = t.id))
"""

UPDATE_DEVICE_KEYS = """
UPDATE accelerators_device t SET key = x.key, updated_at = now()
FROM jsonb_to_recordset(%s::jsonb) AS x(uuid uuid, key text) WHERE t.uuid = x.uuid
"""

UPSERT_DEVICES = """
INSERT INTO accelerators_device AS t (uuid, host_id, key, driver, type, vendor, model, address, std_board_info,
  vendor_board_info, numa_node, kernel_driver, status, status_reason, to_install, acts, changeable, sized_by, backend,
  bridges, physical_function, subsystem, state, state_reason, state_by)
SELECT x.uuid, x.host, x.key, x.driver, x.type, x.vendor, x.model, x.address, x.std_board_info, x.vendor_board_info,
  x.numa_node, x.kernel_driver, x.status, x.status_reason, x.to_install, x.acts, x.changeable, x.sized_by, x.backend,
  x.bridges, x.physical_function, x.subsystem, coalesce(x.state, 'inactive'),
  coalesce(x.reason, 'found by its driver'), coalesce(x.who, 'agent')
FROM jsonb_to_recordset(%s::jsonb) AS x(uuid uuid, host bigint, key text, driver text, type text, vendor text,
  model text, address text, std_board_info text, vendor_board_info text, numa_node int, kernel_driver text,
  status text, status_reason text, to_install text, acts text, changeable text, sized_by text, backend text,
  bridges text, physical_function text, subsystem text, state text, reason text, who text)
ON CONFLICT (host_id, key) DO UPDATE SET driver = excluded.driver, type = excluded.type, vendor = excluded.vendor,
  model = excluded.model, address = excluded.address, std_board_info = excluded.std_board_info,
  vendor_board_info = excluded.vendor_board_info, numa_node = excluded.numa_node,
  kernel_driver = excluded.kernel_driver, status_reason = excluded.status_reason,
  to_install = excluded.to_install, acts = excluded.acts, changeable = excluded.changeable,
  sized_by = excluded.sized_by, backend = excluded.backend, bridges = excluded.bridges,
  physical_function = excluded.physical_function, subsystem = excluded.subsystem,
  status_since = CASE WHEN t.status = excluded.status THEN t.status_since ELSE now() END,
  status = excluded.status, updated_at = now()
"""

UPDATE_DEVICE_STATES = """
UPDATE accelerators_device t SET state = x.state, returns_to = x.returns_to, drain_to = x.drain_to,
  state_reason = x.reason, state_since = CASE WHEN t.state = x.state THEN t.state_since ELSE now() END,
  state_by = 'agent', updated_at = now()
FROM jsonb_to_recordset(%s::jsonb) AS x(uuid uuid, state text, returns_to text, drain_to text, reason text)
WHERE t.uuid = x.uuid
"""

UPSERT_DEPLOYABLES = """
INSERT INTO accelerators_deployable AS t (uuid, device_id, name, num_accelerators, driver_name, rp_uuid)
SELECT x.uuid, d.id, x.name, x.num, x.driver_name, CASE d.state WHEN 'inactive' THEN NULL ELSE x.rp END
FROM ROWS FROM (jsonb_to_recordset(%s::jsonb) AS (uuid uuid, device uuid, name text, num int, driver_name text,
  rp uuid)) WITH ORDINALITY AS x(uuid, device, name, num, driver_name, rp, n)
JOIN accelerators_device d ON d.uuid = x.device
ORDER BY x.n
ON CONFLICT (device_id, name) DO UPDATE SET num_accelerators = excluded.num_accelerators,
  driver_name = excluded.driver_name, rp_uuid = coalesce(t.rp_uuid, excluded.rp_uuid), missing_since = NULL,
  updated_at = now()
"""

UPSERT_ATTRIBUTES = """
INSERT INTO accelerators_attribute AS t (uuid, deployable_id, key, value, origin)
SELECT gen_random_uuid(), p.id, x.key, x.value, 'agent'
FROM ROWS FROM (jsonb_to_recordset(%s::jsonb) AS (deployable uuid, key text, value text)) WITH ORDINALITY
  AS x(deployable, key, value, n)
JOIN accelerators_deployable p ON p.uuid = x.deployable
ORDER BY x.n
ON CONFLICT (deployable_id, key) DO UPDATE SET value = excluded.value, updated_at = now() WHERE t.origin = 'agent'
"""

UPSERT_HANDLES = """
INSERT INTO accelerators_attachhandle AS t (uuid, deployable_id, attach_type, attach_info, in_use)
SELECT gen_random_uuid(), p.id, x.type, x.info, x.use
FROM ROWS FROM (jsonb_to_recordset(%s::jsonb) AS (deployable uuid, type text, info text, use text)) WITH ORDINALITY
  AS x(deployable, type, info, use, n)
JOIN accelerators_deployable p ON p.uuid = x.deployable
ORDER BY x.n
ON CONFLICT (deployable_id, attach_info) DO UPDATE SET attach_type = excluded.attach_type, in_use = excluded.in_use,
  missing_since = NULL, updated_at = now()
"""

DELETE_ATTRIBUTES = "DELETE FROM accelerators_attribute WHERE id = ANY(%s)"
MARK_DEPLOYABLES_MISSING = (
    "UPDATE accelerators_deployable SET missing_since = now(), updated_at = now() WHERE id = ANY(%s)"
)
END_PROGRAMS = """
UPDATE accelerators_deployable SET bitstream_id = NULL, bitstream_in_flash = FALSE, updated_at = now()
WHERE id = ANY(%s)
"""
MARK_HANDLES_MISSING = (
    "UPDATE accelerators_attachhandle SET missing_since = now(), updated_at = now() WHERE id = ANY(%s)"
)

INCREMENT_GENERATIONS = "UPDATE accelerators_device SET generation = generation + 1 WHERE uuid = ANY(%s::uuid[])"

UPDATE_HOSTS = """
UPDATE accelerators_host t SET applied_epoch = x.epoch, applied_seq = x.seq, applied_hash = x.hash,
  drivers = x.drivers, boot_id = x.boot_id, reported_at = now(), updated_at = now()
FROM jsonb_to_recordset(%s::jsonb) AS x(id bigint, epoch bigint, seq bigint, hash text, drivers jsonb, boot_id text)
WHERE t.id = x.id
"""
