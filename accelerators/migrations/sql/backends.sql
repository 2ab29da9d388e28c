-- Backends and services of drivers, a row each. They are stored as JSON in `drivers` of their host, as the last report
-- described them.
CREATE VIEW accelerators_backend AS
SELECT hashtextextended(k.key, 0) & 9223372036854775807 AS id, k.key,
  (h.name || ' ' || d.key || ' ' || b.key) COLLATE "C" AS place, h.name AS host, d.key COLLATE "C" AS driver,
  b.key COLLATE "C" AS name, b.value ->> 'kind' AS kind, b.value -> 'labels' AS labels, b.value ->> 'error' AS error,
  (b.value ->> 'since')::timestamptz AS since, b.value -> 'services' AS services,
  (SELECT count(*) FROM accelerators_device v WHERE v.host_id = h.id AND v.driver = d.key AND v.backend = b.key)
    AS devices
FROM accelerators_host h CROSS JOIN LATERAL jsonb_each(h.drivers) d
CROSS JOIN LATERAL jsonb_each(d.value -> 'backends') b
CROSS JOIN LATERAL (SELECT (h.uuid::text || ':' || d.key || ':' || b.key) COLLATE "C" AS key) k;

CREATE VIEW accelerators_service AS
SELECT hashtextextended(k.key, 0) & 9223372036854775807 AS id, k.key,
  (b.place || ' ' || (s.value ->> 'name')) COLLATE "C" AS place, b.host, b.driver, b.name AS backend,
  s.value ->> 'name' AS name, s.value ->> 'version' AS version, s.value ->> 'state' AS state,
  s.value ->> 'reason' AS reason, s.value -> 'limits' AS limits
FROM accelerators_backend b CROSS JOIN LATERAL jsonb_array_elements(b.services) s
CROSS JOIN LATERAL (SELECT (b.key || ':' || (s.value ->> 'name')) COLLATE "C" AS key) k;
