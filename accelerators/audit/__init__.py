"""The audit trail: seal events into a hash chain, verify it, replay it, and delete old months."""
