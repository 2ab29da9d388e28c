-- The drivers of each host: those that it reported, those that are wanted there, and whether the two differ.
CREATE VIEW accelerators_hostdriver AS
SELECT ('x' || substr(md5(h.id || ' ' || k.driver), 1, 15))::bit(60)::bigint AS id,
  (h.uuid || ':' || k.driver) COLLATE "C" AS key, (h.name || ' ' || k.driver) COLLATE "C" AS place, h.id AS host_id,
  k.driver COLLATE "C" AS driver, s.seen, s.state, coalesce((s.seen ->> 'devices')::int, 0) AS devices, w.id AS wish_id,
  CASE WHEN w.id IS NULL THEN false
    ELSE coalesce((s.seen ->> 'generation')::bigint, 0) <> w.generation
      OR CASE WHEN w.installed AND w.enabled THEN s.state <> 'ok' ELSE s.state NOT IN ('disabled', 'absent') END
  END AS drifts
FROM accelerators_host h
CROSS JOIN LATERAL (
  SELECT jsonb_object_keys(h.drivers) UNION SELECT v.driver FROM accelerators_driverwish v WHERE v.host_id = h.id
) k(driver)
CROSS JOIN LATERAL (
  SELECT h.drivers -> k.driver AS seen, CASE WHEN NOT h.drivers ? k.driver THEN 'absent'
    WHEN h.drivers -> k.driver ->> 'state' <> '' THEN h.drivers -> k.driver ->> 'state'
    WHEN h.drivers -> k.driver ->> 'error' <> '' THEN 'failed' ELSE 'ok' END AS state
) s
LEFT JOIN accelerators_driverwish w ON w.host_id = h.id AND w.driver = k.driver;
