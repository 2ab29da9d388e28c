"""What tests share: the database, the write guard, reports, a gateway to talk to."""
