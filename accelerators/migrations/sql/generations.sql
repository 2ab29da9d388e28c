-- The generation of a collection is the number of statements that have written to its tables. Caches compare it.
CREATE FUNCTION generation_count() RETURNS trigger LANGUAGE plpgsql AS $$
-- Add one to the generation of the collection that the trigger's argument names, in the writer's own transaction.
-- A collection has as many rows as it ever had concurrent writers: a writer updates a row that nobody has locked, so no
-- writer waits for another.
BEGIN
  UPDATE generation SET value = value + 1 WHERE id = (
    SELECT id FROM generation WHERE collection = TG_ARGV[0] LIMIT 1 FOR UPDATE SKIP LOCKED);
  IF NOT FOUND THEN
    INSERT INTO generation (collection, value) VALUES (TG_ARGV[0], 1);
  END IF;
  RETURN NULL;
END $$;

CREATE TRIGGER generation_count AFTER INSERT OR UPDATE OR DELETE ON accelerators_host
  FOR EACH STATEMENT EXECUTE FUNCTION generation_count('hosts');
CREATE TRIGGER generation_count AFTER INSERT OR UPDATE OR DELETE ON accelerators_device
  FOR EACH STATEMENT EXECUTE FUNCTION generation_count('devices');
CREATE TRIGGER generation_count AFTER INSERT OR UPDATE OR DELETE ON accelerators_deployable
  FOR EACH STATEMENT EXECUTE FUNCTION generation_count('devices');
CREATE TRIGGER generation_count AFTER INSERT OR UPDATE OR DELETE ON accelerators_attribute
  FOR EACH STATEMENT EXECUTE FUNCTION generation_count('devices');
CREATE TRIGGER generation_count AFTER INSERT OR UPDATE OR DELETE ON accelerators_attachhandle
  FOR EACH STATEMENT EXECUTE FUNCTION generation_count('devices');
CREATE TRIGGER generation_count AFTER INSERT OR UPDATE OR DELETE ON accelerators_deviceprofile
  FOR EACH STATEMENT EXECUTE FUNCTION generation_count('profiles');
CREATE TRIGGER generation_count AFTER INSERT OR UPDATE OR DELETE ON accelerators_acceleratorrequest
  FOR EACH STATEMENT EXECUTE FUNCTION generation_count('requests');
CREATE TRIGGER generation_count AFTER INSERT OR UPDATE OR DELETE ON accelerators_event
  FOR EACH STATEMENT EXECUTE FUNCTION generation_count('events');
CREATE TRIGGER generation_count AFTER INSERT OR UPDATE OR DELETE ON accelerators_command
  FOR EACH STATEMENT EXECUTE FUNCTION generation_count('commands');
