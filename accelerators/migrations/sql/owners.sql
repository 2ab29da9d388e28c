-- A node name and a resource provider belong to one host. The database refuses a second owner, whoever writes.

CREATE FUNCTION accelerators_provider_of(name text) RETURNS uuid LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
-- Compute the id of the provider with this name: uuid3 (RFC 9562, 5.3) with the namespace of DNS names, as
-- `accelerators.domain.provider_ids` does.
  SELECT overlay(overlay(x.digest PLACING '3' FROM 13 FOR 1)
    PLACING to_hex(('x' || substr(x.digest, 17, 1))::bit(4)::int & 3 | 8) FROM 17 FOR 1)::uuid
  FROM (SELECT md5('\x6ba7b8109dad11d180b400c04fd430c8'::bytea || convert_to(name, 'UTF8'))) AS x(digest)
$$;

CREATE FUNCTION accelerators_own_provider() RETURNS trigger LANGUAGE plpgsql AS $$
-- Make the deployable's host the owner of its provider, and of the provider that its name stands for. Refuse the row if
-- another host owns one of them.
DECLARE
  host CONSTANT bigint := (SELECT host_id FROM accelerators_device WHERE id = NEW.device_id);
  claimed uuid;
  owner bigint;
BEGIN
  FOREACH claimed IN ARRAY ARRAY[accelerators_provider_of(NEW.name), NEW.rp_uuid] LOOP
    CONTINUE WHEN claimed IS NULL;
    SELECT o.host_id INTO owner FROM accelerators_providerowner o WHERE o.provider = claimed;
    IF owner IS NULL THEN
      INSERT INTO accelerators_providerowner (provider, host_id) VALUES (claimed, host) ON CONFLICT DO NOTHING;
      SELECT o.host_id INTO owner FROM accelerators_providerowner o WHERE o.provider = claimed;
    END IF;
    IF owner <> host THEN
      RAISE EXCEPTION 'provider % (%) belongs to another host', claimed, NEW.name
        USING ERRCODE = 'unique_violation', CONSTRAINT = 'provider_one_host';
    END IF;
  END LOOP;
  RETURN NEW;
END $$;

-- Existing rows: a host owns the providers whose names begin with its node; other providers belong to the host that has
-- had them longest.
INSERT INTO accelerators_providerowner (provider, host_id)
SELECT DISTINCT ON (x.provider) x.provider, d.host_id
FROM accelerators_deployable p JOIN accelerators_device d ON d.id = p.device_id JOIN accelerators_host h ON h.id = d.host_id
CROSS JOIN LATERAL (VALUES (accelerators_provider_of(p.name)), (p.rp_uuid)) AS x(provider)
WHERE x.provider IS NOT NULL
ORDER BY x.provider, starts_with(p.name, h.node || '_') DESC, p.id;

-- The devices of a host that names providers of another host are quarantined and lose these provider ids.
WITH taken AS (
  UPDATE accelerators_deployable p SET rp_uuid = NULL, updated_at = now()
  FROM accelerators_device d
  WHERE d.id = p.device_id AND EXISTS (
    SELECT FROM accelerators_providerowner o
    WHERE o.provider IN (p.rp_uuid, accelerators_provider_of(p.name)) AND o.host_id <> d.host_id)
  RETURNING p.device_id, p.name),
moved AS (
  UPDATE accelerators_device d SET drain_to = NULL, updated_at = now(), state_by = 'upgrade', state_since = now(),
    state = CASE d.state WHEN 'missing' THEN 'missing' ELSE 'quarantined' END,
    returns_to = CASE d.state WHEN 'missing' THEN 'quarantined' END,
    state_reason = format('its provider %s belongs to another host: give each host a node name of its own', t.name)
  FROM (SELECT t.device_id, min(t.name) AS name, max(b.state) AS state, max(b.returns_to) AS returns_to,
      max(b.drain_to) AS drain_to FROM taken t JOIN accelerators_device b ON b.id = t.device_id GROUP BY 1) t
  WHERE d.id = t.device_id AND d.state NOT IN ('retired', 'quarantined') AND d.returns_to IS DISTINCT FROM 'quarantined'
  RETURNING d.uuid, d.model, d.host_id, d.state, d.returns_to, d.state_reason, t.state AS had_state,
    t.returns_to AS had_returns_to, t.drain_to AS had_drain_to)
INSERT INTO accelerators_event (source, actor, request_id, action, subject_type, subject, subject_name, host, changes,
  reason)
SELECT 'system', 'upgrade', '', 'device.quarantined', 'device', m.uuid, m.model, h.name,
  jsonb_build_object('state', jsonb_build_array(m.had_state, m.state),
    'returns_to', jsonb_build_array(m.had_returns_to, m.returns_to),
    'drain_to', jsonb_build_array(m.had_drain_to, NULL)), m.state_reason
FROM moved m JOIN accelerators_host h ON h.id = m.host_id;

CREATE TRIGGER accelerators_own_provider BEFORE INSERT ON accelerators_deployable
  FOR EACH ROW EXECUTE FUNCTION accelerators_own_provider();
CREATE TRIGGER accelerators_own_new_provider BEFORE UPDATE OF rp_uuid, name, device_id ON accelerators_deployable
  FOR EACH ROW WHEN (OLD.rp_uuid IS DISTINCT FROM NEW.rp_uuid OR OLD.name <> NEW.name OR OLD.device_id <> NEW.device_id)
  EXECUTE FUNCTION accelerators_own_provider();

-- Of the hosts with the same node name, the oldest keeps it. The others get a name that no agent uses, so that their
-- agents are refused until they have a node name of their own.
WITH moved AS (
  UPDATE accelerators_host h SET node = left(h.node, 230) || '~' || h.id, applied_hash = '', updated_at = now()
  FROM accelerators_host b
  WHERE b.id = h.id AND EXISTS (SELECT FROM accelerators_host o WHERE o.node = h.node AND o.id < h.id)
  RETURNING h.uuid, h.name, b.node AS had_node, h.node)
INSERT INTO accelerators_event (source, actor, request_id, action, subject_type, subject, subject_name, host, changes,
  reason)
SELECT 'system', 'upgrade', '', 'host.changed', 'host', m.uuid, m.name, m.name,
  jsonb_build_object('node', jsonb_build_array(m.had_node, m.node)),
  'an older host has the same node name: set CYBORG_HOST_NODE on this host to a name of its own'
FROM moved m;
