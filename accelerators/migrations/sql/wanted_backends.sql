-- Backends of drivers, a row each: those that the last report of a host described, and those that are sections of the
-- wanted settings of a driver that is installed there. The columns of `backends.sql` come first, unchanged, because a
-- view can only be replaced by one that has more columns at its end.
CREATE OR REPLACE VIEW accelerators_backend AS
SELECT hashtextextended(k.key, 0) & 9223372036854775807 AS id, k.key,
  (h.name || ' ' || b.driver || ' ' || b.name) COLLATE "C" AS place, h.name AS host, b.driver COLLATE "C" AS driver,
  b.name COLLATE "C" AS name, coalesce(r.seen ->> 'kind', w.section ->> 'kind', '') AS kind,
  coalesce(r.seen -> 'labels', CASE WHEN jsonb_typeof(w.section -> 'labels') = 'object' THEN w.section -> 'labels' END,
    '{}') AS labels,
  coalesce(r.seen ->> 'error', '') AS error, coalesce((r.seen ->> 'since')::timestamptz, wish.updated_at) AS since,
  coalesce(r.seen -> 'services', '[]') AS services,
  (SELECT count(*) FROM accelerators_device v WHERE v.host_id = h.id AND v.driver = b.driver AND v.backend = b.name)
    AS devices,
  s.state,
  CASE s.state
    WHEN 'failing' THEN r.seen ->> 'error'
    WHEN 'disabled' THEN CASE WHEN wish.enabled THEN 'It is disabled in its settings.'
      ELSE 'Its driver is disabled on this host.' END
    WHEN 'waiting' THEN CASE
      WHEN h.stale_since IS NOT NULL THEN 'It is configured, but the agent of the host is not heard from.'
      WHEN h.drivers -> b.driver ->> 'error' <> '' THEN 'It is configured, but its driver fails: '
        || (h.drivers -> b.driver ->> 'error')
      WHEN coalesce((h.drivers -> b.driver ->> 'generation')::bigint, 0) <> wish.generation
        THEN 'It is configured, but the agent does not run the driver with these settings yet.'
      ELSE 'It is configured, but its driver has not reported it yet.' END
    ELSE '' END AS reason,
  w.section AS settings, coalesce(wish.generation, 0) AS generation
FROM accelerators_host h
CROSS JOIN LATERAL (
  SELECT d.key AS driver, one.key AS name FROM jsonb_each(h.drivers) d
    CROSS JOIN LATERAL jsonb_object_keys(d.value -> 'backends') one(key)
  UNION SELECT v.driver, one.key FROM accelerators_driverwish v
    CROSS JOIN LATERAL jsonb_object_keys(
      CASE WHEN jsonb_typeof(v.settings -> 'backends') = 'object' THEN v.settings -> 'backends' ELSE '{}' END) one(key)
    WHERE v.host_id = h.id AND v.installed
) b(driver, name)
CROSS JOIN LATERAL (SELECT (h.uuid::text || ':' || b.driver || ':' || b.name) COLLATE "C" AS key) k
LEFT JOIN accelerators_driverwish wish ON wish.host_id = h.id AND wish.driver = b.driver
CROSS JOIN LATERAL (SELECT h.drivers -> b.driver -> 'backends' -> b.name AS seen) r
CROSS JOIN LATERAL (
  SELECT CASE WHEN wish.installed AND jsonb_typeof(wish.settings -> 'backends') = 'object'
    THEN wish.settings -> 'backends' -> b.name END AS section
) w
CROSS JOIN LATERAL (
  SELECT CASE WHEN r.seen ->> 'error' <> '' THEN 'failing' WHEN r.seen IS NOT NULL THEN 'answering'
    WHEN NOT wish.enabled OR w.section -> 'enabled' = 'false' THEN 'disabled' ELSE 'waiting' END AS state
) s;
