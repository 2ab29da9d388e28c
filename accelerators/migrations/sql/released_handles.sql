-- No request gets a released handle before its host has confirmed that no guest uses it, whatever program writes the
-- request. Released handles are shown in the lists of attach handles and devices, so they count for their generation.
CREATE FUNCTION accelerators_refuse_released_handle() RETURNS trigger LANGUAGE plpgsql AS $$
-- It runs after the row is written: a unique index or an exclusion constraint has then waited for the transaction that
-- releases the handle, and this statement, with its new snapshot, sees what that transaction has committed.
BEGIN
  IF EXISTS (SELECT FROM accelerators_releasedhandle WHERE handle_id = NEW.attach_handle_id) THEN
    RAISE EXCEPTION 'attach handle % was released, and its host has not confirmed that no guest uses it',
      NEW.attach_handle_id USING ERRCODE = 'check_violation';
  END IF;
  RETURN NEW;
END $$;

CREATE TRIGGER request_gets_no_released_handle AFTER INSERT OR UPDATE OF attach_handle_id
  ON accelerators_acceleratorrequest FOR EACH ROW WHEN (NEW.attach_handle_id IS NOT NULL)
  EXECUTE FUNCTION accelerators_refuse_released_handle();

CREATE FUNCTION accelerators_forget_release() RETURNS trigger LANGUAGE plpgsql AS $$
-- A conductor of the former release deletes attach handles without their released handles, which would block the
-- function for ever. It knows no foreign key that would tell it about them.
BEGIN
  DELETE FROM accelerators_releasedhandle WHERE handle_id = OLD.id;
  RETURN NULL;
END $$;
CREATE TRIGGER accelerators_forget_release AFTER DELETE ON accelerators_attachhandle
  FOR EACH ROW EXECUTE FUNCTION accelerators_forget_release();

CREATE TRIGGER generation_count AFTER INSERT OR UPDATE OR DELETE ON accelerators_releasedhandle
  FOR EACH STATEMENT EXECUTE FUNCTION generation_count('devices');
