-- A request claims the hardware behind its handle. The claims of two requests never overlap, whatever device, driver or
-- identity the handles belong to: the exclusion constraint below refuses the second one (promise S1).
--
-- A claim is a set of ranges of numbers. Each PCI function of each host has 2^64 numbers of its own:
--   the lower half stands for the function itself: the one who is given the function claims all of it;
--   the upper half stands for the parts of the function: a virtual function, or a mediated device, claims one number in
--   its parent's upper half, and the one who is given the whole function claims all of it, too.
-- So a function is given once, different parts of a function are given side by side, and never a part beside the whole.
-- A handle without a PCI address claims one number of its host, computed from its text: equal texts are one handle.

CREATE FUNCTION accelerators_function_number(host bigint, domain text, bus text, slot text, func text)
RETURNS numeric LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
-- Return the first of the 2^64 numbers of a PCI function; the parts of its address are in hex. NULL if one is NULL.
  SELECT (host * 72057594037927936::numeric
    + ('x' || lpad(domain, 8, '0'))::bit(32)::bigint * 16777216
    + ('x' || lpad(bus || lpad(slot, 2, '0') || lpad(func, 2, '0'), 8, '0'))::bit(32)::bigint) * 18446744073709551616
$$;

CREATE FUNCTION accelerators_address_number(host bigint, address text) RETURNS numeric
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
-- Return the same for an address such as 0000:01:00.0; NULL if it is no PCI address.
  SELECT accelerators_function_number(host, x.part[1], x.part[2], x.part[3], x.part[4])
  FROM regexp_match(lower(address), '^([0-9a-f]{1,8}):([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-9a-f])$') AS x(part)
$$;

CREATE FUNCTION accelerators_whole_function(host bigint, address text) RETURNS nummultirange
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
-- Return all numbers of a PCI function; NULL if it is no PCI address.
  SELECT nummultirange(numrange(x.start, x.start + 18446744073709551616))
  FROM accelerators_address_number(host, address) AS x(start) WHERE x.start IS NOT NULL
$$;

CREATE FUNCTION accelerators_claim(host bigint, card_address text, attach_type text, info text, alone boolean)
RETURNS nummultirange LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- Return what a request claims that holds this handle. `card_address` is the PCI address of its device or, if that is a
-- virtual function, of its card. `alone` says that the device has no other handle now: if the handle is the device's own
-- function, it is given as a whole, parts included.
DECLARE
  half CONSTANT numeric := 9223372036854775808;
  hex CONSTANT text := '":\s*"(?:0x)?([0-9a-f]{1,2})"';
  words CONSTANT text := lower(info);
  card CONSTANT numeric := accelerators_address_number(host, card_address);
  own CONSTANT numeric := accelerators_function_number(host, substring(words FROM '"domain":\s*"(?:0x)?([0-9a-f]{1,8})"'),
    substring(words FROM '"bus' || hex), substring(words FROM '"device' || hex), substring(words FROM '"function' || hex));
  digest CONSTANT bigint := ('x' || left(md5(attach_type || info), 15))::bit(60)::bigint;
  part numeric;
BEGIN
  IF attach_type IN ('PCI', 'TEST_PCI') AND own IS NOT NULL THEN
    IF own = card THEN
      RETURN nummultirange(numrange(own, own + CASE WHEN alone THEN 2 * half ELSE half END));
    END IF;
    part := card + half + mod(div(own, 2 * half), 72057594037927936);
    RETURN nummultirange(numrange(own, own + 2 * half))
      + CASE WHEN part IS NULL THEN '{}' ELSE nummultirange(numrange(part, part, '[]')) END;
  ELSIF coalesce(own, card) IS NOT NULL THEN
    part := coalesce(own, card) + half + digest;
  ELSE
    part := - (host * 1152921504606846976::numeric + digest) - 1;
  END IF;
  RETURN nummultirange(numrange(part, part, '[]'));
END $$;

CREATE FUNCTION accelerators_claim_of_handle(handle bigint) RETURNS nummultirange LANGUAGE sql STABLE AS $$
-- Return what a request claims that holds this handle now.
  SELECT accelerators_claim(d.host_id, coalesce(d.physical_function, d.address), t.attach_type, t.attach_info, NOT EXISTS (
    SELECT FROM accelerators_attachhandle o JOIN accelerators_deployable q ON q.id = o.deployable_id
    WHERE q.device_id = d.id AND o.id <> t.id AND o.missing_since IS NULL
    AND q.missing_since IS NULL))
  FROM accelerators_attachhandle t JOIN accelerators_deployable p ON p.id = t.deployable_id
  JOIN accelerators_device d ON d.id = p.device_id WHERE t.id = handle
$$;

ALTER TABLE accelerators_acceleratorrequest ADD COLUMN claim nummultirange;

CREATE FUNCTION accelerators_request_claim() RETURNS trigger LANGUAGE plpgsql AS $$
-- Store what the request's handle stands for when the request gets the handle. It stays until the handle is given up,
-- even if the device gets another address meanwhile: the instance has what was at the address when it was bound.
BEGIN
  IF NEW.attach_handle_id IS NULL THEN
    NEW.claim := NULL;
  ELSIF TG_OP = 'INSERT' THEN
    NEW.claim := accelerators_claim_of_handle(NEW.attach_handle_id);
  ELSIF OLD.attach_handle_id IS DISTINCT FROM NEW.attach_handle_id THEN
    NEW.claim := accelerators_claim_of_handle(NEW.attach_handle_id);
  END IF;
  RETURN NEW;
END $$;
CREATE TRIGGER accelerators_request_claim BEFORE INSERT OR UPDATE OF attach_handle_id
  ON accelerators_acceleratorrequest FOR EACH ROW EXECUTE FUNCTION accelerators_request_claim();

DO $$
-- Store the claims of existing requests. If two of them overlap already, the older request has the claim, and the
-- devices of both are quarantined, so that neither is given to a third request before a person has looked.
DECLARE
  late record;
  device record;
  servers text;
BEGIN
  UPDATE accelerators_acceleratorrequest SET claim = accelerators_claim_of_handle(attach_handle_id)
    WHERE attach_handle_id IS NOT NULL;
  BEGIN
    ALTER TABLE accelerators_acceleratorrequest ADD CONSTRAINT request_one_per_function EXCLUDE USING gist (claim WITH &&);
    RETURN;
  EXCEPTION WHEN exclusion_violation THEN
    RAISE WARNING 'two requests hold one function: their devices are quarantined';
  END;
  UPDATE accelerators_acceleratorrequest SET claim = NULL WHERE claim IS NOT NULL;
  SET CONSTRAINTS ALL IMMEDIATE;  -- the table cannot be altered while foreign keys of its rows wait for their check
  ALTER TABLE accelerators_acceleratorrequest ADD CONSTRAINT request_one_per_function EXCLUDE USING gist (claim WITH &&);
  FOR late IN SELECT id, instance_uuid, accelerators_claim_of_handle(attach_handle_id) AS claim
      FROM accelerators_acceleratorrequest WHERE attach_handle_id IS NOT NULL ORDER BY id LOOP
    BEGIN
      UPDATE accelerators_acceleratorrequest SET claim = late.claim WHERE id = late.id;
    EXCEPTION WHEN exclusion_violation THEN
      servers := (SELECT string_agg(coalesce(instance_uuid::text, 'unknown'), ', ' ORDER BY id)
        FROM accelerators_acceleratorrequest WHERE id = late.id OR claim && late.claim);
      FOR device IN SELECT DISTINCT d.id, d.uuid, d.state, d.returns_to, d.drain_to, d.model, h.name AS host
          FROM accelerators_acceleratorrequest r JOIN accelerators_attachhandle t ON t.id = r.attach_handle_id
          JOIN accelerators_deployable p ON p.id = t.deployable_id JOIN accelerators_device d ON d.id = p.device_id
          JOIN accelerators_host h ON h.id = d.host_id
          WHERE (r.id = late.id OR r.claim && late.claim) AND d.state NOT IN ('retired', 'quarantined')
          AND d.returns_to IS DISTINCT FROM 'quarantined' LOOP
        UPDATE accelerators_device SET drain_to = NULL, updated_at = now(), state_by = 'upgrade',
            state = CASE device.state WHEN 'missing' THEN 'missing' ELSE 'quarantined' END,
            returns_to = CASE device.state WHEN 'missing' THEN 'quarantined' END, state_since = now(),
            state_reason = format('the servers %s hold one function: find out on the host which guest has it '
              '(virsh dumpxml), delete the other servers (if no guest has it, server %s), then release and enable all '
              'devices with this reason', servers, coalesce(late.instance_uuid::text, 'unknown'))
          WHERE id = device.id;
        INSERT INTO accelerators_event (source, actor, request_id, action, subject_type, subject, subject_name, host,
            changes, reason)
          SELECT 'system', 'upgrade', '', 'device.quarantined', 'device', device.uuid, device.model, device.host,
            jsonb_build_object('state', jsonb_build_array(device.state, d.state),
              'returns_to', jsonb_build_array(device.returns_to, d.returns_to),
              'drain_to', jsonb_build_array(device.drain_to, NULL)), d.state_reason
          FROM accelerators_device d WHERE d.id = device.id;
      END LOOP;
    END;
  END LOOP;
END $$;

CREATE INDEX request_without_claim ON accelerators_acceleratorrequest (id)
  WHERE claim IS NULL AND attach_handle_id IS NOT NULL;

CREATE FUNCTION accelerators_pass_on_claim() RETURNS trigger LANGUAGE plpgsql AS $$
-- Give the claim that a request gave up to the requests that hold the function, too, and have no claim because they are
-- the later ones of a conflict that the migration found. Normally there are none.
DECLARE
  late bigint;
BEGIN
  FOR late IN SELECT id FROM accelerators_acceleratorrequest
      WHERE claim IS NULL AND attach_handle_id IS NOT NULL
      AND accelerators_claim_of_handle(attach_handle_id) && OLD.claim ORDER BY id LOOP
    BEGIN
      UPDATE accelerators_acceleratorrequest SET claim = accelerators_claim_of_handle(attach_handle_id)
        WHERE id = late AND claim IS NULL AND attach_handle_id IS NOT NULL;
    EXCEPTION WHEN exclusion_violation THEN
      CONTINUE;  -- another request still has a part of it
    END;
  END LOOP;
  RETURN NULL;
END $$;
CREATE TRIGGER accelerators_pass_on_claim AFTER UPDATE OF attach_handle_id ON accelerators_acceleratorrequest
  FOR EACH ROW WHEN (OLD.claim IS NOT NULL AND NEW.claim IS DISTINCT FROM OLD.claim)
  EXECUTE FUNCTION accelerators_pass_on_claim();
CREATE TRIGGER accelerators_pass_on_deleted_claim AFTER DELETE ON accelerators_acceleratorrequest
  FOR EACH ROW WHEN (OLD.claim IS NOT NULL) EXECUTE FUNCTION accelerators_pass_on_claim();

-- A released handle claims the same until its host has confirmed that no guest uses it: no request gets the function
-- through another handle either.
ALTER TABLE accelerators_releasedhandle ADD COLUMN claim nummultirange;
UPDATE accelerators_releasedhandle SET claim = accelerators_claim_of_handle(handle_id);

CREATE FUNCTION accelerators_release_claim() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  NEW.claim := accelerators_claim_of_handle(NEW.handle_id);
  RETURN NEW;
END $$;
CREATE TRIGGER release_claim BEFORE INSERT ON accelerators_releasedhandle
  FOR EACH ROW EXECUTE FUNCTION accelerators_release_claim();

CREATE OR REPLACE FUNCTION accelerators_refuse_released_handle() RETURNS trigger LANGUAGE plpgsql AS $$
-- It runs after the row is written: the exclusion constraint has then waited for the transaction that releases the
-- function, and this statement, with its new snapshot, sees what that transaction has committed.
BEGIN
  IF EXISTS (SELECT FROM accelerators_releasedhandle
      WHERE handle_id = NEW.attach_handle_id OR claim && NEW.claim) THEN
    RAISE EXCEPTION 'the function of attach handle % was released, and its host has not confirmed that no guest uses it',
      NEW.attach_handle_id USING ERRCODE = 'exclusion_violation', CONSTRAINT = 'request_one_per_function';
  END IF;
  RETURN NEW;
END $$;

CREATE FUNCTION accelerators_correct_claims() RETURNS trigger LANGUAGE plpgsql AS $$
-- Compute the claims of a device's requests and released handles anew when it becomes known that the device is a virtual
-- function. If another request already has what a new claim contains, the old claim stays.
DECLARE
  holder record;
BEGIN
  FOR holder IN SELECT r.id, accelerators_claim_of_handle(t.id) AS claim FROM accelerators_deployable p
      JOIN accelerators_attachhandle t ON t.deployable_id = p.id
      JOIN accelerators_acceleratorrequest r ON r.attach_handle_id = t.id WHERE p.device_id = NEW.id ORDER BY r.id LOOP
    BEGIN
      UPDATE accelerators_acceleratorrequest SET claim = holder.claim
        WHERE id = holder.id AND attach_handle_id IS NOT NULL AND claim <> holder.claim;
    EXCEPTION WHEN exclusion_violation THEN
      CONTINUE;
    END;
  END LOOP;
  UPDATE accelerators_releasedhandle w SET claim = accelerators_claim_of_handle(w.handle_id)
    FROM accelerators_deployable p JOIN accelerators_attachhandle t ON t.deployable_id = p.id
    WHERE p.device_id = NEW.id AND w.handle_id = t.id;
  RETURN NULL;
END $$;
CREATE TRIGGER accelerators_correct_claims AFTER UPDATE OF physical_function ON accelerators_device
  FOR EACH ROW WHEN (OLD.physical_function IS NULL AND NEW.physical_function IS NOT NULL
    AND OLD.address IS NOT DISTINCT FROM NEW.address)
  EXECUTE FUNCTION accelerators_correct_claims();
