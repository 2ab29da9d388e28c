-- The columns of signed seals cannot be changed either, and no unsigned seal may follow a signed one. A cluster of the
-- former release, which still runs during an upgrade, would add such seals.
CREATE TRIGGER accelerators_seal_signed BEFORE UPDATE OF kind, details, key, signature ON accelerators_seal
  FOR EACH ROW EXECUTE FUNCTION accelerators_event_frozen();

CREATE FUNCTION accelerators_seal_unsigned() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF (SELECT signature <> '' FROM accelerators_seal ORDER BY number DESC LIMIT 1) THEN
    RAISE EXCEPTION 'seals are signed since this upgrade: an unsigned one is refused' USING ERRCODE = 'restrict_violation';
  END IF;
  RETURN NEW;
END $$;
CREATE TRIGGER accelerators_seal_unsigned BEFORE INSERT ON accelerators_seal
  FOR EACH ROW WHEN (NEW.signature = '') EXECUTE FUNCTION accelerators_seal_unsigned();
