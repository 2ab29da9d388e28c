-- Seals over events are append-only, too. Only `marks` may be changed, because it is derived from the events.
SELECT accelerators_event_keep('accelerators_seal');
CREATE TRIGGER accelerators_seal_frozen BEFORE DELETE OR UPDATE OF number, month, tx, event, events, digest, hash, drops,
  sealed_at ON accelerators_seal FOR EACH ROW EXECUTE FUNCTION accelerators_event_frozen();
