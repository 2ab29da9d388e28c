"""SQL statements that fill the database with hosts, devices and events for trials of its size.

They are raw SQL because PostgreSQL generates the rows itself: a hundred thousand devices take seconds instead of
minutes.
"""

from __future__ import annotations

from accelerators.conductor_sql import build_event_insert

COUNT_HOSTS = """
SELECT count(*) FILTER (WHERE NOT starts_with(name, 'seed-')),
  coalesce(max(substring(name FROM '^seed-([0-9]{1,9})\\.')::bigint), 0)
FROM accelerators_host
"""
"""Counts the hosts that were not seeded, and returns the highest number of a seeded host."""

INSERT_HOSTS = """
INSERT INTO accelerators_host (uuid, name, node, reported_at, applied_hash, applied_epoch, applied_seq, drivers)
SELECT gen_random_uuid(), x.name, x.name, now(), md5(x.name), 1, 1, jsonb_build_object('generic_driver',
  jsonb_build_object('error', '', 'since', to_jsonb(now()), 'devices', 0, 'faults', '[]'::jsonb, 'state', 'ok',
    'version', '1', 'generation', 0, 'backends', jsonb_build_object(
      'cards', jsonb_build_object('kind', 'pci', 'labels', '{}'::jsonb, 'error', '', 'since', to_jsonb(now()),
        'services', '[{"name": "reset", "version": "1", "state": "ready", "reason": "", "limits": {}}]'::jsonb),
      'nics', jsonb_build_object('kind', 'pci', 'labels', '{}'::jsonb, 'since', to_jsonb(now()), 'services',
        '[]'::jsonb, 'error', CASE n %% 100 WHEN 0 THEN 'the tool did not answer within 5 s' ELSE '' END))))
FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n,
  LATERAL (SELECT 'seed-' || lpad(n::text, 5, '0') || '.example' AS name) AS x
"""
"""Every hundredth host has a backend that fails."""

CREATE_SEEDED_HOSTS = """
CREATE TEMPORARY TABLE seeded_host ON COMMIT DROP AS
SELECT row_number() OVER (ORDER BY id) - 1 AS place, id, name, node FROM accelerators_host
WHERE substring(name FROM '^seed-([0-9]{1,9})\\.')::bigint BETWEEN %(first)s AND %(last)s
"""

INSERT_DEVICES = """
WITH wanted AS (
  SELECT n, h.id AS host_id, h.node, n / %(hosts)s AS slot, n %% 7 AS kind
  FROM generate_series(%(start)s::bigint, %(end)s::bigint - 1) AS n JOIN seeded_host h ON h.place = n %% %(hosts)s),
device AS (
  INSERT INTO accelerators_device (uuid, host_id, key, driver, type, vendor, model, address, backend, status,
    status_reason, state, state_reason, state_by, numa_node, kernel_driver, std_board_info, vendor_board_info,
    to_install, acts, generation)
  SELECT gen_random_uuid(), w.host_id,
    CASE w.n %% 3 WHEN 0 THEN 'pci:' || a.address ELSE 'serial:SN' || lpad(w.host_id::text, 7, '0')
      || lpad(w.slot::text, 4, '0') END,
    'generic_driver', (ARRAY['GPU', 'GPU', 'FPGA', 'NIC', 'NIC', 'QAT', 'SSD'])[w.kind + 1],
    (ARRAY['10de', '1002', '10ee', '15b3', '8086', '8086', '144d'])[w.kind + 1],
    (ARRAY['20b5', '740f', '5000', 'a2d6', '1592', '4940', 'a80a'])[w.kind + 1],
    a.address, CASE WHEN w.kind IN (3, 4) THEN 'nics' ELSE 'cards' END,
    CASE WHEN w.n %% 1000 = 7 THEN 'failed' WHEN w.n %% 500 = 3 THEN 'degraded' ELSE 'ok' END,
    CASE WHEN w.n %% 1000 = 7 THEN 'it does not answer on the bus' WHEN w.n %% 500 = 3 THEN 'corrected errors'
      ELSE '' END,
    CASE w.n %% 5 WHEN 0 THEN 'inactive' WHEN 1 THEN 'maintenance' ELSE 'ready' END, 'seeded', 'seed', w.slot %% 2, '',
    '', '', '', 'health rescan', 0
  FROM wanted w, LATERAL (SELECT lpad(to_hex(w.slot / 8192), 4, '0') || ':' || lpad(to_hex(w.slot / 32 %% 256), 2, '0')
    || ':' || lpad(to_hex(w.slot %% 32), 2, '0') || '.0' AS address) AS a
  RETURNING id, host_id, type, model, address, state),
deployable AS (
  INSERT INTO accelerators_deployable (uuid, device_id, name, num_accelerators, driver_name, rp_uuid)
  SELECT gen_random_uuid(), d.id, x.name, 1, '',
    CASE WHEN %(with_providers)s AND d.state <> 'inactive' THEN accelerators_provider_of(x.name) END
  FROM device d JOIN seeded_host h ON h.id = d.host_id, LATERAL (SELECT h.node || '_' || d.address AS name) AS x
  RETURNING id, device_id),
attribute AS (
  INSERT INTO accelerators_attribute (uuid, deployable_id, key, value, origin)
  SELECT gen_random_uuid(), p.id, a.key, a.value, 'agent'
  FROM deployable p JOIN device d ON d.id = p.device_id, LATERAL (VALUES
    ('rc', CASE d.type WHEN 'GPU' THEN 'PGPU' WHEN 'FPGA' THEN 'FPGA' ELSE 'CUSTOM_' || d.type END),
    ('trait0', 'OWNER_CYBORG'), ('trait1', 'CUSTOM_PCI_PRODUCT_ID_' || upper(d.model))) AS a(key, value))
INSERT INTO accelerators_attachhandle (uuid, deployable_id, attach_type, attach_info)
SELECT gen_random_uuid(), p.id, 'PCI', format('{"bus": "%%s", "device": "%%s", "domain": "%%s", "function": "0"}',
  substr(d.address, 6, 2), substr(d.address, 9, 2), substr(d.address, 1, 4))
FROM deployable p JOIN device d ON d.id = p.device_id
"""
"""Each device has one deployable, with a resource class and two traits, and one attach handle. Two of three have a
serial number. As on a running site, the deployable of a device that has left `inactive` has the id of its resource
provider, unless `with_providers` is false."""

COUNT_DEVICES_OF_HOSTS = """
UPDATE accelerators_host h
SET drivers = jsonb_set(h.drivers, '{generic_driver,devices}', to_jsonb(c.devices))
FROM (SELECT host_id, count(*) AS devices FROM accelerators_device GROUP BY host_id) c
WHERE c.host_id = h.id AND h.id IN (SELECT id FROM seeded_host)
"""

CREATE_SEEDED_DEVICES = """
CREATE TEMPORARY TABLE seeded_device ON COMMIT DROP AS
SELECT row_number() OVER (ORDER BY d.id) - 1 AS place, d.uuid, d.model || ' ' || d.address AS name, h.name AS host
FROM accelerators_device d JOIN seeded_host h ON h.id = d.host_id;
CREATE UNIQUE INDEX ON seeded_device (place);
ANALYZE seeded_device
"""

INSERT_EVENTS = build_event_insert(
    """
  SELECT m.first + (n + 1)::float8 / %(events)s * (now() - m.first) AS at, v.source, coalesce(v.actor, d.host) AS actor,
    NULL AS request_id, 'device.' || v.verb AS action, d.uuid AS subject, d.name AS subject_name, d.host,
    jsonb_build_object('state', jsonb_build_array(v.state_before, v.state_after)) AS changes, 'seeded' AS reason
  FROM generate_series(%(start)s::bigint, %(end)s::bigint - 1) AS n
  JOIN seeded_device d ON d.place = n %% %(devices)s
  JOIN (VALUES (0, 'agent', NULL, 'found', NULL, 'inactive'),
      (1, 'person', 'olga', 'maintenance', 'inactive', 'maintenance'),
      (2, 'rule', 'all gpus', 'inactive', 'maintenance', 'inactive'))
    AS v(kind, source, actor, verb, state_before, state_after) ON v.kind = n / %(devices)s %% 3
  CROSS JOIN (SELECT date_trunc('month', now() AT TIME ZONE 'UTC') AT TIME ZONE 'UTC' AS first) AS m
  ORDER BY n""",
    at="e.at",
)
"""The events of a device follow each other, and all are in the present month, whose partition exists. No subscription
sends messages about them. The job `seals` seals them like all other events."""

ANALYZE = """
ANALYZE accelerators_host, accelerators_device, accelerators_deployable, accelerators_attribute,
  accelerators_attachhandle, accelerators_providerowner, accelerators_event
"""
