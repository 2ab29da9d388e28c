-- Triggers that run statements of their own do it once for all rows of a statement, and not at all if there is nothing
-- to write: each of their statements counts for a generation, and updates the same row of it as the one before. Claims
-- are explained in `claims.sql`; the functions here replace those of the same name there and in `released_handles.sql`.

CREATE OR REPLACE FUNCTION accelerators_refuse_released_handle() RETURNS trigger LANGUAGE plpgsql AS $$
-- Refuse a handle that was released, or whose function was. A request that keeps its handle keeps its claim: nothing is
-- given to it. It runs after the row is written: the exclusion constraint has then waited for the transaction that
-- releases the function, and this statement, with its new snapshot, sees what that transaction has committed.
BEGIN
  IF TG_OP = 'UPDATE' THEN
    IF OLD.attach_handle_id = NEW.attach_handle_id THEN
      RETURN NULL;
    END IF;
  END IF;
  IF EXISTS (SELECT FROM accelerators_releasedhandle
      WHERE handle_id = NEW.attach_handle_id OR claim && NEW.claim) THEN
    RAISE EXCEPTION 'the function of attach handle % was released, and its host has not confirmed that no guest uses it',
      NEW.attach_handle_id USING ERRCODE = 'exclusion_violation', CONSTRAINT = 'request_one_per_function';
  END IF;
  RETURN NULL;
END $$;

DROP TRIGGER accelerators_forget_release ON accelerators_attachhandle;
CREATE OR REPLACE FUNCTION accelerators_forget_release() RETURNS trigger LANGUAGE plpgsql AS $$
-- A conductor of the former release deletes attach handles without their released handles, which would block the
-- function for ever. It knows no foreign key that would tell it about them.
BEGIN
  IF EXISTS (SELECT FROM accelerators_releasedhandle WHERE handle_id IN (SELECT id FROM gone)) THEN
    DELETE FROM accelerators_releasedhandle WHERE handle_id IN (SELECT id FROM gone);
  END IF;
  RETURN NULL;
END $$;
CREATE TRIGGER accelerators_forget_release AFTER DELETE ON accelerators_attachhandle
  REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION accelerators_forget_release();

-- A claim is partial while another request has a part of what it should contain.
ALTER TABLE accelerators_acceleratorrequest ADD COLUMN claim_is_partial boolean NOT NULL DEFAULT false;

CREATE OR REPLACE FUNCTION accelerators_request_claim() RETURNS trigger LANGUAGE plpgsql AS $$
-- Store what the request's handle stands for when the request gets the handle. It stays until the handle is given up,
-- even if the device gets another address meanwhile: the instance has what was at the address when it was bound.
BEGIN
  IF TG_OP = 'UPDATE' THEN
    IF OLD.attach_handle_id IS NOT DISTINCT FROM NEW.attach_handle_id THEN
      RETURN NEW;
    END IF;
  END IF;
  NEW.claim_is_partial := false;
  NEW.claim := CASE WHEN NEW.attach_handle_id IS NOT NULL THEN accelerators_claim_of_handle(NEW.attach_handle_id) END;
  RETURN NEW;
END $$;

DROP INDEX request_without_claim;
CREATE INDEX request_without_whole_claim ON accelerators_acceleratorrequest (id)
  WHERE attach_handle_id IS NOT NULL AND (claim IS NULL OR claim_is_partial);

CREATE OR REPLACE FUNCTION accelerators_pass_on_claim() RETURNS trigger LANGUAGE plpgsql AS $$
-- Give the claim that a request gave up to the requests that hold the function, too, and have no claim, or only a part
-- of it, because of a conflict that the upgrade found. Normally there are none.
DECLARE
  late bigint;
BEGIN
  FOR late IN SELECT id FROM accelerators_acceleratorrequest
      WHERE attach_handle_id IS NOT NULL AND (claim IS NULL OR claim_is_partial)
      AND accelerators_claim_of_handle(attach_handle_id) && OLD.claim ORDER BY id LOOP
    BEGIN
      UPDATE accelerators_acceleratorrequest
        SET claim = accelerators_claim_of_handle(attach_handle_id), claim_is_partial = false
        WHERE id = late AND attach_handle_id IS NOT NULL AND (claim IS NULL OR claim_is_partial);
    EXCEPTION WHEN exclusion_violation THEN
      CONTINUE;  -- another request still has a part of it
    END;
  END LOOP;
  RETURN NULL;
END $$;

CREATE FUNCTION accelerators_quarantine_holders(late bigint, wanted nummultirange) RETURNS void LANGUAGE plpgsql AS $$
-- Quarantine the devices of the request `late` and of those that have a part of the claim it should have, with events,
-- so that neither hardware is given to a third request before a person has looked.
DECLARE
  device record;
  servers CONSTANT text := (SELECT string_agg(coalesce(instance_uuid::text, 'unknown'), ', ' ORDER BY id)
    FROM accelerators_acceleratorrequest WHERE id = late OR claim && wanted);
  server CONSTANT text := (SELECT coalesce(instance_uuid::text, 'unknown')
    FROM accelerators_acceleratorrequest WHERE id = late);
BEGIN
  FOR device IN SELECT DISTINCT d.id, d.uuid, d.state, d.returns_to, d.drain_to, d.model, h.name AS host,
        h.uuid AS host_uuid
      FROM accelerators_acceleratorrequest r JOIN accelerators_attachhandle t ON t.id = r.attach_handle_id
      JOIN accelerators_deployable p ON p.id = t.deployable_id JOIN accelerators_device d ON d.id = p.device_id
      JOIN accelerators_host h ON h.id = d.host_id
      WHERE (r.id = late OR r.claim && wanted) AND d.state NOT IN ('retired', 'quarantined')
      AND d.returns_to IS DISTINCT FROM 'quarantined' ORDER BY d.id LOOP
    UPDATE accelerators_device SET drain_to = NULL, updated_at = now(), state_by = 'upgrade',
        state = CASE device.state WHEN 'missing' THEN 'missing' ELSE 'quarantined' END,
        returns_to = CASE device.state WHEN 'missing' THEN 'quarantined' END,
        state_since = CASE device.state WHEN 'missing' THEN state_since ELSE now() END,
        state_reason = format('the servers %s hold one card, one of them as a whole: find out on the host which guest '
          'has the card or a virtual function of it (virsh dumpxml), delete the other servers (if no guest has one, '
          'server %s), then release and enable all devices with this reason', servers, server)
      WHERE id = device.id;
    INSERT INTO accelerators_event (source, actor, request_id, action, subject_type, subject, subject_name, host,
        changes, reason)
      SELECT 'system', 'upgrade', '', 'device.quarantined', 'device', device.uuid, device.model, device.host,
        jsonb_build_object('state', jsonb_build_array(device.state, d.state),
          'returns_to', jsonb_build_array(device.returns_to, d.returns_to),
          'drain_to', jsonb_build_array(device.drain_to, NULL)), d.state_reason
      FROM accelerators_device d WHERE d.id = device.id;
    INSERT INTO accelerators_intent AS t (uuid, kind, key, payload, attempts, last_error)
      VALUES (gen_random_uuid(), 'provider', device.host_uuid, jsonb_build_object('host', device.host), 0, '')
      ON CONFLICT (kind, key) DO UPDATE SET payload = excluded.payload, next_at = now(), updated_at = now();
  END LOOP;
END $$;

CREATE FUNCTION accelerators_correct_claims_of(devices bigint[]) RETURNS void LANGUAGE plpgsql AS $$
-- Compute the claims of these devices' requests and released handles anew. If other requests already have a part of
-- what a new claim should contain, the request gets the rest, and the devices are quarantined.
-- Raise lock_not_available if another transaction has one of the requests locked: the caller has locked hosts and
-- devices, which that transaction may wait for. The job that merges reports is then repeated.
DECLARE
  holders CONSTANT bigint[] := (SELECT array_agg(r.id) FROM accelerators_deployable p
    JOIN accelerators_attachhandle t ON t.deployable_id = p.id
    JOIN accelerators_acceleratorrequest r ON r.attach_handle_id = t.id
    WHERE p.device_id = ANY (devices) AND r.claim IS DISTINCT FROM accelerators_claim_of_handle(t.id));
  holder record;
BEGIN
  IF holders IS NOT NULL THEN
    PERFORM FROM accelerators_acceleratorrequest WHERE id = ANY (holders) ORDER BY id FOR NO KEY UPDATE NOWAIT;
    -- First all old claims end, so that none of them is in the way of a new one. Until the commit, the exclusion
    -- constraint makes other transactions wait for the ended claims, too.
    UPDATE accelerators_acceleratorrequest SET claim = NULL WHERE id = ANY (holders);
    BEGIN
      UPDATE accelerators_acceleratorrequest
        SET claim = accelerators_claim_of_handle(attach_handle_id), claim_is_partial = false
        WHERE id = ANY (holders) AND attach_handle_id IS NOT NULL;
    EXCEPTION WHEN exclusion_violation THEN
      FOR holder IN SELECT id, attach_handle_id AS handle, accelerators_claim_of_handle(attach_handle_id) AS claim
          FROM accelerators_acceleratorrequest
          WHERE id = ANY (holders) AND attach_handle_id IS NOT NULL ORDER BY id LOOP
        BEGIN
          UPDATE accelerators_acceleratorrequest SET claim = holder.claim, claim_is_partial = false
            WHERE id = holder.id AND attach_handle_id = holder.handle;
        EXCEPTION WHEN exclusion_violation THEN
          UPDATE accelerators_acceleratorrequest SET claim_is_partial = true, claim = holder.claim - (
              SELECT range_agg(o.claim) FROM accelerators_acceleratorrequest o
              WHERE o.id <> holder.id AND o.claim && holder.claim)
            WHERE id = holder.id AND attach_handle_id = holder.handle;
          PERFORM accelerators_quarantine_holders(holder.id, holder.claim);
        END;
      END LOOP;
    END;
  END IF;
  IF EXISTS (SELECT FROM accelerators_deployable p JOIN accelerators_attachhandle t ON t.deployable_id = p.id
      JOIN accelerators_releasedhandle w ON w.handle_id = t.id WHERE p.device_id = ANY (devices)) THEN
    UPDATE accelerators_releasedhandle w SET claim = accelerators_claim_of_handle(w.handle_id)
      FROM accelerators_deployable p JOIN accelerators_attachhandle t ON t.deployable_id = p.id
      WHERE p.device_id = ANY (devices) AND w.handle_id = t.id;
  END IF;
END $$;

DROP TRIGGER accelerators_correct_claims ON accelerators_device;
CREATE OR REPLACE FUNCTION accelerators_correct_claims() RETURNS trigger LANGUAGE plpgsql AS $$
-- Correct the claims of devices of which it becomes known that they are virtual functions. The versions of each row are
-- compared in a group, because a join would be slow if its plan was made for another number of rows.
DECLARE
  learned CONSTANT bigint[] := (
    SELECT array_agg(x.id) FROM (
      SELECT v.id FROM (SELECT id, address FROM was WHERE physical_function IS NULL
        UNION ALL SELECT id, address FROM became WHERE physical_function IS NOT NULL) v
      GROUP BY v.id, v.address HAVING count(*) = 2) x);
BEGIN
  IF learned IS NOT NULL THEN
    PERFORM accelerators_correct_claims_of(learned);
  END IF;
  RETURN NULL;
END $$;
CREATE TRIGGER accelerators_correct_claims AFTER UPDATE ON accelerators_device
  REFERENCING OLD TABLE AS was NEW TABLE AS became FOR EACH STATEMENT EXECUTE FUNCTION accelerators_correct_claims();

-- The former function kept the claim that a virtual function had as a device of its own if the new one met another.
SELECT accelerators_correct_claims_of(array_agg(DISTINCT d.id)) FROM accelerators_device d
JOIN accelerators_deployable p ON p.device_id = d.id JOIN accelerators_attachhandle t ON t.deployable_id = p.id
JOIN accelerators_acceleratorrequest r ON r.attach_handle_id = t.id
WHERE d.physical_function IS NOT NULL AND r.claim IN (
  accelerators_claim(d.host_id, d.address, t.attach_type, t.attach_info, true),
  accelerators_claim(d.host_id, d.address, t.attach_type, t.attach_info, false));
